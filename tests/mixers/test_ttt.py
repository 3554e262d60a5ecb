"""The mixer as a module: contract, inner report, precision."""

import copy

import pytest
import torch

from vit3 import TTT
from vit3.analysis.parity import load_by_rule, relative_error
from vit3.layers.rope import RoPE2d

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}
GRIDS = {196: (14, 14), 4096: (64, 64), 16384: (128, 128), 65536: (256, 256)}
STARTS = {"w1": "glu", "w2": "glu", "w3": "dwconv"}


def test_parameters_are_the_authors():
    shapes = {name: tuple(p.shape) for name, p in TTT(24, 3).named_parameters()}
    assert shapes == {
        "qkv.weight": (96, 24),
        "qkv.bias": (96,),
        "w1": (1, 3, 8, 8),
        "w2": (1, 3, 8, 8),
        "w3": (8, 1, 3, 3),
        "proj.weight": (24, 32),
        "proj.bias": (24,),
    }


def test_no_qkv_bias():
    assert TTT(8, 2, qkv_bias=False).qkv.bias is None


@pytest.mark.parametrize("batch", [0, 1, 3])
@pytest.mark.parametrize("grid", [(1, 1), (1, 7), (3, 5)], ids=str)
@pytest.mark.parametrize("head_dim", [8, 24, 48, 80])
def test_odd_sizes(batch, grid, head_dim):
    mixer = TTT(2 * head_dim, 2)
    x = torch.randn(batch, grid[0] * grid[1], 2 * head_dim, requires_grad=True)
    y = mixer(x, *grid, rope=RoPE2d(2 * head_dim))
    y.sum().backward()
    assert y.shape == x.shape
    assert all(g.isfinite().all() for g in (y, x.grad, *(p.grad for p in mixer.parameters())))


@pytest.mark.parametrize("rope", [False, True])
def test_return_inner_changes_nothing(rope):
    mixer, x = load_by_rule(TTT(64, 2)), torch.randn(2, 35, 64)
    rope = RoPE2d(64) if rope else None
    y, inner = mixer(x, 5, 7, rope=rope, return_inner=True)
    assert torch.equal(y, mixer(x, 5, 7, rope=rope))
    assert set(inner) == {"glu", "dwconv"}


def test_report_agrees_with_itself():
    mixer, x = load_by_rule(TTT(64, 2)), torch.randn(2, 35, 64)
    report = mixer(x, 5, 7, return_inner=True)[1]["glu"]
    update = report["fast_weights"]["w1"] - mixer.w1
    assert torch.allclose(update.flatten(1).norm(dim=1), report["update_norm"]["w1"])
    norm = report["grad_norm"]["w1"]
    assert torch.allclose(update.norm(dim=-2), norm * report["clip_ratio"]["w1"], atol=1e-6)
    assert torch.allclose(report["clip_ratio"]["w1"], 1 / (1 + norm))


def test_loss_falls_on_smooth_input():
    h = w = 8
    y, x = torch.meshgrid(torch.linspace(-1, 1, h), torch.linspace(-1, 1, w), indexing="ij")
    waves = torch.stack([torch.sin((i + 1) * x + i * y) for i in range(32)], dim=-1).view(1, h * w, 32)
    for report in TTT(32, 2)(waves, h, w, return_inner=True)[1].values():
        assert report["loss_after"].sum() <= report["loss_before"].sum()


def test_samples_are_independent():
    mixer, x = load_by_rule(TTT(32, 2)), torch.randn(3, 35, 32)
    y = mixer(x, 5, 7)
    assert all(torch.allclose(y[i : i + 1], mixer(x[i : i + 1], 5, 7), atol=1e-5) for i in range(3))


def test_grid_matters():
    mixer, x = load_by_rule(TTT(32, 2)), torch.randn(1, 12, 32)
    assert relative_error(mixer(x, 3, 4), mixer(x, 2, 6)) > 1e-2


def test_second_derivative():
    mixer = load_by_rule(TTT(8, 2)).double()
    x = torch.randn(1, 6, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: mixer(x, 2, 3), x)


def updates(mixer, x, grid, **options):
    """W' - W0 of every fast weight."""
    report = mixer(x, *grid, return_inner=True, **options)[1]
    return {name: report[part]["fast_weights"][name] - getattr(mixer, name) for name, part in STARTS.items()}


@pytest.mark.parametrize("tokens", GRIDS)
@pytest.mark.parametrize("dtype", LOW.values(), ids=LOW)
@torch.no_grad()
def test_update_under_autocast(tokens, dtype):
    mixer, x = load_by_rule(TTT(64, 2)), torch.randn(1, tokens, 64)
    exact = updates(copy.deepcopy(mixer).double(), x.double(), GRIDS[tokens])
    with torch.autocast("cpu", dtype):
        ours = updates(mixer, x, GRIDS[tokens])
    for name in exact:
        assert ours[name].dtype == torch.float32
        assert relative_error(ours[name], exact[name]) <= 1e-2, name


@pytest.mark.parametrize("rope", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype,bound", [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)], ids=LOW)
@torch.no_grad()
def test_output_error(dtype, bound, autocast, rope):
    mixer, x = load_by_rule(TTT(64, 2)), torch.randn(2, 196, 64)
    rope = RoPE2d(64) if rope else None
    if not autocast:
        mixer, x = mixer.to(dtype), x.to(dtype)
    exact = copy.deepcopy(mixer).double()(x.double(), 14, 14, rope=rope)
    with torch.autocast("cpu", dtype, enabled=autocast):
        y = mixer(x, 14, 14, rope=rope)
    assert y.dtype == dtype
    assert relative_error(y, exact) <= bound


@pytest.mark.parametrize("dtype", LOW.values(), ids=LOW)
def test_autocast_gradients_are_float32(dtype):
    mixer = load_by_rule(TTT(32, 2))
    x = torch.randn(2, 35, 32, requires_grad=True)
    with torch.autocast("cpu", dtype):
        y = mixer(x, 5, 7)
    y.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in mixer.parameters())


def test_backend_is_checked_at_once(monkeypatch):
    with pytest.raises(ValueError, match="backend='cuda' is unknown"):
        TTT(8, 2, backend="cuda")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="backend='triton' needs the package triton"):
        TTT(8, 2, backend="triton")


def test_backend_reaches_the_operators():
    mixer = TTT(8, 2)
    mixer.backend = "cuda"
    with pytest.raises(ValueError, match="backend='cuda' is unknown"):
        mixer(torch.randn(1, 4, 8), 2, 2)
