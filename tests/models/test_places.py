"""Where weights may lie, what is checked on the way, and what is said where there are none."""

import json
from pathlib import Path
from urllib.error import URLError

import pytest
import torch

from tests.helpers import same_dict, shallow
from vit3.files import sha256_of
from vit3.models import published
from vit3.models.places import described, download, resolve
from vit3.models.weights import WeightsError, load_weights, read_tensors, write_tensors


@pytest.fixture
def model():
    return shallow("vit3_tiny", num_classes=3)


@pytest.fixture
def folder(tmp_path, model):
    """The layout of timm's hub, with a checksum."""
    path = tmp_path / "folder"
    write_tensors(path / "model.safetensors", model.state_dict())
    (path / "config.json").write_text(json.dumps({"sha256": sha256_of(path / "model.safetensors")}))
    return path


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    return tmp_path / "torch" / "hub" / "checkpoints"


def loads(model, place):
    """Whether the loader takes all of ``model`` from there."""
    other = shallow("vit3_tiny", num_classes=3)
    load_weights(other, place)
    return same_dict(other.state_dict(), model.state_dict())


def test_file_and_folder(folder, model):
    file = folder / "model.safetensors"
    for place in (file, str(file), folder, str(folder), f"local-dir:{folder}"):
        assert resolve(place) == file and loads(model, place)
    assert resolve(file, sha256=sha256_of(file).upper()) == file
    (folder / "config.json").unlink()
    assert resolve(folder) == file


