"""Processes: alone without variables, together under a launcher, one GPU each."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
import torch

from tests.helpers import ROOT
from vit3.engine.distributed import start_processes
from vit3.errors import UserError

LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "SLURM_", "SUBMITIT_")
TORCHRUN = dict(RANK="1", WORLD_SIZE="2", LOCAL_RANK="1", MASTER_ADDR="a", MASTER_PORT="1")
STEP = dict(
    SLURM_STEP_NUM_TASKS="2", SLURM_PROCID="1", SLURM_LOCALID="1", SLURM_JOB_ID="1", SLURM_JOB_NODELIST="n"
)  # fmt: skip


@pytest.fixture(autouse=True)
def bare_shell(monkeypatch):
    for name in os.environ:
        if name.startswith(LAUNCHERS):
            monkeypatch.delenv(name)


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def test_bare_shell_is_one_process():
    processes = start_processes("cpu")
    assert processes.main and not processes.distributed and processes.device == torch.device("cpu")


def test_two_tasks_of_a_slurm_step_meet():
    """No variable besides SLURM's, except the port, which may be taken here."""
    code = """
import torch
from vit3.engine.distributed import start_processes, stop_processes
from vit3.errors import UserError
processes = start_processes("cpu", timeout_minutes=1)
total = torch.tensor([processes.rank + 1.0])
torch.distributed.all_reduce(total)
def fail():
    raise UserError("said by all")
try:
    processes.on_main(fail)
except UserError as error:
    print(processes.rank, processes.world_size, total.item(), processes.on_main(lambda: "shared"), error)
stop_processes()
"""
    step = dict(SLURM_JOB_ID="1", SLURM_STEP_NUM_TASKS="2", SLURM_STEP_NODELIST="localhost", MASTER_PORT=free_port())
    tasks = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | step | dict(SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank)),
        )
        for rank in range(2)
    ]
    said = [task.communicate(timeout=120)[0].strip() for task in tasks]
    assert said == [f"{rank} 2 3.0 shared said by all" for rank in range(2)]


def test_nobody_else_comes(monkeypatch):
    step = dict(
        SLURM_JOB_ID="1", SLURM_STEP_NUM_TASKS="2", SLURM_PROCID="1", SLURM_LOCALID="1", MASTER_ADDR="127.0.0.1"
    )
    for name, value in (step | dict(MASTER_PORT=free_port())).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="process 1 of 2 did not meet the others at tcp://127.0.0.1:"):
        start_processes("cpu", timeout_minutes=0.02)


@pytest.fixture
def gpus(monkeypatch):
    """Pretends that there are GPUs; sets how many and returns what was chosen."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda backend, **options: chosen.append(backend))

    def pretend(count, **env):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        return chosen

    return pretend


@pytest.mark.parametrize(("count", "env", "index"), [(2, TORCHRUN, 1), (2, STEP, 1), (1, STEP, 0)])
def test_every_process_has_its_gpu(gpus, count, env, index):
    chosen = gpus(count, **env)
    assert start_processes().device == torch.device("cuda", index)
    assert chosen == [torch.device("cuda", index), "nccl"]


@pytest.mark.parametrize(("count", "env"), [(1, TORCHRUN), (2, STEP | dict(SLURM_LOCALID="2"))])
def test_more_processes_than_gpus(gpus, count, env):
    gpus(count, **env)
    with pytest.raises(UserError, match=rf"LOCAL_RANK={count}, but PyTorch sees {count} GPU.*nproc-per-node={count}"):
        start_processes()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu():
    with pytest.raises(UserError, match="device=cuda, but PyTorch sees no GPU"):
        start_processes("cuda")
