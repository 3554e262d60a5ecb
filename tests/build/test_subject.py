"""What is exported of runs, checkpoints, hub folders and bare files: which weights, which arguments, which figures."""

import json

import pytest
import timm
import torch
from omegaconf import OmegaConf

from tests.toy import compose_config
from vit3.build import build_subject
from vit3.build.trained import read_stored
from vit3.config import ExportConfig, typed
from vit3.engine.checkpoint import save_checkpoint
from vit3.errors import UserError
from vit3.export.hub import write_hub_folder
from vit3.models.weights import write_tensors

NARROW = dict(embed_dim=16, depth=1, num_heads=2)
SMALL = [f"++model.kwargs.{key}={value}" for key, value in NARROW.items()]
GENERATOR = ["recipe=dit3_digits", "data.img_size=[8,16]", "model.kwargs.patch_size=2", *SMALL]
LABELS = tuple("0123456789")


@pytest.fixture(scope="module")
def asked():
    """``asked(place, key=value, ...)``: the subject of a command line, whose other keys are as in configs/."""
    default = compose_config("checkpoint=x", root="export")

    def ask(place, **options):
        cfg = OmegaConf.merge(default, {"checkpoint": str(place), **options})
        return build_subject(typed(cfg, ExportConfig), OmegaConf.create)

    return ask


def checkpoint(path, network, cfg, kinds=("raw", "ema"), **others):
    """A file of ours; the averaged weights are all one more than the raw ones."""
    weights = network.state_dict()
    keys = {"raw": {"state_dict": weights}, "ema": {"state_dict_ema": {k: v + 1 for k, v in weights.items()}}}
    state = {"config": cfg, "classes": list(LABELS), "epoch": 3, "position": 0}
    state["record"] = {"val/top1": 10.0, "val_ema/top1": 20.0, "train/loss": 1.0}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_checkpoint({**state, **{k: v for kind in kinds for k, v in keys[kind].items()}, **others}, path)
    return path


@pytest.fixture(scope="module")
def classifier():
    overrides = (
        "inner.lr=0.5",
        "++mixer.kwargs.qkv_bias=false",
        "data.img_size=[8,12]",
        "data.crop_pct=0.75",
        "data.std=[0.3]",
        *SMALL,
    )
    cfg = OmegaConf.to_container(compose_config(*overrides), resolve=True)
    options = dict(in_chans=1, num_classes=10, img_size=(8, 12), mixer_kwargs=dict(qkv_bias=False, inner=dict(lr=0.5)))
    return timm.create_model("vit3_tiny", **{**cfg["model"]["kwargs"], **options}), cfg


@pytest.fixture(scope="module")
def run(tmp_path_factory, classifier):
    """A run folder: its best weights of each kind, and a newer checkpoint with both."""
    folder = tmp_path_factory.mktemp("run")
    checkpoint(folder / "best_raw.pt", *classifier, ["raw"])
    checkpoint(folder / "best_ema.pt", *classifier, ["ema"])
    checkpoint(folder / "checkpoints" / "update-00000009-00003-000000000.pt", *classifier, optimizer={}, updates=9)
    return folder


@pytest.fixture
def narrow(monkeypatch):
    """Registered names stand for narrow networks, as files of whole ones take seconds."""
    create, two = timm.create_model, dict(dims=(16, 16), depths=(1, 1), num_heads=(2, 2))
    sizes = {
        "vit3_tiny": NARROW,
        "h_vit3_tiny": two,
        "h_vit3_tiny_dense": {**two, "out_indices": (0, 1)},
        "dit3_s_8": NARROW,
    }
    monkeypatch.setattr(timm, "create_model", lambda name, **options: create(name, **{**sizes[name], **options}))


def differs(subject, network):
    """By how much all weights do."""
    own = network.state_dict()
    (by,) = {round(float((value - own[name]).mean()), 3) for name, value in subject.model.state_dict().items()}
    return by


