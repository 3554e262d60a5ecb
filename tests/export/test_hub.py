"""Folders in timm's hub layout: built again by timm from the folder alone, to the last bit."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

import pytest
import timm
import torch
from timm.utils import ModelEmaV3
from torch import nn

import vit3
from tests.helpers import same_dict, shallow
from tests.toy import CONFIGS, no_pictures, short_run
from vit3.build.model import build_model, mixer_kwargs
from vit3.build.trained import read_stored
from vit3.cli import stored_config
from vit3.errors import UserError
from vit3.export import Subject, hub
from vit3.export.hub import open_hub_folder, write_hub_folder
from vit3.files import sha256_of
from vit3.inner import BranchSpec, InnerSpec
from vit3.models.weights import WeightsError, load_weights, read_tensors, stored_kinds

SEEN = dict(mean=[0.5] * 3, std=[0.25] * 3, interpolation="bilinear", crop_pct=0.9)
SMALL = dict(embed_dim=32, depth=1, num_heads=2)
MAPS = dict(dims=[16, 32], depths=[1, 1], num_heads=[2, 2], out_indices=[0, 1])
INNER = InnerSpec(lr=0.5, loss="mse", beside=(BranchSpec("conv", kernel=5, heads=1), BranchSpec("fc", extra=True)))
# Of each kind of network: kind, name, arguments, classes
NETWORKS = {
    "classifier": ("classifier", "vit3_tiny", dict(SMALL, num_classes=3, img_size=[32, 48]), ("cat", "dog", "owl")),
    "inner": ("classifier", "vit3_tiny", dict(SMALL, num_classes=3, mixer_kwargs={"inner": INNER.to_plain()}), None),
    "softmax": ("classifier", "vit3_tiny", dict(SMALL, num_classes=3, mixer="softmax", pos="rope"), None),
    "one_class": ("classifier", "vit3_tiny", dict(SMALL, num_classes=1, in_chans=13), None),
    "hierarchical": ("classifier", "h_vit3_tiny", dict(MAPS, num_classes=10) | {"in_chans": 1}, None),
    "dense": ("features", "h_vit3_tiny_dense", MAPS, None),
    "generator": ("generator", "dit3_s_8", dict(SMALL, num_classes=3, in_chans=2, img_size=[16, 16]), None),
    "other": ("classifier", "test_vit", dict(num_classes=3, img_size=[32, 32]), None),
}
NETWORKS["hierarchical"][2].pop("out_indices")


def subject_of(network, **changes):
    """With weights that all have an effect."""
    kind, name, kwargs, classes = NETWORKS[network]
    model = timm.create_model(name, **kwargs).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    facts = dict(training={"top1": 61.25, "dataset": "digits"}, source={"file": "best.pt", "sha256": "ab"})
    given = dict(model=model, kind=kind, name=name, kwargs=kwargs, img_size=(32, 48), classes=classes, weights="ema")
    return Subject(**given | facts | dict(preprocessing={} if kind == "generator" else SEEN) | changes)


def inputs_of(subject, size=(40, 56)):
    """Random ones; a generator takes times and labels too."""
    if subject.kind != "generator":
        return (torch.randn(2, subject.in_chans, *(size if subject.name != "test_vit" else (32, 32))),)
    return torch.randn(2, subject.in_chans, *size), torch.tensor([0, 999]), torch.tensor([1, 3])


def config_of(folder):
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("network", sorted(NETWORKS.keys() - {"other"}))
def test_timm_builds_it_again(network, tmp_path):
    subject = subject_of(network)
    folder = write_hub_folder(subject, tmp_path / "folder")
    inputs = inputs_of(subject)
    with torch.no_grad():
        expected = subject.model(*inputs)
    expected = (expected,) if isinstance(expected, torch.Tensor) else expected
    assert all(torch.equal(a, b) for a, b in zip(open_hub_folder(folder)(*inputs), expected, strict=True))
    again = vit3.create_model(f"local-dir:{folder}", pretrained=True)
    assert type(again) is type(subject.model)
    assert same_dict(again.state_dict(), subject.model.state_dict())
    fresh = vit3.create_model(f"local-dir:{folder}")
    assert not same_dict(fresh.state_dict(), again.state_dict())
    assert load_weights(fresh, folder).fraction == 1 and same_dict(fresh.state_dict(), again.state_dict())


def test_other_networks_of_timm(tmp_path):
    subject = subject_of("other")
    folder = write_hub_folder(subject, tmp_path / "folder")
    inputs = inputs_of(subject)
    assert torch.equal(open_hub_folder(folder)(*inputs)[0], subject.model(*inputs))
    config = config_of(folder)
    assert config["pretrained_cfg"]["fixed_input_size"] is True and "label_names" not in config
    assert config["kind"] == "classifier" and config["global_pool"] == "token"


def test_what_the_folder_says(tmp_path):
    subject = subject_of("classifier")
    folder = write_hub_folder(subject, tmp_path / "folder", license="cc-by-nc-4.0")
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    config = config_of(folder)
    assert config["architecture"] == "vit3_tiny" and config["model_args"] == subject.kwargs
    assert config["label_names"] == ["cat", "dog", "owl"] and config["num_features"] == 32
    assert config["sha256"] == sha256_of(folder / "model.safetensors")
    assert (config["weights"], config["training"], config["source"]) == ("ema", subject.training, subject.source)
    assert config["versions"].keys() == {"vit3", "timm", "torch"}
    cfg = timm.create_model(f"local-dir:{folder}", pretrained=True).pretrained_cfg
    assert {name: cfg[name] for name in SEEN} == SEEN
    assert tuple(cfg["input_size"]) == (3, 32, 48) and list(cfg["label_names"]) == ["cat", "dog", "owl"]
    assert (cfg["first_conv"], cfg["classifier"], cfg["license"]) == ("patch_embed.proj", "head", "cc-by-nc-4.0")


def test_what_the_weights_say_and_what_timm_does_not_know(tmp_path):
    seen = SEEN | {"crop_mode": "squash", "gamma": 2.2}
    folder = write_hub_folder(subject_of("classifier", preprocessing=seen), tmp_path / "new" / "deep")
    assert stored_kinds(folder / "model.safetensors") == ("ema",) and folder.stat().st_mode & 0o777 == 0o755
    about = config_of(folder)["pretrained_cfg"]
    assert about["crop_mode"] == "squash" and "gamma" not in about and about["pool_size"] is None
    assert about["num_classes"] == config_of(folder)["num_classes"] == 3
    write_hub_folder(subject_of("classifier", classes=("é", "b", "c")), folder)
    assert "é" in (folder / "config.json").read_text(encoding="utf-8")


def test_the_old_folder_comes_back_where_the_new_one_cannot(tmp_path, monkeypatch):
    """And what arrives is on the same disk, hidden."""
    folder = write_hub_folder(subject_of("classifier"), tmp_path / "folder")
    replace, moved = Path.replace, []

    def once(self, target):
        moved.append((self.parent, self.name[:8], target))
        if len(moved) == 2:
            raise OSError("disk full")
        return replace(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", once)
        patch.setattr(hub, "write_tensors", lambda path, *args: path.touch())  # which replaces too
        with pytest.raises(OSError, match="disk full"):
            write_hub_folder(subject_of("classifier", weights="raw"), folder)
    assert moved[1] == (tmp_path, ".folder.", folder)
    assert config_of(folder)["weights"] == "ema" and [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_timms_adaptations(tmp_path):
    """Maps, other classes, other channels: from the folder too, and by our loader the same weights."""
    subject = subject_of("classifier")
    folder = write_hub_folder(subject, tmp_path / "folder")
    source = f"local-dir:{folder}"
    maps = vit3.create_model(source, pretrained=True, features_only=True, out_indices=[0])
    (expected,) = subject.model.forward_intermediates(x := inputs_of(subject)[0], [0], intermediates_only=True)
    assert torch.equal(maps(x)[0], expected)
    for channels in (1, 4, 13):
        ours, theirs = (vit3.create_model(source, p, in_chans=channels, num_classes=10) for p in (False, True))
        report = load_weights(ours, folder)
        assert report.adapted == {"patch_embed.proj.weight": f"from 3 to {channels} channels"}
        trunks = ({k: v for k, v in m.state_dict().items() if "head" not in k} for m in (ours, theirs))
        assert same_dict(*trunks)


def test_classes_go_by_name(tmp_path):
    subject = subject_of("classifier")
    write_hub_folder(subject, tmp_path / "folder")
    model = shallow("vit3_tiny", num_classes=2)
    load_weights(model, tmp_path / "folder", classes=["owl", "dog"])
    assert torch.equal(model.head.weight, subject.model.head.weight[[2, 1]])


@pytest.mark.parametrize("network", ["classifier", "hierarchical"])
def test_wrapped_models_save_cleanly(network, tmp_path):
    """channels_last, compiled, averaged, wrapped by DDP (R20b): the file has the plain names and loads strictly."""
    subject = subject_of(network)
    model = subject.model.to(memory_format=torch.channels_last)
    ddp = nn.Module()  # DDP needs a process group; its names are these
    ddp.module = torch.compile(model, backend="eager")
    wrapped = {"compiled": ddp.module, "average": ModelEmaV3(ddp.module), "ddp": ddp}
    for name, wrapper in wrapped.items():
        write_hub_folder(subject_of(network, model=wrapper), tmp_path / name)
        tensors = read_tensors(tmp_path / name / "model.safetensors")
        plain = timm.create_model(subject.name, **subject.kwargs)
        plain.load_state_dict(tensors, strict=True)
        assert same_dict(plain.state_dict(), model.state_dict())
        assert config_of(tmp_path / name)["pretrained_cfg"]["classifier"] == "head"


def test_damaged_weights_are_refused(tmp_path):
    for network in ("classifier", "dense", "generator"):
        folder = write_hub_folder(subject_of(network), tmp_path / network)
        data = bytearray((folder / "model.safetensors").read_bytes())
        data[-1] ^= 1
        (folder / "model.safetensors").write_bytes(data)
        with pytest.raises(WeightsError, match="has the SHA-256"):
            vit3.create_model(f"local-dir:{folder}", pretrained=True)


@pytest.mark.parametrize("network", ["classifier", "generator"])
def test_from_the_hub(network, tmp_path, monkeypatch):
    """The same folder as a repository: timm asks huggingface_hub for its files, and so do we."""
    huggingface_hub = pytest.importorskip("huggingface_hub")
    subject = subject_of(network)
    folder = write_hub_folder(subject, tmp_path / "folder")

    def served(repo_id, filename, **options):
        assert repo_id == "me/net" and options["revision"] == "v1"
        return str(folder / filename)

    for place in (timm.models._hub, huggingface_hub):
        monkeypatch.setattr(place, "hf_hub_download", served)
    model = vit3.create_model("hf-hub:me/net@v1", pretrained=True)
    assert same_dict(model.state_dict(), subject.model.state_dict())


def test_model_card(tmp_path):
    training = {"top1": 61.25, "epochs": 3, "dataset": ["digits", "a: b"], "quoted": {"top1 (table 7)": 76.5}}
    folder = write_hub_folder(subject_of("classifier", training=training), tmp_path / "my-model")
    card = (folder / "README.md").read_text(encoding="utf-8")
    yaml = pytest.importorskip("yaml").safe_load(card.split("---")[1])
    assert yaml["license"] == "mit" and yaml["library_name"] == "timm" and yaml["datasets"] == ["digits", "a: b"]
    assert yaml["pipeline_tag"] == "image-classification" and "vit3" in yaml["tags"]
    measured, quoted = (card.split(f"## {title}")[1].split("##")[0] for title in ("Training", "Quoted"))
    assert "| top1 | 61.25 |" in measured and "76.5" not in measured and "76.5" in quoted
    assert "| crop_pct | 0.9 |" in card and config_of(folder)["sha256"] in card
    numbers = {*re.findall(r"\d+\.\d+", measured + quoted)}
    assert numbers == {"61.25", "76.5"}  # none but those given
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    assert len(code.splitlines()) == 3


@pytest.mark.parametrize("network", ["classifier", "dense", "generator"])
def test_lines_of_the_card_run(network, tmp_path, monkeypatch):
    write_hub_folder(subject_of(network), tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    card = (tmp_path / "model" / "README.md").read_text(encoding="utf-8")
    code = re.findall(r"```python\n(.*?)```", card, re.DOTALL)[0].replace(
        "[500]), torch.tensor([0]", "[5]), torch.tensor([0]"
    )
    exec(code, names := {})
    assert names["output"] is not None
    assert ("pipeline_tag" in card) == (network != "generator") and "Training and measured" in card


def test_whole_or_not_at_all(tmp_path, monkeypatch):
    subject = subject_of("classifier")
    folder = write_hub_folder(subject, tmp_path / "folder")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def broken(*args):
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(hub, "model_card", broken)
        with pytest.raises(OSError, match="disk full"):
            write_hub_folder(subject_of("classifier"), folder)
        with pytest.raises(OSError, match="disk full"):
            write_hub_folder(subject, tmp_path / "new")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    write_hub_folder(subject_of("classifier", weights="raw"), folder)
    assert config_of(folder)["weights"] == "raw" and [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_refusals(tmp_path):
    subject = subject_of("classifier")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(UserError, match="mine holds thesis.tex, which is no part of an export; name a new folder"):
        write_hub_folder(subject, tmp_path / "mine")
    with pytest.raises(UserError, match="thesis.tex is a file"):
        write_hub_folder(subject, tmp_path / "mine" / "thesis.tex")
    odd = subject_of("classifier", kwargs=SMALL | dict(mixer_kwargs={"inner": InnerSpec()}))
    with pytest.raises(UserError, match="vit3_tiny cannot be described in JSON: Object of type InnerSpec"):
        write_hub_folder(odd, tmp_path / "odd")
    assert not (tmp_path / "odd").exists()


def test_push(tmp_path, monkeypatch):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    said = []

    class Api:
        def create_repo(self, repo_id, exist_ok):
            said.append((repo_id, exist_ok))

        def upload_folder(self, repo_id, folder_path, commit_message):
            said.append((repo_id, folder_path))
            assert commit_message == "folder by vit3"

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    folder = write_hub_folder(subject_of("classifier"), tmp_path / "folder", push="me/net")
    assert said == [("me/net", True), ("me/net", str(folder))]
    assert '"hf-hub:me/net"' in (folder / "README.md").read_text(encoding="utf-8")
    for name in ("net", "me/", "a/b/c"):
        with pytest.raises(UserError, match=f"push={name} must be OWNER/NAME"):
            write_hub_folder(subject_of("classifier"), folder, push=name)

    def refuse(self, *args, **options):
        raise RuntimeError("401 unauthorised\nlong text")

    monkeypatch.setattr(Api, "upload_folder", refuse)
    with pytest.raises(UserError, match=r"push=me/net failed \(401 unauthorised\); .* is written: log in") as caught:
        write_hub_folder(subject_of("classifier"), folder, push="me/net")
    assert "\n" not in str(caught.value) and folder.is_dir()


def test_from_training_to_timm(tmp_path, monkeypatch):
    """A run's checkpoint, its average, a folder, and timm by path: the same bits, and the other weights are not."""
    from vit3.tools.train import train

    no_pictures(monkeypatch.setattr)
    tiny = [f"++model.kwargs.{name}={value}" for name, value in SMALL.items()]
    train(short_run(tmp_path, "name=r", "engine.ema_decay=0.5", *tiny))
    stored = read_stored(str(tmp_path / "r"), functools.partial(stored_config, configs=CONFIGS), newest=True)
    assert {"state_dict", "state_dict_ema"} <= stored.state.keys()
    model = build_model(stored.cfg, stored.classes)
    kind = stored.load_into(model, "ema")
    inner = InnerSpec.of(mixer_kwargs(stored.cfg)["inner"].to_plain())
    assert inner == stored.cfg.inner
    kwargs = {
        **{name: value for name, value in stored.cfg.model.kwargs.items()},
        **dict(in_chans=model.in_chans, num_classes=len(stored.classes), img_size=list(stored.cfg.data.img_size)),
        "mixer_kwargs": {"inner": inner.to_plain()},
    }
    size = tuple(stored.cfg.data.img_size)
    subject = Subject(model.eval(), "classifier", stored.cfg.model.name, kwargs, size, stored.classes, SEEN, kind)
    folder = write_hub_folder(subject, tmp_path / "folder")
    again = timm.create_model(f"local-dir:{folder}", pretrained=True)
    assert same_dict(again.state_dict(), stored.state["state_dict_ema"])
    assert not same_dict(again.state_dict(), stored.state["state_dict"])
    assert config_of(folder)["weights"] == "ema" and config_of(folder)["label_names"] == list(stored.classes)
    ours = timm.create_model(stored.cfg.model.name, **kwargs)
    load_weights(ours, stored.path, ema=True)
    assert same_dict(ours.state_dict(), again.state_dict())
