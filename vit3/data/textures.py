"""Two-coloured textures: where the second colour stands."""

from __future__ import annotations

import math

import numpy as np

TEXTURES = ("plain", "stripes", "dots", "checks")


def texture(kind: str, size: tuple[int, int], step: float, turn: float) -> np.ndarray:
    """Mask [height, width] of the pixels that the second colour takes.

    Args:
        kind: of ``TEXTURES``. size: (height, width) in pixels. step: period in pixels. turn: in radians.
    """
    row, column = np.ogrid[: size[0], : size[1]]
    u = (column * math.cos(turn) + row * math.sin(turn)) / step % 1
    v = (row * math.cos(turn) - column * math.sin(turn)) / step % 1
    return {
        "plain": np.zeros(u.shape, bool),
        "stripes": u < 0.45,
        "dots": (u - 0.5) ** 2 + (v - 0.5) ** 2 < 0.3**2,
        "checks": (u < 0.5) ^ (v < 0.5),
    }[kind]