def test_a_run_gives_the_best_weights_of_the_kind_asked_for(asked, run, classifier):
    network, cfg = classifier
    for kind, by, top1 in (("raw", 0.0, 10.0), ("ema", 1.0, 20.0)):
        subject = asked(run, weights=kind)
        assert (subject.weights, differs(subject, network)) == (kind, by)
        assert subject.source["file"] == f"best_{kind}.pt" and len(subject.source["sha256"]) == 64
        assert subject.training["top1"] == top1 and "loss" not in subject.training
    assert (subject.kind, subject.name, subject.img_size) == ("classifier", "vit3_tiny", (8, 12))
    assert subject.classes == LABELS and subject.training["saved"] == "epoch 4" and not subject.model.training
    assert subject.preprocessing["crop_pct"] == 0.75 and subject.preprocessing["std"] == [0.3]
    assert subject.kwargs["img_size"] == [8, 12]
    again = timm.create_model(subject.name, **subject.kwargs)
    assert again.blocks[0].attn.inner == network.blocks[0].attn.inner and again.blocks[0].attn.inner.lr == 0.5
    again.load_state_dict(subject.model.state_dict())
    assert asked(run, weights="raw", img_size=[16, 8]).img_size == (16, 8)


def test_kinds_are_chosen_where_one_is_there(asked, tmp_path, classifier):
    for kind in ("raw", "ema"):
        checkpoint(tmp_path / kind / f"best_{kind}.pt", *classifier, [kind])
        assert asked(tmp_path / kind).weights == kind
        assert asked(tmp_path / kind / f"best_{kind}.pt").weights == kind
    with pytest.raises(UserError, match="weights=ema, but the run kept raw weights; use weights=raw"):
        asked(tmp_path / "raw", weights="ema")
    newest = checkpoint(tmp_path / "new" / "checkpoints" / "update-00000001-00000-000000007.pt", *classifier, ["raw"])
    assert asked(tmp_path / "new").source["file"] == newest.name  # stopped before its first scores


def test_two_kinds_are_never_chosen_from(asked, run):
    with pytest.raises(UserError, match="the run kept its best raw and its best averaged weights; set weights=ema"):
        asked(run)
    with pytest.raises(UserError, match="the checkpoint holds raw and averaged weights; set weights=ema"):
        asked(next((run / "checkpoints").iterdir()))


def test_scores_are_those_of_these_weights(asked, run, tmp_path, classifier):
    newest = next((run / "checkpoints").iterdir())
    assert asked(newest, weights="ema").training.items() >= {"top1": 20.0, "saved": "epoch 3"}.items()
    younger = checkpoint(tmp_path / "u.pt", *classifier, optimizer={}, position=16)
    subject = asked(younger, weights="ema")
    assert "top1" not in subject.training and subject.training["saved"] == "epoch 4 after 16 images"


@pytest.mark.parametrize("cached", [False, True])
def test_a_generator_has_its_newest_weights_and_the_size_of_its_latents(asked, tmp_path, cached):
    data = ("data=latents", "data.root=x", "data.img_size=[8,16]") if cached else ()
    cfg = OmegaConf.to_container(compose_config(*GENERATOR, *data), resolve=True)
    options = dict(in_chans=4, img_size=(8, 16) if cached else (4, 8), learn_sigma=True)
    network = timm.create_model("dit3_s_2", **{**cfg["model"]["kwargs"], **options, "num_classes": 10})
    cfg["model"]["name"] = "dit3_s_2"
    codec = dict(channels=4, factor=2)
    checkpoint(tmp_path / "best_raw.pt", network, cfg, ["raw"], codec=codec)
    name = "update-00000009-00003-000000000.pt"
    checkpoint(tmp_path / "checkpoints" / name, network, cfg, codec=codec)
    OmegaConf.save(cfg, tmp_path / "config.yaml")
    subject = asked(tmp_path, weights="ema")
    assert (subject.source["file"], subject.weights, differs(subject, network)) == (name, "ema", 1.0)
    assert (subject.kind, subject.img_size, subject.preprocessing) == ("generator", options["img_size"], {})
    again = timm.create_model(subject.name, **subject.kwargs)
    again.load_state_dict(subject.model.state_dict())
    assert again.img_size == subject.img_size


