"""Sweeps for the tests: very small cells, and the command that starts them in a process that has imported all."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from pathlib import Path

import tests.processes  # noqa: F401 (says what the server of the commands' processes imports)
from vit3.sweeps.sweep import Sweep

TINY = (
    "engine.epochs=1", "engine.steps_per_epoch=2", "engine.batch_size=16", "engine.device=cpu", "engine.ema_decay=null",
    "optim.warmup_epochs=0", "model.kwargs.depth=1", "engine.threads=1",
)  # fmt: skip

# Three rows of two columns. What goes wrong is in the values: a rate no weights survive, a file that is no checkpoint.
TABLE = """
title: Things that go wrong
source: ours
recipe: null
seeds: [0, 1]
baseline: plain
rows:
  plain:
    set: []
    published: {{top1: 78.9}}
  hot: {{set: [optim.lr=1e30, optim.min_lr=1e30, optim.clip_grad=null]}}
  long:
    title: "many epochs"
    set: [engine.epochs=4]
columns:
  scratch: {{set: []}}
  started: {{set: [model.checkpoint={checkpoint}]}}
"""


class Command:
    """``python tools/train.py ...`` with all its imports done: in a process forked from a server that has them.

    Args:
        folder: for its log. server: let cells have a server of their own, as they do outside of tests; else they are
            forked from the command, which saves the seconds of its imports.
    """

    def __init__(self, folder: Path, *arguments: str, server: bool = False):
        self.log = folder / f"command-{len(list(folder.glob('command-*')))}.txt"
        self.log.touch()
        self.process = multiprocessing.get_context("forkserver").Process(
            target=_train, args=(self.log, arguments, dict(os.environ), server)
        )
        self.process.start()

    def end(self, timeout: float = 150) -> tuple[int, str]:
        """Exit status and what was printed."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            self.process.kill()
            raise AssertionError(f"no end within {timeout} s:\n{self.log.read_text()}")
        return self.process.exitcode, self.log.read_text()


def _train(log: Path, arguments: tuple[str, ...], environment: dict[str, str], server: bool) -> None:
    os.environ.clear()
    os.environ.update(environment)
    with open(log, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    multiprocessing.set_start_method("fork", force=True)
    from vit3.tools import train

    from vit3.sweeps import process

    if server:
        process._PRELOAD += ("tests.sweeps.light",)
    else:
        import tests.sweeps.light  # noqa: F401 (in the cells, too)

        process._METHOD = "fork"
    sys.argv = ["tools/train.py", *arguments]
    train.main()


def states(sweep: Sweep) -> dict[tuple[str, str | None, int], str]:
    """State of every cell by row, column and seed."""
    return {(c.row, c.column, c.seed): sweep.folder(c).state()["status"] for c in sweep.cells()}


def files_of(sweep: Sweep, cells) -> dict[Path, tuple[int, bytes]]:
    """Times and contents of what cells left."""
    paths = [sweep.folder(cell) / name for cell in cells for name in ("cell.json", "metrics.jsonl", "log.txt")]
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in paths if path.exists()}


def starts(sweep: Sweep, cell) -> int:
    """How many times its run was started."""
    return len(json.loads((sweep.folder(cell) / "environment.json").read_text()))
