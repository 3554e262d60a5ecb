"""Linear attention against sums over pairs of tokens, and as an inner linear model trained on the dot product."""

import math

import pytest
import torch

from tests.helpers import max_error
from tests.mixers.naive import GRIDS, assert_same, of_head, per_head, projected, randomised
from vit3.layers.rope import RoPE2d
from vit3.mixers import LinearAttention, Retention
from vit3.mixers.linear import _positive

OPTIONS = {
    "normalised": {},
    "elu-mean": dict(normalise=False),
    "mean": dict(feature_map="identity", normalise=False),
    "sum": dict(feature_map="identity", normalise=False, average=False),
}
directions = pytest.mark.parametrize("direction", ["bidirectional", "causal"])


def naive(mixer, x, h, w, rope):
    q, k, v = projected(mixer, x)
    if mixer.feature_map == "elu":
        q, k = (torch.nn.functional.elu(t) + 1 for t in (q, k))
    turned = (q, k) if rope is None else (rope(q, h, w), rope(k, h, w))

    def head_of_sample(b, head):
        plain_q, plain_k, rq, rk, rv = (of_head(mixer, t[b], head) for t in (q, k, *turned, v))
        out = []
        for n in range(h * w):
            seen = n + 1 if mixer.direction == "causal" else h * w
            total = sum((rk[:seen] * rq[n]).sum(dim=1, keepdim=True) * rv[:seen])
            if mixer.normalise:
                total = total / seen / ((plain_k[:seen] * plain_q[n]).sum() / seen + 1e-6)
            elif mixer.average:
                total = total / seen
            out.append(total)
        return out

    return mixer.proj(per_head(mixer, x, head_of_sample))


@directions
@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_equals_a_loop_over_pairs(options, grid, direction):
    mixer = randomised(LinearAttention(8, 2, direction=direction, chunk=5, **options))
    assert_same(mixer, naive, *grid)


@directions
def test_rope_turns_the_numerator_alone(direction):
    assert_same(randomised(LinearAttention(8, 2, direction=direction)), naive, 3, 5, RoPE2d(8))


@pytest.mark.parametrize("lr", [1.0, 0.7])
def test_fc_with_dot_loss_is_linear_attention_beside_a_static_map(lr):
    """One full-batch step: O = Q W0 + lr / (N sqrt(D)) Q KᵀV, by autograd through the inner loss."""
    n, d = 15, 4
    q, k, v = torch.randn(3, n, d, dtype=torch.float64)
    start = torch.randn(d, d, dtype=torch.float64, requires_grad=True)
    mixer = LinearAttention(d, 1, qkv_bias=False, feature_map="identity", normalise=False).double()
    with torch.no_grad():  # q, k and v are the tokens themselves
        mixer.qkv.weight.zero_()
        mixer.qkv.weight[:d] = mixer.proj.weight[:] = torch.eye(d)
        mixer.proj.bias.zero_()
    for w0 in (start, torch.zeros_like(start).requires_grad_()):
        loss = -((k @ w0) * v).sum() / n / math.sqrt(d)
        fast = w0 - lr * torch.autograd.grad(loss, w0)[0]
        mixer.project = lambda x, h, w: (q[None], k[None], v[None])
        attention = mixer(q[None], 3, 5)[0]
        assert max_error(q @ fast, q @ w0 + lr / math.sqrt(d) * attention) <= 1e-10


def test_retention_without_decay_is_the_causal_sum():
    linear = LinearAttention(8, 2, feature_map="identity", normalise=False, average=False, direction="causal")
    retention = Retention(8, 2, decay=1.0, norm=False, gate=False, direction="causal", chunk=4)
    retention.double().load_state_dict(randomised(linear).state_dict())
    x = torch.randn(2, 42, 8, dtype=torch.float64)
    assert max_error(linear(x, 7, 6), retention(x, 7, 6)) <= 1e-10


def test_normalised_weights_average_the_values():
    """Equal values come out unchanged, whatever the weights."""
    mixer = randomised(LinearAttention(8, 2))
    with torch.no_grad():
        mixer.qkv.weight[16:] = 0
    y = mixer(torch.randn(1, 15, 8).double(), 3, 5)
    assert max_error(y, mixer.proj(mixer.qkv.bias[16:]).expand_as(y)) <= 1e-5  # the 1e-6 of the denominator


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_feature_map_does_not_cancel(dtype):
    """elu(-8) + 1 is 0 in bfloat16; the feature is exp(-8)."""
    x = torch.tensor([-8.0, -30.0, 0.0, 3.0, 1000.0], dtype=dtype, requires_grad=True)
    y = _positive(x)
    y.sum().backward()
    assert y.dtype == torch.float32
    assert y.tolist() == pytest.approx([math.exp(-8), math.exp(-30), 1, 4, 1001], rel=1e-2)
    assert x.grad.tolist() == pytest.approx([math.exp(-8), math.exp(-30), 1, 1, 1], rel=1e-2, abs=1e-7)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (dict(feature_map="relu"), "feature_map='relu' is unknown; use one of: elu, identity"),
        (dict(feature_map="identity"), "use feature_map='elu', or normalise=False"),
        (dict(average=False), "average=False means nothing with normalise=True"),
        (dict(direction="both"), "direction='both' is unknown; use one of: bidirectional, causal"),
        (dict(chunk=0), "chunk=0 must be a number of tokens"),
    ],
)
def test_refused(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        LinearAttention(8, 2, **options)
