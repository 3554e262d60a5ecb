"""A job of a Hydra launcher is one cell: look it up, have it computed, say what became of it in one line."""

from __future__ import annotations

import atexit
import dataclasses
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from vit3.sweeps.cell import DIVERGED, FAILED, FINISHED, KILLED, RESULTS, Cell, CellFolder, compose_cell
from vit3.sweeps.launch import launch_name, stop_file, sweep_name
from vit3.sweeps.process import compute_apart
from vit3.sweeps.sweep import Sweep
from vit3.sweeps.work import ELSEWHERE, Train, compute

logger = logging.getLogger("vit3.sweep")

STOPPED = "stopped"  # the command was told to stop


def run_job(
    train: Train, overrides: Sequence[str], schema: type, configs: Path, *, in_place: bool, worker: bool
) -> str:
    """Compute the cell that a job stands for; returns its state.

    Args:
        train: picklable by name; one run from a composed configuration. overrides: of the job.
        schema: dataclass of the configuration. configs: folder of the configurations.
        in_place: the launcher has started processes for this cell alone. worker: this process is not the command's own.

    Raises:
        Interrupted: somebody stopped this job of a launcher, and everything is saved.
    """
    cell, cfg = compose_cell(overrides, (), schema, configs)
    sweep = Sweep.named(cfg.output, sweep_name(overrides))
    cell = _listed(sweep, cell)
    folder = sweep.folder(cell)
    before = folder.record()["status"]
    if before in RESULTS:
        _say(cell, folder, before, again=True)
        return before
    launch = launch_name()
    if in_place:
        state = compute(train, cfg, cell, folder, None)
        if state in (FAILED, KILLED):
            _leave_with(1)
    else:
        if worker and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the command, which hands it on
        if _stopped(sweep, launch):
            return STOPPED
        state = compute_apart(train, cfg, cell, folder, launch, stop_file(sweep, launch) if launch else None)
    if int(os.environ.get("RANK", os.environ.get("SUBMITIT_LOCAL_GLOBALID", os.environ.get("SLURM_PROCID", 0)))) == 0:
        _say(cell, folder, state)
    return STOPPED if _stopped(sweep, launch) else state


def _listed(sweep: Sweep, cell: Cell) -> Cell:
    """The cell with the labels that the sweep lists it under; listed now if the sweeper has just thought of it."""
    listed = sweep.cells() if (sweep.path / "sweep.json").exists() else []
    known = next((other for other in listed if other.overrides == cell.overrides), None)
    cell = dataclasses.replace(known, id=cell.id) if known else cell
    if cell != known:
        sweep.extend([cell])
    return cell


def _stopped(sweep: Sweep, launch: str | None) -> bool:
    """Whether the command that this process belongs to was told to stop."""
    return launch is not None and stop_file(sweep, launch).exists()


def _leave_with(code: int) -> None:
    """End this process with ``code`` after the launcher has written the job's result.

    The other cells' command then still gets a result, while SLURM sees a failed job.
    """

    def leave() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    atexit.register(leave)


def _say(cell: Cell, folder: CellFolder, state: str, again: bool = False) -> None:
    """One line on the screen."""
    record, summary = folder.record(), folder.summary()
    best = summary.get("best")
    score = f"  best top-1 {best['top1']:6.2f} %" if best else ""
    if state == ELSEWHERE:
        what = "at work elsewhere"
    elif state == FINISHED:
        what = f"finished{score}  {record['seconds']:.0f} s{'  (before)' if again else ''}"
    elif state == DIVERGED:
        what = f"diverged{score}: {record['reason']}{'  (before)' if again else ''}"
    else:
        what = f"{state}: {record.get('reason') or 'what became of it is not on record'}; log: {folder / 'log.txt'}"
    logger.info(f"{cell.label}  {what}")
