"""``pretrained=True``: what it needs, what it says without a network, what it loads."""

from urllib.error import URLError

import pytest
import timm
import torch

from tests.helpers import same_dict
from tests.models.official_files import official_generator, official_weights, save_official
from vit3.models import GENERATOR_NAMES, MODEL_NAMES, published
from vit3.models.dense import DenseHViT3
from vit3.models.official import from_official
from vit3.models.published import PUBLISHED, PUBLISHED_GENERATORS
from vit3.models.weights import WeightsError, write_tensors


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def network(cache, monkeypatch):
    """A network that serves a synthetic official file; returns the addresses asked for."""
    asked = []

    def download(address, path, *args, **kwargs):
        asked.append(address)
        save_official(path, official_weights("vit3_tiny"))

    monkeypatch.setattr(torch.hub, "download_url_to_file", download)
    return asked


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_no_network(name, cache, monkeypatch):
    def download(*args, **kwargs):
        raise URLError("no route to host")

    monkeypatch.setattr(torch.hub, "download_url_to_file", download)
    with pytest.raises(RuntimeError) as caught:
        timm.create_model(name, pretrained=True)
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert f"python tools/convert.py FILE.pth {name}.safetensors" in sentence
    assert PUBLISHED[name]["address"] in sentence and "no route to host" in sentence


def test_download_and_convert_once(network):
    expected = from_official(official_weights("vit3_tiny"), "vit3_tiny")
    for _ in range(2):
        model = timm.create_model("vit3_tiny", pretrained=True)
        assert same_dict(model.state_dict(), expected)
    assert network == [PUBLISHED["vit3_tiny"]["address"]]


def test_other_classes_get_a_fresh_head(network):
    model = timm.create_model("vit3_tiny", pretrained=True, num_classes=7)
    assert model(torch.randn(1, 3, 32, 32)).shape == (1, 7)
    trunk = official_weights("vit3_tiny")
    assert all(torch.equal(v, trunk[k]) for k, v in model.state_dict().items() if not k.startswith("head"))


def test_gray_images_sum_the_first_convolution(network):
    """timm's rule for one channel: a gray image gives what its three equal channels gave."""
    model = timm.create_model("vit3_tiny", pretrained=True, in_chans=1).eval()
    expected = official_weights("vit3_tiny")["patch_embed.proj.weight"].sum(dim=1, keepdim=True)
    assert torch.allclose(model.patch_embed.proj.weight, expected, atol=1e-6)


def test_features_only(network):
    model = timm.create_model("vit3_tiny", pretrained=True, features_only=True, out_indices=(1, 3))
    assert torch.equal(model.model.blocks[3].attn.w1, official_weights("vit3_tiny")["blocks.3.attn.w1"])


def test_converted_file_as_checkpoint_path(network, cache):
    timm.create_model("vit3_tiny", pretrained=True)
    (converted,) = cache.rglob("*.safetensors")
    model = timm.create_model("vit3_tiny", checkpoint_path=str(converted))
    assert same_dict(model.state_dict(), from_official(official_weights("vit3_tiny"), "vit3_tiny"))


def test_other_mixer_is_refused(network):
    with pytest.raises(ValueError, match="published weights of vit3_tiny fit mixer='ttt' only"):
        timm.create_model("vit3_tiny", pretrained=True, mixer="softmax")
    assert network == []


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_facts_are_recorded(name):
    facts = PUBLISHED[name]
    assert facts["address"].startswith("https://")
    cfg = timm.get_pretrained_cfg(name)
    assert cfg.url == facts["address"] and cfg.input_size == (3, 224, 224)


LINKED = ["dit3_b_2", "dit3_b_4", "dit3_b_8"]


@pytest.fixture
def linked(cache, monkeypatch):
    """A network that serves a small file of the authors' in place of a large one; returns how to change it."""
    raw = official_generator()
    file = {"model": raw, "ema": {k: v + 1 for k, v in raw.items()}, "opt": {}}
    monkeypatch.setitem(PUBLISHED_GENERATORS, "dit3_s_8", {"address": "https://nowhere"})
    monkeypatch.setattr(torch.hub, "download_url_to_file", lambda address, path: torch.save(file, path))
    return file


@pytest.mark.parametrize("alone", [False, True])
def test_generators_are_their_average(linked, alone):
    """Scores belong to it; a file may hold it as plain weights."""
    expected = from_official(linked["ema"], "dit3_s_8")
    if alone:
        average = linked["ema"]
        linked.clear()
        linked.update(average)
    model = timm.create_model("dit3_s_8", pretrained=True)
    assert same_dict(model.state_dict(), expected)


