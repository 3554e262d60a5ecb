"""What every registered mixer promises: signature, errors, sizes, dtypes, independence, compiling, cost, registry."""

import copy
import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import vit3
from tests.helpers import ROOT, max_error, narrow
from vit3.analysis.parity import load_by_rule, relative_error
from vit3.layers.rope import RoPE2d
from vit3.mixers import MIXERS, create_mixer, register_mixer

each_mixer = pytest.mark.parametrize("name", MIXERS)
SEQUENTIAL = [name for name in MIXERS if "direction" in inspect.signature(MIXERS[name]).parameters]
VARIANTS = [(name, {}) for name in MIXERS] + [(name, dict(direction="causal")) for name in SEQUENTIAL]
each_variant = pytest.mark.parametrize(
    ("name", "options"), VARIANTS, ids=lambda v: v if isinstance(v, str) else "-".join(v)
)
LOW = {"bf16": (torch.bfloat16, 2e-2), "fp16": (torch.float16, 3e-3)}
each_low = pytest.mark.parametrize(("dtype", "bound"), LOW.values(), ids=LOW)


def test_which_mixers_have_directions():
    assert SEQUENTIAL == ["linear", "retention", "delta", "ttt_linear", "ttt_mlp"]


@each_mixer
@pytest.mark.parametrize("rope", [False, True])
def test_shape_and_gradients(name, rope):
    mixer, x = create_mixer(name, 16, 2), torch.randn(2, 15, 16, requires_grad=True)
    y = mixer(x, 3, 5, rope=RoPE2d(16) if rope else None)
    y.square().sum().backward()
    assert y.shape == x.shape
    assert all(t.grad is not None for t in (x, *mixer.parameters()))


@each_mixer
def test_rope_has_an_effect(name):
    mixer, x = create_mixer(name, 16, 2), torch.randn(1, 15, 16)
    assert max_error(mixer(x, 3, 5), mixer(x, 3, 5, rope=RoPE2d(16))) > 0


@each_mixer
@pytest.mark.parametrize("dim,heads", [(10, 3), (8, 0), (0, 1), (2, 4)])
def test_heads(name, dim, heads):
    with pytest.raises(ValueError, match=f"dim={dim} must be a positive multiple of num_heads={heads}"):
        create_mixer(name, dim, heads)


@each_mixer
def test_grid(name):
    with pytest.raises(ValueError, match="15 tokens, but the grid h=4, w=4 has 16"):
        create_mixer(name, 16, 2)(torch.randn(1, 15, 16), 4, 4)


@each_mixer
def test_channels(name):
    with pytest.raises(ValueError, match="8 channels, but this mixer was built for dim=16"):
        create_mixer(name, 16, 2)(torch.randn(1, 15, 8), 3, 5)


@each_mixer
def test_dimensions(name):
    with pytest.raises(ValueError, match="x must be tokens"):
        create_mixer(name, 16, 2)(torch.randn(1, 16, 3, 5), 3, 5)


@each_mixer
def test_macs_grow_with_tokens(name):
    mixer = create_mixer(name, 16, 2)
    assert mixer.macs(4, 8) >= 2 * mixer.macs(4, 4) > 0


@each_variant
@pytest.mark.parametrize("batch", [0, 1, 3])
@pytest.mark.parametrize("grid", [(1, 1), (1, 7), (3, 5), (9, 8)], ids=str)
@pytest.mark.parametrize("head_dim", [3, 8])
def test_odd_sizes(name, options, head_dim, grid, batch):
    mixer = create_mixer(name, 4 * head_dim, 4, **options)
    x = torch.randn(batch, grid[0] * grid[1], 4 * head_dim, requires_grad=True)
    y = mixer(x, *grid, rope=None if head_dim % 2 else RoPE2d(4 * head_dim))  # pairs of channels stay in a head
    y.sum().backward()
    assert y.shape == x.shape
    assert all(g.isfinite().all() for g in (y, x.grad, *(p.grad for p in mixer.parameters() if p.grad is not None)))


