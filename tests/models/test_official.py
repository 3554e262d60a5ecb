"""Key maps to and from the authors' checkpoints, and the conversion of their files."""

import argparse
import hashlib
import json
import re
import sys

import pytest
import timm
import torch
from safetensors import safe_open

from tests.helpers import GOLDEN, same_dict
from tests.models.official_files import OFFICIAL, official_generator, official_shapes, official_weights, save_official
from tools import convert as convert_tool
from vit3.files import sha256_of
from vit3.layers.rope import RoPE2d
from vit3.models import MODEL_NAMES
from vit3.models.dense import DENSE_NAMES, DenseHViT3
from vit3.models.official import convert, from_official, to_official
from vit3.models.weights import WeightsError, read_tensors, stored_kinds

each_model = pytest.mark.parametrize("name", MODEL_NAMES)
families = pytest.mark.parametrize("name", ["vit3_tiny", "h_vit3_tiny"])


def meta(shapes):
    return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}


@each_model
def test_names_and_shapes(name):
    """The authors' state dict, less the rotation tables, is ours."""
    renamed = from_official(meta(official_shapes(name)), name)
    with torch.device("meta"):
        model = timm.create_model(name)
    assert {k: v.shape for k, v in renamed.items()} == {k: v.shape for k, v in model.state_dict().items()}


@families
def test_there_and_back(name):
    """Official -> ours -> official, bit for bit; only rotation tables are computed anew, to rounding."""
    weights = official_weights(name)
    again = to_official(from_official(weights, name), name)
    tables = {k for k in weights if k.endswith("rotations")}
    assert bool(tables) == name.startswith("h_")
    assert again.keys() == weights.keys()
    assert all(torch.equal(again[k], weights[k]) for k in weights.keys() - tables)
    assert all(torch.allclose(again[k], weights[k], rtol=0, atol=2e-6) for k in tables)
    once_more = to_official(from_official(again, name), name)
    assert same_dict(once_more, again)


@families
def test_gradients_map_too(name):
    model = timm.create_model(name)
    gradients = {k: torch.randn_like(p) for k, p in model.named_parameters()}
    official = to_official(gradients, name)
    assert not any(k.endswith("rotations") for k in official)
    assert same_dict(from_official(official, name), gradients)


def test_rotations_of_another_size():
    with torch.device("meta"):
        model = timm.create_model("h_vit3_tiny")
    tensors = to_official(model.state_dict(), "h_vit3_tiny", img_size=(384, 200))
    sizes = [tuple(tensors[f"layers.{i}.blocks.0.rope.rotations"].shape[:2]) for i in range(4)]
    assert sizes == [(96, 50), (48, 25), (24, 13), (12, 7)]


def test_rotation_tables_rotate():
    """The written table, taken as complex numbers, does what the layer does."""
    with torch.device("meta"):
        model = timm.create_model("h_vit3_tiny")
    table = to_official(model.state_dict(), "h_vit3_tiny")["layers.1.blocks.0.rope.rotations"]
    h, w, pairs, _ = table.shape
    x = torch.randn(1, h * w, 2 * pairs)
    z = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.view_as_complex(table.contiguous()).flatten(0, 1)
    assert torch.allclose(RoPE2d(2 * pairs)(x, h, w), torch.view_as_real(z).flatten(-2), atol=1e-5)


@pytest.mark.parametrize("mapping", [from_official, to_official], ids=lambda f: f.__name__)
@families
def test_names_are_strict(mapping, name):
    with torch.device("meta"):
        tensors = timm.create_model(name).state_dict()
    with pytest.raises(WeightsError, match="1 missing .*head.bias.*0 unexpected"):
        mapping({k: v for k, v in tensors.items() if k != "head.bias"}, name)
    with pytest.raises(WeightsError, match="0 missing .*1 unexpected .*surplus"):
        mapping({**tensors, "surplus": tensors["head.bias"]}, name)
    with pytest.raises(ValueError, match="model_name='vittt_tiny' is unknown; use one of: vit3_tiny"):
        mapping(tensors, "vittt_tiny")