def test_generators_of_other_classes_learn_their_labels_anew(linked, caplog):
    with caplog.at_level("INFO", logger="vit3.models.published"):
        model = timm.create_model("dit3_s_8", pretrained=True, num_classes=7)
    assert model.y_embedder.embedding_table.weight.shape == (8, 384)
    assert torch.equal(model.blocks[3].attn.w1, linked["ema"]["blocks.3.attn.w1"])
    assert caplog.messages[-1] == "dit3_s_8: published weights, but fresh: y_embedder.embedding_table.weight"


@pytest.mark.parametrize("options", [dict(mixer="softmax"), dict(cpe=False)], ids=str)
def test_generators_of_other_blocks_are_refused(linked, options):
    with pytest.raises(ValueError, match="weights of dit3_s_8 fit mixer='ttt' with cpe=True only"):
        timm.create_model("dit3_s_8", pretrained=True, **options)


@pytest.mark.parametrize("name", sorted({*GENERATOR_NAMES} - {*LINKED}))
def test_generators_that_are_not_published(name):
    with pytest.raises(
        ValueError, match=f"no weights of {name} are published; there are: dit3_b_8, dit3_b_4, dit3_b_2"
    ):
        timm.create_model(name, pretrained=True)


@pytest.mark.parametrize("name", LINKED)
def test_generators_without_network(name, cache, monkeypatch):
    def download(*args):
        raise URLError("no route to host")

    monkeypatch.setattr(torch.hub, "download_url_to_file", download)
    with pytest.raises(RuntimeError, match=f"convert.py FILE.pth {name}.safetensors.*, and pass") as caught:
        published.fetch(name)
    assert PUBLISHED_GENERATORS[name]["address"] in str(caught.value)


def test_dense_backbones_stand_on_the_classifier(cache, monkeypatch, caplog):
    """The published trunk, with norms of the maps that no classifier has."""
    shape = dict(dims=(16, 32), depths=(1, 1), num_heads=(2, 2))
    origin = timm.create_model("h_vit3_tiny", **shape)
    cache.joinpath("hub", "checkpoints").mkdir(parents=True)
    write_tensors(cache / "hub" / "checkpoints" / "h_vit3_tiny.safetensors", origin.state_dict())
    options = dict(shape, out_indices=(0, 1))
    with caplog.at_level("INFO", logger="vit3.models.published"):
        model = timm.create_model("h_vit3_tiny_dense", pretrained=True, **options)
    assert isinstance(model, DenseHViT3)
    own = {name: value for name, value in model.state_dict().items() if not name.startswith("norm")}
    assert same_dict(own, {name: value for name, value in origin.state_dict().items() if name in own})
    assert "published weights, but fresh: norm0.weight, norm0.bias, norm1.weight" in caplog.messages[-1]
    with pytest.raises(ValueError, match="weights of h_vit3_tiny_dense fit mixer='ttt' only"):
        timm.create_model("h_vit3_tiny_dense", pretrained=True, mixer="softmax", **options)


def test_a_file_in_place_of_the_published_one(tmp_path):
    """timm's overlay, for networks that its builder does not build; of the file nothing may lack."""
    options = dict(embed_dim=32, depth=1, num_heads=2, mixer="softmax")
    origin = timm.create_model("dit3_s_8", **options)
    write_tensors(tmp_path / "file.safetensors", origin.state_dict())
    given = dict(pretrained=True, pretrained_cfg_overlay={"file": str(tmp_path / "file.safetensors")}, **options)
    assert same_dict(timm.create_model("dit3_s_8", **given).state_dict(), origin.state_dict())
    state = origin.state_dict()
    del state["blocks.0.mlp.fc1.bias"]
    write_tensors(tmp_path / "file.safetensors", state)
    with pytest.raises(WeightsError, match="lacks 1 tensors of dit3_s_8, blocks.0.mlp.fc1.bias for one"):
        timm.create_model("dit3_s_8", **given)


def test_another_mixer_loads_its_own_file(network, tmp_path):
    """Only the published file asks for the published block."""
    options = dict(embed_dim=32, depth=1, num_heads=2, mixer="softmax", pos="rope")
    origin = timm.create_model("vit3_tiny", **options)
    write_tensors(tmp_path / "file.safetensors", origin.state_dict())
    overlay = {"file": str(tmp_path / "file.safetensors")}
    model = timm.create_model("vit3_tiny", pretrained=True, pretrained_cfg_overlay=overlay, **options)
    assert same_dict(model.state_dict(), origin.state_dict()) and network == []
