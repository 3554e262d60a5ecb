"""The closed forms against autograd through the inner step, in float64."""

import pytest
import torch

from tests.helpers import OPS, STEP, max_error

# (B, M, h, w, D): every token count, head width, grid and batch of interest at least once
CASES = [
    (1, 1, 1, 1, 8),
    (2, 3, 1, 7, 8),
    (2, 1, 3, 5, 24),
    (2, 3, 5, 7, 32),
    (1, 3, 7, 7, 48),
    (2, 1, 7, 9, 64),
    (1, 1, 14, 14, 80),
    (2, 3, 14, 14, 24),
    (1, 3, 25, 41, 32),
    (2, 1, 41, 25, 8),
]


@pytest.mark.parametrize("op", OPS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_oracle(op, case):
    tensors = op.inputs(*case)
    y = op.run(*tensors, **STEP)
    expected, fast = op.oracle(*tensors)
    assert max_error(y, expected) <= 1e-12
    ours = op.fast(*tensors[1:], **STEP)
    assert len(ours) == len(fast) == op.weights
    assert max(map(max_error, ours, fast)) <= 1e-12

    upstream = torch.randn_like(y)
    ours = torch.autograd.grad(y, tensors, upstream)
    theirs = torch.autograd.grad(expected, tensors, upstream)
    assert max(map(max_error, ours, theirs)) <= 1e-12


@pytest.mark.parametrize("op", OPS, ids=str)
@pytest.mark.parametrize("check", [torch.autograd.gradcheck, torch.autograd.gradgradcheck], ids=["first", "second"])
def test_gradcheck(op, check):
    assert check(lambda *tensors: op.run(*tensors, **STEP), op.inputs(2, 2, 2, 3, 3))


@pytest.mark.parametrize("op", OPS, ids=str)
def test_step_lowers_loss(op):
    q, k, v, *weights = op.inputs(grad=False)
    start = tuple(w.expand_as(f) for w, f in zip(weights, op.fast(k, v, *weights, lr=0.0, scale=1 / 3)))
    fast = op.fast(k, v, *weights, lr=0.1, scale=1 / 3)
    before, after = ((op.predict(w, k) * v).sum() for w in (start, fast))
    assert after > before  # the loss is minus this


@pytest.mark.parametrize("op", OPS, ids=str)
def test_no_step_applies_start(op):
    q, k, v, *weights = op.inputs(grad=False)
    y = op.run(q, k, v, *weights, lr=0.0, scale=1 / 3)
    start = tuple(w.expand_as(f) for w, f in zip(weights, op.fast(k, v, *weights, lr=0.0, scale=1 / 3)))
    assert max_error(y, op.predict(start, q)) <= 1e-14
