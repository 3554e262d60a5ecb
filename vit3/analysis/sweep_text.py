"""The table of a sweep as Markdown and CSV."""

from __future__ import annotations

import csv
import io
import math
import shlex
from typing import Any

from vit3.analysis.sweep_table import SYMBOLS, CellResult, Entry, SweepTable
from vit3.sweeps.cell import DIVERGED, FAILED, FINISHED, KILLED, MISSING, RUNNING

LEGEND = {
    DIVERGED: "diverged; left out of mean and spread, where nothing else is there its best value before",
    FAILED: "failed",
    KILLED: "stopped before its end",
    RUNNING: "running",
    MISSING: "not started",
}


def score_text(entry: Entry) -> str:
    """``97.20 ± 0.11``, with symbols and the number of seeds where some are missing."""
    mean = entry.mean if entry.mean is not None else entry.before_divergence
    text = "–" if mean is None else f"{mean:.2f}"
    text += f" ± {entry.std:.2f}" if entry.std is not None else ""
    missing = f" (n = {len(entry.scores)} of {len(entry.results)})" if len(entry.scores) < len(entry.results) else ""
    return f"{text}{entry.marks}{missing}"


def to_markdown(table: SweepTable) -> str:
    """The table, and under it everything that is needed to read it and to make it again."""
    quoted = any(entry.published for entry in table.entries)
    columns = table.columns
    head = [
        "",
        *([""] if columns else []),
        "top-1 [%]",
        "difference",
        "best",
        "training loss",
        "parameters",
        "multiply-adds",
        "images/s",
    ]
    head += ["published top-1", "published size"] if quoted else []
    lines = [f"# {table.title}", ""]
    if columns:
        lines += _matrix(table)
    lines += _markdown_row(head), "|" + "---|" * len(head)
    for entry in table.entries:
        base = entry.row == table.baseline
        values = [
            entry.line.title + (" (baseline)" if base else ""),
            *([table.column_title(entry.column)] if columns else []),
        ]
        values += [score_text(entry), entry.verdict, _number(entry.of("best"), ".2f")]
        values += [_number(entry.of("train_loss"), ".3f")]
        values += [_amount(entry.of("parameters")), _amount(entry.of("multiply_adds"))]
        values += [_number(entry.of("images_per_s"), ",.0f")]
        if quoted:
            values += _published(entry)
        lines.append(_markdown_row(values))
    return "\n".join([*lines, "", *_explain(table, quoted)]) + "\n"


def _matrix(table: SweepTable) -> list[str]:
    lines = [
        _markdown_row(["top-1 [%]", *map(table.column_title, table.columns)]),
        "|" + "---|" * (1 + len(table.columns)),
    ]
    for row in table.rows:
        entries = [table.entry(row, column) for column in table.columns]
        title = next(entry.line.title for entry in entries if entry)
        lines.append(_markdown_row([title, *(score_text(entry) if entry else "" for entry in entries)]))
    return [*lines, ""]


def _published(entry: Entry) -> list[str]:
    said = entry.published
    top1 = "" if "top1" not in said else f"*{said['top1']:.1f}*" + (f" ({said['note']})" if "note" in said else "")
    forms = (("params_m", ".1f", "M"), ("macs_g", ".2f", "G"))
    size = [f"{said[key]:{form}} {unit}" for key, form, unit in forms if key in said]
    size += [f"{said['images_per_s']:g} images/s"] if "images_per_s" in said else []
    return [top1, f"*{', '.join(size)}*" if size else ""]


def _explain(table: SweepTable, quoted: bool) -> list[str]:
    results = [result for entry in table.entries for result in entry.results]
    weights = {r.weights for r in results if r.weights}
    which = {"ema": "averaged (EMA)", "raw": "raw"}
    lines = [
        f"Top-1: last epoch, {' or '.join(which[w] for w in sorted(weights)) or 'no'} weights; mean ± sample standard "
        f"deviation over seeds {', '.join(map(str, table.seeds))} (n = {len(table.seeds)} unless said). Best: of any "
        "epoch, chosen on the test images, so flattered.",
        f"Difference: to {table.baseline}{' in the same column' if table.columns else ''}; within noise: below "
        "or at 2·√(s₁²/n₁ + s₀²/n₀).",
        "Training loss: mean over the last epoch. Images/s: of training, median over epochs, evaluation left out.",
    ]
    if quoted:
        lines.append(
            f"*Published*: quoted from {table.source}, not rerun here; its data, schedule and hardware are its own."
        )
    found = [status for status in SYMBOLS if any(result.status == status for result in results)]
    if found:
        lines.append("; ".join(f"{SYMBOLS[status]} {LEGEND[status]}" for status in found) + ".")
    reasons = [r for r in results if r.status in (DIVERGED, FAILED, KILLED)]
    lines += [f"- {r.cell.label}: {r.status}: {r.reason}" for r in reasons]
    codes = sorted({r.code for r in results if r.code})
    commits = sorted({r.commit[:10] + r.commit[40:] for r in results if r.commit})
    epochs = sorted({r.epochs for r in results if r.epochs})
    lines += table.notes
    lines += [
        "",
        f"- command: `{shlex.join(table.content.get('command', []))}`",
        f"- recipe {table.content.get('recipe') or 'none'}, data {table.content.get('data')}, epochs "
        f"{', '.join(map(str, epochs)) or 'none done'}",
        f"- code {', '.join(codes) or 'unknown'}" + (f" (commit {', '.join(commits)})" if commits else "")
        + ("; **cells of several versions of the code are mixed here**" if len(codes) > 1 else ""),
    ]  # fmt: skip
    return lines


def to_csv(table: SweepTable) -> str:
    """One line per entry, numbers alone."""
    rows = []
    for entry in table.entries:
        rows.append(
            {
                "row": entry.row, "column": entry.column or "", "top1_mean": entry.mean, "top1_std": entry.std,
                "n": len(entry.scores), "seeds": len(entry.results), "best_mean": entry.of("best"),
                "before_divergence": entry.before_divergence, "difference": entry.difference, "noise": entry.noise,
                "parameters": entry.of("parameters"), "multiply_adds": entry.of("multiply_adds"),
                "images_per_s": entry.of("images_per_s"),
                **{f"published_{k}": entry.published.get(k) for k in ("top1", "params_m", "macs_g", "images_per_s")},
                **{s: sum(r.status == s for r in entry.results) for s in (FINISHED, *SYMBOLS)},
            }
        )  # fmt: skip
    return _csv(rows)


def cells_csv(table: SweepTable) -> str:
    """One line per cell."""
    names = [n for n in CellResult.__dataclass_fields__ if n != "cell"]
    rows = []
    for result in (r for entry in table.entries for r in entry.results):
        cell = result.cell
        place = {"row": cell.row, "column": cell.column or "", "seed": cell.seed, "id": cell.id}
        rows.append(place | {n: getattr(result, n) for n in names} | {"overrides": " ".join(cell.overrides)})
    return _csv(rows)


def _csv(rows: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _markdown_row(values: list[str]) -> str:
    return f"| {' | '.join(value.replace('|', '/') for value in values)} |"


def _amount(value: float | None) -> str:
    """Three digits or more, in thousands, millions or billions."""
    for unit, suffix in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value is not None and value >= unit:
            return f"{value / unit:.{max(0, 2 - int(math.log10(value / unit)))}f}{suffix}"
    return _number(value, ".0f")


def _number(value: float | None, form: str, unit: float = 1, suffix: str = "") -> str:
    return "" if value is None else f"{value / unit:{form}}{suffix}"
