"""Numbers to Weights & Biases and TensorBoard too: best effort, in threads of their own, never in the way of a step."""

from __future__ import annotations

import hashlib
import logging
import numbers
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vit3.errors import first_line

logger = logging.getLogger(__name__)

_FINISH_SECONDS = 10  # at most, at the end of a run, for all trackers together
_LOGIN_SECONDS = 15  # before an online run falls back to offline


class Tracker:
    """Hands numbers to some service in a daemon thread; a failure is one warning, the run folder has them all anyway.

    A subclass says how to start (:meth:`_start`), to send (:meth:`_send`) and to end (:meth:`_end`); all run in the
    thread, may block and may raise.
    """

    name = "tracker"

    def __init__(self):
        self._queue: queue.Queue = queue.Queue()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Queue ``values`` at ``step``; returns at once."""
        self._queue.put((step, values))

    def finish(self, seconds: float | None = None) -> None:
        """Let it write what is queued, for a few seconds at most."""
        self._queue.put(None)
        self._thread.join(_FINISH_SECONDS if seconds is None else seconds)
        if self._thread.is_alive():
            logger.warning("%s did not finish within %g s and is left behind", self.name, _FINISH_SECONDS)

    def _work(self) -> None:
        try:
            self._start()
            while (item := self._queue.get()) is not None:
                self._send(*item)
            self._end()
        except Exception as error:  # whatever a tracker does, training goes on
            logger.warning(
                "%s is off for this run (%s); all numbers are in the run folder", self.name, first_line(error)
            )

    def _start(self) -> None:
        raise NotImplementedError

    def _send(self, step: int, values: dict[str, Any]) -> None:
        raise NotImplementedError

    def _end(self) -> None:
        raise NotImplementedError


class Trackers:
    """Several trackers as one."""

    def __init__(self, trackers: list[Tracker]):
        self.trackers = trackers

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Hand ``values`` at ``step`` (updates since the start of the run) to every tracker; returns at once."""
        for tracker in self.trackers:
            tracker.log(step, values)

    def finish(self) -> None:
        """End all, within the time that one may take."""
        end = time.monotonic() + _FINISH_SECONDS
        for tracker in self.trackers:
            tracker.finish(max(0.0, end - time.monotonic()))


class WandbTracker(Tracker):
    """Weights & Biases; a resumed run goes on in the same run there, on an axis of updates."""

    name = "wandb"

    def __init__(self, *, mode: str, project: str, entity: str | None, folder: str, name: str, config: dict):
        # resuming the same folder continues the same wandb run; two folders of one name stay apart
        unique = hashlib.sha256(str(Path(folder).resolve()).encode()).hexdigest()[:16]
        self._mode = mode
        self._options = dict(
            project=project, entity=entity, dir=folder, name=name, id=unique, resume="allow", config=config
        )
        super().__init__()

    def _start(self) -> None:
        import wandb

        self._run = self._init(wandb)
        # wandb's own step cannot go back, which a run does that resumes at a checkpoint before its last lines
        self._run.define_metric("updates")
        self._run.define_metric("*", step_metric="updates")

    def _send(self, step: int, values: dict[str, Any]) -> None:
        self._run.log(values | {"updates": step})

    def _end(self) -> None:
        self._run.finish()

    def _init(self, wandb):
        settings = wandb.Settings(init_timeout=_LOGIN_SECONDS, silent=True, console="off")
        if self._mode == "online":
            try:
                if not wandb.login(anonymous="never", timeout=_LOGIN_SECONDS, verify=False):
                    raise RuntimeError("not logged in")
                return wandb.init(mode="online", settings=settings, **self._options)
            except Exception as error:
                logger.warning("wandb goes offline for this run (%s); `wandb sync` uploads it later", first_line(error))
        return wandb.init(mode="offline", settings=settings, **self._options)


class TensorBoardTracker(Tracker):
    """TensorBoard's event files in ``folder``; what is no number is left out."""

    name = "tensorboard"

    def __init__(self, folder: Path):
        self._folder = folder
        self._writer: Any = None
        super().__init__()

    def _start(self) -> None:
        from torch.utils.tensorboard import SummaryWriter  # needs the package tensorboard

        self._make_writer: Callable = SummaryWriter

    def _send(self, step: int, values: dict[str, Any]) -> None:
        if (
            self._writer is None
        ):  # what an interrupted run wrote from this step on is hidden, as this run writes it again
            self._writer = self._make_writer(str(self._folder), purge_step=step, flush_secs=30)
        for key, value in values.items():
            if isinstance(value, numbers.Real) and not isinstance(value, bool):
                self._writer.add_scalar(key, value, step)

    def _end(self) -> None:
        if self._writer is not None:
            self._writer.close()
