"""Inner optimisers against plain loops."""

import pytest
import torch

from vit3.inner import InnerSpec
from vit3.inner.optim import InnerOptimizer, orthogonalised

DIMS = ((-2,),)


def gradients(steps=3):
    return [torch.randn(2, 3, 5, 4, dtype=torch.float64) for _ in range(steps)]


def run(start, steps, rates=(0.5,), **knobs):
    spec = InnerSpec(**{"gradient_norm": "none", "model": "fc", "beside": (), **knobs})
    optimizer, weights = InnerOptimizer(spec, (start,), DIMS, rates), (start,)
    for g in steps:
        weights = optimizer.step(weights, (g,))
    return weights[0]


def test_sgd_momentum_and_ascent():
    w, steps = torch.randn(1, 3, 5, 4, dtype=torch.float64), gradients()
    assert torch.allclose(run(w, steps), w - 0.5 * sum(steps), atol=1e-14)
    assert torch.allclose(run(w, steps, direction="ascent"), w + 0.5 * sum(steps), atol=1e-14)
    reference = torch.nn.Parameter(w.expand(2, 3, 5, 4).clone())
    sgd = torch.optim.SGD([reference], lr=0.5, momentum=0.8)
    for g in steps:
        reference.grad = g
        sgd.step()
    assert torch.allclose(run(w, steps, optimizer="momentum", momentum=0.8), reference, atol=1e-14)


def test_adam_is_torchs():
    w, steps = torch.randn(1, 3, 5, 4, dtype=torch.float64), gradients()
    reference = torch.nn.Parameter(w.expand(2, 3, 5, 4).clone())
    adam = torch.optim.Adam([reference], lr=0.5, betas=(0.9, 0.95), eps=0)
    for g in steps:
        reference.grad = g
        adam.step()
    assert torch.allclose(run(w, steps, optimizer="adam"), reference, atol=1e-10)


@pytest.mark.parametrize("shape", [(2, 3, 5, 4), (2, 3, 4, 9), (2, 3, 6, 6)])
def test_muon_makes_orthogonal(shape):
    m = torch.randn(shape, dtype=torch.float64)
    values = torch.linalg.svdvals(orthogonalised(m))
    assert values.min() > 0.5 and values.max() < 1.3
    u, _, vt = torch.linalg.svd(m, full_matrices=False)
    rotated = u.mT @ orthogonalised(m) @ vt.mT  # diagonal in the matrix's own singular vectors
    assert torch.allclose(rotated, torch.diag_embed(rotated.diagonal(dim1=-2, dim2=-1)), atol=1e-9)


def test_muon_of_a_dense_kernel_is_per_head():
    m = torch.randn(2, 6, 3, 3, 3, dtype=torch.float64)  # two heads of three channels
    ours = orthogonalised(m)
    assert torch.allclose(ours[:, 3:], orthogonalised(m[:, 3:]), atol=1e-12)
    matrix = m[0, :3].flatten(1)[None, None]
    assert torch.allclose(ours[0, :3].flatten(1), orthogonalised(matrix)[0, 0], atol=1e-12)


def test_gradient_norms():
    (g,) = gradients(1)
    w = torch.zeros(1, 3, 5, 4, dtype=torch.float64)
    norm = g.norm(dim=-2, keepdim=True)
    assert torch.allclose(run(w, [g], gradient_norm="soft"), -0.5 * g / (norm + 1))
    clipped = run(w, [g], gradient_norm="clip", max_norm=2.0)
    assert torch.allclose(clipped, -0.5 * g * (2 / norm).clamp(max=1))
    assert (norm > 2).any() and (norm < 2).any()


def test_renormalise_keeps_norms():
    w, steps = torch.randn(1, 3, 5, 4, dtype=torch.float64), gradients()
    fast = run(w, steps, renormalise=True)
    assert torch.allclose(fast.norm(dim=-2), w.norm(dim=-2).expand(2, 3, 4), atol=1e-12)
    step = w - 0.5 * steps[0]
    assert torch.allclose(
        run(w, steps[:1], renormalise=True), step * w.norm(dim=-2, keepdim=True) / step.norm(dim=-2, keepdim=True)
    )


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "muon", "adam"])
def test_ascent_goes_the_other_way(optimizer):
    w, steps = torch.randn(1, 3, 5, 4, dtype=torch.float64), gradients()
    down, up = (run(w, steps, optimizer=optimizer, direction=d) for d in ("descent", "ascent"))
    assert torch.allclose(up - w, w - down, rtol=0, atol=1e-14) and (down - w).abs().max() > 0.1


def test_muon_is_five_steps_of_its_polynomial():
    m = torch.randn(2, 3, 5, 4, dtype=torch.float64)
    values = torch.linalg.svdvals(m) / m.flatten(2).norm(dim=2)[..., None]
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    ours = torch.linalg.svdvals(orthogonalised(m))
    assert torch.allclose(ours.sort(dim=-1)[0], values.abs().sort(dim=-1)[0], rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("norm", ["none", "soft", "clip"])
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "muon", "adam"])
def test_zero_gradients_are_finite(optimizer, norm, dtype):
    """Steps, and their own gradients, where columns or the whole gradient are zero."""
    w = torch.randn(1, 3, 5, 4, dtype=dtype).requires_grad_()
    for zeros in (slice(None), slice(0, 1)):
        g = torch.randn(2, 3, 5, 4, dtype=dtype)
        g[..., zeros] = 0
        g.requires_grad_()
        fast = run(w, [g, g], optimizer=optimizer, gradient_norm=norm, renormalise=True)
        assert fast.isfinite().all() and all(t.isfinite().all() for t in torch.autograd.grad(fast.sum(), (w, g)))
