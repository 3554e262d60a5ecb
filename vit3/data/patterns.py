"""Generated images whose classes need texture, place or the relation of two distant objects; nothing is downloaded.

Twelve classes. Textures are stripes or checks with a period of about an eighth of the side; discs are bright, dark or
textured and a third of the side wide.

    texture_level, _upright, _checks   the whole picture is filled with stripes that lie, stripes that stand, or checks
    place_left, _middle, _right        one bright disc at the left, in the middle or at the right; in any of two rows
    plain_alike, _unlike               two plain discs: both bright or both dark, or one of each
    match_alike, _unlike               two striped discs: both lie or both stand, or one of each
    cue_kept, _broken                  a plain and a striped disc: bright and lying or dark and standing, or else

Two discs stand in diagonally opposite quarters. Drawn anew for every picture: the quarters, colours or grey levels,
contrast, phases, periods, sizes, small shifts and turns, faint spots as clutter, noise.

What tokens that do not talk to each other can tell: let every token be any function of its patch and its place, average
over tokens, read out linearly, so that scores are sums over patches. Textures and places can be told so; the last three
pairs of classes cannot. Each is an exclusive or of two fair coins, one a disc: whatever its quarter, any single disc is
of either kind equally often in both classes. A sum over discs thus has the same mean in both, and among such scores
cross-entropy is lowest where both classes get 1/2. Such a network names about 3/4 of all pictures. With patches of an
eighth of the side, diagonal neighbours' centres are 4.5 patches apart in each direction: filters of 3x3 patches bring
both before one token after two or three layers, and have to learn it; attention and fast weights do so at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from PIL import Image
from torch.utils.data import Dataset

from vit3.errors import UserError

CLASSES = (
    "texture_level", "texture_upright", "texture_checks",
    "place_left", "place_middle", "place_right",
    "plain_alike", "plain_unlike", "match_alike", "match_unlike", "cue_kept", "cue_broken",
)  # fmt: skip
KINDS = ("level", "upright", "checks", "bright", "dark")  # of discs
IMAGES = {"train": 4200, "val": 900}
_SPLITS = {"train": 0, "val": 1}
_SPOTS = 6  # of clutter
_NOISE = 0.06
_DRAWS = 33 + 4 * _SPOTS  # random numbers a picture has besides its noise
_CHUNK = 512  # pictures that are drawn at a time: about 30 MB at 32x32


class Patterns(Dataset):
    """Generated pictures, all in memory; picture i depends on seed, split, i, size and channels alone.

    Args:
        split: ``train`` (4,200 pictures) or ``val`` (900); classes follow each other, so all are equally frequent.
        size: (height, width) in pixels, each 32 to 64.
        in_chans: 1 (grey) or 3 (RGB).
        seed: of all that is random. count: how many pictures, if not the usual number.

    Raises:
        UserError: another size or number of channels.
    """

    classes = CLASSES

    def __init__(self, split: str, size: tuple[int, int], in_chans: int, seed: int = 0, count: int | None = None):
        if len(size) != 2 or not all(32 <= side <= 64 for side in size):
            raise UserError(
                f"data.img_size={list(size)} is not possible for patterns; use two sides of 32 to 64 pixels"
            )
        if in_chans not in (1, 3):
            raise UserError(f"data.in_chans={in_chans} is not possible for patterns; use 1 (grey) or 3 (RGB)")
        count = IMAGES[split] if count is None else count
        self.labels = np.arange(count) % len(CLASSES)
        scenes, noise = (np.random.default_rng([seed, _SPLITS[split], part]) for part in (0, 1))
        draws = scenes.random((count, _DRAWS))
        self.images = np.empty((count, *size, in_chans), np.uint8)
        for i in range(0, count, _CHUNK):
            part = slice(i, min(i + _CHUNK, count))
            pixels = _paint(self.labels[part], draws[part], size, in_chans)
            pixels += (_NOISE * 12**0.5) * (noise.random(pixels.shape, np.float32) - 0.5)
            self.images[part] = (255 * pixels).clip(0, 255)
        self.transform: Callable | None = None

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int):
        pixels = self.images[index]
        image = Image.fromarray(pixels if pixels.shape[-1] == 3 else pixels[..., 0])
        return (self.transform(image) if self.transform else image), int(self.labels[index])


@dataclass
class Scenes:
    """What stands where, for n pictures; lengths in units of the side.

    Attributes:
        y, x: centres [n, 2]. radius: [n, 2], 0 for a disc that is absent, 2 for one that fills the picture.
        kind: [n, 2], a place in ``KINDS``. quarter: (row, column) of both discs, 0 or 1 [n, 2, 2].
    """

    y: np.ndarray
    x: np.ndarray
    radius: np.ndarray
    kind: np.ndarray
    quarter: np.ndarray


def arrange(labels: np.ndarray, draws: np.ndarray) -> Scenes:
    """Discs of pictures with these labels.

    Args:
        labels: [n]. draws: uniform random numbers [n, 16 or more].
    """
    texture, place = labels < 3, (3 <= labels) & (labels < 6)
    first = (2 * draws[:, :2]).astype(int)  # (row, column)
    quarter = np.stack([first, 1 - first], 1)
    coin = (2 * draws[:, 2]).astype(int)
    coins = np.stack([coin, coin ^ labels % 2], -1)  # equal in even classes, the first of each pair
    striped = np.stack([labels // 2 == 4, labels >= 8], -1)
    kind = np.where(striped, coins, KINDS.index("bright") + coins)
    kind[texture] = labels[texture, None]
    kind[place] = KINDS.index("bright")
    radius = 0.16 + 0.03 * draws[:, 3:5]
    radius[place, 1] = 0
    radius[texture] = [2, 0]
    shift = 0.06 * (draws[:, 5:9].reshape(-1, 2, 2) - 0.5)
    y, x = np.moveaxis(0.22 + 0.56 * quarter + shift, -1, 0)
    x[place, 0] = (0.22 + 0.28 * (labels - 3) + shift[:, 0, 1])[place]
    return Scenes(y, x, radius, kind, quarter)


def _paint(labels: np.ndarray, draws: np.ndarray, size: tuple[int, int], in_chans: int) -> np.ndarray:
    """Pictures without noise, [n, height, width, in_chans], about 0 to 1."""
    n, scenes = len(labels), arrange(labels, draws)
    row, column = ((np.arange(side, dtype=np.float32) + 0.5) / side for side in size)
    soft = min(size)  # edges are one pixel wide
    free = iter(draws[:, 16:].T.astype(np.float32))

    def covered(y, x, radius):  # [n, height, width]
        far = np.hypot(row[:, None] - _each(y), column - _each(x))
        return ((_each(radius) - far) * soft + 0.5).clip(0, 1) * (_each(radius) > 0)

    light = np.zeros((n, *size), np.float32)  # what objects add, -1 to 1
    for i in range(2):
        wave = _surface(scenes.kind[:, i], row[:, None], column, *(next(free) for _ in range(4)))
        light += wave * covered(scenes.y[:, i], scenes.x[:, i], scenes.radius[:, i])
    contrast = 0.3 + 0.2 * next(free)
    light *= _each(contrast)
    for _ in range(_SPOTS):
        y, x, strength, radius = (next(free) for _ in range(4))
        light += _each(0.2 * (strength - 0.5)) * covered(y, x, 0.03 + 0.03 * radius)
    ground, tint = 0.4 + 0.2 * next(free), np.stack([next(free) for _ in range(2 * in_chans)], -1)
    if in_chans == 1:
        return light[..., None] + _each(ground)[..., None]
    ground = ground[:, None] + 0.3 * (tint[:, :3] - 0.5)
    colour = 0.6 + 0.8 * tint[:, 3:]
    return light[..., None] * colour[:, None, None] + ground[:, None, None]


def _surface(kind, row, column, turn, period, phase_y, phase_x) -> np.ndarray:
    """Values -1 to 1 [n, height, width] of discs of these kinds."""
    angle = _each(0.35 * (turn - 0.5))  # up to 10 degrees
    waves = _each(7.5 + 2 * period)  # along a side
    across = np.sin(2 * np.pi * (waves * (row * np.cos(angle) + column * np.sin(angle)) + _each(phase_y)))
    along = np.sin(2 * np.pi * (waves * (column * np.cos(angle) - row * np.sin(angle)) + _each(phase_x)))
    kind = _each(kind)
    return np.select([kind == i for i in range(4)], [across, along, np.sqrt(2) * across * along, 1.0], -1.0)


def _each(values: np.ndarray) -> np.ndarray:
    """One value per picture, to go with [n, height, width]."""
    return np.asarray(values, np.float32)[:, None, None]