def damage(path):
    """One bit of the last value, which leaves the file readable."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_damaged_folder(folder, model):
    damage(folder / "model.safetensors")
    assert read_tensors(folder / "model.safetensors").keys() == model.state_dict().keys()
    with pytest.raises(WeightsError, match="model.safetensors has the SHA-256 .*: the file is damaged or another"):
        resolve(folder)
    with pytest.raises(WeightsError, match="has the SHA-256"):
        resolve(folder / "model.safetensors", sha256="0" * 64)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"architecture": ["a"]}, "names no architecture"),
        ({"model_args": [1]}, r"model_args=\[1\] must be a dict"),
        ({"label_names": 5}, "label_names=5 must be a list"),
        ({"sha256": 5}, "sha256=5 must be a str"),
        ({"training": "long"}, "training='long' must be a dict"),
        ({"source": "disk"}, "source='disk' must be a dict"),
        ({"pretrained_cfg": [1]}, r"pretrained_cfg=\[1\] must be a dict"),
        ({"pretrained_cfg": {"input_size": [8, 8]}}, r"must be \[channels,height,width\]"),
        ({"pretrained_cfg": {"input_size": [1, 8, 8.0]}}, r"must be \[channels,height,width\]"),
        ({"pretrained_cfg": {"input_size": [1, 0, 8]}}, "each above 0"),
        ({"pretrained_cfg": {"crop_pct": True}}, "crop_pct=True must be a number above 0"),
        ({"pretrained_cfg": {"input_size": "abc"}}, "input_size='abc' must be"),
        ({"pretrained_cfg": {"input_size": [1, -8, 8]}}, "each above 0"),
        ({"pretrained_cfg": {"input_size": [1, 10**9, 8]}}, "below 100,000"),
        ({"pretrained_cfg": {"mean": 0.5}}, "mean=0.5 must be a list of numbers"),
        ({"pretrained_cfg": {"std": [0.5, "a"]}}, r"std=\[0.5, 'a'\] must be a list of numbers"),
        ({"pretrained_cfg": {"crop_pct": "0.9"}}, "crop_pct='0.9' must be a number above 0"),
        ({"pretrained_cfg": {"crop_pct": 0}}, "crop_pct=0 must be a number above 0"),
        ({"pretrained_cfg": {"interpolation": "cubic"}}, "interpolation='cubic' must be one of: bicubic, "),
        ({"num_classes": 7, "model_args": {"num_classes": 9}}, "num_classes=7, model_args.num_classes=9 must be one"),
        ({"pretrained_cfg": {"num_classes": 7}, "num_classes": 9}, "pretrained_cfg.num_classes=7 must be one number"),
    ],
)
def test_a_description_of_other_types(tmp_path, values, sentence):
    good = {"architecture": "vit3_tiny", "pretrained_cfg": {"input_size": [3, 8, 8]}, "label_names": None}
    (tmp_path / "config.json").write_text(json.dumps(good))
    assert described(tmp_path) == good
    (tmp_path / "config.json").write_text(json.dumps(good | values))
    with pytest.raises(WeightsError, match=sentence):
        described(tmp_path)


@pytest.mark.parametrize(
    "values",
    [
        {"label_names": {"0": "cat"}, "num_classes": 1},
        {"model_args": None, "pretrained_cfg": None, "training": None, "source": None, "sha256": None},
        {"pretrained_cfg": {"input_size": [1, 99_999, 1], "interpolation": "lanczos", "mean": [0], "crop_pct": 1}},
        {"num_classes": 3, "model_args": {"num_classes": None}, "pretrained_cfg": {"num_classes": 3}},
    ],
)
def test_descriptions_that_are_good(tmp_path, values):
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "vit3_tiny"} | values))
    assert described(tmp_path) == {"architecture": "vit3_tiny"} | values


def test_a_checksum_that_was_given_counts_wherever_the_weights_lie(folder, tmp_path, monkeypatch):
    """Also where the one in ``config.json`` is right; and a folder for what is fetched is used."""
    huggingface_hub = pytest.importorskip("huggingface_hub")
    folders = []

    def served(repo_id, filename, revision, cache_dir):
        folders.append((revision, cache_dir))
        return str(folder / filename)

    def fetch(name, cache_dir):
        folders.append((name, cache_dir))
        return folder / "model.safetensors"

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", served)
    monkeypatch.setattr(published, "fetch", fetch)
    for place in (folder, "hf-hub:owner/name", "hf_hub:owner/name", "h_vit3_tiny"):
        assert resolve(place, cache_dir=tmp_path).name == "model.safetensors"
        with pytest.raises(WeightsError, match=f"but {'0' * 64} was expected"):
            resolve(place, sha256="0" * 64, cache_dir=tmp_path)
    assert set(folders) == {(None, tmp_path), ("h_vit3_tiny", tmp_path)}


@pytest.mark.parametrize("scheme", ["http", "https", "HTTPS", "file"])
def test_addresses(tmp_path, cache, monkeypatch, scheme):
    monkeypatch.setattr(torch.hub, "download_url_to_file", lambda address, path, progress: Path(path).write_text("w"))
    address = f"{scheme}://host/some%20net.pth?download=1"
    assert resolve(address).parent == cache and resolve(address).name.endswith("-some net.pth")
    assert resolve(address, cache_dir=tmp_path / "new" / "deep").parent == tmp_path / "new" / "deep"
    with pytest.raises(WeightsError, match=f"{'0' * 64} was expected"):
        resolve(address, sha256="0" * 64)


@pytest.mark.parametrize("address", ["http://127.0.0.1:9/a b.pth", "http://[::1/a.pth", "http://127.0.0.1:port/a.pth"])
def test_addresses_that_are_none(cache, address):
    with pytest.raises(WeightsError, match="http.* (could not be downloaded|is no address) .*; "):
        resolve(address)


def test_the_home_folder(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder.parent))
    assert resolve("~/folder") == folder / "model.safetensors"


def test_address_is_fetched_once(folder, model, cache, monkeypatch):
    file = folder / "model.safetensors"
    address = file.as_uri()
    path = resolve(address)
    assert path.parent == cache and path.name.endswith("-model.safetensors")
    assert path.read_bytes() == file.read_bytes()
    assert resolve(f"{address}#sha256={sha256_of(file)}") == path  # checked where it lies
    file.unlink()
    assert loads(model, address)
    monkeypatch.setattr(torch.hub, "download_url_to_file", None)
    assert resolve(address) == path and [p.name for p in cache.iterdir()] == [path.name]


def test_addresses_of_one_name_differ(tmp_path, cache):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text(name)
    paths = [download((tmp_path / name / "model.safetensors").as_uri()) for name in "ab"]
    assert [path.read_text() for path in paths] == ["a", "b"]


def test_wrong_checksum_leaves_nothing(folder, cache):
    address = (folder / "model.safetensors").as_uri()
    with pytest.raises(WeightsError, match=f"{address}: .* but {'0' * 64} was expected"):
        resolve(f"{address}#sha256={'0' * 64}")
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("fragment", ["sha256=", "sha256=0123", "md5=" + "0" * 32])
def test_a_checksum_that_is_none_is_not_ignored(folder, cache, fragment):
    with pytest.raises(WeightsError, match=f"#{fragment}, which checks nothing"):
        resolve(f"{(folder / 'model.safetensors').as_uri()}#{fragment}")
    assert not cache.exists()


def test_changed_file_is_fetched_again(folder, cache):
    file = folder / "model.safetensors"
    path = resolve(file.as_uri())
    damage(file)
    assert resolve(file.as_uri()).read_bytes() != file.read_bytes()
    assert resolve(file.as_uri(), sha256=sha256_of(file)) == path and path.read_bytes() == file.read_bytes()


def test_cut_off_download_leaves_nothing(cache, monkeypatch):
    def cut_off(address, path, **options):
        with open(path, "wb") as file:
            file.write(b"half")
        raise URLError("connection reset")

    monkeypatch.setattr(torch.hub, "download_url_to_file", cut_off)
    with pytest.raises(WeightsError, match="https://x/y.pth could not be downloaded .*connection reset.*file instead"):
        resolve("https://x/y.pth")
    assert list(cache.iterdir()) == []


def test_hub(folder, model, monkeypatch):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    asked = []

    def served(repo_id, filename, revision, cache_dir):
        asked.append((repo_id, revision, filename))
        return str(folder / filename)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", served)
    assert loads(model, "hf-hub:owner/name@v2")
    assert asked == [("owner/name", "v2", "model.safetensors"), ("owner/name", "v2", "config.json")]
    damage(folder / "model.safetensors")
    with pytest.raises(WeightsError, match="has the SHA-256"):
        resolve("hf-hub:owner/name")

    def offline(**options):
        raise ConnectionError("no route to host\nand more")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", offline)
    with pytest.raises(WeightsError, match=r"hf-hub:owner/name could not be fetched \(no route to host\)") as caught:
        resolve("hf-hub:owner/name")
    assert "\n" not in str(caught.value)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda **options: (_ for _ in ()).throw(TimeoutError()))
    with pytest.raises(WeightsError, match=r"could not be fetched \(TimeoutError\)"):
        resolve("hf-hub:owner/name")


def test_published_name(folder, model, monkeypatch):
    with pytest.raises(FileNotFoundError, match="dit3_s_8: no such file; weights are a file, a folder"):
        resolve("dit3_s_8")  # no weights of it are published
    monkeypatch.setattr(published, "fetch", lambda name, cache_dir: folder / "model.safetensors")
    assert loads(model, "h_vit3_tiny")

    def offline(name, cache_dir):
        raise RuntimeError("pretrained=True: no network")

    monkeypatch.setattr(published, "fetch", offline)
    with pytest.raises(WeightsError, match="no network"):
        resolve("dit3_b_2")


def test_what_is_no_place(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="nowhere.pth: no such file; weights are a file, a folder"):
        resolve("nowhere.pth")
    with pytest.raises(WeightsError, match="is a folder without model.safetensors"):
        resolve(tmp_path)
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(WeightsError, match="config.json is not readable JSON"):
        resolve(tmp_path)
    monkeypatch.setattr(Path, "read_text", lambda self, encoding: (_ for _ in ()).throw(PermissionError("not yours")))
    with pytest.raises(WeightsError, match=r"config.json is not readable JSON \(not yours\)"):
        resolve(tmp_path)
