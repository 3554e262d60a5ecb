"""All images of a set in one .npz, as ADM's evaluation reads it, written image by image."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from vit3.errors import UserError
from vit3.files import replacing


def write_archive(path: Path, images: Iterable[np.ndarray], labels: Sequence[int]) -> None:
    """Write ``arr_0`` (n, H, W, C) uint8 and ``arr_1`` (n,) int64; one image at a time is in memory.

    Grey images are repeated to three channels: https://github.com/openai/guided-diffusion/tree/main/evaluations reads
    colours only. The bytes depend on images and labels alone.

    Args:
        images: (H, W, C) uint8 each, as many as labels. labels: of all images.

    Raises:
        UserError: the images are of several shapes; ``path`` is untouched.
    """
    shape = None
    with replacing(path) as file, zipfile.ZipFile(file, "w") as archive:
        with archive.open(zipfile.ZipInfo("arr_0.npy"), "w", force_zip64=True) as entry:  # its date is always 1980
            for number, image in enumerate(images):
                if image.shape[2] == 1:
                    image = image.repeat(3, axis=2)
                if shape is None:
                    shape = image.shape
                    header = {"descr": "|u1", "fortran_order": False, "shape": (len(labels), *shape)}
                    np.lib.format.write_array_header_1_0(entry, header)
                if image.shape != shape:
                    raise UserError(f"image {number} is {image.shape}, and those before are {shape}; draw it again")
                entry.write(np.ascontiguousarray(image).data)
        with archive.open(zipfile.ZipInfo("arr_1.npy"), "w") as entry:
            np.lib.format.write_array(entry, np.asarray(labels, dtype=np.int64), allow_pickle=False)


def archive_length(path: Path) -> int:
    """How many images an archive holds; 0 where there is none, or none that can be read."""
    try:
        with zipfile.ZipFile(path) as archive, archive.open("arr_0.npy") as entry:
            np.lib.format.read_magic(entry)
            return np.lib.format.read_array_header_1_0(entry)[0][0]
    except (OSError, KeyError, ValueError, zipfile.BadZipFile):
        return 0
