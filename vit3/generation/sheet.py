"""A picture of generated images, by class."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from vit3.analysis.plots import new_figure
from vit3.files import replacing

_SMALLEST = 48  # pixels that the longer side of an image gets at least, by whole factors
_GAP, _TITLE, _CHARACTER, _LONGEST = 3, 30, 8, 18  # pixels, but for the last: characters of a class name


def save_sheet(
    images: np.ndarray | Tensor, labels: Sequence[int], classes: Sequence[str], path: Path, title: str
) -> None:
    """Draw the images of each class in a row behind its name; short rows stand beside each other.

    Args:
        images: (n, H, W, C) uint8, C = 1 or 3, all shown. labels: of the images. classes: names by label.
        path: PNG file to write, whole or not at all. title: above the images.

    Raises:
        ValueError: no image, other channels, or another number of labels.
    """
    images = images.cpu().numpy() if isinstance(images, Tensor) else images
    labels = [int(label) for label in labels]
    if images.ndim != 4 or not len(images) or images.shape[3] not in (1, 3) or len(images) != len(labels):
        raise ValueError(f"a sheet needs images (n, H, W, 1 or 3) and n labels, got {images.shape} and {len(labels)}")
    factor = -(-_SMALLEST // max(images.shape[1:3]))
    images = images.repeat(factor, axis=1).repeat(factor, axis=2)
    height, width = images.shape[1:3]
    rows = [[i for i, label in enumerate(labels) if label == shown] for shown in sorted(set(labels))]
    names = [_short(classes[labels[row[0]]]) for row in rows]
    margin = _CHARACTER * max(map(len, names)) + 3 * _GAP
    step = margin + max(map(len, rows)) * (width + _GAP)  # of a row, its name included
    beside = max(1, round((len(rows) * (height + _GAP) / step) ** 0.5))  # about as wide as high
    deep = -(-len(rows) // beside)
    sheet_width = max(-(-len(rows) // deep) * step + _GAP, _CHARACTER * len(title))
    sheet = np.full((_TITLE + deep * (height + _GAP), sheet_width, 3), 255, np.uint8)
    figure = new_figure(1, 1)
    figure.set_layout_engine("none")
    figure.set_size_inches(sheet.shape[1] / figure.dpi, sheet.shape[0] / figure.dpi)  # one pixel is one pixel
    axes = figure.add_axes((0, 0, 1, 1))
    for number, (row, name) in enumerate(zip(rows, names)):
        left, top = number // deep * step + margin, _TITLE + number % deep * (height + _GAP)
        for place, i in enumerate(row):
            x = left + place * (width + _GAP)
            sheet[top : top + height, x : x + width] = images[i]
        axes.text(left - 2 * _GAP, top + height / 2, name, fontsize=8, ha="right", va="center", color="#222222")
    axes.imshow(sheet, interpolation="nearest", aspect="auto")
    axes.text(sheet.shape[1] / 2, _TITLE / 2, title, fontsize=9, ha="center", va="center", color="#222222")
    axes.axis("off")
    with replacing(path) as file:
        figure.savefig(file, format="png")


def _short(name: str) -> str:
    name = name.split(",")[0]  # of ImageNet's names the first is the usual one
    return name if len(name) <= _LONGEST else name[: _LONGEST - 1] + "…"
