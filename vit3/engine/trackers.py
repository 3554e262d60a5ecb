"""Weights & Biases beside the run folder: best effort, in a thread of its own, never in the way of a step."""

from __future__ import annotations

import hashlib
import logging
import queue
import threading
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_FINISH_SECONDS = 10  # at most, at the end of a run
_LOGIN_SECONDS = 15  # before an online run falls back to offline


class WandbTracker:
    """Hands numbers to wandb in a daemon thread; a failure is one warning, the run folder has them all anyway."""

    def __init__(self, *, mode: str, project: str, entity: str | None, folder: str, name: str, config: dict):
        self._queue: queue.Queue = queue.Queue()
        # resuming the same folder continues the same wandb run; two folders of one name stay apart
        unique = hashlib.sha256(str(Path(folder).resolve()).encode()).hexdigest()[:16]
        options = dict(project=project, entity=entity, dir=folder, name=name, id=unique, resume="allow", config=config)
        self._thread = threading.Thread(target=self._work, args=(mode, options), daemon=True)
        self._thread.start()

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Queue ``values`` at ``step``; returns at once."""
        self._queue.put((step, values))

    def finish(self) -> None:
        """Let wandb write what is queued, for a few seconds at most."""
        self._queue.put(None)
        self._thread.join(_FINISH_SECONDS)
        if self._thread.is_alive():
            logger.warning("wandb did not finish within %d s and is left behind", _FINISH_SECONDS)

    def _work(self, mode: str, options: dict) -> None:
        try:
            run = self._start(mode, options)
            while (item := self._queue.get()) is not None:
                run.log(item[1], step=item[0])
            run.finish()
        except Exception as error:  # whatever a tracker does, training goes on
            logger.warning("wandb is off for this run (%s); all numbers are in the run folder", _first_line(error))

    @staticmethod
    def _start(mode: str, options: dict):
        import wandb

        settings = wandb.Settings(init_timeout=_LOGIN_SECONDS, silent=True, console="off")
        if mode == "online":
            try:
                if not wandb.login(anonymous="never", timeout=_LOGIN_SECONDS, verify=False):
                    raise RuntimeError("not logged in")
                return wandb.init(mode="online", settings=settings, **options)
            except Exception as error:
                logger.warning(
                    "wandb goes offline for this run (%s); `wandb sync` uploads it later", _first_line(error)
                )
        return wandb.init(mode="offline", settings=settings, **options)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
