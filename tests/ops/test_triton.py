"""The Triton kernels, in Triton's interpreter, against the closed form in float64."""

import functools

import pytest
import torch

from tests.helpers import STEP
from vit3.ops import dwconv_ttt, glu_ttt, packed_ttt
from vit3.ops.rotary import rotary_tables

# (B, M, h, w, D, rotated): every token count, head width, batch and number of heads of interest at least once;
# 1025 tokens take several programs a head at these widths
CASES = [
    (2, 3, 1, 1, 8, False),
    (2, 3, 5, 7, 24, True),
    (1, 3, 7, 7, 32, False),
    (2, 1, 7, 9, 48, True),
    (1, 1, 10, 14, 64, True),
    (1, 1, 5, 7, 80, False),
    (1, 1, 5, 7, 128, True),
    (1, 1, 25, 41, 16, True),
]
BOUND = {torch.float32: 2e-6, torch.float16: 3e-3}


def packed_inputs(b, m, h, w, d, dtype=torch.float32, weight_dtype=None):
    """qkv, w1, w2, w3 and an upstream gradient; weights are scaled by their fan."""
    qkv = torch.randn(b, h * w, 3 * d * (m + 1)).to(dtype)
    weights = [torch.randn(1, m, d, d) / d**0.5, torch.randn(1, m, d, d) / d**0.5, torch.randn(d, 1, 3, 3) / 3]
    grad = torch.randn(b, h * w, d * (m + 1)).to(dtype)
    return [qkv, *(x.to(weight_dtype or dtype) for x in weights)], grad


def run(tensors, grad, h, w, rotated, backend, dtype=None):
    """Output and gradients of ``packed_ttt``, the inputs converted to ``dtype``."""
    tensors = [x.detach().to(dtype or x.dtype).requires_grad_() for x in tensors]
    m, d = tensors[1].shape[1], tensors[1].shape[-1]
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    rotary = rotary_tables(h, w, m * d, 10000.0, wide, "cpu") if rotated else None
    y = packed_ttt(*tensors, h, w, **STEP, rotary=rotary, backend=backend)
    return y.detach(), *torch.autograd.grad(y, tensors, grad.to(y.dtype))


def by_head(x, m, d):
    """Everything as (.., heads, .., D) groups over which an error is relative: heads of y and qkv, heads of W."""
    if x.ndim == 3:
        return x.unflatten(-1, (-1, d)).movedim(-2, 0).flatten(1)
    return x.squeeze(0).flatten(1) if x.shape[0] == 1 else x.flatten()[None]


def errors(ours, exact, m, d):
    """Relative L2 error, worst head, of output and each gradient."""
    result = []
    for a, b in zip(ours, exact):
        a, b = by_head(a.double(), m, d), by_head(b.double(), m, d)
        result.append(((a - b).norm(dim=-1) / b.norm(dim=-1).clamp_min(1e-30)).max().item())
    return result


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("backend", ["fused", "triton"])
def test_float32(case, backend):
    b, m, h, w, d, rotated = case
    tensors, grad = packed_inputs(b, m, h, w, d)
    exact = run(tensors, grad, h, w, rotated, "reference", torch.float64)
    assert max(errors(run(tensors, grad, h, w, rotated, backend), exact, m, d)) <= BOUND[torch.float32]


