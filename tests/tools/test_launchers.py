"""Many runs as jobs of a Hydra launcher: submitit's processes on this machine stand for those on SLURM."""

from __future__ import annotations

import json

import pytest

from tests.helpers import ROOT
from tests.tools.test_commands import SHORT, run

pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="needs hydra-submitit-launcher")


def test_submitit_runs_two_jobs_and_reports_a_failing_one(tmp_path):
    """From another folder, with relative paths: both jobs start; one trains, one finds its name taken."""
    (tmp_path / "out" / "seed-1").mkdir(parents=True)
    (tmp_path / "out" / "seed-1" / "config.yaml").write_text("")
    result = run(
        str(ROOT / "tools" / "train.py"), "-m", "hydra/launcher=submitit_local", *SHORT, "engine.seed=0,1",
        "output=out", "name=seed-${engine.seed}", cwd=tmp_path, OMP_NUM_THREADS="1", OMP_WAIT_POLICY="passive",
    )  # fmt: skip
    assert result.returncode == 1, result.stderr
    sentence = "name=seed-1: out/seed-1 holds a run already; add resume=out/seed-1, or choose another name"
    assert result.stderr.strip() == f"error: a job ended without a result; {sentence}"
    assert "Traceback" not in result.stdout
    summary = json.loads((tmp_path / "out" / "seed-0" / "summary.json").read_text())
    assert summary["last"]["updates"] == 3
    assert "engine.seed=0" in (tmp_path / "out" / "seed-0" / "environment.json").read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"out"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {".jobs", "seed-0", "seed-1"}
    logs = [path.read_text() for path in tmp_path.glob("out/.jobs/.submitit/*/*_log.err")]
    assert len(logs) == 2 and "best top-1" in "".join(logs)  # our own lines, in the jobs' logs
