"""Images by number, from any reader, with a stated policy for those that cannot be decoded."""

from __future__ import annotations

import multiprocessing
import warnings

import numpy as np
from PIL import Image
from timm.data import ImageDataset

from vit3.errors import UserError

# What Pillow raises for files that are cut off, empty, no image or beyond its limit of pixels
DECODE_ERRORS = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)
_MODES = {1: "L", 3: "RGB"}
_RETRIES = 50


class FolderImages(ImageDataset):
    """A timm image dataset that either stops at a bad file or counts it and goes on.

    In training the next image takes a bad one's place, with its own label; in evaluation a blank one does, with label
    -1, which :func:`vit3.engine.evaluate.evaluate` leaves out, so that no image counts twice.

    Args:
        reader: timm reader: folders, shards on this machine or a Hugging Face data set.
        in_chans: 1 (grey) or 3 (RGB); palettes, CMYK and 16-bit images are converted.
        on_bad_image: ``raise`` or ``skip``.
        training: which of the two ways to go on.

    Attributes:
        bad_images: shared counter of skipped files, over all loader processes.

    Raises:
        UserError: in_chans is neither 1 nor 3.
    """

    def __init__(self, reader, in_chans: int, on_bad_image: str, training: bool):
        super().__init__(root=None, reader=reader, input_img_mode=image_mode(in_chans))
        self.skip, self.training = on_bad_image == "skip", training
        self.bad_images = multiprocessing.Value("q", 0)

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names in the order of their labels."""
        return tuple(sorted(self.reader.class_to_idx, key=self.reader.class_to_idx.get))

    def decode(self, index: int) -> tuple[Image.Image, int]:
        """Image and label of one file.

        Raises:
            UserError: the file cannot be decoded.
        """
        try:
            file, target = self.reader[index]
            with file, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # corrupt metadata beside good pixels
                return converted(Image.open(file), self.input_img_mode), target
        except DECODE_ERRORS as error:
            name = self.reader.filename(index, absolute=True)
            raise UserError(
                f"{name} cannot be decoded ({error}); repair or remove it, or set data.on_bad_image=skip"
            ) from error

    def __getitem__(self, index: int):
        for _ in range(_RETRIES):
            try:
                image, target = self.decode(index)
                return (self.transform(image) if self.transform else image), target
            except UserError:
                if not self.skip:
                    raise
                with self.bad_images.get_lock():
                    self.bad_images.value += 1
                if not self.training:
                    blank = Image.new(self.input_img_mode, (64, 64))
                    return (self.transform(blank) if self.transform else blank), -1
                index = (index + 1) % len(self)
        raise UserError(f"{_RETRIES} images in a row cannot be decoded; check the files under data.root")


def image_mode(in_chans: int) -> str:
    """Pillow's mode for 1 or 3 channels.

    Raises:
        UserError: another number.
    """
    if in_chans not in _MODES:
        raise UserError(f"data.in_chans={in_chans} is not possible for image files; use 1 (grey) or 3 (RGB)")
    return _MODES[in_chans]


def converted(image: Image.Image, mode: str) -> Image.Image:
    """``image`` in ``mode``; 16-bit samples are scaled to 8 bit, which Pillow would clip to white."""
    if image.mode.startswith("I"):
        pixels = np.asarray(image).astype(np.int64)
        if image.mode.startswith("I;16") or pixels.max(initial=0) > 255:
            pixels = pixels >> 8
        image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
    return image.convert(mode)
