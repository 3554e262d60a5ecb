"""The training loop, the same for every task: epochs of updates, evaluation, checkpoints, numbers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from timm.task import TrainingTask
from torch import nn

from vit3.data.loader import TrainLoader
from vit3.engine.checkpoint import config_hash, kept_best, save_checkpoint, save_update
from vit3.engine.distributed import Processes
from vit3.engine.evaluate import evaluate
from vit3.engine.profiling import Profile
from vit3.engine.progress import progress
from vit3.engine.run_folder import RunFolder
from vit3.engine.run_place import RunPlace, Score, epoch_line
from vit3.engine.sharding import load_model, load_optimizer, whole
from vit3.engine.signals import StopRequest, stop_requests
from vit3.engine.update import Counts, NotFinite, Outcome, Updater
from vit3.errors import UserError

logger = logging.getLogger(__name__)

_CHOSEN = ("weight_decay", "betas", "eps")  # settings of the optimiser, of which the configuration's count
_STOP, _SAVE = 0, 1  # places of the flags on which the processes agree after every update


@dataclass
class Trainer:
    """Everything a run needs; :meth:`fit` runs it.

    Attributes:
        updater: takes the updates. batches, val_loader: what is learnt from and what is scored on.
        epochs: of the whole run. keep_last: checkpoints to keep beside the best. save_minutes: at most so long between
            two of them; None saves at the ends of epochs alone. log_every: updates between lines of ``steps.jsonl``.
        frozen: modules that stay in evaluation mode.
        metadata: what every checkpoint carries along (configuration, class names).
        facts: what ``summary.json`` carries along (derived numbers, sizes).
        bad_images: number of images skipped by this process so far.
        profile_updates: time so many updates at the start.
        evaluate: gives the scores of a model, by the signature of :func:`vit3.engine.evaluate.evaluate`.
        score: which of them decides what is best.
    """

    updater: Updater
    batches: TrainLoader
    val_loader: Any
    processes: Processes
    epochs: int
    keep_last: int = 2
    save_minutes: float | None = None
    log_every: int = 50
    frozen: tuple[nn.Module, ...] = ()
    metadata: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    bad_images: Callable[[], int] = lambda: 0
    profile_updates: int = 0
    evaluate: Callable[..., dict[str, float] | None] = evaluate
    score: Score = Score()

    def __post_init__(self):
        self.place = RunPlace()
        self._bad_images_before = 0

    @property
    def task(self) -> TrainingTask:
        return self.updater.task

    def fit(self, run: RunFolder, tracker=None, after_epoch: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """Train to the last epoch and leave everything in ``run``.

        Args:
            run: folder of checkpoints and numbers. tracker: gets the numbers too, by ``log(step, values)``.
            after_epoch: called in the main process after each epoch's files are written.

        Returns:
            What ``summary.json`` holds.

        Raises:
            UserError: a file cannot be written, or loss or gradient is not finite for too long.
            Interrupted: a signal asked to stop; everything is saved.
        """
        self.updater.dump_folder = run.path
        self.updater.profile = Profile(
            self.profile_updates, self.processes.device, run.path if self.processes.main else None
        )
        try:
            with stop_requests() as stop:
                return self._fit(run, tracker, after_epoch, stop)
        finally:
            self.updater.profile.close()
            if tracker:
                tracker.finish()

    def resume(self, state: dict[str, Any]) -> None:
        """Continue where ``state`` (a checkpoint) was saved.

        Raises:
            UserError: the optimiser's state does not fit.
        """
        load_model(self.task.get_eval_model(), state["state_dict"])
        if self.task.has_ema():
            load_model(self.task.get_eval_model(ema=True), state.get("state_dict_ema") or state["state_dict"])
        groups = self.updater.optimizer.param_groups
        chosen = [{name: group[name] for name in _CHOSEN if name in group} for group in groups]
        try:
            load_optimizer(self.updater.optimizer, state["optimizer"])
        except (ValueError, KeyError) as error:
            raise UserError(f"resume: the optimiser of the run does not fit this one ({error})") from error
        for group, values in zip(self.updater.optimizer.param_groups, chosen):
            group.update(values)
        self.updater.scaler.load_state_dict(state["scaler"])
        self.updater.counts = Counts(**{name: state[name] for name in asdict(Counts())})
        self.place = RunPlace(**{name: state[name] for name in asdict(RunPlace())})
        self._bad_images_before = self.place.bad_images
        self._place_schedule(state)

    def _place_schedule(self, state: dict[str, Any]) -> None:
        """Put the schedule where the run is in epochs, which may have had more or fewer updates before."""
        now, updates = self.batches.plan.updates, self.updater.counts.updates
        before = state.get("updates_per_epoch", now)
        done = (updates + state.get("schedule_ahead", 0)) * now / before
        self.updater.schedule_ahead = round(done) - updates
        self.updater.set_rates()

    def _fit(self, run: RunFolder, tracker, after_epoch: Callable[[], None], stop: StopRequest) -> dict[str, Any]:
        place = self.place
        place.best = self.processes.on_main(lambda: self._go_back(run))
        self._saved_at = time.monotonic()
        while place.epoch < self.epochs:
            started = time.perf_counter()
            if hasattr(self.task, "start_epoch"):
                self.task.start_epoch(place.epoch, self.epochs)
            rate = self._train_epoch(run, tracker, stop, started)
            scores = self._evaluate_all(run, stop, started)
            place.seconds += time.perf_counter() - started
            record = self._record(rate, scores)
            improved = place.note_best(record, self.score)
            place.epoch, place.position, place.record = place.epoch + 1, 0, record
            place.loss_sums, place.images = {}, 0
            self._finish_epoch(run, record, improved)
            if tracker:
                tracker.log(record["updates"], record)
            if self.processes.main:
                logger.info(epoch_line(record, self.epochs, self.place.better(self.score), self.score))
                try:
                    after_epoch()
                except Exception as error:  # whatever becomes of a picture, training goes on
                    logger.warning("pictures of this epoch are lost (%s)", error)
        return self._summary()

    def _go_back(self, run: RunFolder) -> dict[str, Any]:
        """Make the files of the run those of its place; returns which best weights are there."""
        place = self.place
        with run.writing():
            run.rewind(place.epoch, self.updater.counts.updates, place.record)
            best = kept_best(run.path, place.best, self.score)
            if place.epoch >= self.epochs:  # stopped between the last checkpoint and its numbers
                place.best = best
                run.write_json("summary.json", self._summary())
        return best

    def _train_epoch(self, run: RunFolder, tracker, stop: StopRequest, started: float) -> float:
        """Updates from where the epoch is to its end; returns images per second."""
        place, updater, plan = self.place, self.updater, self.batches.plan
        self.task.train()
        for module in self.frozen:
            module.eval()
        if place.position == 0:
            place.lr = _lr(updater.optimizer)
        used, title = place.position, f"epoch {place.epoch + 1}/{self.epochs}"

        def flags() -> list[float]:
            return [float(stop.signal is not None), float(self._save_is_due())]

        with progress(title, plan.updates_from(place.position), self.processes.main) as advance:
            batches = self.batches.epoch(place.epoch, place.position)
            updater.profile.epoch_starts()
            while True:
                with updater.profile.phase("data"):
                    batch = next(batches, None)
                if batch is None:
                    break
                try:
                    outcome = updater.run(place.epoch, *batch, flags)
                except NotFinite:
                    self._save(run)
                    raise
                if outcome is None:
                    continue
                share = batch[0]
                place.position = share.position
                if outcome.taken:
                    place.images += share.total
                    for name, loss in outcome.losses.items():
                        place.loss_sums[name] = place.loss_sums.get(name, 0.0) + loss * share.total
                    self._log_step(run, tracker, outcome)
                advance(share.total)
                updater.profile.update_done()
                self._save_or_stop(run, stop, outcome.flags, started)
        seconds = time.perf_counter() - started
        return round((place.position - used) / seconds, 1)

    def _save_or_stop(self, run: RunFolder, stop: StopRequest, flags: list[float], started: float) -> None:
        if not any(flags):
            return
        before = self.place.seconds
        self.place.seconds += time.perf_counter() - started
        path = self._save(run)
        self.place.seconds = before
        if flags[_STOP]:
            raise_after = stop.interrupted(f"everything up to here is in {path}; resume={run.path} goes on")
            stop.hand_on()
            raise raise_after

    def _save_is_due(self) -> bool:
        """Whether the main process's clock asks for a checkpoint."""
        return (
            self.processes.main
            and self.save_minutes is not None
            and time.monotonic() - self._saved_at > 60 * self.save_minutes
        )

    def _evaluate_all(self, run: RunFolder, stop: StopRequest, started: float) -> dict[str, float]:
        """Scores of the raw and, where there is one, the averaged model, as ``val/…`` and ``val_ema/…``."""
        scores = {}
        for prefix, ema in (("val", False), ("val_ema", True)):
            if ema and not self.task.has_ema():
                continue
            result = self.evaluate(
                self.task.get_eval_model(ema=ema),
                self.val_loader,
                self.processes,
                amp=self.updater.amp,
                channels_last=self.updater.channels_last,
                stop=lambda: stop.signal is not None,
            )
            if result is None:  # training of this epoch is done and is not repeated
                self._save_or_stop(run, stop, [1.0, 0.0], started)
            scores |= {f"{prefix}/{name}": value for name, value in result.items()}
        return scores

    def _record(self, rate: float, scores: dict[str, float]) -> dict[str, Any]:
        """The epoch's line of ``metrics.jsonl``."""
        place, counts = self.place, self.updater.counts
        place.bad_images = self._bad_images_before + self.processes.total(self.bad_images())
        losses = (
            {f"train/{name}": total / place.images for name, total in place.loss_sums.items()} if place.images else {}
        )
        record = {"epoch": place.epoch, "updates": counts.updates, "lr": place.lr, **losses, **scores}
        record["images_per_s"] = rate
        record["seconds"] = round(place.seconds, 2)
        left_out = {"bad_updates": counts.bad, "scale_skips": counts.scale_skips, "bad_images": place.bad_images}
        return record | {name: number for name, number in left_out.items() if number}

    def _summary(self) -> dict[str, Any]:
        return {
            "best": self.place.better(self.score),
            "best_of_each": self.place.best,
            "last": self.place.record,
            "epochs": self.epochs,
            "seconds": round(self.place.seconds, 2),
            **self.facts,
        }

    def _state(self) -> dict[str, Any]:
        """What a checkpoint holds. All processes call this together: sharded tensors are gathered."""
        ema = self.task.get_checkpoint_state(ema=True) if self.task.has_ema() else {}
        return {
            **asdict(self.place),
            **asdict(self.updater.counts),
            "world_size": self.processes.world_size,
            "batch_size": self.batches.plan.batch,
            "train_images": self.batches.plan.images,
            "updates_per_epoch": self.batches.plan.updates,
            "schedule_ahead": self.updater.schedule_ahead,
            "optimizer": whole(self.updater.optimizer.state_dict()),
            "scaler": self.updater.scaler.state_dict(),
            **whole({**self.task.get_checkpoint_state(), **ema}),
            **self.metadata,
            "config_hash": config_hash(self.metadata.get("config", {})),
        }

    def _save(self, run: RunFolder) -> str:
        state = self._state()
        path = self.processes.on_main(lambda: str(save_update(state, run.path, self.keep_last)))
        self._saved_at = time.monotonic()
        return path

    def _finish_epoch(self, run: RunFolder, record: dict[str, Any], improved: list[str]) -> None:
        """Write checkpoints, then numbers, so that no number stands for weights that were not kept."""
        state = self._state()

        def write() -> None:
            for weights in improved:
                key = {"raw": "state_dict", "ema": "state_dict_ema"}[weights]
                kept = {key: state[key], "weights": weights, "epoch": record["epoch"], "record": record}
                save_checkpoint({**kept, **self.metadata}, run / f"best_{weights}.pt")
            save_update(state, run.path, self.keep_last)
            with run.writing():
                run.append("metrics.jsonl", record)
                run.write_json("summary.json", self._summary())

        self.processes.on_main(write)
        self._saved_at = time.monotonic()

    def _log_step(self, run: RunFolder, tracker, outcome: Outcome) -> None:
        """One line of ``steps.jsonl`` for every so many updates; best effort."""
        updates = self.updater.counts.updates
        if not self.processes.main or updates % self.log_every:
            return
        line = {"updates": updates, "epoch": self.place.epoch, **outcome.losses, "grad_norm": outcome.grad_norm}
        line["lr"] = _lr(self.updater.optimizer)
        if self.updater.scaler.is_enabled():
            line["scale"] = self.updater.scaler.get_scale()
        try:
            run.append("steps.jsonl", line)
        except OSError as error:
            logger.warning("a line of steps.jsonl is lost (%s)", error)
        if tracker:
            tracker.log(updates, {f"step/{name}": value for name, value in line.items() if name != "updates"})


def _lr(optimizer) -> float:
    return max(group["lr"] for group in optimizer.param_groups)