def test_bare_files_tell_channels_and_classes(asked, tmp_path, narrow):
    network = timm.create_model("vit3_tiny", in_chans=2, num_classes=7)
    write_tensors(tmp_path / "c.safetensors", network.state_dict())
    subject = asked(tmp_path / "c.safetensors", model_name="vit3_tiny")
    assert subject.kwargs == dict(in_chans=2, num_classes=7) and subject.weights == "stored"
    assert (subject.kind, subject.img_size) == ("classifier", (224, 224))
    assert "mean" not in subject.preprocessing and "crop_pct" in subject.preprocessing  # of three colours
    assert differs(subject, network) == 0
    for name, kind, size in (("h_vit3_tiny", "classifier", (224, 224)), ("dit3_s_8", "generator", (32, 32))):
        write_tensors(tmp_path / "o.safetensors", timm.create_model(name, in_chans=2, num_classes=7).state_dict())
        other = asked(tmp_path / "o.safetensors", model_name=name)
        assert (other.kwargs, other.kind, other.img_size) == (dict(in_chans=2, num_classes=7), kind, size)
    with pytest.raises(UserError, match="the SHA-256"):
        asked(tmp_path / "c.safetensors", model_name="vit3_tiny", sha256="0" * 64)
    with pytest.raises(UserError, match="the file lacks 2 tensors of vit3_tiny .*, head"):
        rest = {name: value for name, value in network.state_dict().items() if not name.startswith("head.")}
        write_tensors(tmp_path / "headless.safetensors", rest)
        asked(tmp_path / "headless.safetensors", model_name="vit3_tiny")


def test_kinds_of_a_bare_file(asked, tmp_path, narrow):
    network = timm.create_model("vit3_tiny", num_classes=7)
    raw, ema = network.state_dict(), {name: value + 1 for name, value in network.state_dict().items()}
    torch.save({"model": raw, "model_ema": ema}, tmp_path / "both.pth")
    torch.save({"model_ema": ema}, tmp_path / "ema.pth")
    with pytest.raises(UserError, match="the file holds raw and averaged weights; set weights=ema or weights=raw"):
        asked(tmp_path / "both.pth", model_name="vit3_tiny")
    for file, weights, kind, by in (
        ("both.pth", "raw", "raw", 0),
        ("both.pth", "ema", "ema", 1),
        ("ema.pth", "auto", "ema", 1),
    ):
        subject = asked(tmp_path / file, model_name="vit3_tiny", weights=weights)
        assert (subject.weights, differs(subject, network)) == (kind, by)
    assert subject.preprocessing["mean"] and subject.in_chans == 3
    with pytest.raises(UserError, match="weights=raw, but the file holds ema weights alone; use weights=ema"):
        asked(tmp_path / "ema.pth", model_name="vit3_tiny", weights="raw")


def test_kinds_that_a_header_tells(asked, tmp_path, narrow):
    network = timm.create_model("vit3_tiny", num_classes=7)
    for kind, other in (("raw", "ema"), ("ema", "raw")):
        path = tmp_path / f"{kind}.safetensors"
        write_tensors(path, network.state_dict(), {"weights": kind})
        for wanted in ("auto", kind):
            assert asked(path, model_name="vit3_tiny", weights=wanted).weights == kind
        with pytest.raises(UserError, match=f"weights={other}, but the file holds {kind} weights alone"):
            asked(path, model_name="vit3_tiny", weights=other)


