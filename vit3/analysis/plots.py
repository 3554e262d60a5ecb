"""Pictures of a run: curves over epochs, and test images with predictions."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

_RAW, _EMA, _LOSS, _WRONG = "#1f5fa8", "#d1661f", "#444444", "#c02626"
_PAPER = dict(facecolor="white", edgecolor="none", alpha=0.8, pad=1.5)  # behind text, so that it can be read on lines


def new_figure(width: float, height: float):
    """A figure that needs no display and no global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def plot_curves(metrics: Path, target: Path, title: str) -> None:
    """Draw losses and accuracy over epochs from ``metrics.jsonl``."""
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    epochs = [record["epoch"] + 1 for record in records]
    figure = new_figure(9, 3.6)
    loss, accuracy = figure.subplots(1, 2)

    def line(axes, key: str, label: str, color: str, style: str = "-") -> None:
        if key in records[-1]:
            marker = "o" if len(records) == 1 else None
            axes.plot(epochs, [r.get(key) for r in records], style, color=color, label=label, marker=marker)

    whole = "train/cross_entropy" not in records[-1]  # else the loss has a second part, which sets in later
    line(loss, "train/loss" if whole else "train/cross_entropy", "training (augmented)", _LOSS, "--")
    line(loss, "train/mesa", "training, MESA part", _LOSS, ":")
    line(loss, "val/loss", "test", _RAW)
    line(loss, "val_ema/loss", "test, EMA", _EMA)
    line(accuracy, "val/top1", "top-1", _RAW)
    line(accuracy, "val_ema/top1", "top-1, EMA", _EMA)
    scores = [(r[k], -r["epoch"] - 1) for r in records for k in ("val/top1", "val_ema/top1") if k in r]
    best, epoch = max(scores)  # the first of equal ones
    last = max(records[-1].get(k, 0.0) for k in ("val/top1", "val_ema/top1"))
    accuracy.axhline(best, color="#999999", linewidth=0.8, linestyle=":")
    note = f"last {last:.2f} %, best {best:.2f} % (epoch {-epoch})"
    accuracy.annotate(note, (0.98, 0.04), xycoords="axes fraction", ha="right", color="#333333", bbox=_PAPER)
    for axes, ylabel in ((loss, "loss"), (accuracy, "accuracy [%]")):
        axes.set_xlabel("epoch")
        axes.set_ylabel(ylabel)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    loss.legend(frameon=False)
    accuracy.legend(frameon=False)
    figure.suptitle(title, fontsize=10)
    figure.savefig(target)


