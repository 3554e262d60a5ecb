"""One update: forward and backward passes over a global batch, the guard, the optimiser, the moving average."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from timm.task import TrainingTask
from timm.utils import unwrap_model
from torch import Tensor

from vit3.data.loader import TrainLoader
from vit3.data.plan import Share
from vit3.engine.distributed import Processes
from vit3.engine.numerics import first_nonfinite, nonfinite_gradients
from vit3.engine.precision import autocast
from vit3.engine.profiling import Profile
from vit3.engine.sharding import gradient_norm, is_sharded, synchronise
from vit3.errors import UserError
from vit3.seeding import Purpose, seed_everything

logger = logging.getLogger(__name__)

Flags = Callable[[], list[float]]
Batch = Tensor | list  # of one size, or of as many as there are images


class NotFinite(UserError):
    """Loss or gradient was not finite for too long; the weights are those of the last good update."""


@dataclass
class Counts:
    """What happened to the updates of a run so far.

    Attributes:
        updates: optimiser steps taken; the schedule and the moving average count the same.
        bad: updates left out because loss or gradient was not finite. bad_in_row: those after the last good one.
        scale_skips: updates left out by float16's loss scaling, which is how it finds its scale.
    """

    updates: int = 0
    bad: int = 0
    bad_in_row: int = 0
    scale_skips: int = 0


@dataclass
class Outcome:
    """One update as seen by all processes alike.

    Attributes:
        losses: ``loss`` and the parts that the task names, means over the update's images. grad_norm: before clipping.
        taken: whether the optimiser stepped. flags: sums over the processes of the numbers given to ``run``.
    """

    losses: dict[str, float]
    grad_norm: float
    taken: bool
    flags: list[float]


@dataclass
class Updater:
    """Takes updates; knows nothing of epochs, files or evaluation.

    Attributes:
        task, optimizer, schedule: timm's. batches: where a share can be read again from. mix: mixup or cutmix, or None.
        amp: None, ``float16`` (with loss scaling) or ``bfloat16``. clip_grad: global norm, or None.
        max_bad: so many bad updates in a row stop the run. ema_warmup: let the decay of the average grow.
        schedule_ahead: steps of the schedule beyond the updates taken; not 0 where epochs had more or fewer updates
            before the run was resumed.
        dump_folder: where the batch of the last bad update is left.
    """

    task: TrainingTask
    optimizer: torch.optim.Optimizer
    schedule: Any
    batches: TrainLoader
    processes: Processes
    seed: int
    amp: str | None = None
    clip_grad: float | None = None
    channels_last: bool = False
    ema_warmup: bool = False
    max_bad: int = 10
    mix: Callable | None = None
    schedule_ahead: int = 0
    counts: Counts = field(default_factory=Counts)
    dump_folder: Path | None = None
    profile: Profile | None = None

    def __post_init__(self):
        self.scaler = torch.amp.GradScaler(self.processes.device.type, enabled=self.amp == "float16")
        self.model = unwrap_model(self.task.get_trainable_module())
        # statistics of normalisation: each process has seen other images, but one set of them is kept
        self._statistics = [buffer for buffer in self.model.buffers() if buffer.is_floating_point()]
        self._passes: list[Share] = []
        self._losses: dict[str, Tensor] = {}

    def run(self, epoch: int, share: Share, images: Batch, target: Batch, flags: Flags = list) -> Outcome | None:
        """One forward and backward pass; with the last of an update also its optimiser step.

        Args:
            epoch: from 0. share, images, target: from the loader. flags: gives numbers to be added up over the
                processes; asked after the last backward pass.

        Returns:
            None until the update is complete.

        Raises:
            NotFinite: loss or gradient was not finite in too many updates in a row.
        """
        if share.first:
            self.optimizer.zero_grad()
            self._passes, self._losses = [], {}
            self._buffers_before = [buffer.clone() for buffer in self.model.buffers()]
        self._passes.append(share)
        with self._phase("forward and backward"), synchronise(self.task, share.last):
            result = self._forward(epoch, share, images, target)
            self.scaler.scale(result["loss"] * share.weight).backward()
        for name, value in result.items():
            if name != "output":
                part = value.detach().double() * (share.weight / self.processes.world_size)
                self._losses[name] = self._losses[name] + part if name in self._losses else part
        return self._step(epoch, flags) if share.last else None

    def _forward(self, epoch: int, share: Share, images: Batch, target: Batch) -> dict[str, Tensor]:
        seed_everything(self.seed, Purpose.STEP, epoch, share.start)
        if self.mix is not None:
            images, target = self.mix(images, target)
        if self.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        with autocast(self.processes.device, self.amp):
            return self.task(images, target)

    def _step(self, epoch: int, flags: Flags) -> Outcome:
        with self._phase("optimizer"):
            self.scaler.unscale_(self.optimizer)
            norm = gradient_norm(self.task.get_clip_parameters(), self.clip_grad)
        losses, norm, totals = self._agree(norm, flags())
        if taken := math.isfinite(losses["loss"]) and math.isfinite(norm):
            with self._phase("optimizer"):
                self.scaler.step(self.optimizer)
                self.scaler.update()
            self.counts.updates += 1
            self.counts.bad_in_row = 0
            with self._phase("ema"):
                self._average_statistics()
                self.task.update_ema(step=self.counts.updates if self.ema_warmup else None)
            self.set_rates()
        else:
            self._leave_out(epoch, losses["loss"])
        return Outcome(losses, norm, taken, totals)

    def set_rates(self) -> None:
        """Learning rates for the next update, from the number of those taken."""
        if self.counts.updates:
            self.schedule.step_update(max(0, self.counts.updates + self.schedule_ahead - 1))

    def _agree(self, norm: Tensor, flags: list[float]) -> tuple[dict[str, float], float, list[float]]:
        """Losses, norm and flags, equal in all processes; the one wait for the device in an update."""
        own = torch.tensor(flags, dtype=torch.float64, device=self.processes.device)
        numbers = torch.stack([*self._losses.values(), norm.double() / self.processes.world_size])
        numbers = torch.cat([numbers, own])
        if self.processes.distributed:
            dist.all_reduce(numbers)
        values = numbers.tolist()
        losses = dict(zip(self._losses, values))
        return losses, values[len(losses)], values[len(losses) + 1 :]

    def _average_statistics(self) -> None:
        if self.processes.distributed and self._statistics:
            flat = torch.cat([buffer.flatten() for buffer in self._statistics])
            dist.all_reduce(flat)
            flat /= self.processes.world_size
            parts = flat.split([buffer.numel() for buffer in self._statistics])
            for buffer, part in zip(self._statistics, parts):
                buffer.copy_(part.view_as(buffer))

    def _leave_out(self, epoch: int, loss: float) -> None:
        """Undo what the passes of a bad update have left, and say what happened."""
        scale = self.scaler.get_scale()
        ordinary = self.scaler.is_enabled() and math.isfinite(loss) and scale > 1
        sentence = None
        if ordinary:
            self.counts.scale_skips += 1
        else:
            self.counts.bad += 1
            self.counts.bad_in_row += 1
            sentence = self._report(epoch, loss, scale)
        self.optimizer.zero_grad()
        self.scaler.update()  # the scale alone learns of it; some optimisers count steps without gradients too
        with torch.no_grad():
            for buffer, before in zip(self.model.buffers(), self._buffers_before):
                buffer.copy_(before)
        if sentence and self.counts.bad_in_row >= self.max_bad:
            raise NotFinite(sentence)

    def _report(self, epoch: int, loss: float, scale: float) -> str:
        """Name the module at fault in the log, leave its batch on disk; returns what to say if it does not end."""
        where, share, batch = self._find_cause(epoch, scale)
        what = "the loss" if not math.isfinite(loss) else "a gradient"
        cause = f", {where}" if where else ""
        if where or self.processes.main:
            logger.warning(
                "update %d, epoch %d, process %d: %s is not finite%s; the update is left out (%d in a row, %d in all)",
                self.counts.updates + 1, epoch + 1, self.processes.rank, what, cause, self.counts.bad_in_row,
                self.counts.bad,
            )  # fmt: skip
        dump = ""
        if self.dump_folder is not None and batch is not None and where:
            path = self.dump_folder / f"nonfinite-{self.processes.rank}.pt"
            facts = {"updates": self.counts.updates, "epoch": epoch, "loss": loss, "scale": scale, "where": where}
            try:
                torch.save({**facts, "indices": list(share.images), "images": batch[0], "target": batch[1]}, path)
                dump = f" and the batch is in {path}"
            except (OSError, RuntimeError) as error:  # a full disk, or another machine that lacks the folder
                logger.warning("%s could not be written (%s)", path, error)
        return (
            f"{what} was not finite in {self.counts.bad_in_row} updates in a row{cause}; the weights of before are "
            f"saved{dump}: lower optim.lr, or use engine.amp=bfloat16 or null"
        )

    def _find_cause(self, epoch: int, scale: float):
        """Phrase, share and batch of this process's first forward pass that went wrong, as far as they can be known."""
        if is_sharded(self.model):
            return nonfinite_gradients(self.model), None, None
        for share in self._passes:
            batch = self.batches.load(epoch, share)
            if batch is None:
                break
            loss = lambda: self._forward(epoch, share, *batch)["loss"] * (share.weight * scale)  # noqa: B023, E731
            if where := first_nonfinite(self.task, batch[0], loss):
                return where, share, batch
        return nonfinite_gradients(self.model), None, None

    def _phase(self, name: str):
        return self.profile.phase(name) if self.profile else nullcontext()
