"""What becomes of a file in a model: wrappers' names, averages, channels, classes, and counts that add up."""

import copy
import logging

import pytest
import timm
import torch
from timm.utils import ModelEmaV3
from torch import nn

from tests.helpers import same_dict, shallow
from vit3.models.weights import WeightsError, bare, load_weights, read_tensors, strip_prefixes, write_tensors


def adds_up(report, model):
    """Every tensor of the model stands in the report once, with its number of values."""
    own = strip_prefixes(model.state_dict())
    assert sorted(report.matched + report.missing + report.reshaped) == sorted(own)
    assert {*report.adapted} <= {*report.matched} and not {*report.unexpected} & {*own}
    assert report.sizes == {name: value.numel() for name, value in own.items()}
    counts = [len(names) for names in (report.matched, report.missing, report.reshaped, report.unexpected)]
    for what, count in zip(("matched", "missing", "reshaped", "unexpected"), counts):
        assert f"{what} {count} tensors" in str(report)
    assert str(report).split("; ")[1].split(" ")[-1] == str(len(own)) == str(sum(counts[:3]))
    return True


def under(prefix, tensors):
    return {prefix + name: value for name, value in tensors.items()}


# What a classifier's tensors are wrapped in (R16): file, and whether its average is asked for
WRAPPED = {
    "plain": lambda tensors: tensors,
    "model.": lambda tensors: {"state_dict": under("model.", tensors)},
    "module.": lambda tensors: {"model": under("module.", tensors)},
    "_orig_mod.": lambda tensors: under("_orig_mod.", tensors),
    "backbone.": lambda tensors: {"state_dict": under("backbone.", tensors) | {"neck.a": torch.ones(1)}},
    "state_dict_ema": lambda tensors: {"state_dict": under("x.", tensors), "state_dict_ema": tensors},
    "nested": lambda tensors: {"model": under("module._orig_mod.model.backbone.", tensors)},
    "nested average": lambda tensors: {"model": {}, "model_ema": under("module.module._orig_mod.", tensors)},
}


@pytest.mark.parametrize("kind", WRAPPED)
def test_wrapped_classifiers_load_fully(tmp_path, kind, caplog):
    origin, model = (shallow("vit3_tiny", num_classes=5) for _ in range(2))
    torch.save(WRAPPED[kind](origin.state_dict()), tmp_path / "file.pth")
    average = kind in ("state_dict_ema", "nested average")
    with caplog.at_level(logging.INFO, logger="vit3.models.weights"):
        report = load_weights(model, tmp_path / "file.pth", ema=average)
    assert adds_up(report, model) and report.fraction == 1
    x = torch.randn(1, 3, 40, 33)
    assert torch.equal(model.forward_features(x), origin.forward_features(x)) and torch.equal(model(x), origin(x))
    assert ("taking its moving average" in caplog.text) == average and "file.pth: taking its" in caplog.text


def test_average_only_when_asked(tmp_path, caplog):
    raw, average = (shallow("vit3_tiny").state_dict() for _ in range(2))
    torch.save({"state_dict": raw, "state_dict_ema": average}, tmp_path / "file.pth")
    model = shallow("vit3_tiny")
    for ema, expected, said in ((False, raw, "raw weights (state_dict); ema=True"), (True, average, "moving average")):
        with caplog.at_level(logging.INFO, logger="vit3.models.weights"):
            load_weights(model, tmp_path / "file.pth", ema=ema)
        assert same_dict(model.state_dict(), expected) and said in caplog.messages[-1]
    for kind in ("raw", "ema"):
        write_tensors(tmp_path / f"{kind}.safetensors", average, {"weights": kind})
        with caplog.at_level(logging.INFO, logger="vit3.models.weights"):
            load_weights(model, tmp_path / f"{kind}.safetensors")
        assert f"taking its {kind} weights" in caplog.messages[-1]
    assert read_tensors(tmp_path / "ema.safetensors", ema=True).keys() == average.keys()
    with pytest.raises(WeightsError, match="raw.safetensors holds raw weights, no moving average"):
        read_tensors(tmp_path / "raw.safetensors", ema=True)


def test_foreign_classifier_is_an_error(tmp_path):
    torch.save({"state_dict": under("model.", timm.create_model("resnet10t").state_dict())}, tmp_path / "file.pth")
    model = shallow("vit3_tiny")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(WeightsError, match="fits 0.0 % of the model, at least 95 % is needed"):
        load_weights(model, tmp_path / "file.pth")
    assert same_dict(model.state_dict(), before)


