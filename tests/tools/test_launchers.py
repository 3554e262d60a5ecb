"""Many runs as jobs of a Hydra launcher: submitit's processes on this machine stand for those on SLURM."""

from __future__ import annotations

import json

import pytest

from tests.helpers import ROOT
from tests.sweeps.commands import states
from tests.tools.test_commands import SHORT, run
from vit3.sweeps.sweep import Sweep

pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="needs hydra-submitit-launcher")


def test_submitit_runs_two_jobs_and_reports_a_failing_one(tmp_path):
    """From another folder, with relative paths: both jobs are cells, computed in place; one trains, one fails."""
    (tmp_path / "good.pt").write_bytes(b"no checkpoint")
    result = run(
        str(ROOT / "tools" / "train.py"), "-m", "hydra/launcher=submitit_local", *SHORT,
        "model.checkpoint=null,good.pt", "output=out", "name=two", cwd=tmp_path, OMP_NUM_THREADS="1",
        OMP_WAIT_POLICY="passive",
    )  # fmt: skip
    assert result.returncode == 1, result.stderr
    assert "Traceback" not in result.stdout + result.stderr
    sweep = Sweep.named(tmp_path / "out", "two")
    assert list(states(sweep).values()) == ["finished", "failed"]
    good, bad = (sweep.folder(cell) for cell in sweep.cells())
    assert json.loads((good / "summary.json").read_text())["last"]["updates"] == 3
    assert "engine.batch_size=16" in (good / "environment.json").read_text()
    assert (
        "finished    1" in result.stderr
        and f"model.checkpoint=good.pt, seed 0: {bad.record()['reason']}" in result.stderr
    )
    assert {path.name for path in tmp_path.iterdir()} == {"out", "good.pt"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {".jobs", "cells", "sweeps"}
    logs = [path.read_text() for path in tmp_path.glob("out/.jobs/.submitit/*/*_log.err")]
    assert len(logs) == 2 and "best top-1" in "".join(logs)  # our own lines, in the jobs' logs
