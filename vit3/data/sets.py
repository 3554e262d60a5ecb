"""From plain values to datasets and loaders (timm's), with the class names that belong to the labels."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from timm.data import create_dataset
from timm.data.readers.img_extensions import get_img_extensions
from torch.utils.data import Dataset

from vit3.data.digits import Digits
from vit3.data.folder import FolderImages
from vit3.errors import UserError

DATA_NAMES = ("digits", "folder", "imagenet")
_EXTENSIONS = " ".join(sorted(get_img_extensions()))


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


def make_data(name: str, root: str | None, in_chans: int, on_bad_image: str) -> Data:
    """Open both splits of a data set.

    Args:
        name: ``digits``, ``folder`` or ``imagenet``.
        root: folder that holds ``train`` and ``val`` (not for digits).
        in_chans: channels of the images.
        on_bad_image: ``raise`` or ``skip``.

    Raises:
        UserError: unknown name, missing folder, no image, class folders that are empty or differ between splits.
    """
    train, val = (open_split(name, root, split, in_chans, on_bad_image) for split in ("train", "val"))
    only_train = sorted(set(train.classes) - set(val.classes))
    only_val = sorted(set(val.classes) - set(train.classes))
    if only_train or only_val:
        raise UserError(
            f"data.root={root}: the class folders of train and val differ "
            f"(only in train: {_some(only_train)}; only in val: {_some(only_val)}); make them the same"
        )
    return Data(train, val, train.classes)


def open_split(name: str, root: str | None, split: str, in_chans: int, on_bad_image: str, key: str = "data.root"):
    """Open ``train`` or ``val`` of a data set; arguments as of :func:`make_data`.

    Args:
        key: what the user calls ``root``, for the sentences.
    """
    if name == "digits":
        if in_chans != 1:
            raise UserError(f"data.in_chans={in_chans}: the digits have 1 channel")
        return Digits(split)
    if name not in DATA_NAMES:
        raise UserError(f"data.name={name} is unknown; use one of: {', '.join(DATA_NAMES)}")
    if not root:
        raise UserError(f"{key} is not set; data={name} needs {key}=FOLDER with train/ and val/ in it")
    reader = _reader(Path(root), split, key)
    images = FolderImages(reader, in_chans, on_bad_image, training=split == "train")
    if name == "imagenet" and len(images.classes) != 1000:
        raise UserError(
            f"{key}={root} holds {len(images.classes)} classes, ImageNet-1K has 1000; use data=folder for other sets"
        )
    return images


def _reader(root: Path, split: str, key: str):
    """timm's reader of ROOT/split/CLASS/...; a class is the first level of folders, as in ImageFolder."""
    if not root.is_dir():
        raise UserError(f"{key}={root} is no folder; set {key} to the folder that holds train/ and val/")
    names = {"train": ("train", "training"), "val": ("val", "valid", "validation", "test")}[split]
    folder = next((root / name for name in names if (root / name).is_dir()), None)
    if folder is None:
        raise UserError(f"{key}={root} has no folder {split}/; expected {split}/CLASS/image below it")
    try:
        reader = create_dataset("", root=str(folder), split=split, search_split=False).reader
    except RuntimeError as error:  # timm: no images
        raise UserError(f"{folder} holds no image ({_EXTENSIONS}); expected {split}/CLASS/image") from error
    paths = [Path(path).relative_to(folder).parts for path, _ in reader.samples]
    flat = [parts[0] for parts in paths if len(parts) < 2]
    if flat:
        raise UserError(f"{folder} has images outside of class folders ({_some(flat)}); expected {split}/CLASS/image")
    folders = {entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")}
    if empty := sorted(folders - {parts[0] for parts in paths}):
        raise UserError(
            f"{folder}: class folders without an image ({_EXTENSIONS}): {_some(empty)}; fill or remove them"
        )
    # timm names a class by the last folder of a path, which merges CLASS_A/part1 and CLASS_B/part1
    reader.class_to_idx = {name: i for i, name in enumerate(sorted({parts[0] for parts in paths}))}
    reader.samples = [(path, reader.class_to_idx[parts[0]]) for (path, _), parts in zip(reader.samples, paths)]
    return reader


def _some(names: list[str]) -> str:
    """The first few of ``names``, for a sentence."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "") if names else "none"
