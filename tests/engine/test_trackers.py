"""wandb and TensorBoard: absent, failing or hanging, they never stop a run."""

from __future__ import annotations

import math
import sys
import time
import types

import pytest

from vit3.engine import trackers
from vit3.engine.trackers import TensorBoardTracker, Trackers, WandbTracker


def wandb_tracker(folder, mode="offline"):
    return WandbTracker(mode=mode, project="p", entity=None, folder=str(folder), name="run", config={})


@pytest.fixture
def fake(monkeypatch):
    """A stand-in for the wandb package; ``made`` lists the modes it was started with, ``logged`` its numbers."""
    made, logged, axes = [], [], {}
    run = types.SimpleNamespace(
        log=logged.append,
        finish=lambda: None,
        define_metric=lambda name, step_metric=None: axes.update({name: step_metric}),
    )

    def init(mode, **options):
        made.append(mode)
        return run

    module = types.SimpleNamespace(
        Settings=lambda **k: k, login=lambda **k: True, init=init, made=made, logged=logged, axes=axes, run=run
    )
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_wandb_gets_numbers_in_order_on_an_axis_of_updates(fake, tmp_path):
    t = wandb_tracker(tmp_path)
    for step in (50, 100, 50):  # resumed at a checkpoint before its last line
        t.log(step, {"loss": step})
    t.finish()
    assert fake.made == ["offline"] and fake.logged == [{"loss": s, "updates": s} for s in (50, 100, 50)]
    assert fake.axes == {"updates": None, "*": "updates"}


def test_no_login_goes_offline(fake, tmp_path, caplog):
    fake.login = lambda **k: False
    wandb_tracker(tmp_path, "online").finish()
    assert fake.made == ["offline"] and "wandb goes offline" in caplog.text


def test_failures_are_one_warning(fake, tmp_path, caplog):
    def fail(values):
        raise ConnectionError("gone\nwith details")

    fake.run.log = fail
    t = wandb_tracker(tmp_path)
    t.log(0, {})
    t.log(1, {})
    t.finish()
    assert caplog.text.count("wandb is off for this run (gone)") == 1


@pytest.mark.parametrize(
    ("make", "module", "name"),
    [(wandb_tracker, "wandb", "wandb"), (TensorBoardTracker, "torch.utils.tensorboard", "tensorboard")],
)
def test_a_missing_package_is_one_warning(monkeypatch, tmp_path, caplog, make, module, name):
    monkeypatch.setitem(sys.modules, module, None)
    t = make(tmp_path)
    t.log(0, {"loss": 1.0})
    t.finish()
    assert caplog.text.count(f"{name} is off for this run") == 1 and list(tmp_path.iterdir()) == []


def test_hanging_trackers_hold_nobody_up(fake, monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(trackers, "_FINISH_SECONDS", 0.3)
    fake.run.log = lambda values: time.sleep(30)
    t = Trackers([wandb_tracker(tmp_path), wandb_tracker(tmp_path)])
    started = time.perf_counter()
    for step in range(100):
        t.log(step, {})
    t.finish()
    assert time.perf_counter() - started < 2
    assert caplog.text.count("did not finish within 0.3 s") == 2


def scalars(folder):
    """What TensorBoard reads: {tag: [(step, value), ...]}."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_has_the_numbers_of_a_resumed_run_once(tmp_path):
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    for steps in ((50, 100, 150), (100, 150)):  # killed after 150, resumed at a checkpoint of 50
        t = TensorBoardTracker(tmp_path)
        for step in steps:
            t.log(step, {"train/loss": step / len(steps), "device": "cpu", "ok": True, "list": [1], "lr": math.nan})
        t.finish()

    read = scalars(tmp_path)
    assert sorted(read) == ["lr", "train/loss"]
    assert read["train/loss"] == [(50, pytest.approx(50 / 3)), (100, 50), (150, 75)]


def test_one_that_fails_leaves_the_other(fake, tmp_path, caplog):
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    (tmp_path / "taken").write_text("a file where a folder should be")
    t = Trackers([TensorBoardTracker(tmp_path / "taken"), wandb_tracker(tmp_path)])
    t.log(1, {"loss": 1.0})
    t.finish()
    assert fake.logged == [{"loss": 1.0, "updates": 1}] and "tensorboard is off for this run" in caplog.text