@each_variant
def test_samples_are_independent(name, options):
    mixer, x = load_by_rule(create_mixer(name, 32, 2, **options)), torch.randn(3, 35, 32)
    y = mixer(x, 5, 7)
    assert all(torch.allclose(y[i : i + 1], mixer(x[i : i + 1], 5, 7), atol=1e-5) for i in range(3))
    assert torch.equal(y, mixer(x, 5, 7))  # nothing is kept from call to call


@each_variant
def test_who_sees_whom(name, options):
    """The gradient of token 17's output by the tokens: all of them, or none after it."""
    mixer, x = load_by_rule(create_mixer(name, 32, 2, **options)), torch.randn(1, 35, 32, requires_grad=True)
    mixer(x, 5, 7)[0, 17].square().sum().backward()
    seen = x.grad[0].abs().amax(dim=1) > 0
    assert seen[:18].all() and seen[18:].all() == (not options) and seen[18:].any() == (not options)


@pytest.mark.parametrize("name", [name for name in SEQUENTIAL if name != "linear"])
def test_both_ways_is_the_mean_of_both(name):
    causal, both = (create_mixer(name, 32, 2, direction=d) for d in ("causal", "bidirectional"))
    for mixer in (causal, both):
        load_by_rule(mixer)
        for part in ("proj", "post_norm", "norm", "gate"):  # what is not linear stands behind the mean
            if hasattr(mixer, part):
                setattr(mixer, part, None if part in ("norm", "gate", "post_norm") else nn.Identity())
    x = torch.randn(2, 35, 32)
    mean = (causal(x, 5, 7) + causal(x.flip(1), 5, 7).flip(1)) / 2
    assert max_error(both(x, 5, 7), mean) <= 1e-5


@each_variant
@each_low
@pytest.mark.parametrize("autocast", [False, True])
@torch.no_grad()
def test_low_precision(name, options, dtype, bound, autocast):
    mixer, x = load_by_rule(create_mixer(name, 64, 2, **options)), torch.randn(2, 196, 64)
    if not autocast:
        mixer, x = mixer.to(dtype), x.to(dtype)
    exact = copy.deepcopy(mixer).double()(x.double(), 14, 14, rope=RoPE2d(64))
    with torch.autocast("cpu", dtype, enabled=autocast):
        y = mixer(x, 14, 14, rope=RoPE2d(64))
    assert y.dtype == dtype
    assert relative_error(y, exact) <= bound


@each_variant
@each_low
def test_autocast_gradients_are_float32(name, options, dtype, bound):
    mixer, x = load_by_rule(create_mixer(name, 32, 2, **options)), torch.randn(2, 35, 32, requires_grad=True)
    with torch.autocast("cpu", dtype):
        y = mixer(x, 5, 7)
    y.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in mixer.parameters())


@each_variant
def test_inference_mode(name, options):
    mixer, x = create_mixer(name, 16, 2, **options), torch.randn(2, 15, 16)
    y = mixer(x, 3, 5)
    with torch.inference_mode():
        assert torch.allclose(mixer(x, 3, 5), y, atol=1e-6)


@pytest.mark.parametrize("name", SEQUENTIAL)
def test_compiles_whole(name):
    torch._dynamo.reset()
    mixer, x = create_mixer(name, 16, 2), torch.randn(2, 17, 16)  # two mini-batches
    compiled = torch.compile(mixer, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, 1, 17), mixer(x, 1, 17))


@each_mixer
def test_norms_and_biases_are_not_decayed(name):
    """They are 1-D, which is what the optimiser's groups go by; the inner models' matrices are called w1, w2, w3."""
    for parameter, value in create_mixer(name, 16, 2).named_parameters():
        last = parameter.split(".")[-1]
        assert (value.ndim > 1) == (
            last in ("w1", "w2", "w3") or parameter.endswith("weight") and "norm" not in parameter
        )


