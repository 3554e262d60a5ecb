"""timm's reader of folders of images, ROOT/SPLIT/CLASS/..., with labels by class name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from timm.data import create_dataset
from timm.data.readers.img_extensions import get_img_extensions

from vit3.data.classes import check_known, some, warn_missing
from vit3.data.splits import USUAL_NAMES
from vit3.errors import UserError

_EXTENSIONS = " ".join(sorted(get_img_extensions()))


def folder_reader(root: Path, split: str, *, wanted: str | None, classes: Sequence[str] | None, key: str):
    """Reader of one split; a class is the first level of folders, as in ImageFolder.

    Args:
        root: folder that holds the splits. split: ``train`` or ``val``. wanted: name of its folder, None for the usual.
        classes: names in label order; None takes the sorted names of the folders. key: what the user calls ``root``.

    Raises:
        UserError: missing folder, no image, images outside of class folders; without ``classes`` an empty class folder,
            with them a folder that is none of them.
    """
    if not root.is_dir():
        raise UserError(f"{key}={root} is no folder; set {key} to the folder that holds train/ and val/")
    names = (wanted,) if wanted else USUAL_NAMES[split]
    folder = next((root / name for name in names if (root / name).is_dir()), None)
    if folder is None:
        raise UserError(f"{key}={root} has no folder {names[0]}/; expected {names[0]}/CLASS/image below it")
    try:
        reader = create_dataset("", root=str(folder), split=split, search_split=False).reader
    except RuntimeError as error:  # timm: no images
        raise UserError(f"{folder} holds no image ({_EXTENSIONS}); expected {names[0]}/CLASS/image") from error
    images = [(path, Path(path).relative_to(folder).parts) for path, _ in reader.samples]
    images = [(path, parts) for path, parts in images if not parts[0].startswith(".")]
    flat = [parts[0] for _, parts in images if len(parts) < 2]
    if flat:
        raise UserError(f"{folder} has images outside of class folders ({some(flat)}); expected {names[0]}/CLASS/image")
    filled = {parts[0] for _, parts in images}
    folders = {entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")}
    if classes is not None:
        check_known(folders, classes, str(folder))
        warn_missing(filled, classes, str(folder))
    elif empty := sorted(folders - filled):
        raise UserError(f"{folder}: class folders without an image ({_EXTENSIONS}): {some(empty)}; fill or remove them")
    # timm names a class by the last folder of a path, which merges CLASS_A/part1 and CLASS_B/part1
    reader.class_to_idx = {name: i for i, name in enumerate(sorted(filled) if classes is None else classes)}
    reader.samples = [(path, reader.class_to_idx[parts[0]]) for path, parts in images]
    return reader
