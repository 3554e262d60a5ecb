"""Pictures of a sweep: a dot per row with its seeds and spread beside what was published, or a heat map."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from vit3.analysis.plots import new_figure
from vit3.analysis.sweep_table import SYMBOLS, SweepTable
from vit3.analysis.sweep_text import score_text
from vit3.sweeps.cell import DIVERGED

_OURS, _PUBLISHED, _BASE = "#1f5fa8", "#d1661f", "#777777"


def plot_table(table: SweepTable, target: Path) -> None:
    """Draw the table: a heat map where it has columns, else dots.

    Args:
        target: PNG file to write.
    """
    (_plot_map if table.columns else _plot_dots)(table, target)


def _plot_dots(table: SweepTable, target: Path) -> None:
    entries = table.entries
    quoted = [entry.published.get("top1") for entry in entries]
    panels = 2 if any(value is not None for value in quoted) else 1
    labels = [
        e.line.title + (f"\n{e.marks} {len(e.scores)} of {len(e.results)} seeds" if e.marks else "") for e in entries
    ]
    wide = min(4.0, 0.085 * max(len(line) for label in labels for line in label.split("\n")))
    figure = new_figure(4.6 * panels + wide + 0.6, 0.42 * len(entries) + 1.7)
    axes = figure.subplots(1, panels, sharey=True, squeeze=False)[0]
    ours = axes[0]
    places = range(len(entries))
    for place, entry in zip(places, entries):
        mean = entry.mean if entry.mean is not None else entry.before_divergence
        if entry.scores:
            shifts = np.linspace(-0.16, 0.16, len(entry.scores)) if len(entry.scores) > 1 else [0.0]
            ours.plot(entry.scores, [place + s for s in shifts], "o", color=_OURS, alpha=0.35, markersize=4, zorder=2)
            ours.errorbar(mean, place, xerr=entry.std, fmt="o", color=_OURS, capsize=4, markersize=7, zorder=3)
        elif mean is not None:
            ours.plot(mean, place, "x", color=_OURS, markersize=7)
    base = table.entry(table.baseline, None)
    if base is not None and base.mean is not None:
        ours.axvline(base.mean, color=_BASE, linewidth=0.9, linestyle=":", zorder=1)
    ours.set_title("here: mean ± std, dots = seeds, dotted = baseline", fontsize=9)
    if panels == 2:
        other = axes[1]
        for place, value in zip(places, quoted):
            if value is not None:
                other.plot(value, place, "o", color=_PUBLISHED, markerfacecolor="white", markersize=7)
        said = base.published.get("top1") if base is not None else None
        if said is not None:
            other.axvline(said, color=_BASE, linewidth=0.9, linestyle=":", zorder=1)
        other.set_title(f"published ({table.source}), not rerun", fontsize=9)
    for panel in axes:
        panel.set_xlabel("top-1 [%]")
        panel.grid(axis="x", alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
        panel.margins(x=0.12)
    ours.set_yticks(list(places), labels)
    ours.set_ylim(len(entries) - 0.5, -0.5)  # the first row on top
    figure.suptitle(_headline(table), fontsize=10)
    figure.savefig(target)


def _plot_map(table: SweepTable, target: Path) -> None:
    rows, columns = table.rows, table.columns
    entries = [[table.entry(row, column) for column in columns] for row in rows]
    means = np.array([[e.mean if e and e.mean is not None else np.nan for e in line] for line in entries], dtype=float)
    figure = new_figure(1.5 * len(columns) + 3.4, 0.55 * len(rows) + 2.0)
    axes = figure.subplots()
    image = axes.imshow(means, cmap="Blues", aspect="auto")
    finite = means[np.isfinite(means)]
    middle = (finite.min() + finite.max()) / 2 if finite.size else 0.0
    for i, line in enumerate(entries):
        for j, entry in enumerate(line):
            if entry is None:
                continue
            dark = np.isfinite(means[i, j]) and means[i, j] > middle
            text = score_text(entry).replace(" (n", "\n(n")
            axes.text(j, i, text, ha="center", va="center", fontsize=8, color="white" if dark else "#222222")
    axes.set_xticks(range(len(columns)), [table.column_title(column) for column in columns])
    axes.set_yticks(range(len(rows)), [next(e for e in line if e).line.title for line in entries])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    if finite.size:
        figure.colorbar(image, label="top-1 [%]")
    figure.suptitle(_headline(table), fontsize=10)
    figure.savefig(target)


def _headline(table: SweepTable) -> str:
    found = [status for status in SYMBOLS if any(r.status == status for e in table.entries for r in e.results)]
    legend = ", ".join(f"{SYMBOLS[status]} {status}" for status in found)
    crosses = " (cross: best value before)" if DIVERGED in found and not table.columns else ""
    line = f"{table.title}: {table.content.get('data')}, seeds {', '.join(map(str, table.seeds))}"
    return f"{line}\n{legend}{crosses}" if legend else line
