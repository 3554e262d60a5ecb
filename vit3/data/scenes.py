"""Generated scenes: shapes and scanned digits on textured grounds, and which pixels of each remain visible.

Everything random is drawn anew for every scene: odd sizes, one or two grounds, and for every thing its place, radius,
turn, stretch, colours and texture. Most things have a hue near that of their class, which helps to learn from few
pictures, but not all, and grounds and second colours have any: form decides. Later things cover earlier ones; a thing
keeps at least ``_VISIBLE`` of its pixels.
"""

from __future__ import annotations

import colorsys
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vit3.data.textures import texture

GROUNDS = ("plain ground", "striped ground", "checked ground", "speckled ground")
THINGS = ("disc", "ring", "square", "crescent", "triangle", "star", "cross", "digit")
_SMOOTH = 3  # coverage of a pixel is counted at so many points a side
_VISIBLE = 0.55  # the smallest part of a thing that may remain uncovered
_LEAST = 40  # pixels of a thing
_TRUE_HUE = 0.75  # part of things with a hue near their class's
_CONTRAST = 90.0  # smallest distance of a thing's colours from the ground's, of 441 between black and white


@dataclass
class Thing:
    """One thing, or a crowd of many.

    Attributes:
        name: of ``THINGS``. mask: its visible pixels [H, W], bool. crowd: many small ones that are not told apart.
        outline: corners (x, y) in pixels [n, 2], where one closed line bounds all that is visible; else None.
    """

    name: str
    mask: np.ndarray
    crowd: bool
    outline: np.ndarray | None


@dataclass
class Scene:
    """A picture and what stands in it.

    Attributes:
        pixels: [H, W, 3], uint8. ground: place in ``GROUNDS`` of what lies behind each pixel [H, W].
        things: from the back to the front; their masks do not meet.
    """

    pixels: np.ndarray
    ground: np.ndarray
    things: list[Thing]


def draw_scene(
    rng: np.random.Generator, size: int, names: Sequence[str], digits: np.ndarray, *, count: int, crowd: bool = False
) -> Scene:
    """Draw one scene.

    Args:
        rng: all that is random. size: about the shorter side, in pixels. names: of ``THINGS``, those that may occur.
        digits: scans to choose from [n, 8, 8], 0 to 255. count: how many things are tried. crowd: a crowd besides.
    """
    height, width = (int(side) | 1 for side in rng.uniform((0.75, 0.9), (1.2, 1.5)) * size)  # odd sides
    pixels, ground, colours = _draw_ground(rng, height, width, size)
    names_here, covers, outlines = [], [], []
    for i in range(count + crowd):
        name = str(rng.choice([n for n in names if n != "digit"] if crowd and i == 0 else names))
        for _ in range(12):
            draw = _place_crowd if crowd and i == 0 else _place
            cover, outline = draw(rng, name, height, width, size, digits)
            solid = cover > 0.5
            visible = [((c > 0.5) & ~_union(covers[k + 1 :], solid)).sum() for k, c in enumerate(covers)]
            enough = all(v >= max(_LEAST, _VISIBLE * (c > 0.5).sum()) for v, c in zip(visible, covers))
            if enough and solid.sum() >= _LEAST:
                _paint(rng, pixels, cover, colours, size, name)
                names_here.append(name)
                covers.append(cover)
                outlines.append(outline)
                break
    things = []
    for k, (name, cover, outline) in enumerate(zip(names_here, covers, outlines)):
        over = _union(covers[k + 1 :], np.zeros((height, width), bool))
        whole = outline is not None and not (over & (cover > 0)).any() and _inside(outline, height, width)
        things.append(Thing(name, (cover > 0.5) & ~over, bool(crowd and k == 0), outline if whole else None))
    light = np.linspace(*rng.uniform(0.85, 1.1, 2), width)[None, :, None] * np.linspace(
        *rng.uniform(0.9, 1.05, 2), height)[:, None, None]  # fmt: skip
    pixels = pixels * light + rng.normal(0, 6, pixels.shape)
    return Scene(pixels.clip(0, 255).astype(np.uint8), ground, things)


