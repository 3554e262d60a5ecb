"""Inner losses against their formulas, and their derivatives against autograd."""

import pytest
import torch

from vit3.inner import InnerSpec, Loss
from vit3.inner.spec import LOSSES

each_loss = pytest.mark.parametrize("name", LOSSES)
SHAPE = (2, 3, 5, 4)  # B, G, N, D


def loss_of(name, **knobs):
    """The loss; ``threshold`` counts for huber alone."""
    if name != "huber":
        knobs.pop("threshold", None)
    return Loss.of(InnerSpec(loss=name, **knobs), SHAPE[-1])


def inputs(grad=True):
    return [torch.randn(SHAPE, dtype=torch.float64).requires_grad_(grad) for _ in range(2)]


def by_hand(name, p, v, scale, threshold):
    """The formulas of the paper's appendix, token by token and channel by channel, for one sample and head."""
    a = scale / len(p)
    total = 0.0
    for x, y in zip(p.tolist(), v.tolist()):
        lengths = [sum(t * t for t in side) ** 0.5 for side in (x, y)]
        if name == "cosine":
            total -= a * sum(s * t for s, t in zip(x, y)) / (lengths[0] * lengths[1])
        for s, t in zip(x, y):
            e = s - t
            if name == "dot":
                total -= a * s * t
            elif name == "mse":
                total += a * e * e / 2
            elif name == "rmse":
                total += a * e * e
            elif name == "mae":
                total += a * abs(e)
            elif name in ("smooth_l1", "huber"):
                total += a * (e * e / 2 if abs(e) < threshold else threshold * (abs(e) - threshold / 2))
    return total**0.5 if name == "rmse" else total


@each_loss
@pytest.mark.parametrize("scale", [None, 1 / 3])
def test_value_is_the_formula(name, scale):
    p, v = inputs(grad=False)
    threshold = 1.0 if name == "smooth_l1" else 0.7
    values = loss_of(name, scale=scale, threshold=0.7).value(p, v)
    for b in range(2):
        for g in range(3):
            wanted = by_hand(name, p[b, g], v[b, g], SHAPE[-1] ** -0.5 if scale is None else scale, threshold)
            assert values[b, g].item() == pytest.approx(wanted, abs=1e-9)


@each_loss
@pytest.mark.parametrize("rated", [False, True])
def test_error_is_the_derivative(name, rated):
    p, v = inputs()
    rate = torch.rand(2, 1, 5, 1, dtype=torch.float64) if rated else None
    loss = loss_of(name, threshold=0.7)
    (wanted,) = torch.autograd.grad(loss.value(p, v, rate, 3).sum(), p)
    error = loss.error(p if loss.needs_prediction else None, v, rate, 3)
    assert torch.allclose(error, wanted, rtol=0, atol=1e-12)


@each_loss
@pytest.mark.parametrize("rated", [False, True])
def test_mixed_derivative(name, rated):
    """d2L / dv dp of each entry, by differentiating autograd's own first derivative."""
    p, v = inputs()
    rate = torch.rand(2, 3, 5, 1, dtype=torch.float64) if rated else None
    loss = loss_of(name, threshold=0.7)
    (first,) = torch.autograd.grad(loss.value(p, v, rate, 3).sum(), p, create_graph=True)
    wanted = torch.stack(
        [
            torch.autograd.grad(entry, v, retain_graph=True, allow_unused=True, materialize_grads=True)[0].flatten()[i]
            for i, entry in enumerate(first.flatten())
        ]
    )
    assert torch.allclose(loss.mixed(p, v, rate, 3).flatten(), wanted, rtol=0, atol=1e-11)


def test_where_the_signal_vanishes():
    p, v = inputs(grad=False)
    e = (p - v).abs()
    assert not loss_of("mae").mixed(p, v).any()
    assert torch.equal(loss_of("smooth_l1").mixed(p, v) == 0, e >= 1)
    assert torch.equal(loss_of("huber", threshold=0.3).mixed(p, v) == 0, e >= 0.3)
    assert all((loss_of(name).mixed(p, v) != 0).all() for name in ("dot", "mse", "rmse", "cosine"))


def test_zero_errors_are_finite():
    p = torch.zeros(1, 1, 2, 3, dtype=torch.float64, requires_grad=True)
    for name in LOSSES:
        loss = loss_of(name)
        assert torch.autograd.grad(loss.error(p, p).sum() + loss.value(p, p).sum(), p, allow_unused=True)[0] is not None
        assert loss.error(p, p).isfinite().all() and loss.mixed(p, p).isfinite().all()
