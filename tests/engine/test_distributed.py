"""Processes: alone without variables, and no waiting for processes that nobody started."""

from __future__ import annotations

import pytest
import torch

from vit3.engine.distributed import _environment, start_processes
from vit3.errors import UserError

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "MASTER_ADDR")


@pytest.fixture(autouse=True)
def bare_shell(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_bare_shell_is_one_process():
    processes = start_processes("cpu")
    assert processes.main and not processes.distributed and processes.device == torch.device("cpu")


def test_torchrun_and_srun_are_seen(monkeypatch):
    for name, value in dict(RANK=3, WORLD_SIZE=4, LOCAL_RANK=1).items():
        monkeypatch.setenv(name, str(value))
    assert _environment() == (1, 3, 4)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name)
    for name, value in dict(SLURM_PROCID=5, SLURM_NTASKS=8, SLURM_LOCALID=1, MASTER_ADDR="node0").items():
        monkeypatch.setenv(name, str(value))
    assert _environment() == (1, 5, 8)


def test_an_allocation_without_srun_is_one_process(monkeypatch):
    monkeypatch.setenv("SLURM_NTASKS", "8")
    assert _environment() == (0, 0, 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu():
    with pytest.raises(UserError, match="device=cuda, but PyTorch sees no GPU"):
        start_processes("cuda")
