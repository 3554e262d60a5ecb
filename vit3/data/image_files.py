"""Image files as a user names them, and their pixels."""

from __future__ import annotations

import glob
import logging
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from vit3.data.folder import DECODE_ERRORS, converted
from vit3.errors import UserError

logger = logging.getLogger(__name__)

_ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff")


def image_files(images: str | None) -> list[Path]:
    """The files that ``images=FILE_OR_FOLDER`` means, those of a folder by name.

    Raises:
        UserError: nothing given, or nothing there.
    """
    if images is None:
        raise UserError("images has no value yet; set it on the command line: images=FILE_OR_FOLDER")
    path = Path(images)
    if path.is_file():
        return [path]
    found = sorted(file for file in path.rglob("*") if file.suffix.lower() in _ENDINGS) if path.is_dir() else []
    if not found:
        raise UserError(f"images={images}: no image is there; give a file or a folder with {', '.join(_ENDINGS)}")
    return found


def named_images(words: Sequence[str]) -> list[Path]:
    """The files that ``images=[...]`` means, each once: files, folders (see :func:`image_files`) and patterns.

    Args:
        words: a name that exists is that file or folder; any other is a pattern as of :mod:`glob`, with ``**``.

    Raises:
        UserError: nothing given, or one of them is nothing.
    """
    if not words:
        raise UserError("images=[] names no image; give files, folders or patterns such as '*.jpg'")
    found: list[Path] = []
    for word in words:
        places = [word] if Path(word).exists() else sorted(glob.glob(word, recursive=True))
        if not places:
            raise UserError(f"images: there is no file, folder or match of {word}; check the name")
        for place in places:
            found += image_files(place)
    return list(dict.fromkeys(found))


def read_image(path: str | Path, mode: str, *, upright: bool = False) -> Image.Image:
    """An image file, decoded as training data is.

    Args:
        mode: of Pillow, ``L`` or ``RGB``. upright: turn it as its EXIF data says, as OpenCV does and torchvision does
            not.

    Raises:
        UserError: it cannot be decoded.
    """
    try:
        with Image.open(path) as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # corrupt metadata beside good pixels
            return converted(ImageOps.exif_transpose(file) if upright else file, mode)
    except DECODE_ERRORS as error:
        raise UserError(f"{path} cannot be decoded ({error}); replace it or take it out") from error


def read_rgb(path: str | Path, *, upright: bool = False) -> np.ndarray:
    """An image file as (H, W, 3) uint8; arguments and errors as of :func:`read_image`."""
    return np.array(read_image(path, "RGB", upright=upright))


def readable(files: Iterable[Path], *, upright: bool = False) -> Iterator[tuple[Path, np.ndarray]]:
    """Those files that can be decoded, with their pixels as of :func:`read_rgb`; a warning for each other one."""
    for path in files:
        try:
            yield path, read_rgb(path, upright=upright)
        except UserError as error:
            logger.warning("left out: %s", error)
