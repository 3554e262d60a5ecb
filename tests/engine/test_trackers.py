"""wandb: offline, absent, failing or hanging, it never stops a run."""

from __future__ import annotations

import sys
import time
import types

import pytest

from vit3.engine import trackers
from vit3.engine.trackers import WandbTracker


def tracker(folder, mode="offline"):
    return WandbTracker(mode=mode, project="p", entity=None, folder=str(folder), name="run", config={})


@pytest.fixture
def fake(monkeypatch):
    """A stand-in for the wandb package; ``made`` lists the modes it was started with, ``logged`` its numbers."""
    made, logged = [], []
    run = types.SimpleNamespace(log=lambda values, step: logged.append((step, values)), finish=lambda: None)

    def init(mode, **options):
        made.append(mode)
        return run

    module = types.SimpleNamespace(
        Settings=lambda **k: k, login=lambda **k: True, init=init, made=made, logged=logged, run=run
    )
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_numbers_arrive_in_order(fake, tmp_path):
    t = tracker(tmp_path)
    for step in range(5):
        t.log(step, {"loss": step})
    t.finish()
    assert fake.made == ["offline"] and fake.logged == [(step, {"loss": step}) for step in range(5)]


def test_no_login_goes_offline(fake, tmp_path, caplog):
    fake.login = lambda **k: False
    tracker(tmp_path, "online").finish()
    assert fake.made == ["offline"] and "wandb goes offline" in caplog.text


def test_failures_are_one_warning(fake, tmp_path, caplog):
    def fail(values, step):
        raise ConnectionError("gone\nwith details")

    fake.run.log = fail
    t = tracker(tmp_path)
    t.log(0, {})
    t.log(1, {})
    t.finish()
    assert caplog.text.count("wandb is off for this run (gone)") == 1


def test_a_missing_package_is_one_warning(monkeypatch, tmp_path, caplog):
    monkeypatch.setitem(sys.modules, "wandb", None)
    t = tracker(tmp_path)
    t.log(0, {})
    t.finish()
    assert "wandb is off for this run" in caplog.text


def test_a_hanging_tracker_holds_nobody_up(fake, monkeypatch, tmp_path):
    monkeypatch.setattr(trackers, "_FINISH_SECONDS", 0.2)
    fake.run.log = lambda values, step: time.sleep(30)
    started = time.perf_counter()
    t = tracker(tmp_path)
    for step in range(100):
        t.log(step, {})
    t.finish()
    assert time.perf_counter() - started < 2
