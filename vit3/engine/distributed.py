"""Processes: one without any environment variable, many under torchrun or srun, with the same command."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

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


def start_processes(device: str = "auto") -> Processes:
    """Join the processes that torchrun (or srun) started, or be the only one.

    Args:
        device: ``auto`` (a GPU if there is one), ``cpu`` or ``cuda``.

    Raises:
        UserError: ``cuda`` is wanted and there is none.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("device=cuda, but PyTorch sees no GPU here; use device=cpu, or install a CUDA build of torch")
    local_rank, rank, world_size = _environment()
    chosen = torch.device("cuda", local_rank) if device == "cuda" else torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(chosen)
    if world_size > 1:
        dist.init_process_group("nccl" if device == "cuda" else "gloo", rank=rank, world_size=world_size)
    return Processes(chosen, rank, world_size)


def stop_processes() -> None:
    """Leave the process group, if there is one."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def _environment() -> tuple[int, int, int]:
    """(local rank, rank, world size): torchrun's variables, else srun's, else alone.

    SLURM_NTASKS alone is no sign of srun: it is set in an salloc shell too, where waiting for others would hang.
    """
    env = os.environ
    if "RANK" in env and "WORLD_SIZE" in env:
        return int(env.get("LOCAL_RANK", 0)), int(env["RANK"]), int(env["WORLD_SIZE"])
    if "SLURM_PROCID" in env and "MASTER_ADDR" in env:
        return int(env.get("SLURM_LOCALID", 0)), int(env["SLURM_PROCID"]), int(env["SLURM_NTASKS"])
    return 0, 0, 1
