"""Back to the authors' layout, through files: what was theirs is theirs again; other networks are refused."""

from __future__ import annotations

import json

import pytest
import timm
import torch

from tests.export.test_hub import subject_of
from tests.helpers import GOLDEN, same_dict, shallow
from tests.models.official_files import official_generator, official_weights, save_official
from vit3.errors import UserError
from vit3.export import Subject
from vit3.export.official import open_official, write_official
from vit3.models import dit3, h_vit3
from vit3.models.official import convert
from vit3.models.weights import load_weights


def dense_weights():
    shapes = json.loads((GOLDEN / "dense_state_dict.json").read_text())["vittt_tiny"]
    return {name: torch.randn(shape) if shape else torch.tensor(0) for name, shape in shapes.items()}


# Their file, our name, kind, size of images or latents, and tables that are computed anew
OFFICIAL = {
    "vit3_tiny": (lambda: official_weights("vit3_tiny"), "classifier", (224, 224), "none"),
    "h_vit3_tiny": (lambda: official_weights("h_vit3_tiny"), "classifier", (224, 224), "rotations"),
    "h_vit3_tiny_dense": (dense_weights, "features", (512, 512), "rotations"),
    "dit3_s_8": (official_generator, "generator", (32, 32), "pos_embed"),
}


@pytest.mark.parametrize(
    "name", ["vit3_tiny", *(pytest.param(name, marks=pytest.mark.slow) for name in OFFICIAL if name != "vit3_tiny")]
)
def test_there_and_back(name, tmp_path):
    """Their file (with a config object, yacs absent), our safetensors, a network, their file: the same bits."""
    make, kind, size, table = OFFICIAL[name]
    theirs = make()
    source = save_official(tmp_path / "theirs.pth", theirs)
    convert(source, tmp_path / "ours.safetensors")
    model = timm.create_model(name)
    assert load_weights(model, tmp_path / "ours.safetensors").fraction == 1
    subject = Subject(model.eval(), kind, name, {}, size)
    path = write_official(subject, tmp_path / "folder" / "again.pth")
    content = torch.load(path, weights_only=True)
    assert content.keys() == {"model"}
    again = content["model"]
    assert again.keys() == theirs.keys() and all(again[key].shape == theirs[key].shape for key in theirs)
    same = [key for key in theirs if not key.endswith(table)]
    assert len(same) == len(model.state_dict()) and all(torch.equal(again[key], theirs[key]) for key in same)
    if kind == "classifier":  # the tables of the others hold random numbers, which must not matter
        assert all(torch.allclose(again[key], theirs[key], atol=2e-6) for key in theirs)
    convert(path, tmp_path / "once_more.safetensors", name)
    other = timm.create_model(name)
    load_weights(other, tmp_path / "once_more.safetensors")
    assert same_dict(other.state_dict(), model.state_dict())


NARROW = dict(dims=(16, 32, 32, 32), depths=(1, 1, 1, 1), num_heads=(2, 2, 2, 2))


@pytest.fixture
def narrow(monkeypatch):
    """The published networks, cut to one or two blocks of few channels."""
    monkeypatch.setitem(h_vit3.ARCHS, "tiny", NARROW)
    monkeypatch.setitem(dit3.ARCHS, "s", dict(embed_dim=32, depth=1, num_heads=2))


def written(subject, folder):
    return torch.load(write_official(subject, folder / "theirs.pth"), weights_only=True)["model"]


def runs_as(model, subject, folder, *inputs):
    """Whether the file, opened again, gives what the network gives."""
    with torch.no_grad():
        expected = model(*inputs)
    expected = (expected,) if isinstance(expected, torch.Tensor) else expected
    outputs = open_official(folder / "theirs.pth", subject)(*inputs)
    return all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))


def test_classifiers(narrow, tmp_path):
    """Compiled, and of other classes, which the authors' code takes; tables are those of the subject's size."""
    kwargs = dict(num_classes=7)
    model = timm.create_model("h_vit3_tiny", **kwargs).eval()
    subject = Subject(torch.compile(model, backend="eager"), "classifier", "h_vit3_tiny", kwargs, (64, 96))
    tensors = written(subject, tmp_path)
    assert tensors["head.weight"].shape == (7, 32)
    assert tensors["layers.0.blocks.0.rope.rotations"].shape == (16, 24, 8, 2)
    assert tensors["layers.1.blocks.0.rope.rotations"].shape == (8, 12, 16, 2)
    assert runs_as(model, subject, tmp_path, torch.randn(1, 3, 64, 96))


def test_backbones(narrow, tmp_path):
    """Their tables are for 224 x 224 pixels whatever the images, as their code builds them."""
    model = timm.create_model("h_vit3_tiny_dense").eval()
    subject = Subject(model, "features", "h_vit3_tiny_dense", {}, (64, 96))
    assert written(subject, tmp_path)["layers.0.blocks.0.attn.rope.rotations"].shape == (56, 56, 8, 2)
    assert runs_as(model, subject, tmp_path, torch.randn(1, 3, 64, 96))


def test_generators(narrow, tmp_path):
    """Their table of places is that of the subject's latents."""
    kwargs = dict(num_classes=5)
    model = timm.create_model("dit3_s_8", **kwargs).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    subject = Subject(model, "generator", "dit3_s_8", kwargs, (16, 24))
    tensors = written(subject, tmp_path)
    assert torch.equal(tensors["pos_embed"][0], model.position.table(2, 3))
    assert runs_as(model, subject, tmp_path, torch.randn(1, 4, 16, 24), torch.tensor([7]), torch.tensor([5]))


def refused(subject, sentence, tmp_path):
    with pytest.raises(UserError, match=sentence) as caught:
        write_official(subject, tmp_path / "file.pth")
    assert "\n" not in str(caught.value) and not (tmp_path / "file.pth").exists()


def test_other_networks_are_refused(tmp_path):
    refused(subject_of("other"), "the authors have no .*test_vit; use one of: vit3_tiny", tmp_path)
    refused(subject_of("classifier"), "this vit3_tiny is not the published network: it lacks blocks.1.", tmp_path)
    refused(subject_of("dense"), "this h_vit3_tiny_dense is not the published network: it lacks layers", tmp_path)
    wide = Subject(timm.create_model("vit3_tiny", in_chans=1), "classifier", "vit3_tiny", {}, (224, 224))
    refused(wide, r"patch_embed.proj.weight is \(192, 1, 16, 16\), theirs \(192, 3, 16, 16\)", tmp_path)
    softmax = Subject(timm.create_model("vit3_tiny", mixer="softmax"), "classifier", "vit3_tiny", {}, (224, 224))
    refused(softmax, "not the published network: it lacks blocks.0.attn.w1", tmp_path)


def test_other_inner_training_is_refused(tmp_path):
    """The tensors would fit, and give other outputs there."""
    model = timm.create_model("vit3_tiny", mixer_kwargs={"inner": {"lr": 0.5}})
    refused(
        Subject(model, "classifier", "vit3_tiny", {}, (224, 224)), "has inner.lr=0.5, the authors' code 1.0", tmp_path
    )
    assert shallow("vit3_tiny").blocks[0].attn.inner != model.blocks[0].attn.inner
