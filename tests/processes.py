"""Several processes for one test: started in a fraction of a second, never hanging, errors told by the test."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

# Forked from a server that has imported what costs seconds; the server itself runs no tensor code and holds no threads.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "torch",
        "timm",
        "timm.task",
        "torch.distributed.fsdp",
        "torchvision",
        "vit3",
        "pytest",
        "tests.processes",
        "tests.toy",
    ]
)


def run_processes(function: Callable, world_size: int, *args, timeout: float = 120) -> list[Any]:
    """Run ``function(*args)`` in ``world_size`` processes that torchrun could have started.

    Each has RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT beside this process's environment, one thread,
    and seed 0. The function joins the others itself (``start_processes("cpu")``); it leaves them when it returns.

    Args:
        function: of a module, so that it can be pickled by name. args: picklable; tensors are copied.
        timeout: in seconds, for all processes together.

    Returns:
        What the processes returned, by rank.

    Raises:
        AssertionError: a process raised (its traceback is in the message), died, or did not end in time.
    """
    deadline = time.monotonic() + timeout
    address = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_free_port()), WORLD_SIZE=str(world_size))
    work = pickle.dumps((function, args))  # plain pickle: tensors by value, not through shared memory
    processes, pipes = [], {}
    try:
        for rank in range(world_size):
            environment = {**os.environ, **address, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            pipe, other_end = _CONTEXT.Pipe(duplex=False)
            process = _CONTEXT.Process(target=_child, args=(other_end, environment, work, timeout), name=f"rank {rank}")
            process.start()
            other_end.close()  # so that a process that dies ends its pipe
            processes.append(process)
            pipes[pipe] = rank
        results = _gather(pipes, deadline, function.__name__, timeout)
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        return results
    finally:
        for process in processes:
            process.kill()
            process.join()
        for pipe in pipes:
            pipe.close()


def _gather(pipes: dict[Connection, int], deadline: float, name: str, timeout: float) -> list[Any]:
    """Results by rank; the first failure is raised at once, for the others are then waiting for that process."""
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = [pipe for pipe, rank in pipes.items() if rank not in results]
        ready = wait(waiting, max(0.0, deadline - time.monotonic()))
        if not ready:
            raise AssertionError(f"{name}: ranks {[pipes[p] for p in waiting]} did not end within {timeout} s")
        for pipe in ready:
            try:
                failed, result = pickle.loads(pipe.recv_bytes())
            except EOFError:
                raise AssertionError(f"{name}: rank {pipes[pipe]} died without a word") from None
            if failed:
                raise AssertionError(f"{name}: rank {pipes[pipe]} raised\n{result}")
            results[pipes[pipe]] = result
    return [results[rank] for rank in sorted(results)]


def _child(pipe: Connection, environment: dict[str, str], work: bytes, timeout: float) -> None:
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    faulthandler.dump_traceback_later(0.9 * timeout)  # says where it hangs, before it is killed
    try:
        function, args = pickle.loads(work)
        message = pickle.dumps((False, function(*args)))
    except BaseException:
        message = pickle.dumps((True, traceback.format_exc()))
    pipe.send_bytes(message)  # before the group is left, for then the others fail too
    if dist.is_initialized():
        dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
