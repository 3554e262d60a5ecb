"""Draw a sheet of generated patterns, a row of examples per class: ``python scripts/draw_patterns.py OUT.png``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from vit3.data.patterns import Patterns
from vit3.errors import UserError

_ENLARGED = 2
_GAP = 4  # pixels between pictures
_NAMES = 120  # width of the column of names


def sheet(examples: int, size: int, in_chans: int) -> Image.Image:
    """Validation pictures, ``examples`` per class, with the names of the classes.

    Args:
        size: side of a picture in pixels. in_chans: 1 (grey) or 3 (RGB).
    """
    names = Patterns.classes
    data = Patterns("val", (size, size), in_chans, count=examples * len(names))
    step = size * _ENLARGED + _GAP
    page = Image.new("RGB", (_NAMES + examples * step, len(names) * step), "white")
    pen = ImageDraw.Draw(page)
    for row, name in enumerate(names):
        pen.text((_GAP, row * step + step // 2 - 6), name, fill="black")
        for column, i in enumerate(np.flatnonzero(data.labels == row)):
            picture = data[i][0].convert("RGB").resize((size * _ENLARGED,) * 2, Image.Resampling.NEAREST)
            page.paste(picture, (_NAMES + column * step, row * step))
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="picture to write")
    for name, value, text in (
        ("examples", 10, "pictures per class"),
        ("size", 32, "side in pixels, 32 to 64"),
        ("in-chans", 3, "1 (grey) or 3 (RGB)"),
    ):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{text} ({value} if nothing is said)")
    args = parser.parse_args()
    try:
        sheet(args.examples, args.size, args.in_chans).save(args.out)
    except (UserError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(args.out)


if __name__ == "__main__":
    main()