@pytest.mark.parametrize("name", ["vit3_tiny", "h_vit3_tiny"])
@pytest.mark.parametrize("channels", [1, 3, 4, 13])
def test_channels_by_timms_rule(tmp_path, name, channels):
    """Three of the file become one by their sum, n by repeating them, times 3 / n; a gray or flat image shows it."""
    origin, model = shallow(name), shallow(name, in_chans=channels)
    write_tensors(tmp_path / "file.safetensors", origin.state_dict())
    report = load_weights(model, tmp_path / "file.safetensors")
    assert adds_up(report, model) and report.fraction == 1
    stem = next(key for key in origin.state_dict() if key.endswith(".weight"))
    theirs, ours = origin.state_dict()[stem], model.state_dict()[stem]
    if channels == 3:
        assert report.adapted == {} and same_dict(model.state_dict(), origin.state_dict())
        return
    assert report.adapted == {stem: f"from 3 to {channels} channels"}
    assert f"adapted {stem} from 3 to {channels} channels" in str(report)
    expected = torch.stack([theirs[:, i % 3] for i in range(channels)], dim=1) * (3 / channels)
    assert torch.allclose(ours, theirs.sum(1, keepdim=True) if channels == 1 else expected, atol=1e-6)


def test_channels_of_the_file_need_not_be_three(tmp_path):
    origin, model = shallow("vit3_tiny", in_chans=1), shallow("vit3_tiny")
    write_tensors(tmp_path / "file.safetensors", origin.state_dict())
    assert load_weights(model, tmp_path / "file.safetensors").adapted
    x = torch.randn(2, 1, 32, 32)
    assert torch.allclose(model(x.expand(-1, 3, -1, -1)), origin(x), atol=1e-5)


def test_other_convolutions_are_not_adapted(tmp_path):
    """Another patch is another network; channels of latents have meanings of their own."""
    write_tensors(tmp_path / "a.safetensors", shallow("vit3_tiny", patch_size=8).state_dict())
    model = shallow("vit3_tiny", in_chans=4)
    report = load_weights(model, tmp_path / "a.safetensors", minimum=0)
    assert adds_up(report, model) and report.reshaped == ["patch_embed.proj.weight"] and not report.adapted
    write_tensors(tmp_path / "b.safetensors", shallow("dit3_s_8").state_dict())
    model = shallow("dit3_s_8", in_chans=3)
    report = load_weights(model, tmp_path / "b.safetensors", minimum=0)
    assert adds_up(report, model) and "x_embedder.proj.weight" in report.reshaped and not report.adapted


class Net(nn.Module):
    """A convolution for images, a depthwise one, norms that may be fresh, and a classifier."""

    fresh, in_chans = ("norm.",), 3

    def __init__(self, groups=1, first=3):
        super().__init__()
        self.first = nn.Conv2d(first, 4, 1)  # of something else where it is not 3
        self.conv = nn.Conv2d(3, 6, 3, groups=groups)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 2)

    def get_classifier(self):
        return self.head


def test_only_what_may_be_fresh_is_not_counted(tmp_path):
    model = Net()
    body = {name: value for name, value in model.state_dict().items() if name.split(".")[0] in ("first", "conv")}
    write_tensors(tmp_path / "body.safetensors", body)
    assert load_weights(Net(), tmp_path / "body.safetensors", minimum=1).matched == [*body]
    write_tensors(tmp_path / "other.safetensors", body | {"norm.weight": torch.zeros(5)})  # there, and does not fit
    with pytest.raises(WeightsError, match="reshaped: norm.weight"):
        load_weights(Net(), tmp_path / "other.safetensors", minimum=1)


@pytest.mark.parametrize(
    ("model", "changed", "shape"),
    [
        (Net(groups=3), "conv.weight", (6, 3, 3, 3)),  # which is not another number of channels
        (Net(), "first.weight", (4,)),
        (Net(), "first.weight", (5, 1, 1, 1)),
        (Net(), "first.weight", (4, 1, 2, 2)),
        (Net(first=5), "first.weight", (4, 3, 1, 1)),
    ],
)
def test_channels_are_adapted_of_the_first_convolution_alone(tmp_path, model, changed, shape):
    model = copy.deepcopy(model)
    if model.conv.groups == 3:
        model.first = nn.Identity()
    write_tensors(tmp_path / "w.safetensors", model.state_dict() | {changed: torch.randn(shape)})
    report = load_weights(model, tmp_path / "w.safetensors", minimum=0)
    assert not report.adapted and report.reshaped == [changed]


