"""Colours of classes: as far from each other as eyes can tell, and the same for a class in every picture."""

from __future__ import annotations

import functools

import numpy as np

IGNORED = (45, 45, 45)  # of pixels without a class
# The first ones are chosen by eye; each further one is the candidate that is farthest from all before it.
_FIRST = (
    "#2f7ed8", "#f28f2b", "#3aa655", "#d43d51", "#8e5cc4", "#17b5c4", "#e267b5", "#b5bd2b", "#8c5a3c", "#f7c948",
    "#1d4f91", "#8fd694", "#f4a6a0", "#5f6b8f", "#a8d5ee", "#2a6b5a", "#c9a0dc", "#7a1f3d", "#d9c7a0", "#6e7f1f",
)  # fmt: skip
_CHROMA = 75  # of candidates at most; stronger ones are glaring
_TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
_WHITE = np.array([0.9505, 1.0, 1.089])


@functools.cache
def class_colours(count: int) -> np.ndarray:
    """Colours [count, 3], uint8, of classes 0 to count - 1; the first ones do not depend on the count.

    None is near white or black, which stand for paper and for pixels without a class.
    """
    first = np.array([[int(text[i : i + 2], 16) for i in (1, 3, 5)] for text in _FIRST])
    levels = np.linspace(20, 245, 14).astype(int)
    candidates = np.stack(np.meshgrid(levels, levels, levels, indexing="ij"), -1).reshape(-1, 3)
    light, *ab = lab(candidates).T
    candidates = candidates[(light > 30) & (light < 92) & (np.hypot(*ab) < _CHROMA)]
    places = lab(candidates)
    chosen = list(first[:count])
    taken = lab(np.array([*first, IGNORED]))
    far = np.min(np.linalg.norm(places[:, None] - taken, axis=-1), 1)
    while len(chosen) < count:
        best = int(far.argmax())
        chosen.append(candidates[best])
        far = np.minimum(far, np.linalg.norm(places - places[best], axis=-1))
    colours = np.array(chosen, np.uint8).reshape(count, 3)
    colours.setflags(write=False)
    return colours


def lab(colours: np.ndarray) -> np.ndarray:
    """CIE L*a*b* (D65) of sRGB colours [..., 3] of 0 to 255; distances in it are about what eyes see."""
    linear = colours / 255.0
    linear = np.where(linear <= 0.04045, linear / 12.92, ((linear + 0.055) / 1.055) ** 2.4)
    ratio = linear @ _TO_XYZ.T / _WHITE
    f = np.where(ratio > 0.008856, np.cbrt(ratio), 7.787 * ratio + 16 / 116)
    return np.stack([116 * f[..., 1] - 16, 500 * (f[..., 0] - f[..., 1]), 200 * (f[..., 1] - f[..., 2])], -1)


def ink_on(colour: np.ndarray) -> str:
    """Name of the colour, black or white, of text that can be read on a colour [3]."""
    return "black" if lab(np.asarray(colour))[0] > 62 else "white"
