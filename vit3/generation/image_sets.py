"""Sets of images to compare: a folder, an ``.npz`` or the embedded digits, read in order as RGB."""

from __future__ import annotations

import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.lib import format as npy
from PIL import Image
from torch import Tensor

from vit3.data import open_split
from vit3.data.folder import DECODE_ERRORS
from vit3.data.image_files import image_files, read_rgb
from vit3.engine.progress import progress
from vit3.errors import UserError

DIGITS = "digits"
_THREADS = 8  # decoders; Pillow lets other threads run while it decodes
_FLAWS = (*DECODE_ERRORS, zipfile.BadZipFile)


@dataclass(frozen=True)
class ImageSet:
    """Images of one size.

    Attributes:
        title: what it is, for a report. n: images. size: (height, width) in pixels.
        read: gives the images in order, as arrays (b, H, W, C) of uint8 with 1 or 3 channels, for a batch size.
        numbers: of the images, where their files are named by them; None otherwise.
    """

    title: str
    n: int
    size: tuple[int, int]
    read: Callable[[int], Iterator[np.ndarray]] = field(repr=False)
    numbers: tuple[int, ...] | None = None

    def __post_init__(self):
        if self.n < 2:
            raise UserError(f"{self.title} holds {self.n} image; a set needs at least 2")

    def batches(self, batch_size: int) -> Iterator[Tensor]:
        """The images in order, (b, H, W, 3) uint8; grey ones get three equal channels."""
        for batch in self.read(batch_size):
            batch = np.repeat(batch, 3, axis=-1) if batch.shape[-1] == 1 else batch
            yield torch.from_numpy(np.ascontiguousarray(batch))


def open_images(place: str, key: str) -> ImageSet:
    """The images that the argument ``key`` means.

    Args:
        place: a folder (at any depth below it), an ``.npz`` with images in ``arr_0``, ``digits`` (their training
            images) or ``digits:val``. A folder that is called digits is ``./digits``.

    Raises:
        UserError: nothing there, fewer than two images, several sizes, or files that cannot be read, with their count.
    """
    name, _, split = place.partition(":")
    if name == DIGITS:
        return _digits(place, split or "train", key)
    path = Path(place)
    if path.suffix == ".npz":
        return npz_images(path, key)
    if not path.is_dir():
        raise UserError(f"{key}={place}: no such folder; give a folder of images, a file.npz or {DIGITS}")
    return folder_images(image_files(place), place)


def folder_images(files: Sequence[Path], title: str, numbers: tuple[int, ...] | None = None) -> ImageSet:
    """The images in ``files``; all are looked at once, so that a bad one is found before the first is used.

    Raises:
        UserError: some cannot be read, or they differ in size.
    """
    with ThreadPoolExecutor(_THREADS) as pool, progress(f"checking {title}", len(files), enabled=True) as advance:
        sizes = []
        for size in pool.map(_size_of, files):
            sizes.append(size)
            advance(1)
    bad = [file for file, size in zip(files, sizes) if size is None]
    if bad:
        names = ", ".join(str(file) for file in bad[:5]) + (", …" if bad[5:] else "")
        raise UserError(f"{title}: {len(bad)} of {len(files)} images cannot be read ({names}); replace or remove them")
    (size, count), *others = Counter(sizes).most_common()
    if others:
        odd = next(file for file, other in zip(files, sizes) if other != size)
        raise UserError(
            f"{title}: {count} images are {size[0]}x{size[1]} and {len(files) - count} are not (as {odd}); "
            "bring all to one size, as the generator's training images were"
        )

    def read(batch_size: int) -> Iterator[np.ndarray]:
        with ThreadPoolExecutor(_THREADS) as pool:
            for start in range(0, len(files), batch_size):
                yield np.stack(list(pool.map(read_rgb, files[start : start + batch_size])))

    return ImageSet(title, len(files), size, read, numbers)


def npz_images(path: Path, key: str) -> ImageSet:
    """The images in ``arr_0`` of an ``.npz``, (n, H, W, C) or (n, H, W) of uint8, which is never in memory as a whole.

    Raises:
        UserError: no such file or array, or it holds something else.
    """
    try:
        with _open_array(path) as (_, (shape, fortran, dtype)):
            pass
    except FileNotFoundError as error:
        raise UserError(f"{key}={path}: no such file") from error
    except KeyError as error:
        raise UserError(f"{key}={path} holds no images: there is no arr_0 in it") from error
    except _FLAWS as error:
        raise UserError(f"{key}={path} cannot be read ({error}); write it again") from error
    grey = len(shape) == 3
    if dtype != np.uint8 or fortran or not (grey or len(shape) == 4 and shape[-1] in (1, 3)):
        raise UserError(
            f"{key}={path}: arr_0 is {dtype} {shape}; images are uint8 (n, height, width, channels), 1 or 3 channels"
        )
    n, rest = shape[0], (*shape[1:], 1) if grey else shape[1:]

    def read(batch_size: int) -> Iterator[np.ndarray]:
        with _open_array(path) as (file, _):
            for start in range(0, n, batch_size):
                count = min(batch_size, n - start)
                data = _read_exactly(file, count * int(np.prod(rest)), path)
                yield np.frombuffer(data, np.uint8).reshape(count, *rest).copy()

    return ImageSet(str(path), n, rest[:2], read)


class _open_array:
    """Context that yields the stream of ``arr_0`` of an ``.npz``, past its header, and (shape, fortran, dtype)."""

    def __init__(self, path: Path):
        self._path = path

    def __enter__(self):
        self._zip = zipfile.ZipFile(self._path)
        try:
            self._file = self._zip.open("arr_0.npy")
            version = npy.read_magic(self._file)
            header = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}[version](self._file)
        except BaseException:
            self._zip.close()
            raise
        return self._file, header

    def __exit__(self, *error):
        self._file.close()
        self._zip.close()


def _read_exactly(file, count: int, path: Path) -> bytes:
    try:
        data = file.read(count)
    except _FLAWS as error:
        raise UserError(f"{path} is damaged ({error}); write it again") from error
    if len(data) != count:
        raise UserError(f"{path} is cut off; write it again")
    return data


def _digits(place: str, split: str, key: str) -> ImageSet:
    if split not in ("train", "val"):
        raise UserError(f"{key}={place}: the digits have the splits train and val; use {DIGITS} or {DIGITS}:val")
    images = open_split(DIGITS, None, split, 1, "raise").images[..., None]

    def read(batch_size: int) -> Iterator[np.ndarray]:
        for start in range(0, len(images), batch_size):
            yield images[start : start + batch_size]

    return ImageSet(f"{DIGITS}:{split}", len(images), images.shape[1:3], read)


def _size_of(file: Path) -> tuple[int, int] | None:
    """(height, width), after the checksums that the format has; None where the file is no whole image."""
    try:
        with Image.open(file) as image:
            width, height = image.size
            image.verify()
            return height, width
    except DECODE_ERRORS:
        return None
