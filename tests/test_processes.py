"""Several processes for one test: results, errors, deaths and time limits reach the test."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.processes import run_processes
from vit3.engine.distributed import start_processes


def _sum(x):
    processes = start_processes("cpu")
    x = x * (processes.rank + 1)
    dist.all_reduce(x)
    return processes.rank, processes.world_size, x


def _fail(how):
    rank = start_processes("cpu").rank
    if rank == 1:
        if how == "raise":
            raise KeyError("told by rank 1")
        os._exit(3)
    dist.barrier()


def _hang():
    time.sleep(60)


def test_results_by_rank():
    x = torch.arange(3.0)
    (rank0, size, y), (rank1, *_) = run_processes(_sum, 2, x)
    assert (rank0, rank1, size) == (0, 1, 2) and torch.equal(y, 3 * x)


def test_the_environment_of_the_test_reaches_them(monkeypatch):
    monkeypatch.setenv("TOLD", "so")
    assert run_processes(os.getenv, 2, "TOLD") == ["so", "so"]
    assert run_processes(os.getenv, 3, "RANK") == ["0", "1", "2"]


def test_a_failure_of_one_is_told_at_once():
    started = time.monotonic()
    with pytest.raises(AssertionError, match="(?s)rank 1 raised.*in _fail.*KeyError: 'told by rank 1'"):
        run_processes(_fail, 2, "raise")
    with pytest.raises(AssertionError):
        run_processes(_fail, 2, "die")
    assert time.monotonic() - started < 30


def test_nothing_outlives_the_time_limit():
    with pytest.raises(AssertionError, match=r"_hang: ranks \[0, 1\] did not end within 1 s"):
        run_processes(_hang, 2, timeout=1)