def test_hub_folders(asked, run, tmp_path):
    first = asked(run, weights="raw")
    folder = write_hub_folder(first, tmp_path / "hub")
    for place in (folder, folder / "model.safetensors"):
        again = asked(place)
        for name in ("kind", "name", "kwargs", "img_size", "classes", "preprocessing", "weights", "training", "source"):
            assert getattr(again, name) == getattr(first, name), name
        assert differs(again, first.model) == 0
    with pytest.raises(UserError, match="weights=raw is no choice here"):
        asked(folder, weights="raw")
    with pytest.raises(UserError, match="model_name=h_vit3_tiny, but .* holds vit3_tiny; leave model_name out$"):
        asked(folder, model_name="h_vit3_tiny")
    config = json.loads((folder / "config.json").read_text())
    config["pretrained_cfg"]["crop_mode"] = "squash"
    for key in ("weights", "training", "source", "label_names"):
        del config[key]
    (folder / "config.json").write_text(json.dumps(config))  # as others write it
    other = asked(folder)
    assert (other.classes, other.weights, other.training) == (None, "stored", {})
    assert other.preprocessing["crop_mode"] == "squash" and other.source["file"] == "model.safetensors"
    (folder / "config.json").write_text(json.dumps(config | {"label_names": ["a"] * 10}))
    assert asked(folder).classes == ("a",) * 10
    config["pretrained_cfg"]["label_names"] = ["b"] * 10
    (folder / "config.json").write_text(json.dumps(config | {"label_names": ["a"] * 10}))
    assert asked(folder).classes == ("b",) * 10  # where timm looks first
    with pytest.raises(UserError, match="the SHA-256"):
        asked(folder, sha256="0" * 64)
    (folder / "config.json").write_text("{}")
    with pytest.raises(UserError, match="names no architecture"):
        asked(folder)


def test_the_backbone_in_a_classifier(asked, tmp_path, narrow):
    """Its arguments are the classifier's that it has too; it has neither classes nor a head."""
    cfg = OmegaConf.to_container(compose_config("model=h_vit3_tiny", "data=digits", "mixer=linear"), resolve=True)
    network = timm.create_model("h_vit3_tiny", in_chans=1, num_classes=10, img_size=32, mixer="linear")
    subject = asked(checkpoint(tmp_path / "c.pt", network, cfg, ["raw"]), model_name="h_vit3_tiny_dense")
    assert (subject.kind, subject.name, subject.classes) == ("features", "h_vit3_tiny_dense", None)
    assert subject.kwargs["in_chans"] == 1 and subject.kwargs["mixer"] == "linear"
    inner = OmegaConf.to_container(compose_config("model=h_vit3_tiny", "data=digits", "inner.lr=0.5"), resolve=True)
    weights = timm.create_model("h_vit3_tiny", in_chans=1, num_classes=10, img_size=32)
    stepped = asked(checkpoint(tmp_path / "i.pt", weights, inner, ["raw"]), model_name="h_vit3_tiny_dense")
    assert stepped.kwargs["mixer_kwargs"]["inner"]["lr"] == 0.5
    other = timm.create_model("h_vit3_tiny", in_chans=1, num_classes=10, img_size=32, mixer="linear", dims=(32, 32))
    cfg["model"]["kwargs"] = {"dims": [32, 32]}
    path = checkpoint(tmp_path / "w.pt", other, cfg, ["raw"])
    with pytest.raises(UserError, match="h_vit3_tiny in it lacks .* tensors of h_vit3_tiny_dense or has them in ano"):
        asked(path, model_name="h_vit3_tiny_dense")
    own = network.state_dict()
    for name, value in subject.model.state_dict().items():
        assert name.startswith(subject.model.fresh) or torch.equal(value, own[name]), name


def test_the_kind_of_weights_decides_which_best_file_of_a_run_is_read(run):
    """Also for predictions and evaluation, where the other kind may have scored better."""
    for kind in ("raw", "ema"):
        assert read_stored(str(run), OmegaConf.create, weights=kind).path.name == f"best_{kind}.pt"
