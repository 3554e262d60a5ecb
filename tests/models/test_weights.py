"""Reading and writing of weights: safe, prefix-blind, and clear about what is wrong."""

import io
import logging
import os
import zipfile

import pytest
import timm
import torch
from timm.utils import ModelEmaV3

from tests.helpers import same_dict, shallow
from vit3.models.weights import WeightsError, bare, load_weights, match, read_tensors, strip_prefixes, write_tensors


def weights():
    return {"a.weight": torch.randn(3, 4), "a.bias": torch.randn(3), "n.num_batches_tracked": torch.tensor(7)}


class Evil:
    """Runs a command when it is unpickled by an ordinary reader."""

    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


@pytest.mark.parametrize("modern", [True, False], ids=["zip", "legacy"])
def test_pickled_code_does_not_run(tmp_path, modern):
    marker, path, tensors = tmp_path / "ran", tmp_path / "evil.pth", weights()
    state = {"model": tensors, "config": Evil(f"touch {marker}")}
    torch.save(state, path, _use_new_zipfile_serialization=modern)
    assert same_dict(read_tensors(path), tensors)
    assert not marker.exists()
    torch.load(path, weights_only=False)
    assert marker.exists()  # the file does bite


@pytest.mark.parametrize("modern", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_dtypes_survive(tmp_path, modern, dtype):
    tensors = {k: v.to(dtype) for k, v in weights().items()}
    torch.save(tensors, tmp_path / "w.pth", _use_new_zipfile_serialization=modern)
    assert same_dict(read_tensors(tmp_path / "w.pth"), tensors)


def test_parameters_and_views(tmp_path):
    base = torch.randn(4, 6)
    state = {"p": torch.nn.Parameter(base.clone()), "view": base.t(), "part": base[1:, ::2]}
    torch.save({"state_dict": state}, tmp_path / "w.pth")
    read = read_tensors(tmp_path / "w.pth")
    assert all(torch.equal(read[k], state[k]) for k in state)


@pytest.mark.parametrize(
    "prefix", ["", "module.", "_orig_mod.", "model.", "backbone.", "module._orig_mod.", "_orig_mod.module.model."]
)
def test_prefixes(prefix):
    tensors = weights()
    assert same_dict(strip_prefixes({prefix + k: v for k, v in tensors.items()}), tensors)


def test_prefix_of_some_names_stays():
    tensors = {"model.a": torch.zeros(1), "b": torch.zeros(1)}
    assert strip_prefixes(tensors).keys() == tensors.keys()


@pytest.mark.parametrize("key", ["state_dict", "model", None])
def test_keys(tmp_path, key):
    tensors = weights()
    torch.save({key: tensors, "epoch": 3} if key else tensors, tmp_path / "w.pth")
    assert same_dict(read_tensors(tmp_path / "w.pth"), tensors)


@pytest.mark.parametrize("key", ["state_dict_ema", "model_ema"])
def test_ema_is_an_explicit_choice(tmp_path, key):
    raw, ema = weights(), {f"module.{k}": v + 1 for k, v in weights().items()}
    torch.save({"state_dict": raw, key: ema}, tmp_path / "w.pth")
    assert same_dict(read_tensors(tmp_path / "w.pth"), raw)
    assert same_dict(read_tensors(tmp_path / "w.pth", ema=True), strip_prefixes(ema))


def truncated(path):
    file = io.BytesIO()
    torch.save({"model": {"w": torch.randn(1000)}}, file)
    path.write_bytes(file.getvalue()[:2000])


def truncated_legacy(path):
    file = io.BytesIO()
    torch.save({"model": {"w": torch.randn(1000)}}, file, _use_new_zipfile_serialization=False)
    path.write_bytes(file.getvalue()[:2000])


def text(path):
    path.write_text("<html>404 Not Found</html>")


def other_zip(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "hello")


def torchscript(path):
    torch.jit.save(torch.jit.trace(torch.nn.Linear(2, 2), torch.zeros(1, 2)), path)


def no_tensor(path):
    torch.save({"epoch": 3, "model": {"name": "x"}}, path)


def not_a_dict(path):
    torch.save([torch.zeros(3)], path)


def empty(path):
    path.touch()


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch.jit
@pytest.mark.parametrize(
    "make",
    [truncated, truncated_legacy, empty, text, other_zip, torchscript, no_tensor, not_a_dict],
    ids=lambda make: make.__name__,
)
def test_unusable_files(tmp_path, make):
    path = tmp_path / "bad.pth"
    make(path)
    with pytest.raises(WeightsError) as caught:
        read_tensors(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_torchscript_is_named(tmp_path):
    torchscript(tmp_path / "script.pt")
    with pytest.raises(WeightsError, match="is a TorchScript archive; save its state_dict instead"):
        read_tensors(tmp_path / "script.pt")


def test_broken_safetensors(tmp_path):
    path = tmp_path / "w.safetensors"
    write_tensors(path, weights())
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(WeightsError, match="not a readable safetensors file"):
        read_tensors(path)


def test_no_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such file"):
        read_tensors(tmp_path / "w.pth")


@pytest.mark.parametrize("name", ["vit3_tiny", "h_vit3_tiny"])
def test_wrapped_model_to_safetensors(tmp_path, name):
    """channels_last, compiled, and its moving average: saved, and loaded strictly into a plain model."""
    model = shallow(name).to(memory_format=torch.channels_last)
    compiled = torch.compile(model, backend="eager")
    ema = ModelEmaV3(compiled, decay=0.5)
    with torch.no_grad():
        compiled(torch.randn(2, 3, 64, 64).to(memory_format=torch.channels_last))
        for p in model.parameters():
            p.add_(1)
    ema.update(compiled)
    for wrapped in (compiled, ema):
        write_tensors(tmp_path / "w.safetensors", wrapped.state_dict())
        plain, tensors = shallow(name), read_tensors(tmp_path / "w.safetensors")
        plain.load_state_dict(tensors, strict=True)
        assert same_dict(plain.state_dict(), strip_prefixes(wrapped.state_dict()))
    assert not torch.equal(plain.head.weight, model.head.weight)
    assert [path.name for path in tmp_path.iterdir()] == ["w.safetensors"]


def test_match():
    model = torch.nn.Linear(4, 3)
    report = match({"weight": torch.zeros(3, 4), "surplus": torch.zeros(1)}, model)
    assert (report.matched, report.missing, report.unexpected) == (["weight"], ["bias"], ["surplus"])
    assert report.fraction == 0.5
    report.require(0.5, "it")
    with pytest.raises(WeightsError, match="it fits 50.0 % of the model, at least 95 % is needed.*missing: bias"):
        report.require(0.95, "it")


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


def test_rows_go_by_class_name(tmp_path):
    """Both kinds of files name their classes."""
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
