"""The run folder of a training by MMEngine: numbers, progress and signals, in the form that all runs here have."""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from mmengine.hooks import Hook
from mmengine.runner import Runner

from vit3.analysis.dense_plots import plot_scores
from vit3.engine.distributed import Processes
from vit3.engine.run_folder import RunFolder
from vit3.engine.signals import StopRequest
from vit3.engine.trackers import Trackers
from vit3.errors import UserError
from vit3.openmmlab.checkpoints import RunCheckpoints

logger = logging.getLogger(__name__)

_SAY_S = 60  # between two lines of progress
_DRAW_S = 30  # between two drawings of the curves
_ASK_EVERY = 10  # updates, where several processes have to agree on stopping

# What the scores of mmdet and mmseg are called here, and how they are written on a picture
SCORES = {
    "val/bbox_AP": "box AP",
    "val/bbox_AP50": "box AP50",
    "val/segm_AP": "mask AP",
    "val/segm_AP50": "mask AP50",
    "val/mIoU": "mIoU",
    "val/mAcc": "mean accuracy",
}
_PER_CENT = ("mIoU", "aAcc", "mAcc", "mDice", "mFscore", "mPrecision", "mRecall")


class RunFiles(RunFolder):
    """A run folder whose configuration is a file of MMEngine's."""

    config_name = "config.py"

    def rewind_to(self, updates: int) -> list[dict[str, Any]]:
        """Drop the numbers after ``updates``, for they will be written again; returns the evaluations that stay."""
        self._keep("steps.jsonl", lambda line: line["updates"] <= updates)
        return self._keep("metrics.jsonl", lambda line: line["updates"] <= updates)


def our_scores(metrics: dict[str, Any]) -> dict[str, float | None]:
    """Scores of mmdet and mmseg under our names, 0 to 1; None where undefined.

    Args:
        metrics: what an evaluator gives, such as ``coco/bbox_mAP_50`` or, in per cent, ``mIoU``.
    """
    found: dict[str, float | None] = {}
    for key, value in metrics.items():
        if not isinstance(value, int | float) and not hasattr(value, "item"):
            continue
        name = key.removeprefix("coco/").replace("_mAP_", "_AP").replace("_mAP", "_AP").replace("/", "_")
        value = round(float(value) / (100 if key in _PER_CENT else 1), 6)  # some come as float32
        undefined = not math.isfinite(value) or (key.startswith("coco/") and value < 0)  # pycocotools says -1
        found[f"val/{name}"] = None if undefined else value
    return found


def loss_name(name: str) -> str:
    """Our name of a part of the loss: ``decode.loss_ce`` -> ``train/loss_decode_ce``."""
    if name == "loss":
        return "train/loss"
    return "train/loss_" + name.replace("loss_", "").replace("_loss", "").replace(".", "_")


