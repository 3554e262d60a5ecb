"""A cell: one run of a sweep, known by what decides its numbers, and the record of what became of it."""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig

from vit3.config import typed
from vit3.engine.run_folder import RunFolder
from vit3.errors import UserError
from vit3.sweeps.ablation import settled, split_label
from vit3.sweeps.code import code_version

RUNNING, FINISHED, DIVERGED, FAILED, KILLED = "running", "finished", "diverged", "failed", "killed"
RESULTS = (FINISHED, DIVERGED)  # not tried again
MISSING = "missing"  # listed, not started yet
_STATES = (RUNNING, *RESULTS, FAILED, KILLED)

# Where numbers go, who logs them, how often files are written, and how the same images are read: none changes a number.
# Threads change sums in their last digits, as another machine does. What can change speed or numbers on purpose stays
# in: mixer.backend, engine.amp, engine.compile, engine.max_per_process, data.root.
_CHANGES_NOTHING = {
    "": ("output", "name", "resume", "print_groups", "ablation", "row", "column", "logger"),
    "data": ("workers",),
    "engine": ("threads", "save_minutes", "keep_last", "profile"),
}


@dataclass(frozen=True)
class Cell:
    """A cell as one sweep lists it.

    Attributes:
        id: content address, the name of its folder. row, column: its place in the table; column may be None.
        seed: ``engine.seed``. overrides: of its job, by which it can be started again.
    """

    id: str
    row: str
    column: str | None
    seed: int
    overrides: tuple[str, ...]

    @property
    def label(self) -> str:
        """What the screen shows."""
        return f"{self.row}{f' × {self.column}' if self.column else ''}, seed {self.seed}"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"overrides": list(self.overrides)}


def compose_cell(
    overrides: Sequence[str], swept: Sequence[str], schema: type, configs: Path
) -> tuple[Cell, DictConfig]:
    """A cell and its configuration, checked.

    Args:
        overrides: of its job. swept: keys that take several values in the sweep, in order.
        schema: dataclass of the configuration. configs: folder of the configurations.

    Raises:
        UserError: unknown keys, wrong types, values out of range.
    """
    overrides = tuple(overrides)
    cfg, run = _compose(overrides, schema, configs)
    row, column = _place(overrides, swept)
    return Cell(cell_id(run, code_version()), row, column, cfg.engine.seed, overrides), copy.deepcopy(cfg)


@functools.cache  # a sweep is what its files said when it was started; and composing takes a quarter of a second
def _compose(overrides: tuple[str, ...], schema: type, configs: Path) -> tuple[DictConfig, Any]:
    try:
        with hydra_at(configs):
            cfg = compose("train", overrides=settled(overrides, schema, configs))
    except HydraException as error:
        raise UserError(f"{' '.join(overrides)}: {str(error).splitlines()[0]}") from error
    return cfg, typed(cfg, schema)


def hydra_at(configs: Path) -> AbstractContextManager:
    """Context in which Hydra composes from ``configs``: the running one, where Hydra has started this program."""
    running = GlobalHydra.instance().is_initialized()
    return nullcontext() if running else initialize_config_dir(str(configs), version_base="1.3")


def cell_id(run: Any, code: str) -> str:
    """Content address: of all that can change a number, the code's version included.

    Args:
        run: typed configuration, for ``inner.lr=1`` and ``inner.lr=1.0`` are the same. code: version of the code.
    """
    plain = dataclasses.asdict(run)
    for group, keys in _CHANGES_NOTHING.items():
        for key in keys:
            (plain[group] if group else plain).pop(key, None)
    return hashlib.sha256(json.dumps([plain, code], sort_keys=True).encode()).hexdigest()[:16]


def _place(overrides: Sequence[str], swept: Sequence[str]) -> tuple[str, str | None]:
    """Labels of row and column: those of the ablation, else two swept keys, else all of them in the row."""
    values = dict(override.lstrip("+").split("=", 1) for override in overrides if "=" in override)
    row, column = (split_label(values[what])[1] if what in values else None for what in ("row", "column"))
    others = [f"{key}={values[key]}" for key in swept if key not in ("row", "column", "engine.seed")]
    if row is None and len(others) == 2:
        return others[0], others[1]
    return " ".join(filter(None, [row, *others])) or "run", column


class CellFolder(RunFolder):
    """The run folder of a cell, with ``cell.json``, ``log.txt`` and a lock that ends with the process that has it."""

    @classmethod
    def of(cls, output: str | Path, cell_id: str) -> CellFolder:
        return cls(Path(output) / "cells" / cell_id)

    def record(self) -> dict[str, Any]:
        """What ``cell.json`` says; ``status`` is ``missing`` where there is none, or not the numbers it speaks of."""
        record = self._read("cell.json")
        if record.get("status") not in _STATES or record["status"] == FINISHED and not self.summary().get("last"):
            return {"status": MISSING}
        return record

    def state(self) -> dict[str, Any]:
        """The record as it is true now: what was running and holds no lock any more was killed."""
        record = self.record()
        if record["status"] == RUNNING and not self.held():
            record = self.record()  # it may have ended between the two looks
            if record["status"] == RUNNING:
                return record | {"status": KILLED, "reason": "its process is gone without a word"}
        return record

    def note(self, **facts: Any) -> None:
        """Change the record; only for who holds the lock."""
        self.write_json("cell.json", {**self.record(), **facts})

    def lock(self) -> FileLock:
        """The claim on this cell; the system frees it when its process ends, however that ends."""
        return FileLock(self / ".lock")

    def held(self) -> bool:
        """Whether a process is at work on this cell."""
        if not (self / ".lock").exists():
            return False
        try:
            with self.lock().acquire(timeout=0):
                return False
        except Timeout:
            return True
        except OSError:  # a folder that may only be read: nobody can know, and the record says so
            return True

    def summary(self) -> dict[str, Any]:
        """``summary.json``; empty where no epoch was finished."""
        return self._read("summary.json")

    def _read(self, name: str) -> dict[str, Any]:
        """A file of keys and values; empty where it is not there, or damaged."""
        try:
            content = json.loads((self / name).read_text())
        except (OSError, ValueError):
            return {}
        return content if isinstance(content, dict) else {}
