"""The plain network's ways to tell positions: what each stores, sees and leaves unchanged."""

import copy

import pytest
import timm
import torch
from timm.models import group_parameters

from tests.helpers import narrow
from tests.toy import configured, model_of
from vit3.models.vit3 import POSITIONS, ViT3

each_pos = pytest.mark.parametrize("pos", POSITIONS)
TABLES = {"table": {"blocks.0.position.weight", "blocks.1.position.weight"}, "absolute": {"position.weight"}}


def plain(pos, **kwargs):
    return narrow("vit3_tiny", **{"pos": pos, "img_size": 64, **kwargs})


def moved(model):
    """The model with its tables, which start near nothing, at full strength."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "position" in name or "cpe" in name or ".qkv.weight" in name or ".proj.weight" in name:
                parameter.normal_()
    return model


def test_default_is_the_published_one():
    keys, default = list(plain("cpe").state_dict()), narrow("vit3_tiny").state_dict()
    assert keys == list(default) and {"blocks.0.cpe.weight", "blocks.1.cpe.bias"} <= set(keys)
    assert not any("position" in key for key in keys)


@each_pos
def test_parameters(pos):
    names = {name for name, _ in plain(pos).named_parameters()}
    extra = names - {name for name, _ in plain("none").named_parameters()}
    cpe = {f"blocks.{i}.cpe.{kind}" for i in range(2) for kind in ("weight", "bias")}
    shared = {f"blocks.{i}.position.shared" for i in range(2)} if pos == "table" else set()
    assert extra == {"cpe": cpe, **TABLES}.get(pos, set()) | shared


@each_pos
@pytest.mark.parametrize("mixer", ["ttt", "softmax"])
def test_any_size_trains(pos, mixer):
    model = plain(pos, mixer=mixer, img_size=(64, 96))
    for size in ((64, 96), (65, 97), (33, 31), (1, 1)):
        model.zero_grad()
        model(torch.randn(2, 3, *size)).square().sum().backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(
    "pos,tells", [("none", False), ("cpe", True), ("table", True), ("absolute", True), ("rope", True)]
)
@torch.no_grad()
def test_who_can_tell_places(pos, tells):
    """With attention, which knows no order, patches in another order give the same answer without positions only."""
    model = moved(plain(pos, mixer="softmax")).double().eval()
    x = torch.randn(1, 3, 64, 64, dtype=torch.float64)
    difference = (model(x) - model(x.roll((16, 32), (2, 3)))).abs().max()
    assert (difference > 1e-6) == tells


@torch.no_grad()
def test_rotation_enters_q_and_k():
    """``rope`` is what the mixer does with the rotation of all channels; weights are those of ``none``."""
    rotated, plain_one = moved(plain("rope", depth=1)).eval(), plain("none", depth=1).eval()
    plain_one.load_state_dict(rotated.state_dict())
    block, x = plain_one.blocks[0], torch.randn(1, 16, 48)
    wanted = x + block.attn(block.norm1(x), 4, 4, rope=rotated.blocks[0].rope)
    wanted = wanted + block.mlp(block.norm2(wanted))
    torch.testing.assert_close(rotated.blocks[0](x, 4, 4), wanted)
    assert (rotated.blocks[0](x, 4, 4) - block(x, 4, 4)).abs().max() > 1e-3
    assert rotated.blocks[0].rope.dim == 48


@pytest.mark.parametrize("pos", TABLES)
@torch.no_grad()
def test_intermediates_see_the_tables(pos):
    model, x = moved(plain(pos)).eval(), torch.randn(1, 3, 64, 96)
    assert torch.equal(model.forward_intermediates(x)[0], model.forward_features(x))


@pytest.mark.parametrize("pos", TABLES)
def test_tables_are_not_decayed(pos):
    assert plain(pos).no_weight_decay() == TABLES[pos]
    assert plain("cpe").no_weight_decay() == set()


@each_pos
@pytest.mark.parametrize("coarse", [False, True])
def test_groups_cover_every_parameter(pos, coarse):
    model = plain(pos)
    groups = group_parameters(model, model.group_matcher(coarse=coarse), reverse=True)
    assert groups.keys() == dict(model.named_parameters()).keys()
    order = [groups[name] for name, _ in model.named_parameters() if not name.startswith("norm")]
    assert order == sorted(order)


@pytest.mark.parametrize("size,grid", [(64, (4, 4)), ((65, 97), (5, 7)), ((16, 40), (1, 3))], ids=str)
def test_table_has_the_nominal_grid(size, grid):
    assert plain("table", img_size=size).blocks[1].position.weight.shape == (1, *grid, 48)
    assert plain("absolute", img_size=size).position.weight.shape == (1, *grid, 48)


@each_pos
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@torch.no_grad()
def test_sixteen_bit(pos, dtype):
    model, x = plain(pos).eval(), torch.randn(1, 3, 65, 97)
    with torch.autocast("cpu", dtype):
        assert model(x).dtype == dtype
        assert model._run(model.blocks[0], torch.randn(1, 35, 48, dtype=dtype), 5, 7).dtype == dtype
    y = copy.deepcopy(model).to(dtype)(x.to(dtype))
    assert y.dtype == dtype and y.isfinite().all()


def test_wrong_arguments():
    with pytest.raises(ValueError, match="pos='tabel' is unknown; use one of: none, cpe, table, absolute, rope"):
        plain("tabel")
    with pytest.raises(ValueError, match=r"pos='absolute' is a table for one size .* img_size=\(height, width\)"):
        plain("absolute", img_size=None)
    with pytest.raises(ValueError, match="dim=42 must be a multiple of 4"):
        plain("rope", embed_dim=42)
    with pytest.raises(ValueError, match="published weights of vit3_tiny fit pos='cpe' only"):
        timm.create_model("vit3_tiny", pretrained=True, pos="rope")


def test_base_of_the_ablations():
    """DeiT-S without class token has 21.975 M; the paper's columns imply 0.906 to 0.916 M more, at no cost."""
    with torch.device("meta"):
        cfg = configured("model=deit_s", "mixer=softmax", "data=imagenet", "data.root=x")
        model = model_of(cfg, tuple(map(str, range(1000))))
    assert isinstance(model, ViT3) and not any("cpe" in name for name, _ in model.named_modules())
    tables = sum(p.numel() for name, p in model.named_parameters() if "position" in name)
    assert tables == 12 * 197 * 384 and 0.906e6 <= tables <= 0.916e6
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(22.88, abs=0.01)