@families
def test_convert(name, tmp_path):
    """A file with a config object, a namespace and a NumPy number, their classes gone, loads strictly."""
    source = save_official(tmp_path / "official.pth", official_weights(name))
    assert "throwaway_yacs" not in sys.modules and "yacs" not in sys.modules
    target = tmp_path / "folder" / "ours.safetensors"
    report = convert(source, target)
    with torch.device("meta"):
        model = timm.create_model(name)
    assert len(report.matched) == len(model.state_dict()) and report.fraction == 1
    assert not (report.missing or report.unexpected or report.reshaped)
    tensors = read_tensors(target)
    model.load_state_dict(tensors, strict=True, assign=True)
    assert same_dict(tensors, from_official(official_weights(name), name))
    with safe_open(target, "pt") as file:
        facts = {"model": name, "source": "official.pth", "weights": "raw"}
        assert file.metadata() == facts | {"source_sha256": hashlib.sha256(source.read_bytes()).hexdigest()}


def test_convert_takes_ema_on_request(tmp_path):
    weights = official_weights("vit3_tiny")
    source = save_official(tmp_path / "o.pth", weights, model_ema={k: v + 1 for k, v in weights.items()})
    convert(source, tmp_path / "raw.safetensors")
    convert(source, tmp_path / "ema.safetensors", ema=True)
    raw, ema = (read_tensors(tmp_path / f"{kind}.safetensors")["head.bias"] for kind in ("raw", "ema"))
    assert torch.equal(ema, raw + 1)
    plain = save_official(tmp_path / "plain.pth", weights)
    with pytest.raises(WeightsError, match="holds no EMA weights"):
        convert(plain, tmp_path / "no.safetensors", ema=True)


@families
def test_report_adds_up(name, tmp_path):
    """matched + missing + reshaped are the model; one reshaped and one missing tensor still pass."""
    weights = dict(official_weights(name))
    weights["norm.bias"] = torch.zeros(3)
    del weights["norm.weight"]
    weights["extra"] = torch.zeros(5)
    report = convert(save_official(tmp_path / "o.pth", weights), tmp_path / "t.safetensors", name)
    with torch.device("meta"):
        own = timm.create_model(name).state_dict()
    assert (report.missing, report.reshaped, report.unexpected) == (["norm.weight"], ["norm.bias"], ["extra"])
    assert len(report.matched) + 2 == len(own)
    assert sum(report.sizes.values()) == sum(v.numel() for v in own.values())
    assert f"matched {len(own) - 2} tensors" in str(report)


def test_under_95_percent_is_refused(tmp_path):
    weights = {k: v for k, v in official_weights("vit3_tiny").items() if not k.startswith("blocks.0.")}
    source, target = save_official(tmp_path / "o.pth", weights), tmp_path / "t.safetensors"
    with pytest.raises(WeightsError, match=r"as vit3_tiny fits 9\d\.\d % of the model, at least 95 % is needed"):
        convert(source, target)
    assert not target.exists()


def test_foreign_file_is_refused(tmp_path):
    torch.save({"model": {"conv1.weight": torch.zeros(3, 3)}}, tmp_path / "resnet.pth")
    with pytest.raises(WeightsError, match="fits 0.0 % of the model.*unexpected: conv1.weight"):
        convert(tmp_path / "resnet.pth", tmp_path / "t.safetensors", "vit3_tiny")


def test_command(tmp_path, monkeypatch, capsys):
    """The command prints the counts; a bad file ends it with one sentence and a non-zero status."""
    source, target = save_official(tmp_path / "o.pth", official_weights("vit3_tiny")), tmp_path / "t.safetensors"
    monkeypatch.setattr(sys, "argv", ["convert.py", str(source), str(target)])
    convert_tool.main()
    printed = capsys.readouterr().out
    assert "matched 210 tensors" in printed and "missing 0" in printed and "unexpected 0" in printed
    monkeypatch.setattr(sys, "argv", ["convert.py", "nowhere.pth", str(target)])
    with pytest.raises(SystemExit) as stop:
        convert_tool.main()
    assert stop.value.code == 2
    assert capsys.readouterr().err.strip() == "error: nowhere.pth: no such file"


def test_every_model_has_an_official_name():
    assert tuple(OFFICIAL) == MODEL_NAMES
    assert {name.removesuffix("_dense") for name in DENSE_NAMES} < {*MODEL_NAMES}
    assert all(timm.is_model(name) for name in DENSE_NAMES)


