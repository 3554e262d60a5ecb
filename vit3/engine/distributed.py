"""Processes: one without any environment variable, many under torchrun, srun or submitit, with the same command."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from vit3.engine.place import Place, find_place
from vit3.errors import UserError


@dataclass(frozen=True)
class Processes:
    """This process among all of them.

    Attributes:
        device: where it computes. rank: its number. world_size: how many there are.
    """

    device: torch.device
    rank: int = 0
    world_size: int = 1

    @property
    def main(self) -> bool:
        """Whether this process writes files and talks."""
        return self.rank == 0

    @property
    def distributed(self) -> bool:
        return self.world_size > 1

    def on_main(self, action: Callable[[], Any]) -> Any:
        """Run ``action`` in the main process; every process gets its result, or its UserError."""
        if not self.distributed:
            return action()
        box: list = [None, None]
        if self.main:
            try:
                box[0] = action()
            except UserError as error:
                box[1] = str(error)
        dist.broadcast_object_list(box, src=0, device=self.device if self.device.type == "cuda" else None)
        if box[1] is not None:
            raise UserError(box[1])
        return box[0]

    def total(self, number: float) -> float:
        """Sum of ``number`` over all processes."""
        if not self.distributed:
            return number
        box = torch.tensor(number, dtype=torch.float64, device=self.device)
        dist.all_reduce(box)
        return type(number)(box.item())


def usable_device(device: str) -> torch.device:
    """The device of a name; ``auto`` is a GPU if there is one.

    Raises:
        UserError: no such device, or no GPU here.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise UserError(f"device={device} is unknown; use one of: auto, cpu, cuda") from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise UserError("device=cuda, but PyTorch sees no GPU here; use device=cpu, or install a CUDA build of torch")
    return chosen


def start_processes(device: str = "auto", *, timeout_minutes: float = 30) -> Processes:
    """Join the processes that torchrun, srun or submitit started, or be the only one.

    Args:
        device: ``auto`` (a GPU if there is one), ``cpu`` or ``cuda``.
        timeout_minutes: how long one process waits for the others, here and in every exchange. The default lets one
            index a slow file system meanwhile, and ends a run within the hour when a machine dies.

    Raises:
        UserError: ``cuda`` is wanted and there is none, or no GPU of its own; the environment is inconsistent; the
            others do not come.
    """
    device = usable_device(device).type
    place = find_place(os.environ)
    chosen = torch.device("cuda", _gpu_of(place)) if device == "cuda" else torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(chosen)
    if place.world_size > 1 and not dist.is_initialized():  # Ray Train has made the group already
        _meet(place, "nccl" if device == "cuda" else "gloo", timeout_minutes)
    return Processes(chosen, place.rank, place.world_size)


def stop_processes() -> None:
    """Leave the process group, if there is one."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def _gpu_of(place: Place) -> int:
    count = torch.cuda.device_count()
    if place.local_rank < count:
        return place.local_rank
    if place.one_gpu_each and count == 1:  # --gpus-per-task=1; two processes on one GPU are NCCL's error to report
        return 0
    raise UserError(
        f"LOCAL_RANK={place.local_rank}, but PyTorch sees {count} GPU{'' if count == 1 else 's'} on this machine; "
        f"start {count} processes on it (--nproc-per-node={count}), or use device=cpu"
    )


def _meet(place: Place, backend: str, minutes: float) -> None:
    try:
        dist.init_process_group(
            backend,
            init_method=place.meeting,
            rank=place.rank,
            world_size=place.world_size,
            timeout=timedelta(minutes=minutes),
        )
    except dist.DistError as error:
        raise UserError(
            f"process {place.rank} of {place.world_size} did not meet the others at {place.meeting} within {minutes:g} "
            f"minutes; did all start, and is that port free? ({str(error).strip().splitlines()[0]})"
        ) from error
