"""Write an ImageFolder of pictures whose classes can be learned on a CPU: ``python scripts/make_toy_images.py OUT``.

A class is a shape and a texture (see SHAPES and TEXTURES); colours, place, size, turn and background are drawn anew for
every picture, so a network has to look at form. JPEG and PNG files of many odd sizes, seeded.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from vit3.data.textures import TEXTURES, texture

SHAPES = ("disc", "square", "triangle", "star", "ring", "cross")
CLASSES = [f"{shape}_{kind}" for kind, shape in itertools.product(TEXTURES, SHAPES)]
_SMOOTH = 3  # pictures are drawn so many times larger


def picture(name: str, size: int, rng: np.random.Generator) -> Image.Image:
    """One picture of a class.

    Args:
        name: of ``CLASSES``. size: about the shorter side, in pixels. rng: all that is random.
    """
    shape, kind = name.split("_")
    width, height = (int(side) | 1 for side in rng.uniform(0.9, 1.5, 2) * size)  # odd sides
    large = (width * _SMOOTH, height * _SMOOTH)
    dark, light = np.sort(rng.uniform(0, 1, 2)) * (0.6, 0.4) + (0, 0.6)
    first, second = (_colour(value, rng) for value in rng.permutation([dark, light]))
    radius = rng.uniform(0.3, 0.42) * min(large)
    x, y = (rng.uniform(radius, side - radius) for side in large)
    mask = Image.new("L", large)
    _draw(shape, ImageDraw.Draw(mask), x, y, radius, rng.uniform(0, 2 * math.pi))
    inside = _texture(kind, large, radius, first, second, rng)
    outside = np.full((large[1], large[0], 3), second, np.float64)
    covered = np.asarray(mask)[..., None] / 255
    pixels = inside * covered + outside * (1 - covered)
    pixels *= np.linspace(*rng.uniform(0.8, 1.1, 2), large[0])[None, :, None]  # light from one side
    small = Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).resize((width, height), Image.Resampling.BOX)
    noisy = np.asarray(small) + rng.normal(0, 6, (height, width, 3))
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))


def write_folder(out: Path, *, classes: int, train: int, val: int, size: int, seed: int) -> int:
    """Write OUT/{train,val}/CLASS/*; every third file is a PNG. Returns the number of images.

    Args:
        out: must not exist or be empty. classes: how many of ``CLASSES``. train, val: images per class.
        size: about the shorter side, in pixels. seed: the same gives the same files.

    Raises:
        ValueError: numbers out of range, or a folder that holds something.
    """
    if not 2 <= classes <= len(CLASSES):
        raise ValueError(f"classes={classes} is not possible; use 2 to {len(CLASSES)}")
    if min(train, val) < 1 or size < 16:
        raise ValueError(f"train={train}, val={val}, size={size}: at least 1 image a class, of at least 16 pixels")
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty; choose another folder")
    for split, (label, name) in itertools.product(("train", "val"), enumerate(CLASSES[:classes])):
        folder = out / split / name
        folder.mkdir(parents=True)
        for i in range(train if split == "train" else val):
            image = picture(name, size, np.random.default_rng([seed, split == "val", label, i]))
            image.save(folder / (f"{i:04d}.png" if i % 3 == 2 else f"{i:04d}.jpg"), quality=92)
    return classes * (train + val)


def _colour(lightness: float, rng: np.random.Generator) -> np.ndarray:
    """RGB, 0 to 255, of a mean brightness."""
    tint = rng.uniform(0.5, 1, 3)
    return (255 * lightness * tint / tint.mean()).clip(0, 255)


def _draw(shape: str, draw: ImageDraw.ImageDraw, x: float, y: float, radius: float, turn: float) -> None:
    def ring(corners: int, radii: tuple[float, ...]) -> list[tuple[float, float]]:
        angles = [turn + 2 * math.pi * i / corners for i in range(corners)]
        reach = [radius * radii[i % len(radii)] for i in range(corners)]
        return [(x + r * math.cos(a), y + r * math.sin(a)) for r, a in zip(reach, angles)]

    if shape in ("disc", "ring"):
        draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=255)
        if shape == "ring":
            hole = 0.5 * radius
            draw.ellipse((x - hole, y - hole, x + hole, y + hole), fill=0)
    elif shape == "cross":
        for lean in (0, math.pi / 2):
            dx, dy = radius * math.cos(turn + lean), radius * math.sin(turn + lean)
            draw.line((x - dx, y - dy, x + dx, y + dy), fill=255, width=int(0.55 * radius))
    else:
        draw.polygon({"square": ring(4, (1,)), "triangle": ring(3, (1,)), "star": ring(10, (1, 0.42))}[shape], fill=255)


def _texture(
    kind: str, large: tuple[int, int], radius: float, first: np.ndarray, second: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Colours [height, width, 3]: ``first``, broken by the pattern in a mean of both colours."""
    turn, step = rng.uniform(0, math.pi), rng.uniform(0.42, 0.55) * radius
    other = texture(kind, large[::-1], step, turn)
    return np.where(other[..., None], 0.2 * first + 0.8 * second, first)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("out", type=Path, help="folder for train/CLASS/* and val/CLASS/*")
    for name, value, text in (
        ("classes", 20, f"classes, 2 to {len(CLASSES)}"),
        ("train", 40, "training images a class"),
        ("val", 10, "validation images a class"),
        ("size", 64, "about the shorter side, in pixels"),
        ("seed", 0, "of all that is random"),
    ):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{text} ({value} if nothing is said)")
    args = vars(parser.parse_args())
    try:
        count = write_folder(args["out"], **{name: value for name, value in args.items() if name != "out"})
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(f"{count:,} images of {args['classes']} classes: {args['out']}")


if __name__ == "__main__":
    main()
