"""Pictures of a generator's training."""

from __future__ import annotations

import json
from pathlib import Path

from matplotlib.ticker import MaxNLocator

from vit3.analysis.plots import new_figure

_LINES = {
    "train/loss": ("training", "#888888", "--"),
    "val/loss": ("test", "#1f77b4", "-"),
    "val_ema/loss": ("test, EMA", "#d62728", "-"),
}


def plot_losses(metrics: Path, target: Path, title: str) -> None:
    """Draw the losses of a run from ``metrics.jsonl``: all epochs, and the last four fifths on a scale of their own.

    Args:
        metrics: one JSON object a line. target: PNG file to write.
    """
    records = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines() if line.strip()]
    figure = new_figure(10, 3.6)
    for axes, shown in zip(figure.subplots(1, 2), (records, records[len(records) // 5 :])):
        for key, (label, color, style) in _LINES.items():
            points = [(record["epoch"] + 1, record[key]) for record in shown if key in record]
            if points:
                marker = "o" if len(points) < 3 else None
                axes.plot(*zip(*points), style, color=color, label=label, marker=marker, linewidth=1.4)
        axes.set(xlabel="epoch", ylabel="loss", yscale="log" if shown is records else "linear")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    best = {key: min((r[key], r["epoch"] + 1) for r in records if key in r) for key in _LINES if key in records[-1]}
    notes = [f"{_LINES[key][0]} {value:.5f} (epoch {epoch})" for key, (value, epoch) in best.items()]
    figure.axes[0].legend(frameon=False)
    figure.suptitle(f"{title}: least {', '.join(notes)}", fontsize=9)
    figure.savefig(target)
