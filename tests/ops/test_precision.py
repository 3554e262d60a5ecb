"""The inner step never sees less than float32, whatever surrounds it."""

import pytest
import torch

from tests.helpers import OPS, STEP
from vit3.analysis.parity import relative_error
from vit3.ops.precision import widened
from vit3.ops.soft_norm import soft_normalise

each_op = pytest.mark.parametrize("op", OPS, ids=str)
low = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
BOUND = {torch.bfloat16: 2e-2, torch.float16: 3e-3}


@each_op
@low
def test_low_precision_widens_inside(op, dtype):
    tensors = op.inputs(dtype=dtype, grad=False)
    y = op.run(*tensors, **STEP)
    assert y.dtype == dtype
    assert torch.equal(y, op.run(*map(widened, tensors), **STEP).to(dtype))


@each_op
@low
def test_autocast_stays_outside(op, dtype):
    tensors = op.inputs(dtype=torch.float32)
    plain = op.run(*tensors, **STEP)
    with torch.autocast("cpu", dtype):
        inside = op.run(*tensors, **STEP)
    assert torch.equal(plain, inside)
    ours, theirs = (torch.autograd.grad(y.sum(), tensors) for y in (inside, plain))
    assert all(map(torch.equal, ours, theirs))


@each_op
@low
def test_error_against_float64(op, dtype):
    tensors = [x.detach().requires_grad_() for x in op.inputs(h=14, w=14, d=32, dtype=dtype)]
    exact = [x.detach().double().requires_grad_() for x in tensors]
    y, expected = op.run(*tensors, **STEP), op.run(*exact, **STEP)
    upstream = torch.randn_like(y)
    pairs = zip(
        (y, *torch.autograd.grad(y, tensors, upstream)),
        (expected, *torch.autograd.grad(expected, exact, upstream.double())),
    )
    assert max(relative_error(a, b) for a, b in pairs) <= BOUND[dtype]


@each_op
def test_float64_stays(op):
    assert op.run(*op.inputs(grad=False), **STEP).dtype == torch.float64


@pytest.mark.parametrize("size", [0.0, 1e-30, 1.0, 1e15])
def test_soft_norm_is_below_one(size):
    g = size * torch.randn(4, 5)
    norm = torch.linalg.vector_norm(soft_normalise(g, dim=-2), dim=-2)
    raw = torch.linalg.vector_norm(g, dim=-2)
    assert (norm <= 1).all()
    assert torch.allclose(norm, raw / (raw + 1))
