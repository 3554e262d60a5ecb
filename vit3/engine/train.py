"""The training loop, the same for every task: steps, evaluation, checkpoints, numbers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from timm.task import TrainingTask
from timm.utils import distribute_bn, unwrap_model

from vit3.engine.checkpoint import save_checkpoint
from vit3.engine.distributed import Processes, seed_everything
from vit3.engine.evaluate import evaluate
from vit3.engine.precision import autocast
from vit3.engine.progress import progress
from vit3.engine.run_folder import RunFolder
from vit3.engine.trackers import WandbTracker
from vit3.errors import UserError

logger = logging.getLogger(__name__)


@dataclass
class Trainer:
    """Everything a run needs; :meth:`fit` runs it.

    Attributes:
        task: timm training task (model, loss, EMA). optimizer, schedule: timm's; the schedule is stepped per update.
        train_loader, val_loader: batches (images, targets) on the device.
        mix: mixup or cutmix of a batch, or None.
        epochs: of the whole run. steps_per_epoch: updates of an epoch.
        amp: None, ``float16`` (with loss scaling) or ``bfloat16``. clip_grad: global norm, or None.
        metadata: what every checkpoint carries along (configuration, class names).
        facts: what ``summary.json`` carries along (derived numbers, sizes).
        bad_images: number of images skipped so far.
    """

    task: TrainingTask
    optimizer: torch.optim.Optimizer
    schedule: Any
    train_loader: Any
    val_loader: Any
    processes: Processes
    epochs: int
    steps_per_epoch: int
    seed: int
    amp: str | None = None
    clip_grad: float | None = None
    channels_last: bool = False
    ema_warmup: bool = False
    mix: Callable | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    bad_images: Callable[[], int] = lambda: 0

    def __post_init__(self):
        self.scaler = torch.amp.GradScaler(self.processes.device.type, enabled=self.amp == "float16")
        self.start_epoch = self.updates = 0
        self.best: dict[str, Any] | None = None  # epoch, weights (raw or ema), top1
        self.seconds = 0.0

    def fit(
        self,
        run: RunFolder,
        tracker: WandbTracker | None = None,
        after_epoch: Callable[[], None] = lambda: None,
    ) -> dict[str, Any]:
        """Train to the last epoch and leave everything in ``run``.

        Args:
            run: folder of checkpoints and numbers. tracker: gets the numbers too.
            after_epoch: called in the main process after each epoch's files are written.

        Returns:
            What ``summary.json`` holds.

        Raises:
            UserError: a file cannot be written, or the loss is not finite.
        """
        try:
            return self._fit(run, tracker, after_epoch)
        finally:
            if tracker:
                tracker.finish()

    def _fit(self, run: RunFolder, tracker: WandbTracker | None, after_epoch: Callable[[], None]) -> dict[str, Any]:
        self.processes.on_main(lambda: run.keep_metrics_before(self.start_epoch))
        summary = self._summary(None)
        for epoch in range(self.start_epoch, self.epochs):
            started = time.perf_counter()
            record = {"epoch": epoch, "updates": (epoch + 1) * self.steps_per_epoch}
            record |= self._train_epoch(epoch)
            record |= self._evaluate_all()
            improved = self._note_best(record)
            self.seconds += time.perf_counter() - started
            record["seconds"] = round(self.seconds, 2)
            if bad := self.bad_images():
                record["bad_images"] = bad
            summary = self._summary(record)
            self.processes.on_main(lambda: self._write(run, record, summary, improved))  # noqa: B023
            if tracker:
                tracker.log(record["updates"], record)
            if self.processes.main:
                logger.info(_line(record, self.epochs, self.best))
                after_epoch()
        return summary

    def resume(self, state: dict[str, Any]) -> None:
        """Continue after the epoch that ``state`` (a checkpoint) was saved at.

        Raises:
            UserError: the optimiser's state does not fit.
        """
        self.task.load_checkpoint_state(state["state_dict"])
        if self.task.has_ema():
            self.task.load_checkpoint_state(state.get("state_dict_ema") or state["state_dict"], ema=True)
        try:
            self.optimizer.load_state_dict(state["optimizer"])
        except (ValueError, KeyError) as error:
            raise UserError(f"resume: the optimiser of the run does not fit this one ({error})") from error
        self.scaler.load_state_dict(state["scaler"])
        self.start_epoch, self.best, self.seconds = state["epoch"] + 1, state["best"], state["seconds"]
        self.updates = self.start_epoch * self.steps_per_epoch
        self.schedule.step_update(self.updates - 1)  # of this run's schedule, which may differ from the saved one

    def _train_epoch(self, epoch: int) -> dict[str, float]:
        seed_everything(self.seed, self.processes.rank, epoch)
        sampler = getattr(self.train_loader, "sampler", None)
        if hasattr(sampler, "set_epoch"):  # distributed: shuffles by its seed + epoch
            sampler.seed = self.seed * 1_000_003
            sampler.set_epoch(epoch)
        self.task.train()
        lr = max(group["lr"] for group in self.optimizer.param_groups)
        losses = torch.zeros(2, dtype=torch.float64, device=self.processes.device)  # sum and number of the finite ones
        images_seen, started = 0, time.perf_counter()
        title = f"epoch {epoch + 1}/{self.epochs}"
        with progress(title, self.steps_per_epoch, self.processes.main) as advance:
            for step, (images, target) in enumerate(islice(self.train_loader, self.steps_per_epoch)):
                loss = self._step(images, target)
                losses += torch.stack((loss.nan_to_num(0, 0, 0), loss.isfinite().double()))
                self.schedule.step_update(epoch * self.steps_per_epoch + step)
                images_seen += len(images) * self.processes.world_size
                advance(len(images) * self.processes.world_size)
        if self.processes.distributed:
            torch.distributed.all_reduce(losses)
        total, finite = losses.tolist()
        bad = self.steps_per_epoch * self.processes.world_size - int(finite)
        # loss scaling skips a step that overflows; without it, weights and all that follows are lost
        if finite == 0 or (bad and self.amp != "float16"):
            kept = f"last.pt in the run folder holds epoch {epoch}" if epoch else "nothing was saved yet"
            raise UserError(
                f"the training loss was not finite in {bad} steps of epoch {epoch + 1}; {kept}: "
                "lower optim.lr, or use engine.amp=bfloat16 or null"
            )
        rate = images_seen / (time.perf_counter() - started)
        record = {"lr": lr, "train/loss": total / finite, "images_per_s": round(rate, 1)}
        return record | ({"nonfinite_steps": bad} if bad else {})

    def _step(self, images: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """One optimiser update; returns the detached loss."""
        if self.mix is not None:
            images, target = self.mix(images, target)
        if self.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        with autocast(self.processes.device, self.amp):
            loss = self.task(images, target)["loss"]
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        if self.clip_grad is not None:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.task.get_clip_parameters(), self.clip_grad)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.updates += 1
        self.task.update_ema(step=self.updates if self.ema_warmup else None)
        return loss.detach().double()

    def _evaluate_all(self) -> dict[str, float]:
        """Scores of the raw and, where there is one, the averaged model, as ``val/…`` and ``val_ema/…``."""
        record = {}
        for prefix, ema in (("val", False), ("val_ema", True)):
            if ema and not self.task.has_ema():
                continue
            if self.processes.distributed:  # each process has seen other images, but one set of statistics is saved
                distribute_bn(
                    unwrap_model(self.task.get_trainable_module(ema=ema)), self.processes.world_size, reduce=True
                )
            model = self.task.get_eval_model(ema=ema)
            scores = evaluate(model, self.val_loader, self.processes, amp=self.amp, channels_last=self.channels_last)
            record |= {f"{prefix}/{name}": value for name, value in scores.items()}
        return record

    def _note_best(self, record: dict[str, Any]) -> bool:
        """Remember the best top-1 so far, of raw or averaged weights; ties go to the earlier epoch."""
        improved = False
        for weights, key in (("raw", "val/top1"), ("ema", "val_ema/top1")):
            if key in record and (self.best is None or record[key] > self.best["top1"]):
                self.best = {"epoch": record["epoch"], "weights": weights, "top1": record[key]}
                improved = True
        return improved

    def _summary(self, record: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "best": self.best,
            "last": record,
            "epochs": self.epochs,
            "seconds": round(self.seconds, 2),
            **self.facts,
        }

    def _write(self, run: RunFolder, record: dict[str, Any], summary: dict[str, Any], improved: bool) -> None:
        """Write checkpoints, then numbers, so that no number stands for weights that were not kept."""
        state = {
            "epoch": record["epoch"],
            "best": self.best,
            "seconds": self.seconds,
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            **self.task.get_checkpoint_state(),
            **(self.task.get_checkpoint_state(ema=True) if self.task.has_ema() else {}),
            **self.metadata,
        }
        if improved:
            save_checkpoint(state, run / "best.pt")
        save_checkpoint(state, run / "last.pt")
        try:
            run.append_metrics(record)
            run.write_json("summary.json", summary)
        except OSError as error:
            raise UserError(f"{run.path} cannot be written ({error}); free space and resume={run.path}") from error


def _line(record: dict[str, Any], epochs: int, best: dict[str, Any]) -> str:
    """One line of the log for one epoch."""
    ema = f"  ema {record['val_ema/top1']:6.2f} %" if "val_ema/top1" in record else ""
    left = record["seconds"] / (record["epoch"] + 1) * (epochs - record["epoch"] - 1)
    return (
        f"epoch {record['epoch'] + 1:3d}/{epochs}  loss {record['train/loss']:.4f}"
        f"  top-1 {record['val/top1']:6.2f} %{ema}"
        f"  best {best['top1']:.2f} %  {record['images_per_s']:,.0f} images/s  {_duration(left)} left"
    )


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"