# Enough numbers in each case for the ratio of two rounding errors to be a property of the arithmetic.
LOW_CASES = [
    (1, 3, 5, 7, 24, True),
    (1, 1, 14, 14, 48, True),
    pytest.param((4, 3, 1, 1, 32, False), marks=pytest.mark.slow),
    pytest.param((1, 1, 25, 41, 8, False), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("case", LOW_CASES, ids=str)
def test_float16(case):
    """At most twice the closed form's own error, which comes from rounding its inputs and results alone."""
    b, m, h, w, d, rotated = case
    tensors, grad = packed_inputs(b, m, h, w, d, torch.float16)
    exact = run(tensors, grad, h, w, rotated, "reference", torch.float64)
    own = run(tensors, grad, h, w, rotated, "reference")
    ours = run(tensors, grad, h, w, rotated, "triton")
    for a, r, e in zip(ours, own, exact):
        assert a.dtype == r.dtype == torch.float16
        error, bound = ((x.double() - e).norm() / e.norm() for x in (a, r))
        assert error <= 2 * bound and error <= BOUND[torch.float16]


def test_float16_with_float32_weights():
    """As under autocast: the weights' gradients are float32, at the precision of 16-bit products."""
    tensors, grad = packed_inputs(1, 2, 14, 14, 32, torch.float16, torch.float32)
    exact = run(tensors, grad, 14, 14, True, "reference", torch.float64)
    ours = run(tensors, grad, 14, 14, True, "triton")
    assert [x.dtype for x in ours] == [torch.float16] * 2 + [torch.float32] * 3
    assert max(((a.double() - e).norm() / e.norm()).item() for a, e in zip(ours, exact)) <= BOUND[torch.float16]


@pytest.mark.parametrize("tokens", [(14, 14), (64, 64)], ids=str)
def test_update_in_float16(tokens):
    """The error of W' - W0 stays below 1 % and does not grow with the number of tokens."""
    from vit3.ops.glu_ttt import fused, triton

    h, w = tokens
    q, k, v = torch.randn(3, 1, 1, h * w, 16).half()
    w1, w2 = torch.randn(2, 1, 1, 16, 16).half() / 4
    ours = triton.forward(q, k, v, w1, w2, torch.empty_like(q), **STEP)
    exact = fused.forward(*(x.double() for x in (q, k, v, w1, w2, q)), **STEP)
    assert ((ours - exact).norm() / exact.norm()).item() <= 2e-3


@functools.cache
def separate(name):
    """An operator on tensors of its own, with a sensitive layout: small, odd, not square."""
    torch.manual_seed(0)
    if name == "glu":
        tensors = [torch.randn(2, 2, 35, 16) for _ in range(3)] + [torch.randn(1, 2, 16, 16) / 4 for _ in range(2)]
        return functools.partial(glu_ttt, **STEP, backend="triton"), tensors
    tensors = [torch.randn(2, 24, 5, 7) for _ in range(3)] + [torch.randn(24, 1, 3, 3) / 3]
    return functools.partial(dwconv_ttt, **STEP, backend="triton"), tensors


def outcome(op, tensors, grad):
    tensors = [x.detach().requires_grad_() for x in tensors]
    y = op(*tensors)
    return y.detach(), *torch.autograd.grad(y, tensors, grad)


each_op = pytest.mark.parametrize("name", ["glu", "dwconv"])


@each_op
def test_layouts(name):
    """Strides, storage offsets, transposed and expanded gradients change nothing, to the last bit."""
    op, tensors = separate(name)
    grad = torch.randn_like(tensors[0])
    expected = outcome(op, tensors, grad)
    strided = [*torch.stack(tensors[:3], dim=-1).unbind(-1), *tensors[3:]]
    shifted = [torch.cat((x.new_full((3,), 9.0), x.flatten()))[3:].view(x.shape) for x in tensors]
    transposed = grad.transpose(-2, -1).contiguous().transpose(-2, -1)
    for inputs, upstream in [(strided, grad), (shifted, grad), (tensors, transposed)]:
        assert all(map(torch.equal, outcome(op, inputs, upstream), expected))
    same = torch.randn(1).expand_as(grad)  # stride 0 everywhere
    assert all(map(torch.equal, outcome(op, tensors, same), outcome(op, tensors, same.contiguous())))


@each_op
def test_same_call_twice_and_no_number_left_unwritten(name):
    """PyTorch fills new tensors with NaN here, so that an element that no kernel writes would show."""
    op, tensors = separate(name)
    grad = torch.randn_like(tensors[0])
    expected = outcome(op, tensors, grad)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        poisoned = outcome(op, tensors, grad)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(map(torch.equal, poisoned, expected))


@each_op
def test_samples_are_independent(name):
    """To the last bit: the order of every sum depends on the number of tokens alone."""
    op, (q, k, v, *weights) = separate(name)
    grad = torch.randn_like(q)
    together = outcome(op, (q, k, v, *weights), grad)
    for i in range(2):
        alone = outcome(op, (q[i : i + 1], k[i : i + 1], v[i : i + 1], *weights), grad[i : i + 1])
        assert all(torch.equal(a[i : i + 1], b) for a, b in zip(together[:4], alone[:4]))


@each_op
@pytest.mark.parametrize("which", [1, 2], ids=["keys", "values"])
def test_zeros_are_finite(name, which):
    op, tensors = separate(name)
    tensors = [*tensors]
    tensors[which] = torch.zeros_like(tensors[which])
    assert all(x.isfinite().all() for x in outcome(op, tensors, torch.ones_like(tensors[0])))


@each_op
def test_empty_batch(name):
    op, (q, k, v, *weights) = separate(name)
    y, *gradients = outcome(op, (q[:0], k[:0], v[:0], *weights), q[:0])
    assert y.shape == q[:0].shape and not any(x.any() for x in gradients)


def test_large_gradients_in_float16():
    """Sums over tokens pass the range of float16 long before their results do: a loss scale of 65,536 is harmless."""
    tensors, grad = packed_inputs(1, 1, 7, 9, 16, torch.float16)
    plain = run(tensors, grad, 7, 9, False, "triton")
    scaled = run(tensors, grad * 2.0**10, 7, 9, False, "triton")
    small = run(tensors, grad * 2.0**-8, 7, 9, False, "triton")
    for a, b, c in zip(plain[1:], scaled[1:], small[1:]):
        assert b.isfinite().all()
        assert ((b.double() / 2**10 - a.double()).norm() / a.double().norm()) <= 2e-3
        assert ((c.double() * 2**8 - a.double()).norm() / a.double().norm()) <= 2e-3
