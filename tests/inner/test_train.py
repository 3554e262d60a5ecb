"""The generic inner loop: modes of autograd, independence of samples, errors."""

import pytest
import torch

from tests.helpers import OPS, SPEC, max_error
from vit3.inner import InnerSpec, inner_model, inner_train

each_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
modes = pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=lambda mode: mode.__name__)


@each_op
@modes
def test_equal_without_autograd(op, mode):
    tensors = op.inputs()
    expected, fast = op.oracle(*tensors)
    with mode():
        y, quiet = op.oracle(*tensors)
    assert max(map(max_error, (y, *quiet), (expected, *fast))) <= 1e-14
    assert not y.requires_grad
    assert not any(w.requires_grad for w in quiet)


@each_op
def test_inference_tensors(op):
    tensors = op.inputs(grad=False)
    expected, _ = op.oracle(*tensors)
    with torch.inference_mode():
        y, _ = op.oracle(*(x.clone() for x in tensors))
    assert max_error(y, expected) <= 1e-14


@each_op
def test_differentiable_without_leaves(op):
    """Gradients reach the learned start although no input asks for one, and the step is part of them."""
    tensors = op.inputs(grad=False)
    start = [w.requires_grad_() for w in tensors[3:]]
    y, fast = op.oracle(*tensors)
    assert all(g.abs().sum() > 0 for g in torch.autograd.grad(y.sum(), start))


@each_op
def test_samples_are_independent(op):
    q, k, v, *weights = op.inputs(b=3, grad=False)
    _, fast = op.oracle(q, k, v, *weights)
    _, alone = op.oracle(q[1:2], k[1:2], v[1:2], *weights)
    assert all(torch.allclose(f[1:2], a, rtol=0, atol=1e-14) for f, a in zip(fast, alone))


def test_weights_need_a_sample_dimension():
    k = torch.randn(2, 1, 5, 4)
    with pytest.raises(ValueError, match="learned start"):
        inner_train(
            inner_model(SPEC, 1, 4), (torch.randn(3, 1, 4, 4), torch.randn(1, 1, 4, 4)), k, k, SPEC, grid=(1, 5)
        )


@pytest.mark.parametrize("field", ["lr", "scale"])
@pytest.mark.parametrize("value", ["1.0", float("nan"), float("inf")])
def test_spec_refuses(field, value):
    with pytest.raises(ValueError, match=f"inner.{field}=.* must be a finite number"):
        InnerSpec(**{field: value})


@pytest.mark.parametrize("rated", [False, True])
@pytest.mark.parametrize("model", ["fc", "dwconv"])
def test_each_mini_batch_takes_its_own_mean(model, rated):
    """Seven tokens in parts of 3, 2, 2: the dot product's steps add up, each over the number of its own tokens."""
    kernel = dict(kernel=1) if model == "dwconv" else {}
    inner = InnerSpec(model=model, **kernel, beside=(), scale=0.5, lr=3.0, batch="N/3", gradient_norm="none", epochs=2)
    k, v = (torch.randn(2, 1, 7, 4, dtype=torch.float64) for _ in range(2))
    rate = torch.rand(2, 1, 7, 1, dtype=torch.float64) if rated else None
    net = inner_model(inner, 1, 4)
    start = net.start((torch.randn(net.shapes[0], dtype=torch.float64),))
    (fast,) = inner_train(net, start, k, v, inner, grid=(1, 7), token_rate=rate)
    wanted = start[0].expand_as(fast).clone()
    for b in range(2):
        for size, at in ((3, 0), (2, 3), (2, 5)):
            for t in range(at, at + size):
                r = rate[b, 0, t, 0] if rated else 1.0
                step = torch.outer(k[b, 0, t], v[b, 0, t]) if model == "fc" else (k[b, 0, t] * v[b, 0, t])
                wanted[b] += 2 * 3.0 * 0.5 / size * r * step.view(wanted[b].shape)
    assert max_error(fast, wanted) <= 1e-13


@pytest.mark.parametrize("model", ["fc", "dwconv"])
def test_a_factor_per_head_is_of_its_head(model):
    inner = InnerSpec(model=model, beside=(), gradient_norm="none", lr=0.5)
    net = inner_model(inner, 2, 4)
    start = net.start((torch.randn(net.shapes[0], dtype=torch.float64),))
    k, v = (torch.randn(2, 2, 6, 4, dtype=torch.float64) for _ in range(2))
    factors = torch.tensor([2.0, 5.0], dtype=torch.float64)
    (plain,), (fast,) = (inner_train(net, start, k, v, inner, grid=(2, 3), factor=f) for f in (None, factors))
    for head, factor in enumerate((2.0, 5.0)):
        change, wanted = ((w - start[0]).unflatten(1, (2, -1))[:, head] for w in (fast, plain))
        assert max_error(change, factor * wanted) <= 1e-14
