"""Where the time goes, as files; none unless asked for."""

from __future__ import annotations

import json

import pytest
from vit3.tools.train import train

from tests.toy import no_pictures, short_run
from vit3.engine.profiling import PHASES


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch):
    no_pictures(monkeypatch.setattr)


def test_profile_leaves_shares_and_a_trace(tmp_path):
    train(short_run(tmp_path, "name=p", "engine.profile=2", "engine.steps_per_epoch=8", "engine.ema_decay=0.5"))
    report = json.loads((tmp_path / "p" / "profile.json").read_text())
    assert report["updates"] == 2 and report["seconds_per_update"] > 0
    assert set(report["per_cent"]) == {*PHASES, "loop"} and sum(report["per_cent"].values()) == pytest.approx(100)
    assert all(report["per_cent"][phase] > 0 for phase in PHASES) and report["per_cent"]["loop"] >= 0
    names = {event.get("name") for event in json.loads((tmp_path / "p" / "trace.json").read_text())["traceEvents"]}
    assert set(PHASES) <= names


def test_a_run_that_ends_within_its_trace_leaves_what_there_is(tmp_path):
    """And the profiler, of which a process has one, is free for the next run."""
    train(short_run(tmp_path, "name=p", "engine.profile=1", "engine.steps_per_epoch=5"))
    assert (tmp_path / "p" / "profile.json").exists()
    assert json.loads((tmp_path / "p" / "trace.json").read_text())["traceEvents"]


def test_off_by_default(tmp_path):
    train(short_run(tmp_path, "name=p"))
    assert not {path.name for path in (tmp_path / "p").iterdir()} & {"profile.json", "trace.json"}
