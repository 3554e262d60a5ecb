"""TTT-Linear and TTT-MLP against gradients taken token by token with autograd, and TTT-Linear as linear attention."""

import pytest
import torch
import torch.nn.functional as F

from tests.helpers import max_error
from tests.mixers.naive import GRIDS, assert_same, projected, randomised, there_and_back
from vit3.layers.rope import RoPE2d
from vit3.mixers import TTTMLP, LinearAttention, TTTLinear

directions = pytest.mark.parametrize("direction", ["bidirectional", "causal"])
kinds = pytest.mark.parametrize("kind", [TTTLinear, TTTMLP])
STARTS = ("w1", "b1", "w2", "b2")


def naive(mixer, x, h, w, rope):
    """Every token's weights are built; tokens of all samples and heads in one loss, which keeps them apart."""
    batch, heads, tokens, d = x.shape[0], mixer.num_heads, h * w, mixer.dim // mixer.num_heads
    q, k, v = projected(mixer, x)
    if rope is not None:
        q, k = rope(q, h, w), rope(k, h, w)
    q, k, v = (t.reshape(batch, tokens, heads, 1, d) for t in (q, k, v))
    start = {name: getattr(mixer, name) for name in STARTS if getattr(mixer, name, None) is not None}
    start = {name: p.view(heads, 1, -1) if name[0] == "b" else p for name, p in start.items()}
    start = {name: torch.stack([p] * batch) for name, p in start.items()}

    def f(weights, t):
        z = t @ weights["w1"] + weights.get("b1", 0)
        if "w2" in weights:
            z = F.gelu(z) @ weights["w2"] + weights.get("b2", 0)
        if mixer.norm is None:
            return z
        factor, shift = (p.view(heads, 1, d) for p in (mixer.norm.weight, mixer.norm.bias))
        return t + F.layer_norm(z, (d,), eps=1e-6) * factor + shift

    def rate(j):
        if mixer.rate is None:
            return mixer.base_rate
        return (mixer.base_rate * torch.sigmoid(mixer.rate(x[:, j])) / d)[:, :, None, None]

    def one(order):
        before, out = start, {}
        for first in range(0, tokens, mixer.mini_batch):
            total = {name: 0 for name in before}
            for i, j in enumerate(list(order)[first : first + mixer.mini_batch]):
                loss = ((f(before, k[:, j]) - v[:, j]) ** 2).sum() / 2
                gradients = torch.autograd.grad(loss, list(before.values()), create_graph=True)
                total = {name: total[name] + rate(j) * g for name, g in zip(before, gradients)}
                share = 1 if mixer.offset is None else max(1 / (i + 1) + mixer.offset[i], 0 * mixer.offset[i])
                now = {name: before[name] - share * total[name] for name in before}
                out[j] = f(now, q[:, j])
            before = now
        return out

    out = there_and_back(one, tokens, mixer.direction)
    y = torch.stack([o.reshape(batch, mixer.dim) for o in out], dim=1)
    if mixer.post_norm is not None:
        y = F.layer_norm(y, (mixer.dim,), mixer.post_norm.weight, mixer.post_norm.bias, 1e-6)
    return mixer.proj(y)


@directions
@kinds
@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("mini_batch", [1, 4, 64])
def test_dual_form_equals_token_by_token(kind, mini_batch, grid, direction):
    assert_same(randomised(kind(8, 2, direction=direction, mini_batch=mini_batch, base_rate=0.1)), naive, *grid)


@directions
@kinds
@pytest.mark.parametrize(
    "options",
    [
        dict(norm_residual=False),
        dict(gate=False),
        dict(bias=False),
        dict(position_rate=True),
        dict(post_norm=False),
        dict(qkv_bias=False),
    ],
    ids=str,
)
def test_options(kind, options, direction):
    mixer = randomised(kind(8, 2, direction=direction, mini_batch=4, base_rate=0.1, **options))
    if mixer.offset is not None:
        mixer.offset.data[2] = -2.0  # a share that would be negative is 0
    assert_same(mixer, naive, 3, 5, RoPE2d(8))


@kinds
def test_autocast_leaves_the_inner_training_alone(kind):
    mixer = kind(8, 2, gate=False, post_norm=False, base_rate=0.1)
    q, k, v = torch.randn(3, 2, 35, 8)
    mixer.project, mixer.proj = lambda x, h, w: (q, k, v), torch.nn.Identity()
    wanted = mixer(q, 5, 7)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(mixer(q, 5, 7), wanted)


def test_usual_rates():
    assert (TTTLinear(8, 2).base_rate, TTTMLP(8, 2).base_rate, TTTMLP(8, 2, base_rate=0.3).base_rate) == (1, 0.1, 0.3)


@directions
def test_whole_sequence_from_zero_is_linear_attention(direction):
    """Rate 1/2 on the square ‖·‖² is rate 1 on half of it: W_n = sum over m <= n of k_mᵀ v_m."""
    plain = dict(norm_residual=False, gate=False, bias=False, post_norm=False, direction=direction)
    ttt = randomised(TTTLinear(8, 2, base_rate=1.0, mini_batch=1000, **plain))
    linear = LinearAttention(8, 2, feature_map="identity", normalise=False, average=False, direction="causal").double()
    linear.load_state_dict({name: p for name, p in ttt.state_dict().items() if name != "w1"})
    torch.nn.init.zeros_(ttt.w1)
    x = torch.randn(2, 42, 8, dtype=torch.float64)
    wanted = linear(x, 7, 6)
    if direction == "bidirectional":
        wanted = (wanted + linear(x.flip(1), 7, 6).flip(1)) / 2
    assert max_error(ttt(x, 7, 6), wanted) <= 1e-10


@kinds
def test_no_rate_is_the_learned_start(kind):
    """With rate 0 each token passes f(W0; q) alone: moving the other tokens changes nothing."""
    mixer = randomised(kind(8, 2, base_rate=0.0))
    x, other = torch.randn(2, 1, 15, 8, dtype=torch.float64)
    other[:, 3] = x[:, 3]
    assert max_error(mixer(x, 3, 5)[:, 3], mixer(other, 3, 5)[:, 3]) <= 1e-12


@kinds
def test_fresh_parameters(kind):
    mixer = kind(64, 2)
    for name, p in mixer.named_parameters():
        if name in ("w1", "w2"):
            assert p.std().item() == pytest.approx(0.02, rel=0.1)
        elif name in ("b1", "b2"):
            assert p.ndim == 1 and not p.any()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (dict(base_rate=-1.0), "base_rate=-1.0 must be a finite number, 0 or more"),
        (dict(mini_batch=0), "mini_batch=0 must be a number of tokens"),
        (dict(mini_batch="N"), "mini_batch=N must be a number of tokens"),
        (dict(direction="up"), "direction='up' is unknown"),
    ],
)
def test_refused(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        TTTLinear(8, 2, **options)
