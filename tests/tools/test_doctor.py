"""The doctor: each check says ok where all is well, and what is wrong where something is."""

from __future__ import annotations

import logging
import shutil
from collections import namedtuple

import pytest
import torch
from vit3.tools.doctor import doctor, examine
from vit3.tools.train import train

from tests.toy import compose_config, make_folder, short_run
from vit3.doctor import FAIL, OK, WARNING, attempt, machine, run
from vit3.doctor.sizes import checkpoint_bytes, state_per_weight
from vit3.engine.checkpoint import best_checkpoint, load_checkpoint, update_checkpoints
from vit3.errors import UserError

Usage = namedtuple("Usage", "total used free")
RUN = ("asked for", "precision", "backend", "average", "workers", "shared memory", "disk", "tracker")


@pytest.fixture(autouse=True)
def no_login(monkeypatch, tmp_path):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run with a moving average, and its checkpoints."""
    output = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("plot_curves", "plot_predictions"):  # a third of the time
            patch.setattr(f"vit3.tools.train.{name}", lambda *args: None)
        train(short_run(output, "name=a", "engine.ema_decay=0.5", "engine.ema_batch=16"))
    return output / "a"


def found(output, *overrides):
    """Checks of a short run by name."""
    checks = examine(short_run(output, *overrides))
    assert len({c.name for c in checks}) == len(checks)
    return {c.name: c for c in checks}


def test_all_is_well(tmp_path):
    checks = found(tmp_path)
    about_run = ("configuration", "device", "data", "resume", "model", "batch", "learning", *RUN)
    assert {"python", "packages", "optional", "cpu", "kernels", *about_run} <= checks.keys()
    assert {checks[name].status for name in about_run} == {OK}
    assert checks["data"].detail.startswith("1,437 training and 360 test images, 10 classes")
    assert checks["batch"].detail.startswith("16 = 1 processes x 1 forward passes x 16, 2 updates an epoch")
    assert not list(tmp_path.iterdir())  # nothing is written


@pytest.mark.parametrize(
    ("overrides", "name", "status", "text"),
    [
        (("data=folder",), "configuration", FAIL, "data.root has no value yet"),
        (("data=folder", "data.root=/nowhere"), "data", FAIL, "data.root=/nowhere is no folder"),
        (("engine.lr=1",), "configuration", FAIL, "engine.lr is no key"),
        (("engine.batch_size=5000",), "batch", FAIL, "more than the 1437 training images"),
        (("augment.mixup=0.5", "engine.batch_size=15"), "batch", FAIL, "must be even"),
        (("engine.recipe_batch=64",), "batch", WARNING, "the recipe's is 64"),
        (("optim.warmup_epochs=7",), "learning", FAIL, "must be less than engine.epochs"),
        (("task=mesa",), "learning", FAIL, "task=mesa learns from the moving average"),
        (("model.checkpoint=/nowhere",), "model", FAIL, "model.checkpoint=/nowhere"),
        (("resume=/nowhere",), "resume", FAIL, "no such run folder or checkpoint"),
        (("mixer.backend=triton", "engine.amp=bfloat16"), "backend", FAIL, "mixer.backend=triton cannot run"),
        (("engine.amp=float16",), "precision", WARNING, "many times slower"),
        (("engine.ema_decay=0.9999", "engine.ema_warmup=false"), "average", WARNING, "% the untrained network"),
        (("data.workers=1000",), "workers", WARNING, "1000 loader processes on"),
        (("logger=wandb", "logger.wandb=online"), "tracker", WARNING, "finds no login for api.wandb.ai"),
        (("engine.device=cuda",), "device", FAIL, "PyTorch sees no GPU"),
    ],
)  # fmt: skip
def test_each_fault_is_named(tmp_path, overrides, name, status, text):
    if "engine.device=cuda" in overrides and torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    overrides = [f"+{o}" if o == "engine.lr=1" else o for o in overrides]
    check = found(tmp_path, *overrides)[name]
    assert (check.status, text in check.detail) == (status, True), check
    assert check.cure or status == FAIL  # sentences of others name the cure in their own way


def test_bad_files_that_are_skipped_are_a_warning(tmp_path):
    root = make_folder(tmp_path / "data")
    (root / "train" / "class0" / "0.png").write_bytes(b"no image")
    folder = ("data=folder", f"data.root={root}", "engine.batch_size=4", "data.img_size=[16,16]", "data.workers=0")
    assert found(tmp_path, *folder)["data"].status == FAIL
    check = found(tmp_path, *folder, "data.on_bad_image=skip")["data"]
    assert check.status == WARNING and "1 of 12 tried images cannot be decoded" in check.sentence


def test_versions():
    assert machine.required_packages(machine.requirements()).status == OK
    check = machine.required_packages(["torch>=99", "no-such-package>=1", "timm"])
    assert check.status == FAIL and "no-such-package is not installed, needed: >=1" in check.detail
    assert "torch is 2" in check.detail and "timm is" not in check.detail


def test_missing_packages_matter_where_they_are_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "installed", lambda name: None)
    check = found(tmp_path, "logger=wandb")["asked for"]
    assert check.status == FAIL and "wandb" in check.detail and "tensorboard" not in check.detail
    assert check.cure == "pip install wandb"
    monkeypatch.setattr(machine, "installed", lambda name: None)
    assert machine.optional_packages().status == OK and "export" in machine.optional_packages().detail


def test_login_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "x")
    assert found(tmp_path, "logger=wandb", "logger.wandb=online")["tracker"].status == OK


def test_sizes_are_those_of_the_files(finished):
    """Predicted from the model against what the run wrote."""
    state = load_checkpoint(finished)
    model = torch.nn.ParameterDict({k.replace(".", "/"): torch.nn.Parameter(v) for k, v in state["state_dict"].items()})
    sizes = checkpoint_bytes(model, "adamw", averaged=True)
    assert update_checkpoints(finished)[0].stat().st_size == pytest.approx(sizes.whole, rel=0.1)  # names, numbers
    assert best_checkpoint(finished).stat().st_size == pytest.approx(sizes.weights, rel=0.1)
    assert (state_per_weight("adamw"), state_per_weight("momentum")) == (pytest.approx(2, rel=1e-3), 1)


def test_disk(tmp_path, monkeypatch):
    cfg = short_run(tmp_path / "runs" / "new", "engine.keep_last=5", "data.workers=1")
    for free, status in ((10**12, OK), (3 * 10**6, WARNING), (100, FAIL)):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: Usage(10**12, 0, free))
        checks = {c.name: c for c in examine(cfg)}
        assert checks["disk"].status == status, checks["disk"]
    assert checks["shared memory"].status == (WARNING if run._SHM.is_dir() else OK)


def test_training_stops_before_it_writes_anything(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**12, 0, 100))
    with pytest.raises(UserError, match="output=.*: 0.0001 MB free.*; free space or choose another output=FOLDER"):
        train(short_run(tmp_path, "name=r"))
    assert not list(tmp_path.iterdir())


def test_training_warns(tmp_path, caplog):
    (tmp_path / "file").write_text("")  # where the run folder would be: it stops there
    with caplog.at_level(logging.WARNING), pytest.raises(UserError, match="not writable"):
        train(short_run(tmp_path, "name=file", "engine.ema_decay=0.9999", "engine.ema_warmup=false"))
    assert any("% the untrained network; set engine.ema_warmup=true" in r.getMessage() for r in caplog.records)


def test_resumed_run(finished):
    def about(*overrides):
        ema = ("engine.ema_decay=0.5", "engine.ema_batch=16")
        return {
            c.name: c for c in examine(short_run(finished.parent, f"resume={finished}", *ema, *overrides, epochs=2))
        }

    checks = about()
    assert checks["go on"].detail == "goes on in epoch 2" and "update-00000002" in checks["resume"].detail
    check = about("engine.seed=7")["go on"]
    assert check.status == FAIL and "engine.seed is 7 here and 0 in the run" in check.detail
    assert check.cure == "give the run's own value"


def test_report_of_a_start(finished, tmp_path):
    check = found(tmp_path, f"model.checkpoint={finished}")["model"]
    assert check.status == OK and "matched" in check.detail and "the classifier is kept" in check.detail


def test_attempt_leaves_logging_as_it_was(caplog):
    logger = logging.getLogger("vit3")
    before = logger.level, logger.propagate, list(logger.handlers)

    def act():
        logging.getLogger("vit3.x").warning("something; cure it")
        return 3

    check, result = attempt("x", act, str)
    assert (check.status, check.detail, check.cure, result) == (WARNING, "something", "cure it", 3)
    assert before == (logger.level, logger.propagate, list(logger.handlers)) and not caplog.records


def test_command(tmp_path, capsys):
    doctor(compose_config(f"output={tmp_path}"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].endswith(" 0 FAIL") and len(lines) > 15
    with pytest.raises(SystemExit) as stop:
        doctor(compose_config("data=folder"))
    assert stop.value.code == 1
    text = capsys.readouterr().out
    assert "FAIL    configuration  data.root has no value yet -> set it on the command line: data.root=VALUE" in text
