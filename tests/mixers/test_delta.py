"""DeltaNet against its recurrence, token by token, and as gradient steps on a squared error."""

import pytest
import torch

from tests.helpers import max_error
from tests.mixers.naive import GRIDS, assert_same, of_head, per_head, projected, randomised, there_and_back
from vit3.layers.rope import RoPE2d
from vit3.mixers import DeltaNet
from vit3.mixers.delta import delta_rule

directions = pytest.mark.parametrize("direction", ["bidirectional", "causal"])


def naive(mixer, x, h, w, rope):
    """S (values by keys) of the paper: S_t = S_(t-1) (I - β k kᵀ) + β v kᵀ."""
    q, k, v = projected(mixer, x)
    q, k = q / (1 + torch.exp(-q)), k / (1 + torch.exp(-k))
    if rope is not None:
        q, k = rope(q, h, w), rope(k, h, w)
    beta = torch.sigmoid(x @ mixer.beta.weight.T + mixer.beta.bias) * (2 if mixer.negative_eigenvalues else 1)

    def head_of_sample(b, head):
        hq, hk, hv = (of_head(mixer, t[b], head) for t in (q, k, v))
        hq, hk = (t / torch.sqrt((t * t).sum(dim=-1, keepdim=True) + 1e-6) for t in (hq, hk))
        eye = torch.eye(hk.shape[1], dtype=x.dtype)

        def one(order):
            state, out = torch.zeros(hv.shape[1], hk.shape[1], dtype=x.dtype), {}
            for n in order:
                rate = beta[b, n, head]
                state = state @ (eye - rate * torch.outer(hk[n], hk[n])) + rate * torch.outer(hv[n], hk[n])
                out[n] = state @ hq[n]
            return out

        out = there_and_back(one, h * w, mixer.direction)
        if mixer.norm is None:
            return out
        weight = of_head(mixer, mixer.norm.weight, head)
        return [weight * y / torch.sqrt((y * y).mean() + 1e-6) for y in out]

    return mixer.proj(per_head(mixer, x, head_of_sample))


@directions
@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_equals_the_recurrence(chunk, grid, direction):
    assert_same(randomised(DeltaNet(8, 2, direction=direction, chunk=chunk)), naive, *grid)


@directions
@pytest.mark.parametrize("options", [dict(norm=False), dict(negative_eigenvalues=True), dict(qkv_bias=False)], ids=str)
def test_options(options, direction):
    assert_same(randomised(DeltaNet(8, 2, direction=direction, chunk=4, **options)), naive, 3, 5, RoPE2d(8))


def inputs(n=13, d=4):
    q, k, v = torch.randn(3, 2, n, d, dtype=torch.float64)
    return q, torch.nn.functional.normalize(k, dim=-1), v, torch.rand(2, n, 1, dtype=torch.float64)


def test_one_squared_error_step_per_token():
    """SGD with rate β_n on ½‖k_n W - v_n‖², by autograd, then the query of the same token."""
    q, k, v, beta = inputs()
    weight, out = torch.zeros(2, 4, 4, dtype=torch.float64, requires_grad=True), []
    for n in range(13):
        row = slice(n, n + 1)
        loss = 0.5 * (k[:, row] @ weight - v[:, row]).square().sum()
        weight = weight - beta[:, row] * torch.autograd.grad(loss, weight, create_graph=True)[0]
        out.append(q[:, row] @ weight)
    assert max_error(delta_rule(q, k, v, beta, chunk=5), torch.cat(out, dim=1)) <= 1e-10


def test_no_rate_no_output():
    q, k, v, beta = inputs()
    assert max_error(delta_rule(q, k, v, 0 * beta, chunk=5), torch.zeros_like(v)) == 0


def test_one_key_keeps_the_last_value():
    """With β = 1 and all keys equal to the query, the answer is the latest value: the rule overwrites."""
    _, k, v, beta = inputs()
    k = k[:, :1].expand_as(k)
    assert max_error(delta_rule(k, k, v, torch.ones_like(beta), chunk=5), v) <= 1e-12


def test_orthogonal_keys_just_add():
    """Nothing to correct: the rule is linear attention."""
    q, _, v, beta = inputs(n=4)
    k = torch.eye(4, dtype=torch.float64).expand(2, 4, 4)
    assert max_error(delta_rule(q, k, v, beta, chunk=3), (q @ k.mT).tril() @ (beta * v)) <= 1e-12


def test_long_sequences_of_repeated_keys_stay_bounded():
    mixer = DeltaNet(16, 2, negative_eigenvalues=True, norm=False, direction="causal")
    x = torch.randn(1, 1, 16).expand(1, 1024, 16)
    assert mixer(x, 32, 32).abs().max() <= 100


def test_zero_tokens_have_finite_gradients():
    mixer = DeltaNet(8, 2, qkv_bias=False)
    x = torch.zeros(1, 6, 8, requires_grad=True)
    mixer(x, 2, 3).sum().backward()
    assert all(g.isfinite().all() and g.abs().max() <= 1e4 for g in (x.grad, *(p.grad for p in mixer.parameters())))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_are_float32(dtype):
    """Under autocast as well, 16-bit inputs give the float32 result, rounded once."""
    tensors = [t.to(dtype) for t in inputs(n=300)]
    wanted = delta_rule(*(t.float() for t in tensors), chunk=64).to(dtype)
    with torch.autocast("cpu", dtype):
        assert torch.equal(delta_rule(*tensors, chunk=64), wanted)
