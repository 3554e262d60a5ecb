"""The command that starts a sweep: all cells checked first, signals handed on, a table of states at the end."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override

from vit3.engine.place import find_place
from vit3.engine.signals import REQUEUE_CODE
from vit3.errors import UserError
from vit3.sweeps.ablation import given_values, split_label
from vit3.sweeps.cell import DIVERGED, FAILED, FINISHED, KILLED, MISSING, RUNNING, Cell, compose_cell, hydra_at
from vit3.sweeps.code import code_version
from vit3.sweeps.process import start_server
from vit3.sweeps.sweep import Sweep

logger = logging.getLogger("vit3.sweep")

_LAUNCH = "VIT3_LAUNCH"  # inherited by worker processes: which command started them
_POLL_S = 2.0


def sweep_name(overrides: Sequence[str]) -> str:
    """Name of the sweep that overrides belong to: ``name=``, else the ablation's, else ``sweep``.

    Raises:
        UserError: it cannot name a folder, or names several.
    """
    given = given_values(overrides, ("name", "row"))
    default = Path(split_label(given["row"][0])[0]).stem if "row" in given else "sweep"
    name = ",".join(given.get("name", [default]))
    if "${" in name or "," in name or Path(name).name != name or name in (".", ".."):
        raise UserError(f"name={name} must be one folder name, that of the sweep; its cells get folders by themselves")
    return name


class Launch:
    """One command with ``-m``.

    Attributes:
        sweep: what it computes. cells: those of this command, in order. signal: that told it to stop.
        has_workers: the launcher starts processes on this machine, which end with this one.
    """

    def __init__(self, arguments: Sequence[str], typed: Sequence[str], schema: type, configs: Path):
        """Compose and check every cell, and list them in the sweep.

        Args:
            arguments: of the command line, checked, without flags. typed: as the user gave them.
            schema, configs: of the program.

        Raises:
            UserError: a cell that cannot be, or a way to start it that cannot be right.
        """
        _check_alone()
        name = sweep_name(arguments)
        overrides = OverridesParser.create().parse_overrides([a for a in arguments if not a.startswith("-")])
        ours = [o for o in overrides if o.key_or_group.split(".")[0].split("/")[0] != "hydra"]
        swept = [o.key_or_group for o in ours if o.is_sweep_override()]
        _check_keys(ours)
        launcher = next((o.value() for o in overrides if o.key_or_group == "hydra/launcher"), "basic")
        if launcher == "basic":
            start_server()
        [jobs] = BasicSweeper.split_arguments(ours, None)
        with hydra_at(configs):
            composed = [compose_cell(job, swept, schema, configs) for job in jobs]
        self.cells: list[Cell] = [cell for cell, _ in composed]
        cfg = composed[0][1]
        self.sweep = Sweep.named(cfg.output, name)
        recipe = next((o.get_value_element_as_str() for o in ours if o.key_or_group == "recipe"), None)
        [row] = given_values(self.cells[0].overrides, ("row",)).get("row", [None])
        table = split_label(row)[0] if row else None
        self.sweep.extend(
            self.cells,
            command=["python", "tools/train.py", *typed],
            ablation=table,
            recipe=None if recipe == "[]" else recipe,
            data=cfg.data.name,
            code=code_version(),
        )
        if table and table.endswith(".yaml"):
            self.sweep.keep_file(Path(table))
        self.has_workers = launcher == "joblib"
        self.signal: int | None = None
        self.name = f"{socket.gethostname()}-{os.getpid()}"
        os.environ[_LAUNCH] = self.name
        self._stop_file = stop_file(self.sweep, self.name)
        self._stop_file.unlink(missing_ok=True)

    def heed_signals(self) -> None:
        """From now on hand signals to the cells at work, which save, and start no more."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
                signal.signal(number, self._hand_on)

    def _hand_on(self, number: int, frame) -> None:
        self.signal = number
        self._stop_file.touch()
        for cell in self.cells:
            record = self.sweep.folder(cell).record()
            if record["status"] == RUNNING and record.get("launch") == self.name:
                try:
                    os.kill(record["pid"], number)
                except ProcessLookupError:
                    pass

    def end(self) -> int:
        """Wait for cells at work elsewhere, print the table of states; returns the exit status of the command."""
        self._wait()
        self._stop_file.unlink(missing_ok=True)
        states = [(cell, self.sweep.folder(cell).state()) for cell in self.cells]
        for line in state_table(states, self.sweep):
            logger.info(line)
        if self.signal is not None:
            return 128 + signal.SIGINT if self.signal == signal.SIGINT else REQUEUE_CODE
        return 0 if all(record["status"] == FINISHED for _, record in states) else 1

    def _wait(self) -> None:
        said = False
        while self.signal is None:
            busy = [cell for cell in self.cells if self.sweep.folder(cell).record()["status"] == RUNNING]
            busy = [cell for cell in busy if self.sweep.folder(cell).held()]
            if not busy:
                return
            if not said:
                logger.info(f"{len(busy)} cells are at work elsewhere; waiting for them (Ctrl-C ends the waiting)")
                said = True
            time.sleep(_POLL_S)


def launch_name() -> str | None:
    """Which command started this process, if one on this machine did."""
    return os.environ.get(_LAUNCH)


def stop_file(sweep: Sweep, launch: str) -> Path:
    """The file that tells the processes of a command to start nothing more."""
    return sweep.path / f".stop-{launch}"


def state_table(states: list[tuple[Cell, dict]], sweep: Sweep) -> list[str]:
    """Lines: how many cells are in which state, and why those without a number have none."""
    lines = [f"sweep {sweep.path}"]
    for status in (FINISHED, DIVERGED, FAILED, KILLED, RUNNING, MISSING):
        found = [(cell, record) for cell, record in states if record["status"] == status]
        if not found:
            continue
        lines.append(f"  {status:9s} {len(found):3d}")
        if status in (DIVERGED, FAILED, KILLED):
            lines += [
                f"    {cell.label}: {r.get('reason')}; log: {sweep.folder(cell) / 'log.txt'}" for cell, r in found
            ]
    if any(record["status"] in (FAILED, KILLED, MISSING) for _, record in states):
        lines.append("  the same command tries these again, and nothing else")
    return [*lines, f"table: python tools/summarize.py sweep={sweep.path}"]


def _check_alone() -> None:
    if "RANK" in os.environ or find_place(os.environ).world_size > 1:
        raise UserError(
            "-m inside torchrun or a step of several tasks would start the sweep once in each of them; start it with "
            "python, and give a cell several processes by hydra/launcher=slurm or submitit_local"
        )


def _check_keys(overrides: Sequence[Override]) -> None:
    """Refuse what means something else for one run than for many."""
    for override in overrides:
        key, several = override.key_or_group, override.is_sweep_override()
        value = None if several else override.value()
        if key == "resume" and value not in ("auto", None):
            raise UserError(f"resume={value}: every cell of a sweep goes on where it stopped; leave resume out")
        if key == "print_groups" and value is True:
            raise UserError("print_groups=true lists the parameters of one model; leave -m out")
        if key in ("output", "name", "recipe") and several:
            raise UserError(f"{key} takes several values here, and one sweep has one; start one after the other")