def test_wrappers_have_one_child():
    outer = nn.Module()
    outer.module, outer.other = nn.Linear(1, 1), nn.Linear(1, 1)
    assert bare(outer) is outer


@pytest.mark.parametrize(
    ("damaged", "sentence"),
    [
        (lambda w: w.mul(100).to(torch.int8), "is torch.int8, as quantised weights are"),
        (lambda w: w.index_fill(0, torch.tensor(1), torch.nan), "not finite, as after a training that diverged"),
        (lambda w: w / 0, "not finite"),
    ],
)
def test_values_that_cannot_be_computed_with(tmp_path, damaged, sentence):
    model = shallow("vit3_tiny", num_classes=3)
    name = "blocks.0.attn.qkv.weight"
    before = model.state_dict()[name].clone()
    torch.save(model.state_dict() | {name: damaged(before)}, tmp_path / "file.pth")
    with pytest.raises(WeightsError, match=f"{name} (is|has values that are) .*{sentence[3:]}"):
        load_weights(model, tmp_path / "file.pth")
    assert torch.equal(model.state_dict()[name], before)


def test_counters_need_not_be_floating_point(tmp_path):
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), torch.nn.BatchNorm2d(4))
    torch.save(model.state_dict(), tmp_path / "file.pth")
    assert load_weights(model, tmp_path / "file.pth").fraction == 1


@pytest.mark.parametrize("classes", [1, 10, 21841])
def test_classifiers_of_any_size(tmp_path, classes):
    """Of the same size it is loaded, of another one fresh, with the rest of the network whole."""
    origin = shallow("vit3_tiny", num_classes=classes)
    write_tensors(tmp_path / "file.safetensors", origin.state_dict())
    same, other = shallow("vit3_tiny", num_classes=classes), shallow("vit3_tiny", num_classes=7)
    fresh = other.head.weight.clone()
    assert load_weights(same, tmp_path / "file.safetensors").fraction == 1
    assert same_dict(same.state_dict(), origin.state_dict())
    report = load_weights(other, tmp_path / "file.safetensors")
    assert adds_up(report, other) and report.reshaped == ["head.weight", "head.bias"]
    assert torch.equal(other.head.weight, fresh) and torch.equal(other.norm.bias, origin.norm.bias)
    none = shallow("vit3_tiny", num_classes=0)
    assert {*load_weights(none, tmp_path / "file.safetensors").unexpected} == {"head.weight", "head.bias"}


def test_rows_go_by_class_name(tmp_path, caplog):
    """Both kinds of files name their classes."""
    caplog.set_level(logging.INFO)
    origin = shallow("vit3_tiny", num_classes=3)
    write_tensors(tmp_path / "file.safetensors", origin.state_dict(), classes=("cat", "dog", "owl"))
    torch.save({"state_dict": origin.state_dict(), "classes": ["cat", "dog", "owl"]}, tmp_path / "file.pth")
    for path in (tmp_path / "file.safetensors", tmp_path / "file.pth"):
        model = shallow("vit3_tiny", num_classes=2)
        report = load_weights(model, path, classes=["owl", "cat"])
        assert adds_up(report, model) and report.fraction == 1
        assert torch.equal(model.head.weight, origin.head.weight[[2, 0]])
        fresh = shallow("vit3_tiny", num_classes=3)
        report = load_weights(fresh, path, classes=["owl", "cat", "bat"])
        assert adds_up(report, fresh) and report.missing == ["head.weight", "head.bias"]
        assert "bat" in caplog.messages[-1]  # it is said why


def test_loads_into_wrapped_models(tmp_path):
    """Compiled and averaged: the same as into the network inside, the fresh classifier not held against the file."""
    origin = shallow("vit3_tiny", num_classes=9)
    write_tensors(tmp_path / "file.safetensors", origin.state_dict())
    model = shallow("vit3_tiny", num_classes=2)
    wrapped = ModelEmaV3(torch.compile(model, backend="eager"))
    assert isinstance(bare(wrapped), type(model)) and bare(model) is model
    report = load_weights(wrapped, tmp_path / "file.safetensors")
    assert adds_up(report, wrapped) and report.reshaped == ["head.weight", "head.bias"]
    assert torch.equal(bare(wrapped).blocks[0].attn.w1, origin.blocks[0].attn.w1)
