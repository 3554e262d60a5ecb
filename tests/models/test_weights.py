"""Reading and writing of weights: safe, prefix-blind, and clear about what is wrong."""

import io
import logging
import os
import zipfile

import pytest
import torch
from safetensors import safe_open
from timm.utils import ModelEmaV3

from tests.helpers import same_dict, shallow
from vit3.models.weights import (
    WeightsError,
    load_weights,
    match,
    read_tensors,
    stored_kinds,
    strip_prefixes,
    write_tensors,
)


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


def test_of_two_keys_the_first_counts_and_a_bare_state_is_no_average(tmp_path):
    tensors = weights()
    torch.save({"model": {k: v + 1 for k, v in tensors.items()}, "state_dict": tensors}, tmp_path / "both.pth")
    assert same_dict(read_tensors(tmp_path / "both.pth"), tensors)
    torch.save(tensors, tmp_path / "bare.pth")
    with pytest.raises(WeightsError, match="bare.pth holds no EMA weights .looked for state_dict_ema and model_ema"):
        read_tensors(tmp_path / "bare.pth", ema=True)
    torch.save({"ema": tensors}, tmp_path / "ema.pth")
    with pytest.raises(WeightsError, match=r"holds a moving average alone \(ema\); take it by ema=True"):
        read_tensors(tmp_path / "ema.pth")


def test_the_average_of_mmengine_stands_where_others_have_raw_weights(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    average, raw = weights(), {name: value + 1 for name, value in weights().items()}
    torch.save({"state_dict": average, "ema_state_dict": raw}, tmp_path / "w.pth")
    for ema in (False, True):
        assert same_dict(read_tensors(tmp_path / "w.pth", ema=ema), average)
    assert stored_kinds(tmp_path / "w.pth") == ("ema",)
    load_weights(torch.nn.Linear(1, 1), tmp_path / "w.pth", minimum=0)
    assert "taking its moving average (state_dict)" in caplog.text


@pytest.mark.parametrize(
    ("content", "kinds"),
    [
        ({"model": {}, "ema": {}}, ("raw", "ema")),
        ({"model": "vit3_tiny", "model_ema": {}}, ("ema",)),  # which is a name
        ({"state_dict": {}}, ("raw",)),
        ({"w": torch.zeros(1)}, ()),
        ([torch.zeros(1)], ()),
    ],
)
def test_kinds_that_a_file_holds(tmp_path, content, kinds):
    torch.save(content, tmp_path / "w.pth")
    assert stored_kinds(tmp_path / "w.pth") == kinds


@pytest.mark.parametrize("key", ["state_dict_ema", "model_ema", "ema"])
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
    many = match({f"{name}.w": torch.zeros(1) for name in "abcd"}, torch.nn.Linear(1, 1))
    with pytest.raises(WeightsError, match=r"missing: weight, bias; unexpected: a.w, b.w, c.w, …\)"):
        many.require(0.95, "it")


def test_the_same_content_is_the_same_file(tmp_path):
    """Or a SHA-256 would tell nothing; safetensors by itself orders the header anew at every call."""
    tensors, texts = weights(), {letter: letter for letter in "dacb"}
    for i in range(4):
        write_tensors(tmp_path / f"{i}.safetensors", tensors, dict(reversed(texts.items())) if i else texts, ["x", "é"])
    assert len({(tmp_path / f"{i}.safetensors").read_bytes() for i in range(4)}) == 1
    with safe_open(tmp_path / "0.safetensors", "pt") as file:
        assert file.metadata() == texts | {"classes": '["x", "\\u00e9"]'}
    assert same_dict(read_tensors(tmp_path / "0.safetensors"), tensors)
    plain = tmp_path / "new" / "deep" / "plain.safetensors"
    write_tensors(plain, tensors)
    assert same_dict(read_tensors(plain), tensors) and b"__metadata__" not in plain.read_bytes()
    assert all(int.from_bytes(file.read_bytes()[:8], "little") % 8 == 0 for file in tmp_path.rglob("*.safetensors"))