def solve_flops(a_shape, b_shape, *_, out_shape=None, **__):
    """PyTorch's counter leaves triangular systems out: n (n - 1) / 2 multiply-adds a column."""
    *batch, n, columns = b_shape
    return torch.Size(batch).numel() * columns * n * (n - 1)


@each_variant
@pytest.mark.parametrize("grid", [(1, 1), (3, 5), (9, 15)], ids=str)
def test_macs_equal_a_counter_of_dispatched_products(name, options, grid):
    """Every product of matrices is seen; linear attention's normaliser, N·C multiply-adds, is none."""
    mixer = create_mixer(name, 16, 2, **options)
    seen = {torch.ops.aten.linalg_solve_triangular: solve_flops}
    with FlopCounterMode(display=False, custom_mapping=seen) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        mixer(torch.randn(1, grid[0] * grid[1], 16), *grid)
    unseen = grid[0] * grid[1] * 16 if name == "linear" else 0
    assert mixer.macs(*grid) == counter.get_total_flops() // 2 + unseen


@each_mixer
def test_documented_cost(name):
    mixer, text = create_mixer(name, 192, 6), (ROOT / "docs" / "mixers.md").read_text(encoding="utf-8")
    assert f"| `{name}` | {mixer.macs(14, 14) / 1e6:.1f} M | {mixer.macs(56, 56) / 1e6:.0f} M |" in text


@each_mixer
def test_a_small_network_learns(name):
    """Eight random images are told apart after a few updates."""
    model = vit3.create_model("vit3_tiny", embed_dim=32, depth=2, num_heads=2, num_classes=4, mixer=name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    images, labels, losses = torch.randn(8, 3, 48, 64), torch.arange(8) % 4, []
    for _ in range(12):
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] <= 0.5 * losses[0], losses


@each_mixer
@pytest.mark.parametrize("family", ["vit3_tiny", "h_vit3_tiny"])
def test_both_families_take_it(family, name):
    model = narrow(family, mixer=name, num_classes=3).eval()
    with torch.no_grad():
        assert model(torch.randn(2, 3, 33, 47)).isfinite().all()


def test_unknown_name():
    with pytest.raises(ValueError, match="mixer='sofmax' is unknown .did you mean 'softmax'.*registered:"):
        create_mixer("sofmax", 16, 2)


def test_class_instead_of_name():
    assert type(create_mixer(MIXERS["ttt"], 16, 2)) is MIXERS["ttt"]


def test_register(monkeypatch):
    class Mine(nn.Identity):
        pass

    monkeypatch.delitem(MIXERS, "mine", raising=False)
    register_mixer("mine", Mine)
    try:
        register_mixer("mine", Mine)  # again is fine
        with pytest.raises(ValueError, match="'mine' is taken by Mine"):
            register_mixer("mine", nn.Identity)
        assert isinstance(create_mixer("mine", 16, 2), Mine)
    finally:
        del MIXERS["mine"]


@pytest.mark.parametrize("rope", [None, RoPE2d(12)], ids=["plain", "rope"])
def test_softmax_is_attention(rope):
    mixer, x = create_mixer("softmax", 12, 3).double(), torch.randn(2, 6, 12, dtype=torch.float64)
    q, k, v = mixer.qkv(x).split(12, dim=-1)
    if rope:
        q, k = rope(q, 2, 3), rope(k, 2, 3)
    out = torch.zeros_like(x)
    for b in range(2):
        for head in range(3):
            part = slice(4 * head, 4 * head + 4)
            for n in range(6):
                weight = torch.stack([q[b, n, part] @ k[b, i, part] / 2 for i in range(6)]).exp()
                out[b, n, part] = (weight / weight.sum()) @ v[b, :, part]
    assert max_error(mixer(x, 2, 3, rope=rope), mixer.proj(out)) <= 1e-14
