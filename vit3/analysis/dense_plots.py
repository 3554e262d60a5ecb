"""Pictures of dense predictions: boxes and masks of things, maps of classes, and scores over a run."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.ticker import MaxNLocator

from vit3.analysis.class_colours import IGNORED, class_colours, ink_on
from vit3.analysis.plots import new_figure
from vit3.analysis.sheet import Panel, draw_sheet

_FONT = 6.5  # points, of labels at boxes
_LOSS, _PARTS = "#444444", ("#8c8c8c", "#b08d57", "#6b8e9b", "#9a7fb0", "#8aa06a", "#b57b7b")
_SCORES = ("#1f5fa8", "#d1661f", "#2c8a4b", "#8a3fa0", "#c02626", "#6b6b00")
_PAPER = dict(facecolor="white", edgecolor="none", alpha=0.8, pad=1.5)  # behind text, so that it can be read on lines


@dataclass
class Instances:
    """Things in one image.

    Attributes:
        boxes: (left, top, right, bottom) in pixels [n, 4]. labels: class indices [n].
        scores: 0 to 1 [n], None for what is true. masks: [n, H, W], bool, where there are masks.
    """

    boxes: np.ndarray
    labels: np.ndarray
    scores: np.ndarray | None = None
    masks: np.ndarray | None = None


def plot_detections(
    images: Sequence[np.ndarray],
    found: Sequence[Instances],
    classes: Sequence[str],
    target: Path,
    title: str,
    truth: Sequence[Instances] | None = None,
    threshold: float = 0.3,
) -> None:
    """Draw images with boxes, classes and scores, and masks where there are masks; the truth to the left of each.

    Args:
        images: [H, W, 3] each, uint8, of any sizes. found, truth: one for each image. target: PNG file to write.
        threshold: things found with a lower score are left out.

    Raises:
        ValueError: another number of images than of what is found, or a label that is no class.
    """
    _check_counts(images, found=found, truth=truth)
    for instances in (*found, *(truth or ())):
        labels = np.asarray(instances.labels)
        if len(labels) and not 0 <= labels.min() <= labels.max() < len(classes):
            raise ValueError(f"label {_stray(labels, len(classes))} has no class; use 0 to {len(classes) - 1}")
    groups = []
    for i, image in enumerate(images):
        kept = _kept(found[i], threshold)
        count = len(kept.labels)
        note = f"things: {count}" if kept.scores is None else f"found: {count} (score ≥ {threshold:g})"
        groups.append([Panel(image, note, _drawer(kept, classes))])
        if truth is not None:
            groups[-1].insert(0, Panel(image, f"truth: {len(truth[i].labels)}", _drawer(truth[i], classes)))
    draw_sheet(groups, target, title)


def plot_class_maps(
    images: Sequence[np.ndarray],
    predicted: Sequence[np.ndarray],
    classes: Sequence[str],
    target: Path,
    title: str,
    truth: Sequence[np.ndarray] | None = None,
    ignore: int = 255,
    note: str = "predicted",
) -> None:
    """Draw images, each with its predicted classes and the true ones beside it, and a legend below.

    Args:
        images: [H, W, 3] each, uint8, of any sizes. predicted, truth: class indices [H, W], one for each image.
        target: PNG file to write. ignore: label of pixels without a class; they are drawn in dark grey.
        note: what to call ``predicted``.

    Raises:
        ValueError: another number of images than of maps, a map of another size, or a label that is no class.
    """
    _check_counts(images, predicted=predicted, truth=truth)
    groups, seen = [], set()
    for i, image in enumerate(images):
        panels = [Panel(image, "image")]
        for name, maps, scored in (("truth", truth, False), (note, predicted, truth is not None)):
            if maps is None:
                continue
            labels = np.asarray(maps[i])
            if labels.shape != image.shape[:2]:
                raise ValueError(f"{name} map {i} is {labels.shape}, its image {image.shape[:2]}; use equal sizes")
            seen |= set(np.unique(labels).tolist())
            right = _share_right(labels, np.asarray(truth[i]), ignore) if scored else ""
            panels.append(Panel(_coloured(labels, classes, ignore), name + right))
        groups.append(panels)
    colours = class_colours(len(classes))
    legend = [(classes[k], tuple(colours[k])) for k in sorted(seen - {ignore})]
    draw_sheet(groups, target, title, legend + ([("no class", IGNORED)] if ignore in seen else []))


def plot_scores(metrics: Path, target: Path, title: str, scores: dict[str, str]) -> None:
    """Draw losses and scores of a run from ``metrics.jsonl``; its scores are 0 to 1, they are drawn in percent.

    Args:
        metrics: one JSON object a line. target: PNG file to write. scores: label of each key to draw.
    """
    records = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines() if line.strip()]
    epochs = [record.get("epoch") for record in records]
    by_epoch = None not in epochs and len(set(epochs)) == len(epochs)
    places = [e + 1 for e in epochs] if by_epoch else [record.get("updates", i) for i, record in enumerate(records)]
    figure = new_figure(10, 3.9)
    left, right = figure.subplots(1, 2)

    def line(axes, key: str, label: str, color: str, factor: float = 1.0, **style) -> list[tuple[float, float]]:
        points = [(x, factor * r[key]) for x, r in zip(places, records) if _finite(r.get(key))]
        if points:
            axes.plot(*zip(*points), color=color, label=label, marker="o" if len(points) < 3 else None, **style)
        return points

    line(left, "train/loss", "training, sum", _LOSS, linewidth=1.8)
    parts = sorted({key for record in records for key in record if key.startswith("train/loss_")})
    for k, key in enumerate(parts):
        style = ("--", ":", "-.")[k // len(_PARTS) % 3]
        line(left, key, key.removeprefix("train/loss_"), _PARTS[k % len(_PARTS)], linestyle=style, linewidth=1.2)
    notes = []
    for k, (key, label) in enumerate(scores.items()):
        points = line(right, key, label, _SCORES[k % len(_SCORES)], 100.0, linewidth=1.6)
        if points:
            where, best = max(points, key=lambda point: point[1])
            notes.append(
                f"{label}: last {points[-1][1]:.1f}, best {best:.1f} ({'epoch' if by_epoch else 'update'} {where:,})"
            )
    for axes, ylabel in ((left, "loss"), (right, "score [%]")):
        axes.set(xlabel="epoch" if by_epoch else "updates", ylabel=ylabel)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))  # there is no half epoch
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if axes.lines:
            axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    right.set_ylim(0, max(right.get_ylim()[1], 1))  # also where all scores are 0
    right.set_title("\n".join(notes), fontsize=8, loc="left", color="#333333")
    figure.suptitle(title, fontsize=10)
    figure.savefig(target)


def _check_counts(images: Sequence[np.ndarray], **others: Sequence | None) -> None:
    if not len(images):
        raise ValueError("there are no images to draw; give at least one")
    for name, values in others.items():
        if values is not None and len(values) != len(images):
            raise ValueError(f"{name} has {len(values)} entries for {len(images)} images; give one for each")


def _stray(labels: np.ndarray, count: int) -> int:
    return int(next(label for label in labels.ravel() if not 0 <= label < count))


def _finite(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _kept(found: Instances, threshold: float) -> Instances:
    """Those of at least the threshold, best last so that they are drawn on top."""
    if found.scores is None:
        return found
    scores = np.asarray(found.scores)
    order = np.argsort(scores, kind="stable")
    order = order[scores[order] >= threshold]
    masks = None if found.masks is None else np.asarray(found.masks)[order]
    return Instances(np.asarray(found.boxes)[order], np.asarray(found.labels)[order], scores[order], masks)


def _drawer(instances: Instances, classes: Sequence[str]):
    def draw(axes) -> None:
        _draw_instances(axes, instances, classes)

    return draw


def _draw_instances(axes, instances: Instances, classes: Sequence[str]) -> None:
    from matplotlib.patches import Rectangle

    colours = class_colours(len(classes)) / 255
    height, width = int(axes.get_ylim()[0]), int(axes.get_xlim()[1])
    if instances.masks is not None and len(instances.labels):
        veil = np.zeros((height, width, 4))
        for mask, label in zip(np.asarray(instances.masks, bool), instances.labels):
            veil[mask] = (*colours[label], 0.45)
        axes.imshow(veil, extent=(0, width, height, 0), aspect="auto", interpolation="nearest")
        for mask, label in zip(np.asarray(instances.masks, bool), instances.labels):
            _contour(axes, mask, colours[label])
    taken: list[tuple[float, float, float, float]] = []
    for k in reversed(range(len(instances.labels))):  # the best ones choose their place first
        (left, top, right, bottom), label = (float(v) for v in instances.boxes[k]), int(instances.labels[k])
        axes.add_patch(Rectangle((left, top), right - left, bottom - top, fill=False, edgecolor=colours[label],
                                 linewidth=1.3, zorder=3 + k / 1000))  # fmt: skip
        text = classes[label] + ("" if instances.scores is None else f" {instances.scores[k]:.2f}")
        _write(axes, text, (left, top, right, bottom), colours[label], taken)


def _contour(axes, mask: np.ndarray, colour: np.ndarray) -> None:
    if not mask.any():
        return
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    part = np.pad(mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].astype(float), 1)
    x, y = (np.arange(n) + first - 0.5 for n, first in zip(part.shape[::-1], (columns[0], rows[0])))
    axes.contour(x, y, part, [0.5], colors=[colour], linewidths=0.9)


def _write(axes, text: str, box: tuple[float, ...], colour: np.ndarray, taken: list) -> None:
    """Write a label at a corner of its box: inside the picture, and off the labels already written where possible."""
    height, width = axes.get_ylim()[0], axes.get_xlim()[1]
    place = axes.get_position()
    inches = axes.figure.get_size_inches()
    pixel = width / (place.width * inches[0] * 72)  # pixels of the image in one point
    wide, high = pixel * _FONT * (0.6 * len(text) + 0.7), pixel * _FONT * 1.45
    left, top, right, bottom = box
    best = None
    for x, y in ((left, top - high), (left, top), (right - wide, top - high), (left, bottom), (right - wide, bottom),
                 (left, bottom - high), (right - wide, bottom - high), (left, (top + bottom - high) / 2)):  # fmt: skip
        x, y = min(max(x, 0), max(width - wide, 0)), min(max(y, 0), max(height - high, 0))
        covered = sum(
            max(0, min(x + wide, c) - max(x, a)) * max(0, min(y + high, d) - max(y, b)) for a, b, c, d in taken
        )
        if best is None or covered < best[0] - 1e-6:
            best = (covered, x, y)
    _, x, y = best
    taken.append((x, y, x + wide, y + high))
    plate = dict(facecolor=colour, edgecolor="none", pad=0.8, alpha=0.9)
    axes.text(x + 0.3 * pixel * _FONT, y + high / 2, text, fontsize=_FONT, va="center_baseline",
              color=ink_on(255 * colour), bbox=plate, zorder=5, clip_on=True)  # fmt: skip


def _coloured(labels: np.ndarray, classes: Sequence[str], ignore: int) -> np.ndarray:
    """Colours [H, W, 3], uint8, of a map."""
    ignored = labels == ignore
    known = (labels >= 0) & (labels < len(classes))
    if not (known | ignored).all():
        stray = int(labels[~(known | ignored)][0])
        raise ValueError(f"label {stray} has no class; use 0 to {len(classes) - 1}, or {ignore} for none")
    colours = np.concatenate([class_colours(len(classes)), np.array([IGNORED], np.uint8)])
    return colours[np.where(ignored, len(classes), labels)]


def _share_right(predicted: np.ndarray, truth: np.ndarray, ignore: int) -> str:
    counted = truth != ignore
    return f", {100 * (predicted == truth)[counted].mean():.1f} % right" if counted.any() else ""