def test_dense(tmp_path):
    """The authors' detection backbone: there and back, and out of a whole detector's file by itself."""
    shapes = json.loads((GOLDEN / "dense_state_dict.json").read_text())["vittt_tiny"]
    weights = {k: torch.empty(s, device="meta") for k, s in shapes.items()}
    ours = from_official(weights, "h_vit3_tiny_dense")
    with torch.device("meta"):
        model = DenseHViT3("tiny")
    assert {k: v.shape for k, v in ours.items()} == {k: v.shape for k, v in model.state_dict().items()}
    weights = {k: torch.randn(s) if s else torch.tensor(0) for k, s in shapes.items()}
    again = to_official(from_official(weights, "h_vit3_tiny_dense"), "h_vit3_tiny_dense")
    assert {k: tuple(v.shape) for k, v in again.items()} == {k: tuple(s) for k, s in shapes.items()}
    detector = {f"backbone.{k}": v for k, v in weights.items()} | {"neck.conv.weight": torch.ones(2)}
    torch.save({"meta": {"epoch": 12}, "state_dict": detector}, tmp_path / "detector.pth")
    report = convert(tmp_path / "detector.pth", tmp_path / "ours.safetensors")
    assert not report.missing and len(report.matched) == len(ours)
    with safe_open(tmp_path / "ours.safetensors", "pt") as file:
        assert file.metadata()["model"] == "h_vit3_tiny_dense"
    assert same_dict(read_tensors(tmp_path / "ours.safetensors"), {k: weights[k] for k in ours})


def test_generator_there_and_back():
    """The table of places is dropped, and computed for the grid at hand on the way back."""
    weights = official_generator()
    ours = from_official(weights, "dit3_s_8")
    with torch.device("meta"):
        model = timm.create_model("dit3_s_8")
    assert ours.keys() == model.state_dict().keys() == weights.keys() - {"pos_embed"}
    again = to_official(ours, "dit3_s_8")
    assert again.keys() == weights.keys() and all(torch.equal(again[k], weights[k]) for k in ours)
    table = again["pos_embed"]
    assert table.shape == weights["pos_embed"].shape == (1, 16, 384)
    assert torch.equal(table[0], model.position.table(4, 4))
    assert torch.equal(to_official(ours, "dit3_s_8", (16, 60))["pos_embed"][0], model.position.table(2, 8))
    with pytest.raises(WeightsError, match="0 missing .*1 unexpected .*pos_embed"):
        from_official(official_weights("vit3_tiny") | {"pos_embed": table}, "vit3_tiny")


def test_convert_a_generator(tmp_path):
    """A file as DiT's trainer writes it: the model found by itself, its average on request alone."""
    raw = official_generator()
    average = {k: v + 1 for k, v in raw.items()}
    args = argparse.Namespace(model="DiTTT-S/8", vae="ema")
    torch.save({"model": raw, "ema": average, "opt": {"state": {}}, "args": args}, tmp_path / "dit.pt")
    for ema, expected in ((False, raw), (True, average)):
        report = convert(tmp_path / "dit.pt", tmp_path / "ours.safetensors", ema=ema)
        assert report.fraction == 1 and report.unexpected == []
        assert same_dict(read_tensors(tmp_path / "ours.safetensors"), from_official(expected, "dit3_s_8"))
        with safe_open(tmp_path / "ours.safetensors", "pt") as file:
            metadata = {"model": "dit3_s_8", "source": "dit.pt", "weights": "ema" if ema else "raw"}
            assert file.metadata() == metadata | {"source_sha256": sha256_of(tmp_path / "dit.pt")}
    assert stored_kinds(tmp_path / "dit.pt") == ("raw", "ema")
    assert stored_kinds(tmp_path / "ours.safetensors") == ("ema",)
    torch.save({"ema": average}, tmp_path / "alone.pt")
    with pytest.raises(WeightsError, match=r"a moving average alone \(ema\); take it by ema=True"):
        convert(tmp_path / "alone.pt", tmp_path / "no.safetensors")
    torch.save(average, tmp_path / "plain.pt")
    assert stored_kinds(tmp_path / "plain.pt") == ()


def test_names_are_those_of_dit():
    """DiT's own names are those of the network with softmax attention and without the convolution."""
    with torch.device("meta"):
        model = timm.create_model("dit3_s_8", mixer="softmax", cpe=False)
    names = {re.sub(r"^blocks\.\d+", "blocks", name) for name in model.state_dict()}
    assert {name for name in names if name.startswith("blocks")} == {
        f"blocks.{part}.{leaf}"
        for part in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2", "adaLN_modulation.1")
        for leaf in ("weight", "bias")
    }