def _draw_ground(rng, height: int, width: int, size: int) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Pixels [height, width, 3], kinds [height, width], and the colours in them."""
    row, column = np.mgrid[:height, :width]
    turn, shift = rng.uniform(0, 2 * math.pi), rng.uniform(-0.25, 0.25) * size
    beyond = (row - height / 2) * math.sin(turn) + (column - width / 2) * math.cos(turn) > shift
    if rng.random() < 0.3:
        beyond[:] = False
    kinds = rng.choice(len(GROUNDS), 2, replace=False)
    pixels, colours = np.zeros((height, width, 3)), []
    for kind, part in zip(kinds, (~beyond, beyond)):
        first = rng.uniform(60, 190) + rng.uniform(-28, 28, 3)
        second = first + rng.choice([-1, 1]) * rng.uniform(22, 40) + rng.uniform(-8, 8, 3)
        pixels[part] = (first + (second - first) * _share(rng, GROUNDS[kind], height, width, size)[..., None])[part]
        colours += [first, second]
    return pixels, np.where(beyond, kinds[1], kinds[0]), colours


def _share(rng, kind: str, height: int, width: int, size: int) -> np.ndarray:
    """Share of the second colour in each pixel [height, width]."""
    turn, step = rng.uniform(0, math.pi), rng.uniform(0.1, 0.16) * size
    if kind == "plain ground":
        row, column = np.mgrid[:height, :width]
        return 0.5 + 0.5 * ((row / height - 0.5) * math.sin(turn) + (column / width - 0.5) * math.cos(turn))
    if kind == "speckled ground":
        grain = 3
        rough = rng.random((height // grain + 1, width // grain + 1))
        return np.kron(rough, np.ones((grain, grain)))[:height, :width]
    return texture({"striped ground": "stripes", "checked ground": "checks"}[kind], (height, width), step, turn)


def _place(rng, name: str, height: int, width: int, size: int, digits: np.ndarray, radius: float | None = None,
           centre: tuple[float, float] | None = None) -> tuple[np.ndarray, np.ndarray | None]:  # fmt: skip
    """Coverage [height, width], 0 to 1, of a thing at a random place, and its outline where it has but one."""
    radius = size * math.exp(rng.uniform(math.log(0.11), math.log(0.25))) if radius is None else radius
    x, y = (rng.uniform(0.6 * radius, side - 0.6 * radius) for side in (width, height)) if centre is None else centre
    if name == "digit":
        scan = digits[rng.integers(len(digits))]
        return _cover_scan(scan, height, width, x, y, 1.15 * radius, rng.uniform(-0.35, 0.35)), None
    turn, stretch = rng.uniform(0, 2 * math.pi), rng.uniform(0.8, 1.0)
    lean = np.array([[math.cos(turn), -math.sin(turn)], [math.sin(turn), math.cos(turn)]])
    loops = [radius * loop * (1, stretch) @ lean.T + (x, y) for loop in _loops(name)]
    return _cover_loops(loops, height, width), loops[0] if len(loops) == 1 else None


def _place_crowd(rng, name: str, height: int, width: int, size: int, digits: np.ndarray) -> tuple[np.ndarray, None]:
    """Coverage of nine to sixteen small things side by side."""
    radius = rng.uniform(0.045, 0.06) * size
    rows, columns = (int(n) for n in rng.integers(3, 5, 2))
    x, y = (rng.uniform(0, side - 2.3 * radius * n) for side, n in ((width, columns), (height, rows)))
    cover = np.zeros((height, width))
    for i in range(rows * columns):
        centre = [start + radius * (1.15 + 2.3 * k) for start, k in ((x, i % columns), (y, i // columns))]
        centre += rng.uniform(-0.15, 0.15, 2) * radius
        cover = np.maximum(cover, _place(rng, name, height, width, size, digits, radius, tuple(centre))[0])
    return cover, None


def _paint(rng, pixels: np.ndarray, cover: np.ndarray, ground: list[np.ndarray], size: int, name: str) -> None:
    """Colour what is covered, in place."""

    def colour(hue: float | None) -> np.ndarray:
        for _ in range(30):
            turn = rng.uniform(0, 1) if hue is None else hue + rng.uniform(-0.07, 0.07)
            tint = 255 * np.array(colorsys.hsv_to_rgb(turn % 1, rng.uniform(0.45, 1), rng.uniform(0.35, 1)))
            if min(np.linalg.norm(tint - other) for other in ground) >= _CONTRAST:
                break
        return tint

    first = colour(THINGS.index(name) / len(THINGS) if rng.random() < _TRUE_HUE else None)
    second = colour(None)
    kind = ("plain", "plain", "stripes", "dots")[rng.integers(4)]
    other = texture(kind, cover.shape, rng.uniform(0.045, 0.065) * size, rng.uniform(0, math.pi))
    ink = np.where(other[..., None], second, first)
    pixels += cover[..., None] * (ink - pixels)


def _loops(name: str) -> list[np.ndarray]:
    """Closed lines [n, 2] within a circle of radius 1; inside is what an odd number of them surrounds."""

    def circle(corners: int, *radii: float) -> np.ndarray:
        angles = 2 * math.pi * np.arange(corners) / corners
        return np.resize(radii, corners)[:, None] * np.stack([np.cos(angles), np.sin(angles)], -1)

    if name == "ring":
        return [circle(28, 1.0), circle(20, 0.55)]
    if name == "cross":
        a = 0.28
        quarter = np.array([(1, -a), (1, a), (a, a)])
        turns = [np.array([[c, -s], [s, c]]) for c, s in ((1, 0), (0, 1), (-1, 0), (0, -1))]
        return [np.concatenate([quarter @ turn.T for turn in turns])]
    if name == "crescent":
        outer, inner = circle(36, 1.0), circle(36, 0.85) + (0.5, 0)
        outer, inner = outer[np.hypot(*(outer - (0.5, 0)).T) > 0.85], inner[np.hypot(*inner.T) < 1]
        return [np.concatenate([outer, inner[::-1]])]
    corners = {"disc": (28, 1.0), "square": (4, 1.0), "triangle": (3, 1.0), "star": (10, 1.0, 0.42)}
    return [circle(*corners[name])]


def _cover_loops(loops: list[np.ndarray], height: int, width: int) -> np.ndarray:
    """Share of each pixel [height, width] that lies inside."""
    low = np.floor(np.min([loop.min(0) for loop in loops], 0)).astype(int).clip(0)
    high = np.minimum(np.ceil(np.max([loop.max(0) for loop in loops], 0)).astype(int), (width, height))
    cover = np.zeros((height, width))
    if (low >= high).any():
        return cover
    columns, rows = high - low
    x = low[0] + (np.arange(columns * _SMOOTH) + 0.5) / _SMOOTH
    y = (low[1] + (np.arange(rows * _SMOOTH) + 0.5) / _SMOOTH)[:, None]
    inside = np.zeros((len(y), len(x)), bool)
    for loop in loops:
        for (xa, ya), (xb, yb) in zip(loop, np.roll(loop, -1, 0)):
            if ya != yb:
                inside ^= ((ya <= y) != (yb <= y)) & (x < xa + (y - ya) * (xb - xa) / (yb - ya))
    counted = inside.reshape(rows, _SMOOTH, columns, _SMOOTH).mean((1, 3))
    cover[low[1] : high[1], low[0] : high[0]] = counted
    return cover


def _cover_scan(scan, height: int, width: int, x: float, y: float, radius: float, turn: float) -> np.ndarray:
    """Ink [height, width], 0 to 1, of a scan enlarged to 2 x radius and turned; bilinear, then sharpened."""
    row, column = np.mgrid[:height, :width] + 0.5
    right = ((column - x) * math.cos(turn) + (row - y) * math.sin(turn)) * 4 / radius + 4.5  # in pixels of the scan,
    down = ((row - y) * math.cos(turn) - (column - x) * math.sin(turn)) * 4 / radius + 4.5  # which has a margin of 1
    ink = np.pad(scan / 255.0, 1)
    right, down = right.clip(0, 8.999), down.clip(0, 8.999)
    j, i = right.astype(int), down.astype(int)
    b, a = right - j, down - i
    value = (1 - a) * ((1 - b) * ink[i, j] + b * ink[i, j + 1]) + a * ((1 - b) * ink[i + 1, j] + b * ink[i + 1, j + 1])
    return ((value - 0.3) / 0.25).clip(0, 1)


def _union(covers: list[np.ndarray], solid: np.ndarray) -> np.ndarray:
    return np.any([solid, *(cover > 0.5 for cover in covers)], 0)


def _inside(outline: np.ndarray, height: int, width: int) -> bool:
    return bool((outline >= 0).all() and (outline <= (width, height)).all())
