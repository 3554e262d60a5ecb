"""Computing one cell in this process: claim it, train, and leave on record what became of it."""

from __future__ import annotations

import math
import os
import socket
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout
from omegaconf import DictConfig, OmegaConf

from vit3.engine.distributed import start_processes
from vit3.engine.signals import REQUEUE_CODE
from vit3.engine.update import NotFinite
from vit3.errors import Interrupted, UserError
from vit3.sweeps.cell import DIVERGED, FAILED, FINISHED, KILLED, RESULTS, RUNNING, Cell, CellFolder
from vit3.sweeps.code import code_version

Train = Callable[[DictConfig], None]
ELSEWHERE = "elsewhere"  # another process is at work on the cell, or has just ended it

_CLAIM_S = 1.0  # others hold the lock for a moment when they look whether it is held


def cell_config(cfg: DictConfig, folder: CellFolder) -> DictConfig:
    """The configuration of a cell's run: an ordinary run in its folder, which goes on where it stopped."""
    cfg = OmegaConf.create(OmegaConf.to_container(cfg, resolve=True))
    cfg.output, cfg.name, cfg.resume = str(folder.path.parent), folder.path.name, "auto"
    cfg.ablation = cfg.row = cfg.column = None  # those of one sweep among all that share the cell
    OmegaConf.set_struct(cfg, True)
    return cfg


def compute(
    train: Train, cfg: DictConfig, cell: Cell, folder: CellFolder, launch: str | None, stop: Path | None = None
) -> str:
    """Train the cell, unless it is done or another process does; returns its state.

    Under a launcher of several processes all of them call this; the main one claims and records.

    Args:
        train: one run from a composed configuration. cfg: of the cell. launch: which command is at work on it.
        stop: file that is there once that command was told to stop.

    Raises:
        Interrupted: a signal asked to stop, and everything is saved. KeyboardInterrupt and SystemExit pass, too.
    """
    processes = start_processes(cfg.engine.device)
    claim: list[FileLock] = []
    if not processes.on_main(lambda: _claim(folder, claim)):
        state = processes.on_main(lambda: folder.record()["status"])
        return state if state in RESULTS else ELSEWHERE

    def note(**facts) -> None:
        if processes.main:
            folder.note(**facts)

    before, started = folder.record().get("seconds", 0.0), time.monotonic()
    facts = dict(overrides=list(cell.overrides), seed=cell.seed, code=code_version(), launch=launch)
    note(status=RUNNING, reason=None, host=socket.gethostname(), pid=os.getpid(), **facts)
    outcome = dict(status=KILLED, reason="stopped at once; what it had saved is kept")
    try:
        if stop is not None and stop.exists():  # who made it may have looked for running cells before the note above
            raise Interrupted("stopped before its first step", REQUEUE_CODE)
        train(cell_config(cfg, folder))
        outcome = _outcome(folder)
    except NotFinite as error:
        outcome = dict(status=DIVERGED, reason=str(error))
    except UserError as error:
        done = (folder.summary().get("last") or {}).get("epoch", -1) + 1 >= cfg.engine.epochs
        # its numbers are all there, and only the record of its end was lost
        outcome = _outcome(folder) if done else dict(status=FAILED, reason=str(error))
    except Interrupted as error:
        outcome = dict(status=KILLED, reason=str(error))
        raise
    except Exception as error:
        traceback.print_exc()
        outcome = dict(status=FAILED, reason=f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
    finally:
        note(**outcome, seconds=round(before + time.monotonic() - started, 2))
        for lock in claim:
            lock.release()
    return outcome["status"]


def _claim(folder: CellFolder, claim: list[FileLock]) -> bool:
    """Whether this process may compute the cell now; its lock is then put into ``claim``."""
    folder.path.mkdir(parents=True, exist_ok=True)
    lock = folder.lock()
    try:
        lock.acquire(timeout=_CLAIM_S)
    except Timeout:
        return False
    if folder.record()["status"] in RESULTS:
        lock.release()
        return False
    claim.append(lock)
    return True


def _outcome(folder: CellFolder) -> dict[str, str | None]:
    """What a run that came to its end amounts to: updates that are left out as not finite end no run."""
    last = folder.summary().get("last")
    if not last:
        return dict(status=FAILED, reason="the run ended without an evaluated epoch")
    losses = [value for key, value in last.items() if key.endswith("/loss")]
    if "train/loss" not in last or not all(math.isfinite(loss) for loss in losses):
        return dict(status=DIVERGED, reason=f"the loss was not finite at the end of epoch {last['epoch'] + 1}")
    return dict(status=FINISHED, reason=None)
