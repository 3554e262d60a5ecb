"""The adaptors: built by name from a config, weights as ``init_cfg`` names them."""

import subprocess
import sys

import pytest
import timm
import torch

from tests.helpers import ROOT, same_dict
from vit3.inner import BranchSpec
from vit3.models.dense import DenseHViT3
from vit3.models.weights import WeightsError, write_tensors

pytest.importorskip("mmengine", reason="needs the extra mm")
from mmengine.config import Config  # noqa: E402
from mmengine.registry import MODELS, DefaultScope  # noqa: E402

import vit3.openmmlab  # noqa: E402

SMALL = dict(dims=(16, 32, 48, 64), depths=(1, 1, 2, 1), num_heads=(2, 2, 2, 4))


def built(**config):
    return MODELS.build(dict(type="HViT3", **SMALL) | config)


@pytest.mark.parametrize("scope", ["mmdet", "mmseg"])
def test_both_libraries_find_them(scope):
    registry = pytest.importorskip(f"{scope}.registry", reason="needs the extra mm").MODELS
    with DefaultScope.overwrite_default_scope(scope):
        model = registry.build(dict(type="HViT3", arch="tiny", out_indices=(1, 3)))
        assert isinstance(model, vit3.openmmlab.HViT3) and model.channels == (128, 512)
        assert registry.build(dict(type="ViT3", arch="tiny")).channels == (192,)
        assert registry.build(dict(type="TimmBackbone", model_name="resnet10t")).strides == (2, 4, 8, 16, 32)
        neck = registry.build(dict(type="SimpleFeaturePyramid", in_channels=192, out_channels=16, num_outs=4))
        assert [y.shape[-1] for y in neck((torch.randn(1, 192, 2, 3),))] == [12, 6, 3, 2]


def test_custom_imports_alone(tmp_path):
    """A config that names the module is all that another program needs (R17 b)."""
    config = tmp_path / "config.py"
    config.write_text(
        "custom_imports = dict(imports=['vit3.openmmlab'], allow_failed_imports=False)\n"
        "model = dict(type='HViT3', dims=(16, 32), depths=(1, 1), num_heads=(2, 2), out_indices=(0, 1))\n"
    )
    code = (
        f"from mmengine.config import Config\ncfg = Config.fromfile({str(config)!r})\n"
        "import torch\nfrom mmengine.registry import MODELS\nmodel = MODELS.build(cfg.model)\n"
        "print([tuple(y.shape) for y in model(torch.zeros(1, 3, 97, 131))])\n"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.stdout.splitlines()[-1:] == ["[(1, 16, 25, 33), (1, 32, 13, 17)]"], result.stderr


def test_same_network():
    """Nothing is added to the network: names and maps are those of ``vit3.models.dense``."""
    torch.manual_seed(0)
    ours = DenseHViT3(**SMALL).eval()
    model = built().eval()
    model.load_state_dict(ours.state_dict())
    x = torch.randn(1, 3, 64, 96)
    assert all(torch.equal(a, b) for a, b in zip(ours(x), model(x)))
    model.init_weights()
    assert same_dict(ours.state_dict(), model.state_dict())  # no init_cfg, nothing to do


def test_inner_problem_in_plain_values():
    inner = dict(epochs=0, beside=[dict(model="dwconv", kernel=5, extra=True)])
    config = Config(dict(model=dict(type="HViT3", **SMALL, mixer_kwargs=dict(inner=inner))))
    mixer = MODELS.build(config.model).layers[0].blocks[0].attn
    assert mixer.inner.epochs == 0 and mixer.inner.beside == (BranchSpec(model="dwconv", kernel=5, extra=True),)
    assert built(mixer="softmax").layers[0].blocks[0].attn.__class__.__name__ == "SoftmaxAttention"
    with pytest.raises(ValueError, match="inner.epoch is no knob of the inner problem; use one of: model, ratio"):
        built(mixer_kwargs=dict(inner=dict(epoch=0)))
    with pytest.raises(ValueError, match="inner.size is no knob"):
        built(mixer_kwargs=dict(inner=dict(beside=[dict(size=3)])))


def test_weights(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr("vit3.openmmlab.backbones.print_log", lambda text, **options: said.append(text))
    origin = timm.create_model("h_vit3_tiny", num_classes=7, **SMALL)
    write_tensors(tmp_path / "file.safetensors", origin.state_dict())
    model = built(init_cfg=dict(type="Pretrained", checkpoint=str(tmp_path / "file.safetensors")))
    model.init_weights()
    assert same_dict(
        {k: v for k, v in model.state_dict().items() if not k.startswith("norm")},
        {k: v for k, v in origin.state_dict().items() if not k.startswith(("norm", "head"))},
    )
    (report,) = said
    assert "file.safetensors: matched 158 tensors" in report and "missing 8 tensors (320 values)" in report


def test_weights_of_a_detector_that_was_saved_by_mmengine(tmp_path):
    """Such files hold objects of mmengine's, which are not needed and not made."""
    from mmengine.logging import HistoryBuffer

    origin = built()
    state = {f"backbone.{k}": v for k, v in origin.state_dict().items()} | {"neck.conv.weight": torch.ones(1)}
    torch.save({"state_dict": state, "message_hub": {"loss": HistoryBuffer([1.0], [1])}}, tmp_path / "file.pth")
    model = built(init_cfg=dict(type="Pretrained", checkpoint=str(tmp_path / "file.pth")))
    model.init_weights()
    assert same_dict(model.state_dict(), origin.state_dict())


def test_weights_of_something_else(tmp_path):
    torch.save({"state_dict": timm.create_model("resnet10t").state_dict()}, tmp_path / "file.pth")
    model = built(init_cfg=dict(type="Pretrained", checkpoint=str(tmp_path / "file.pth")))
    with pytest.raises(WeightsError, match="at least 95 % is needed"):
        model.init_weights()
    with pytest.raises(FileNotFoundError, match="missing.pth: no such file"):
        built(init_cfg=dict(type="Pretrained", checkpoint="missing.pth")).init_weights()
    with pytest.raises(ValueError, match=r"init_cfg=.* must be dict\(type='Pretrained', checkpoint=FILE"):
        built(init_cfg=dict(type="Normal")).init_weights()


def test_published_name(tmp_path, monkeypatch):
    """The name of a published model stands for its file."""
    origin = timm.create_model("h_vit3_tiny", num_classes=7, **SMALL)
    write_tensors(tmp_path / "h_vit3_tiny.safetensors", origin.state_dict())
    monkeypatch.setattr("vit3.models.published.fetch", lambda name, cache_dir: tmp_path / f"{name}.safetensors")
    model = built(init_cfg=dict(type="Pretrained", checkpoint="h_vit3_tiny"))
    model.init_weights()
    assert torch.equal(model.layers[0].blocks[0].attn.w1, origin.layers[0].blocks[0].attn.w1)