def plot_predictions(
    images: np.ndarray, labels: np.ndarray, predictions: np.ndarray, classes: tuple[str, ...], target: Path, title: str
) -> None:
    """Draw a sheet of images, each with its predicted class; wrong ones in red with the right class.

    Args:
        images: (n, H, W, C) or (n, H, W), uint8. labels, predictions: class indices (n,).
    """
    columns = 8
    rows = -(-len(images) // columns)
    height, width = images.shape[1:3]
    title_height, gap = round(0.24 * width) + 1, round(0.12 * width) + 1  # in pixels of the images
    step = (height + title_height, width + gap)
    sheet = np.full((rows * step[0], columns * step[1], 3), 255, np.uint8)  # one picture: 64 axes would take seconds
    figure = new_figure(1.15 * columns, 1.15 * columns * sheet.shape[0] / sheet.shape[1] + 0.5)
    axes = figure.subplots()
    for i, (image, label, prediction) in enumerate(zip(images, labels, predictions)):
        top, left = (i // columns) * step[0] + title_height, (i % columns) * step[1] + gap // 2
        sheet[top : top + height, left : left + width] = image.reshape(height, width, -1)
        wrong = label != prediction
        text = _short(classes[prediction]) + (f" (is {_short(classes[label])})" if wrong else "")
        if len(text) > 14:  # two lines
            text = text.replace(" (", "\n(")
        axes.text(left + width / 2 - 0.5, top - 0.03 * width - 0.5, text, fontsize=6 if "\n" in text else 8,
                  linespacing=1, ha="center", va="bottom", color=_WRONG if wrong else "#222222")  # fmt: skip
    axes.imshow(sheet, interpolation="nearest")
    axes.axis("off")
    figure.suptitle(title, fontsize=10)
    figure.savefig(target)


def _short(name: str) -> str:
    return name if len(name) <= 12 else name[:11] + "…"


_BARS = ("#888888", "#1f5fa8", "#0b8a6a", "#d1661f")  # eager first

_CONTENDERS = {
    "reference": "#888888",
    "fused": "#1f5fa8",
    "triton": "#0b8a6a",
    "softmax (SDPA)": "#c02626",
    "linear attention": "#d1661f",
}


def plot_growth(rows: list, target: Path) -> None:
    """Draw time and kept memory of mixers against tokens.

    Args:
        rows: benchmark rows (:class:`vit3.analysis.benchmark.Row`); those of level ``growth`` are drawn.
        target: PNG file to write.
    """
    rows = [row for row in rows if row.level == "growth"]
    figure = new_figure(12, 4.2)
    panels = figure.subplots(1, 3)
    drawn = [
        ("forward", "p50_ms", "time of a forward pass (ms)"),
        ("forward+backward", "p50_ms", "time of forward and backward (ms)"),
        ("forward+backward", "saved_elements", "kept for the backward pass (MB)"),
    ]
    for axes, (direction, what, title) in zip(panels, drawn):
        labels = []
        for name, color in _CONTENDERS.items():
            points = [
                (r.tokens, getattr(r, what) * (r.tokens * 64 * 4 / 2**20 if what == "saved_elements" else 1))
                for r in rows
                if r.contender == name and r.direction == direction and getattr(r, what) is not None
            ]
            if points:
                axes.plot(*zip(*points), "o-", color=color, markersize=4)
                labels.append((points[-1], name, color))
        axes.set(xscale="log", yscale="log", xlabel="tokens", title=title)
        ticks = sorted({r.tokens for r in rows})
        axes.set_xticks(ticks, [f"{n:,}" for n in ticks], fontsize=8)
        axes.minorticks_off()
        axes.set_xlim(ticks[0] * 0.8, ticks[-1] * 9)
        axes.grid(alpha=0.25)
        low, high = axes.get_ylim()
        gap, last = (high / low) ** 0.055, 0.0
        for (x, y), name, color in sorted(labels, key=lambda label: label[0][1]):
            place = max(y, last * gap)
            axes.annotate(name, (x, place), (6, 0), textcoords="offset points", color=color, fontsize=9, va="center")
            last = place
    threads = f", {rows[0].threads} threads" if rows[0].threads else ""
    figure.suptitle(f"Mixers of 64 channels, one image, {rows[0].dtype}{threads}")
    figure.savefig(target)


def plot_runtimes(rows: list, target: Path) -> None:
    """Draw images a second and peak memory of each runtime, a group of bars for each case.

    Args:
        rows: benchmark rows (:class:`vit3.analysis.benchmark.Row`); those of level ``runtime`` are drawn.
        target: PNG file to write.
    """
    rows = [row for row in rows if row.level == "runtime"]
    cases, names = list(dict.fromkeys(r.case for r in rows)), list(dict.fromkeys(r.contender for r in rows))
    figure = new_figure(10, 3.8)
    panels = figure.subplots(1, 2)
    for axes, what, title in zip(panels, ("images_s", "peak_mb"), ("images per second", "peak resident set (MB)")):
        for i, (name, color) in enumerate(zip(names, _BARS)):
            values = [next((getattr(r, what) for r in rows if (r.case, r.contender) == (c, name)), 0.0) for c in cases]
            places = [j + (i - (len(names) - 1) / 2) * 0.8 / len(names) for j in range(len(cases))]
            bars = axes.bar(places, values, 0.74 / len(names), color=color, label=name)
            axes.bar_label(bars, [f"{value:.3g}" if value < 100 else f"{value:.0f}" for value in values], fontsize=8)
        axes.set_xticks(range(len(cases)), [case.split(" ", 1)[1].replace(" ", "\n", 1) for case in cases])
        axes.set_title(title)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(y=0.12)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(names), frameon=False)
    figure.suptitle(f"{cases[0].split()[0]}, {rows[0].dtype}, CPU, {rows[0].threads} threads")
    figure.savefig(target)