class RunRecorder(Hook):
    """Writes a run folder while MMEngine trains, says where the run is, and stops it when asked.

    Args:
        run: the folder. facts: derived numbers, for the summary; ``global_batch`` is read. score: our name of the
        score that decides. stop: signals. tracker: other places that want the numbers. processes: all of this run.
        checkpoints: saves on request.
    """

    priority = "LOWEST"  # after the schedulers and the checkpoints

    def __init__(
        self,
        run: RunFiles,
        facts: dict[str, Any],
        score: str | None,
        stop: StopRequest,
        tracker: Trackers | None,
        processes: Processes,
        checkpoints: Callable[[], RunCheckpoints],
        every: int = 50,
    ):
        self.run, self.facts, self.score, self.stop = run, facts, score, stop
        self.tracker, self.processes, self.checkpoints, self.every = tracker, processes, checkpoints, every
        self.records: list[dict[str, Any]] = []
        self._sums: dict[str, Any] = defaultdict(float)  # since the last evaluation
        self._counted = 0
        self._steps: dict[str, Any] = defaultdict(float)  # since the last line of steps.jsonl
        self._drawn = -math.inf

    # -- training ------------------------------------------------------------------------------------------------------

    def before_train(self, runner: Runner) -> None:
        """Take up the numbers of an interrupted run, evaluation included where it was cut off."""
        self._begun = self._said = self._line_start = self._paused = self._resumed = time.monotonic()
        self._first = self._line_updates = runner.iter
        self._before_s = 0.0
        if self.processes.main:
            with self.run.writing():
                self.records = self.run.rewind_to(runner.iter)
            self._before_s = self.records[-1]["seconds"] if self.records else 0.0
        if runner.iter and runner.val_loop is not None and self.processes.on_main(lambda: self._owed(runner)):
            logger.info("resumed      the evaluation after update %d is made now", runner.iter)
            runner.val_loop.run()
            runner.model.train()

    def _owed(self, runner: Runner) -> bool:
        """Whether the run stopped between a checkpoint and the evaluation that follows it."""
        loop = runner.train_loop
        if self.records and self.records[-1]["updates"] == runner.iter:
            return False
        by_epoch = self.checkpoints().by_epoch
        done, last = (runner.epoch, loop.max_epochs) if by_epoch else (runner.iter, loop.max_iters)
        if by_epoch and runner.iter != runner.epoch * len(runner.train_dataloader):
            return False
        return done >= loop.val_begin and (done % loop.val_interval == 0 or done == last)

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        """Add up losses, write a line now and then, and stop when asked."""
        updates = runner.iter + 1
        for name, value in (outputs or {}).items():
            if "loss" in name:  # added up on the device, read once a line
                value = value.detach() if isinstance(value, torch.Tensor) else value
                self._sums[loss_name(name)] += value
                self._steps[loss_name(name)] += value
        self._counted += 1
        if updates % self.every == 0 or updates == runner.max_iters:
            self._write_step(runner, updates)
        if self._asked(updates):
            path = self.checkpoints().save_now(runner, within_update=True)
            raise self.stop.interrupted(self._how_to_go_on(updates, path))

    def _write_step(self, runner: Runner, updates: int) -> None:
        now, count = time.monotonic(), updates - self._line_updates
        losses = {name: float(value) / count for name, value in self._steps.items()}
        self._steps.clear()
        if not math.isfinite(losses.get("train/loss", 0.0)):
            raise UserError(
                f"the loss is {losses['train/loss']} before update {updates}; lower optim_wrapper.optimizer.lr, add "
                "+optim_wrapper.clip_grad.max_norm=1, or look at the data"
            )
        rate = count * self.facts["global_batch"] / max(now - self._line_start, 1e-9)
        self._line_start, self._line_updates = now, updates
        if not self.processes.main:
            return
        line = {"epoch": self._epoch(runner, updates), "updates": updates, "lr": _rate(runner)} | losses
        line["images_per_s"] = rate
        with self.run.writing():
            self.run.append("steps.jsonl", line)
        self._track(updates, line)
        if now - self._said > _SAY_S:
            self._said = now
            loss = losses.get("train/loss", math.nan)
            logger.info(f"update {updates:,}/{runner.max_iters:,}  loss {loss:.4f}  {rate:,.1f} images/s"
                        f"  {self._left(runner, updates)} left")  # fmt: skip

    # -- evaluation ----------------------------------------------------------------------------------------------------

    def before_val(self, runner) -> None:
        """Note when training paused."""
        self._paused = time.monotonic()

    def after_val_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        """Stop when asked; the evaluation is made after resuming."""
        if self._asked(batch_idx + 1):
            path = self.checkpoints().save_now(runner, within_update=False)
            raise self.stop.interrupted(self._how_to_go_on(runner.iter, path))

    def after_val_epoch(self, runner, metrics=None) -> None:
        """One line of ``metrics.jsonl`` and of the log."""
        scores = our_scores(metrics or {})
        losses = {name: float(value) / self._counted for name, value in self._sums.items()} if self._counted else {}
        trained = self._counted
        rate = trained * self.facts["global_batch"] / max(self._paused - self._resumed, 1e-9)
        self._sums.clear()
        self._counted = 0
        self._resumed = time.monotonic()
        self._line_start += self._resumed - self._paused
        if not self.processes.main:
            return
        updates, seconds = runner.iter, self._before_s + time.monotonic() - self._begun
        record = {"epoch": self._epoch(runner, updates), "updates": updates, "lr": _rate(runner)} | losses | scores
        record |= {"images_per_s": rate, "seconds": seconds}
        self.records.append(record)
        with self.run.writing():
            self.run.append("metrics.jsonl", record)
            self.run.write_json("summary.json", self.summary(runner))
        self._track(updates, record)
        self._said = time.monotonic()
        logger.info(self._say(runner, record))
        if time.monotonic() - self._drawn > _DRAW_S:
            self.draw()

    def after_train(self, runner) -> None:
        """The summary and the curves of the whole run; one line of numbers where nothing was evaluated."""
        if runner.val_loop is None and self._counted:
            self.before_val(runner)
            self.after_val_epoch(runner, {})
        if self.processes.main and self.records:
            with self.run.writing():
                self.run.write_json("summary.json", self.summary(runner))
            self.draw()

    def best(self) -> dict[str, Any] | None:
        """The evaluation of the best score, ties to the earlier one."""
        scored = [record for record in self.records if record.get(self.score) is not None]
        return max(scored, key=lambda record: (record[self.score], -record["updates"]), default=None)

    def summary(self, runner: Runner) -> dict[str, Any]:
        """What ``summary.json`` holds."""
        best = self.best()
        if best is not None:
            best = {"score": self.score, "value": best[self.score], "epoch": best["epoch"], "updates": best["updates"]}
        parameters = sum(parameter.numel() for parameter in runner.model.parameters())
        found = self.facts | {"parameters": parameters, "best": best, "last": self.records[-1]}
        found |= {"seconds": self.records[-1]["seconds"]}
        for metric in runner.val_evaluator.metrics if runner.val_loop is not None else ():
            if hasattr(metric, "per_class"):
                found |= {"absent_classes": metric.absent, "IoU": metric.per_class}
        return found

    def draw(self) -> None:
        """Curves over all evaluations so far; a run is whole without them."""
        self._drawn = time.monotonic()
        keys = {key: label for key, label in SCORES.items() if any(r.get(key) is not None for r in self.records)}
        try:
            plot_scores(self.run / "metrics.jsonl", self.run / "curves.png", self.run.path.name, keys)
        except OSError as error:
            logger.warning("curves are lost (%s)", error)

    # -- words ---------------------------------------------------------------------------------------------------------

    def _say(self, runner: Runner, record: dict[str, Any]) -> str:
        by_epoch = self.checkpoints().by_epoch
        where = f"update {runner.iter:,}/{runner.max_iters:,}"
        where = f"epoch {runner.epoch}/{runner.max_epochs}" if by_epoch else where
        loss = f"  loss {record['train/loss']:.4f}" if "train/loss" in record else ""
        said = [f"{label} {_per_cent(record[key])}" for key, label in SCORES.items() if key in record]
        best = self.best()
        best_said = f"  best {_per_cent(best[self.score])}" if best else ""
        return (
            f"{where}{loss}  {', '.join(said)}{best_said}  {record['images_per_s']:,.1f} images/s"
            f"  {self._left(runner, runner.iter)} left"
        )

    def _left(self, runner: Runner, updates: int) -> str:
        done = max(updates - self._first, 1)
        seconds = (time.monotonic() - self._begun) / done * (runner.max_iters - updates)
        minutes, seconds = divmod(int(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02d}:{seconds:02d}"

    def _how_to_go_on(self, updates: int, path: Path) -> str:
        return f"update {updates} is saved in {path}; resume={self.run.path} goes on"

    # -- small parts ---------------------------------------------------------------------------------------------------

    def _asked(self, count: int) -> bool:
        """Whether any process was asked to stop; all get the same answer."""
        if not self.processes.distributed:
            return self.stop.signal is not None
        return count % _ASK_EVERY == 0 and self.processes.total(float(self.stop.signal is not None)) > 0

    def _epoch(self, runner: Runner, updates: int) -> int:
        """The epoch, from 0, that the last of ``updates`` belongs to."""
        loader = runner.train_dataloader
        endless = not self.checkpoints().by_epoch
        length = math.ceil(len(loader.dataset) / self.facts["global_batch"]) if endless else len(loader)
        return max(updates - 1, 0) // max(length, 1)

    def _track(self, updates: int, values: dict[str, Any]) -> None:
        if self.tracker is not None:
            self.tracker.log(updates, values)


def _rate(runner: Runner) -> float:
    """Largest learning rate of all parameters."""
    return max(runner.optim_wrapper.get_lr()["lr"])


def _per_cent(value: float | None) -> str:
    return "undefined" if value is None else f"{100 * value:.1f} %"
