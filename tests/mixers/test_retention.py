"""Retention against its recurrence, token by token, and its forms against each other."""

import pytest
import torch
import torch.nn.functional as F

from tests.helpers import max_error
from tests.mixers.naive import GRIDS, assert_same, of_head, per_head, projected, randomised, there_and_back
from vit3.layers.rope import RoPE2d
from vit3.mixers import LinearAttention, Retention
from vit3.mixers.retention import retain

directions = pytest.mark.parametrize("direction", ["bidirectional", "causal"])


def naive(mixer, x, h, w, rope):
    q, k, v = projected(mixer, x)
    if rope is not None:
        q, k = rope(q, h, w), rope(k, h, w)

    def head_of_sample(b, head):
        hq, hk, hv = (of_head(mixer, t[b], head) for t in (q, k, v))
        gamma = 1 - 2.0 ** (-5 - head) if mixer.decay is None else mixer.decay

        def one(order):
            state, out = torch.zeros(hk.shape[1], hv.shape[1], dtype=x.dtype), {}
            for n in order:
                state = gamma * state + torch.outer(hk[n], hv[n])
                out[n] = hq[n] @ state
            return out

        return there_and_back(one, h * w, mixer.direction)

    y = per_head(mixer, x, head_of_sample)
    if mixer.norm is not None:
        y = F.group_norm(y.flatten(0, 1), mixer.num_heads, mixer.norm.weight, mixer.norm.bias, 1e-6).view_as(x)
    if mixer.gate is not None:
        z = mixer.gate(x)
        y = y * z / (1 + torch.exp(-z))
    return mixer.proj(y)


@directions
@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_equals_the_recurrence(chunk, grid, direction):
    assert_same(randomised(Retention(8, 2, direction=direction, chunk=chunk)), naive, *grid)


@directions
@pytest.mark.parametrize(
    "options", [dict(norm=False), dict(gate=False), dict(decay=0.5), dict(qkv_bias=False)], ids=str
)
def test_options(options, direction):
    assert_same(randomised(Retention(8, 2, direction=direction, chunk=4, **options)), naive, 3, 5, RoPE2d(8))


def test_parallel_form():
    """O = (Q Kᵀ ⊙ Γ) V with the matrix of decays written out."""
    q, k, v = torch.randn(3, 2, 13, 4, dtype=torch.float64)
    gamma = torch.tensor([0.9, 0.5], dtype=torch.float64)
    decays = [[[g ** (n - m) if n >= m else 0.0 for m in range(13)] for n in range(13)] for g in gamma.tolist()]
    wanted = (q @ k.mT * torch.tensor(decays, dtype=torch.float64)) @ v
    for chunk in (1, 5, 13, 99):
        assert max_error(retain(q, k, v, gamma.log(), chunk=chunk), wanted) <= 1e-10


def test_decays_are_the_papers():
    mixer = Retention(24, 6)
    wanted = [1 - 2.0 ** (-5 - h) for h in range(6)]
    assert mixer.log_decay(torch.empty(0, dtype=torch.float64)).exp().tolist() == pytest.approx(wanted, abs=1e-15)
    assert mixer.log_decay(torch.empty(0, dtype=torch.bfloat16)).dtype == torch.float32


def test_both_ways_without_decay_is_linear_attention_with_the_own_token_twice():
    """Every other token is seen by one of the two ways, the own one by both: mean = (sum over all + own) / 2."""
    retention = randomised(Retention(8, 2, decay=1.0, norm=False, gate=False))
    linear = LinearAttention(8, 2, feature_map="identity", normalise=False, average=False).double()
    linear.load_state_dict(retention.state_dict())
    x = torch.randn(2, 15, 8, dtype=torch.float64)
    q, k, v = (t.unflatten(-1, (2, 4)) for t in projected(retention, x))
    own = retention.proj(((q * k).sum(dim=-1, keepdim=True) * v).flatten(2))
    assert max_error(retention(x, 3, 5), (linear(x, 3, 5) + own) / 2) <= 1e-10


def test_fast_decay_over_many_tokens_is_finite():
    """Powers of γ vanish; they never grow."""
    mixer = Retention(8, 2, decay=1e-4)
    x = torch.randn(1, 300, 8, requires_grad=True)
    y = mixer(x, 15, 20)
    y.sum().backward()
    assert y.isfinite().all() and x.grad.isfinite().all()


@pytest.mark.parametrize("decay", [0.0, 1.5, float("nan")])
def test_refused(decay):
    with pytest.raises(ValueError, match=r"must lie in \(0, 1\]"):
        Retention(8, 2, decay=decay)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_are_float32(dtype):
    """Under autocast as well, 16-bit inputs give the float32 result, rounded once."""
    q, k, v = torch.randn(3, 2, 300, 4, dtype=dtype)
    wanted = retain(q.float(), k.float(), v.float(), torch.zeros(2), chunk=64).to(dtype)
    with torch.autocast("cpu", dtype):
        assert torch.equal(retain(q, k, v, torch.zeros(2), chunk=64), wanted)
