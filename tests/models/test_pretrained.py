"""``pretrained=True``: what it needs, what it says without a network, what it loads."""

from urllib.error import URLError

import pytest
import timm
import torch

from tests.helpers import same_dict
from tests.models.official_files import official_weights, save_official
from vit3.models import MODEL_NAMES
from vit3.models.official import from_official
from vit3.models.published import PUBLISHED


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
