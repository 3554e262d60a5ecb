"""Unusual memory layouts, sizes and values must not change a result."""

import pytest
import torch

from tests.helpers import OPS, STEP, max_error

each_op = pytest.mark.parametrize("op", OPS, ids=str)


def packed(q, k, v):
    """q, k and v as strided views of one tensor."""
    return torch.stack((q, k, v), dim=-1).detach().unbind(-1)


def transposed(*tensors):
    return [x.detach().transpose(-2, -1).contiguous().transpose(-2, -1) for x in tensors]


def shifted(*tensors):
    """The same values at an odd place in a larger storage."""
    return [torch.cat((x.detach().new_full((3,), 9.0), x.detach().flatten()))[3:].view(x.shape) for x in tensors]


@each_op
@pytest.mark.parametrize("layout", [packed, transposed, shifted], ids=lambda f: f.__name__)
def test_strided_inputs(op, layout):
    q, k, v, *weights = op.inputs()
    views = [x.requires_grad_() for x in layout(q, k, v)]
    assert not views[0].is_contiguous() or views[0].storage_offset()
    y, expected = op.run(*views, *weights, **STEP), op.run(q, k, v, *weights, **STEP)
    assert max_error(y, expected) <= 1e-14
    ours = torch.autograd.grad(y.sum(), [*views, *weights])
    theirs = torch.autograd.grad(expected.sum(), [q, k, v, *weights])
    assert max(map(max_error, ours, theirs)) <= 1e-13


@each_op
def test_expanded_gradient(op):
    tensors = op.inputs()
    y = op.run(*tensors, **STEP)
    g = torch.randn(1, dtype=y.dtype).expand_as(y)  # stride 0 everywhere
    ours = torch.autograd.grad(y, tensors, g, retain_graph=True)
    assert max(map(max_error, ours, torch.autograd.grad(y, tensors, g.contiguous()))) <= 1e-13


@each_op
def test_transposed_gradient(op):
    tensors = op.inputs()
    y = op.run(*tensors, **STEP)
    g = torch.randn_like(y.transpose(-2, -1).contiguous()).transpose(-2, -1)
    ours = torch.autograd.grad(y, tensors, g, retain_graph=True)
    assert max(map(max_error, ours, torch.autograd.grad(y, tensors, g.contiguous()))) <= 1e-13


@each_op
@pytest.mark.parametrize("which", [1, 2], ids=["keys", "values"])
def test_zeros_are_finite(op, which):
    tensors = op.inputs()
    tensors[which] = torch.zeros_like(tensors[which]).requires_grad_()
    y = op.run(*tensors, **STEP)
    gradients = torch.autograd.grad(y.sum(), tensors)
    assert all(x.isfinite().all() for x in (y, *gradients))


@each_op
def test_samples_are_independent(op):
    q, k, v, *weights = op.inputs(b=3, grad=False)
    y = op.run(q, k, v, *weights, **STEP)
    for i in range(3):
        alone = op.run(q[i : i + 1], k[i : i + 1], v[i : i + 1], *weights, **STEP)
        assert max_error(y[i : i + 1], alone) <= 1e-14
    k[1] += 1
    changed = op.run(q, k, v, *weights, **STEP)
    assert [max_error(changed[i], y[i]) > 1e-6 for i in range(3)] == [False, True, False]


@each_op
def test_same_call_twice(op):
    tensors = op.inputs(dtype=torch.float32)
    outputs = [op.run(*tensors, **STEP) for _ in range(2)]
    assert torch.equal(*outputs)
    first, second = (torch.autograd.grad(y.sum(), tensors) for y in outputs)
    assert all(map(torch.equal, first, second))


@each_op
def test_empty_batch(op):
    tensors = op.inputs(b=0)
    y = op.run(*tensors, **STEP)
    assert y.shape == tensors[0].shape
    assert all(x.isfinite().all() for x in torch.autograd.grad(y.sum(), tensors))


@each_op
def test_inputs_stay(op):
    tensors = op.inputs(grad=False)
    before = [x.clone() for x in tensors]
    op.run(*tensors, **STEP)
    assert all(map(torch.equal, tensors, before))
