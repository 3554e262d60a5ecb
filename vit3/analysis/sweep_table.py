"""The numbers of a sweep: means and spreads over seeds, differences, published values, and what is not there."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vit3.sweeps.ablation import Ablation, Line, load_ablation
from vit3.sweeps.cell import DIVERGED, FAILED, FINISHED, KILLED, MISSING, RUNNING, Cell
from vit3.sweeps.sweep import Sweep

SYMBOLS = {DIVERGED: "*", FAILED: "†", KILLED: "‡", RUNNING: "…", MISSING: "?"}


@dataclass(frozen=True)
class CellResult:
    """What one cell came to.

    Attributes:
        status: as in ``cell.json``. reason: of anything but a finish. best: top-1 of the best epoch, in percent.
        top1: of the last epoch, in percent, by ``weights``: ``ema`` where the run keeps a moving average, else ``raw``.
        train_loss: mean over the last epoch.
        parameters, multiply_adds: of the network, the latter per image. images_per_s: in training, median of epochs.
    """

    cell: Cell
    status: str
    reason: str | None = None
    top1: float | None = None
    weights: str | None = None
    best: float | None = None
    train_loss: float | None = None
    parameters: int | None = None
    multiply_adds: int | None = None
    images_per_s: float | None = None
    seconds: float | None = None
    epochs: int | None = None
    code: str | None = None
    commit: str | None = None


@dataclass
class Entry:
    """One place of the table: a row, or a row in a column.

    Attributes:
        results: by seed, in order. line: what the ablation says of the row. difference: of the mean to the baseline's.
        noise: that below which a difference is noise; None where a spread is unknown.
    """

    row: str
    column: str | None
    results: list[CellResult]
    line: Line
    first_column: bool = True
    difference: float | None = None
    noise: float | None = None

    @property
    def scores(self) -> list[float]:
        """Top-1 of the finished cells."""
        return [r.top1 for r in self.results if r.status == FINISHED and r.top1 is not None]

    @property
    def mean(self) -> float | None:
        return statistics.mean(self.scores) if self.scores else None

    @property
    def std(self) -> float | None:
        """Sample standard deviation over seeds; None for fewer than two."""
        return statistics.stdev(self.scores) if len(self.scores) > 1 else None

    @property
    def before_divergence(self) -> float | None:
        """Mean of the best values of diverged cells, where no cell is finished."""
        found = [r.best for r in self.results if r.status == DIVERGED and r.best is not None]
        return statistics.mean(found) if found and not self.scores else None

    @property
    def marks(self) -> str:
        """Symbols of what is missing."""
        return "".join(symbol for status, symbol in SYMBOLS.items() if any(r.status == status for r in self.results))

    @property
    def published(self) -> dict[str, Any]:
        """Quoted values; those of a row belong to the first column."""
        return self.line.published if self.first_column else {}

    def of(self, name: str) -> float | None:
        """Mean of a number over the cells that have it."""
        found = [v for v in (getattr(r, name) for r in self.results) if v is not None]
        return statistics.mean(found) if found else None

    @property
    def verdict(self) -> str:
        """Difference to the baseline as the table shows it."""
        if self.difference is None:
            return ""
        if self.noise is None:
            return f"{self.difference:+.2f} (spread unknown)"
        return f"{self.difference:+.2f}{' (within noise)' if abs(self.difference) <= self.noise else ''}"


@dataclass
class SweepTable:
    """A table and where it comes from.

    Attributes:
        entries: in the order of the ablation, else of the sweep. seeds: every entry should have. baseline: row label.
        content: of ``sweep.json``. column_titles: by label. notes: lines on what the table leaves open.
    """

    name: str
    title: str
    source: str | None
    entries: list[Entry]
    seeds: list[int]
    baseline: str | None
    content: dict[str, Any]
    column_titles: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(e.column for e in self.entries if e.column is not None))

    @property
    def rows(self) -> list[str]:
        return list(dict.fromkeys(e.row for e in self.entries))

    def column_title(self, label: str) -> str:
        """How a column is shown."""
        return self.column_titles.get(label, label)

    def entry(self, row: str, column: str | None) -> Entry | None:
        return next((e for e in self.entries if (e.row, e.column) == (row, column)), None)


def read_table(sweep: Sweep, configs: Path) -> SweepTable:
    """Read all cells of a sweep.

    Args:
        configs: folder of the configurations, for titles and published values.

    Raises:
        UserError: no such sweep, or its ablation file is gone.
    """
    content, cells = sweep.content(), sweep.cells()
    ablation = _ablation_of(sweep, content.get("ablation"), configs)
    rows, columns = (_order([getattr(c, what) for c in cells], ablation, f"{what}s") for what in ("row", "column"))
    seeds = sorted({cell.seed for cell in cells})
    by_place = {(cell.row, cell.column, cell.seed): cell for cell in cells}
    entries = []
    for row in rows:
        for column in columns:
            found = [by_place.get((row, column, seed)) for seed in seeds]
            if any(found):
                missing = [Cell("", row, column, seed, ()) for seed in seeds]
                results = [
                    _result(sweep, cell) if cell else CellResult(gap, MISSING) for cell, gap in zip(found, missing)
                ]
                line = ablation.rows.get(row, Line(row)) if ablation else Line(row)
                entries.append(Entry(row, column, results, line, column == columns[0]))
    title, source = (ablation.title, ablation.source) if ablation else (sweep.name, None)
    baseline = ablation.baseline if ablation else rows[0]
    titles = {label: line.title for label, line in ablation.columns.items()} if ablation else {}
    table = SweepTable(sweep.name, title, source, entries, seeds, baseline, content, titles)
    _compare(table)
    left_out = [line.title for label, line in ablation.rows.items() if label not in rows] if ablation else []
    if left_out:
        table.notes.append(f"Rows of the table that this sweep leaves out: {', '.join(left_out)}.")
    return table


def _ablation_of(sweep: Sweep, name: str | None, configs: Path) -> Ablation | None:
    """Its file; the sweep's own copy where a file of the user's has gone, or the sweep has come from elsewhere."""
    if name and name.endswith(".yaml") and not Path(name).is_file():
        name = str(sweep.table_file)
    return load_ablation(name, configs) if name else None


def _order(found: Iterable[str | None], ablation: Ablation | None, what: str) -> list[str | None]:
    """Labels without repetition, those of the ablation in its order first."""
    unique = list(dict.fromkeys(found))
    known = [label for label in getattr(ablation, what) if label in unique] if ablation else []
    return [*known, *(label for label in unique if label not in known)]


def _result(sweep: Sweep, cell: Cell) -> CellResult:
    folder = sweep.folder(cell)
    record, summary = folder.state(), folder.summary()
    last, best = summary.get("last") or {}, summary.get("best") or {}
    weights = "ema" if "val_ema/top1" in last else "raw"
    speeds = [line["images_per_s"] for line in _lines(folder / "metrics.jsonl") if line.get("images_per_s")]
    starts = _starts(folder / "environment.json")
    return CellResult(
        cell,
        record["status"],
        record.get("reason"),
        last.get("val_ema/top1" if weights == "ema" else "val/top1"),
        weights if last else None,
        best.get("top1"),
        last.get("train/loss"),
        summary.get("parameters"),
        summary.get("multiply_adds"),
        statistics.median(speeds) if speeds else None,
        record.get("seconds"),
        summary.get("epochs"),
        record.get("code"),
        starts[-1].get("commit") if starts else None,
    )


def _starts(path: Path) -> list[dict[str, Any]]:
    """``environment.json``; what a full disk has left of it says nothing."""
    try:
        return json.loads(path.read_text()) or []
    except (OSError, ValueError):
        return []


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    lines = []
    for text in path.read_text().splitlines():
        try:
            line = json.loads(text)
        except ValueError:  # being written, or killed while writing
            continue
        if isinstance(line, dict):
            lines.append(line)
    return lines


def _compare(table: SweepTable) -> None:
    """Differences to the baseline row of the same column, and the noise of each: twice its standard error."""
    for entry in table.entries:
        base = table.entry(table.baseline, entry.column)
        if base is None or base is entry or base.mean is None or entry.mean is None:
            continue
        entry.difference = entry.mean - base.mean
        if base.std is not None and entry.std is not None:
            entry.noise = 2 * math.sqrt(entry.std**2 / len(entry.scores) + base.std**2 / len(base.scores))
