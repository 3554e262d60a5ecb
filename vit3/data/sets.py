"""From plain values to datasets and loaders (timm's), with the class names that belong to the labels."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.utils.data import Dataset

from vit3.data.classes import note_order, some
from vit3.data.digits import Digits
from vit3.data.folder import FolderImages
from vit3.data.hub import HubReader
from vit3.data.image_folder import folder_reader
from vit3.data.latents import open_latents
from vit3.data.patterns import Patterns
from vit3.data.shards import is_remote, open_shards
from vit3.data.stream import StreamedImages
from vit3.errors import UserError

logger = logging.getLogger(__name__)

DATA_NAMES = ("digits", "patterns", "folder", "imagenet", "wds", "hfds", "latents")
_ROOTS = {
    "folder": "FOLDER with train/ and val/ in it",
    "imagenet": "FOLDER with train/ and val/ in it",
    "wds": "FOLDER with the shards in it",
    "hfds": "FOLDER or the name of a data set on the Hugging Face hub",
    "latents": "FOLDER that tools/cache_latents.py wrote",
}
_OPTIONS = {"wds": {"input_key", "target_key", "stream"}, "hfds": {"input_key", "target_key"}}


@dataclass
class Data:
    """Both splits and what they share.

    Attributes:
        train, val: datasets whose ``transform`` the loader sets. classes: names in label order.
    """

    train: Dataset
    val: Dataset
    classes: tuple[str, ...]

    @property
    def bad_images(self) -> int:
        """Files skipped so far because they could not be decoded."""
        counters = (getattr(split, "bad_images", None) for split in (self.train, self.val))
        return sum(counter.value for counter in counters if counter is not None)


def make_data(
    name: str, root: str | None, in_chans: int, on_bad_image: str, *,
    train_split: str | None = None, val_split: str | None = None, input_key: str | None = None,
    target_key: str | None = None, stream: bool = False, img_size: Sequence[int] | None = None,
) -> Data:  # fmt: skip
    """Open both splits of a data set; the training split decides the classes, the other is read by their names.

    Args:
        name: one of ``DATA_NAMES``.
        root: folder that holds ``train`` and ``val``, or the shards, or a Hugging Face data set; not for digits
            and patterns.
        in_chans: channels of the images.
        on_bad_image: ``raise`` or ``skip``.
        train_split, val_split: names of the splits in the data set; None for the usual ones.
        input_key, target_key: where images and labels stand in shards and Hugging Face data sets; None for the usual.
        stream: read training shards one after another instead of at random.
        img_size: (height, width) at which patterns are drawn, in pixels, and that cached latents must have; other sets
            have sizes of their own.

    Raises:
        UserError: unknown name, missing folder, no image, an empty class folder in the training split, a class that
            only the validation split has, or keys that this kind of data set does not have.
    """
    keys = dict(input_key=input_key, target_key=target_key, img_size=img_size)
    train = open_split(name, root, "train", in_chans, on_bad_image, wanted=train_split, stream=stream, **keys)
    classes = tuple(train.classes)
    note_order(classes)
    val = open_split(name, root, "val", in_chans, on_bad_image, wanted=val_split, classes=classes, **keys)
    return Data(train, val, classes)


def open_split(
    name: str, root: str | None, split: str, in_chans: int, on_bad_image: str, key: str = "data.root", *,
    classes: Sequence[str] | None = None, wanted: str | None = None, input_key: str | None = None,
    target_key: str | None = None, stream: bool = False, img_size: Sequence[int] | None = None,
) -> Dataset:  # fmt: skip
    """Open ``train`` or ``val`` of a data set; arguments as of :func:`make_data`.

    Args:
        key: what the user calls ``root``, for the sentences.
        classes: the stored class map; labels are places in it. None takes the classes of this split.
        wanted: the split's name in the data set.

    Returns:
        A map-style data set, or for training with ``stream`` or a remote ``root`` an iterable one, with ``classes``.
    """
    if name not in DATA_NAMES:
        raise UserError(f"data.name={name} is unknown; use one of: {', '.join(DATA_NAMES)}")
    given = dict(input_key=input_key, target_key=target_key, stream=stream or None)
    for option in given.keys() - _OPTIONS.get(name, set()):
        if given[option] is not None:
            raise UserError(f"data.{option}={given[option]} means nothing to data={name}; leave it out")
    if name == "digits":
        if in_chans != 1:
            raise UserError(f"data.in_chans={in_chans}: the digits have 1 channel")
        _check_classes(name, Digits.classes, classes)
        return Digits(split)
    if name == "patterns":
        _check_classes(name, Patterns.classes, classes)
        return Patterns(split, img_size or (), in_chans)
    if not root:
        raise UserError(f"{key} is not set; data={name} needs {key}={_ROOTS[name]}")
    place = dict(wanted=wanted, classes=classes, key=key)
    if name == "latents":
        return open_latents(root, split, img_size=img_size, in_chans=in_chans, **place)
    keys = dict(input_key=input_key, target_key=target_key)
    if name == "wds" and split == "train" and (stream or is_remote(root)):
        return StreamedImages(root, in_chans, on_bad_image, **place, **keys)
    if name == "wds":
        reader = open_shards(root, split, **place, **keys)
    elif name == "hfds":
        reader = HubReader(root, split, **place, **keys)
    else:
        reader = folder_reader(Path(root), split, **place)
    images = FolderImages(reader, in_chans, on_bad_image, training=split == "train")
    if name == "imagenet" and split == "train" and len(images.classes) != 1000:
        logger.warning(
            "%s=%s holds %d classes, ImageNet-1K has 1000: scores are not those of ImageNet",
            key, root, len(images.classes),
        )  # fmt: skip
    return images


def _check_classes(name: str, own: tuple[str, ...], wanted: Sequence[str] | None) -> None:
    if wanted is not None and tuple(wanted) != own:
        raise UserError(f"the {name} have other classes than the network ({some(list(wanted))}); use the same set")
