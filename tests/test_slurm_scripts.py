"""The batch scripts, run by bash with stand-ins for SLURM's commands that write down how they were called."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest

from tests.helpers import ROOT

# srun runs for a while if it is told to, leaves with $SRUN_STATUS, and on a signal with $SRUN_STATUS_<signal>
SRUN = """#!/usr/bin/env bash
printf '%s\\n' "$@" >"$CALLS/srun"
trap 'echo USR1 >>"$CALLS/signals"; exit "${SRUN_STATUS_USR1:-75}"' USR1
trap 'echo TERM >>"$CALLS/signals"; exit "${SRUN_STATUS_TERM:-1}"' TERM
echo "$$" >"$CALLS/pid"
for ((i = 0; i < ${SRUN_TENTHS:-0}; i++)); do sleep 0.1; done
exit "${SRUN_STATUS:-0}"
"""
SCANCEL = """#!/usr/bin/env bash
[ "$2" = 25 ] && kill -s "${1#--signal=}" "$(cat "$CALLS/pid")"
"""
SCONTROL = """#!/usr/bin/env bash
if [ "$1 $2" = "show hostnames" ]; then printf 'n3\\nn4\\n'; else echo "$@" >>"$CALLS/scontrol"; fi
"""


@pytest.fixture
def job(tmp_path):
    """Starts a batch script as SLURM would; ``read`` gives what a stand-in wrote down."""
    (tmp_path / "bin").mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("scancel", SCANCEL)):
        path = tmp_path / "bin" / name
        path.write_text(text)
        path.chmod(0o755)

    def start(script, *arguments, cwd=ROOT, **env):
        base = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "VIT3_"))}
        slurm = dict(
            PATH=f"{tmp_path / 'bin'}:{base['PATH']}", CALLS=str(tmp_path), VIT3_PYTHON="py", SLURM_JOB_ID="25",
            SLURM_JOB_NUM_NODES="2", SLURM_GPUS_ON_NODE="4", SLURM_CPUS_PER_TASK="6", SLURM_JOB_NODELIST="n[3-4]",
        )  # fmt: skip
        command = ["bash", str(ROOT / "scripts" / "slurm" / script), *arguments]
        return subprocess.Popen(command, cwd=cwd, env=base | slurm | env, stderr=subprocess.PIPE, text=True)

    def read(name):
        return (tmp_path / name).read_text().splitlines() if (tmp_path / name).exists() else []

    def signalled(process, number):
        while not read("pid"):
            time.sleep(0.02)
        process.send_signal(number)
        process.communicate(timeout=20)
        return process.returncode

    start.read, start.signalled = read, signalled
    return start


def test_one_task_per_gpu_continues_the_run(job):
    assert job("train.sbatch", "run1", "recipe=vit3_tiny_in1k", "data.root=/a b").wait(20) == 0
    arguments = job.read("srun")
    assert {"--nodes=2", "--ntasks=8", "--ntasks-per-node=4", "--cpus-per-task=6"} <= set(arguments)
    start = arguments.index("py")
    expected = ["py", "tools/train.py", "name=run1", "resume=auto", "recipe=vit3_tiny_in1k", "data.root=/a b"]
    assert arguments[start:] == expected and job.read("scontrol") == []


@pytest.mark.parametrize("script", ["train.sbatch", "torchrun.sbatch"])
def test_another_tool_gets_name_and_keys_after_its_config(job, script):
    command = ["tools/det.py", "train", "configs/a b.py"]
    assert job(script, "run1", *command, "data_root=/a b").wait(20) == 0
    assert job.read("srun")[-6:] == [*command, "name=run1", "resume=auto", "data_root=/a b"]


def test_without_gpus_tasks_count(job):
    assert job("train.sbatch", "run1", SLURM_GPUS_ON_NODE="", SLURM_NTASKS_PER_NODE="3").wait(20) == 0
    assert "--ntasks-per-node=3" in job.read("srun")


@pytest.mark.parametrize("status", [0, 2, 75, 138])
def test_only_75_requeues(job, status):
    assert job("train.sbatch", "run1", SRUN_STATUS=str(status)).wait(20) == status
    assert job.read("scontrol") == (["requeue 25"] if status == 75 else [])


@pytest.mark.parametrize(("status", "again"), [(75, True), (138, True), (2, False), (0, False)])
def test_a_warning_reaches_the_step(job, status, again):
    process = job("train.sbatch", "run1", SRUN_TENTHS="100", SRUN_STATUS_USR1=str(status))
    assert job.signalled(process, signal.SIGUSR1) == status and job.read("signals") == ["USR1"]
    assert job.read("scontrol") == (["requeue 25"] if again else [])


def test_a_cancelled_job_stays_cancelled(job):
    process = job("train.sbatch", "run1", SRUN_TENTHS="5", SRUN_STATUS="75")
    assert job.signalled(process, signal.SIGTERM) == 75 and job.read("scontrol") == []


def test_torchrun_meets_at_the_first_node(job):
    assert job("torchrun.sbatch", "run1", "engine.seed=3").wait(20) == 0
    arguments = job.read("srun")
    assert {"--ntasks=2", "--ntasks-per-node=1", "--nproc-per-node=4", "--nnodes=2", "--max-restarts=3"} <= set(
        arguments
    )
    assert {"--rdzv-backend=c10d", "--rdzv-id=25", "--rdzv-endpoint=n3:10025"} <= set(arguments)
    assert arguments[-4:] == ["tools/train.py", "name=run1", "resume=auto", "engine.seed=3"]


@pytest.mark.parametrize("status", [0, 1])
def test_torchrun_gets_sigterm_on_a_warning(job, status):
    process = job("torchrun.sbatch", "run1", SRUN_TENTHS="100", SRUN_STATUS_TERM=str(status))
    assert job.signalled(process, signal.SIGUSR1) == status and job.read("signals") == ["TERM"]
    assert job.read("scontrol") == (["requeue 25"] if status else [])


def test_a_failure_under_torchrun_is_no_reason_to_requeue(job):
    assert job("torchrun.sbatch", "run1", SRUN_STATUS="1").wait(20) == 1 and job.read("scontrol") == []


@pytest.mark.parametrize("script", ["train.sbatch", "torchrun.sbatch"])
def test_mistakes_are_one_sentence(job, script, tmp_path):
    for process, sentence in (
        (job(script, "recipe=vit3_tiny_in1k"), "error: the first argument must be the run's name"),
        (job(script, "run1", cwd=tmp_path), "submit from the top of the checkout"),
    ):
        _, said = process.communicate(timeout=20)
        assert process.returncode == 2 and sentence in said and said.count("\n") == 1
    assert job.read("srun") == []
