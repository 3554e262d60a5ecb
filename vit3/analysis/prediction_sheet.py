"""A sheet of images with their predicted classes and, beside each, where the inner step matters in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vit3.analysis.sheet import ColourBar, Panel, draw_sheet

_SHOWN = "what the inner step changed in a token's output before proj: |f(W', q) - f(W0, q)| / |f(W', q)|"


@dataclass(frozen=True)
class Predicted:
    """One image of the sheet.

    Attributes:
        pixels: as the network saw it, (H, W, 1 or 3) uint8. label, probability: of its best class.
        maps: by the number of the block, values (h, w) of :func:`vit3.analysis.inner_maps.inner_maps`.
    """

    pixels: np.ndarray
    label: str
    probability: float
    maps: dict[int, np.ndarray]


def draw_predictions(images: Sequence[Predicted], target: Path, title: str) -> None:
    """Write the sheet as a PNG file; all maps share one scale of colours, from their lowest value to their highest."""
    values = [m for image in images for m in image.maps.values()]
    bar = ColourBar("viridis", min(map(np.min, values)), max(map(np.max, values)), _SHOWN) if values else None
    draw_sheet([_group(image, bar) for image in images], target, title, bar=bar, row_height=1.5)


def _group(image: Predicted, bar: ColourBar | None) -> list[Panel]:
    height, width = image.pixels.shape[:2]
    pixels = np.broadcast_to(image.pixels, (height, width, 3))
    maps = [Panel(_stretched(bar.colours(m), height, width), f"block {n}") for n, m in image.maps.items()]
    return [Panel(pixels, image.label, tail=f"  {100 * image.probability:.1f} %"), *maps]


def _stretched(tokens: np.ndarray, height: int, width: int) -> np.ndarray:
    """A map in colours (h, w, 3) at the size of its image; where the network padded, off by less than a token."""
    rows, columns = (np.arange(side) * count // side for side, count in zip((height, width), tokens.shape))
    return tokens[rows[:, None], columns]
