"""WebDataset shards on this machine as a map-style data set: any sampler reads each image exactly once."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from timm.data.readers.reader import Reader

from vit3.data.classes import check_known, some, warn_missing
from vit3.data.shard_index import LABEL, OFFSET, member_name, shard_index
from vit3.data.splits import USUAL_NAMES, choose_split
from vit3.errors import UserError

INFO_NAMES = ("_info.json", "info.json")  # as timm's reader looks for them
CLASSES_KEY = "classes"  # ours, beside timm's "splits": class names in label order


class ShardReader(Reader):
    """Images of tar files by number, for :class:`vit3.data.folder.FolderImages`.

    Args:
        files: the shards, in order. names: names of the stored labels, None for "0", "1", ... classes: the map that
            labels are translated to by name; None takes ``names``. input_key, target_key: see
            :func:`vit3.data.shard_index.shard_index`. lengths: images of each shard, if known.

    Attributes:
        class_to_idx: label of each name.

    Raises:
        UserError: unreadable or incomplete shards, no image, labels without a name, names outside of ``classes``.
    """

    def __init__(
        self,
        files: Sequence[Path],
        *,
        names: Sequence[str] | None,
        classes: Sequence[str] | None,
        input_key: str | None = None,
        target_key: str | None = None,
        lengths: Sequence[int] | None = None,
    ):
        super().__init__()
        self.files = list(files)
        indices = [shard_index(path, input_key, target_key) for path in self.files]
        for path, index, length in zip(self.files, indices, lengths or [len(index) for index in indices]):
            if len(index) != length:
                raise UserError(
                    f"shard {path} holds {len(index)} images, its info file says {length}; copy or pack it again, or "
                    f"set data.input_key to the ending of the images (now: {input_key or 'all that timm knows'})"
                )
        self.shards = np.repeat(np.arange(len(indices)), [len(index) for index in indices])
        self.members = np.concatenate(indices) if indices else np.empty((0, 3), np.int64)
        if not len(self.members):
            raise UserError(
                f"the shards {some([str(path) for path in self.files])} hold no image; "
                f"set data.input_key to the ending of the images (now: {input_key or 'all that timm knows'})"
            )
        where = f"{self.files[0]}{f' to {self.files[-1].name}' if self.files[1:] else ''}"
        self._set_labels(names, classes, where)

    def _set_labels(self, names: Sequence[str] | None, classes: Sequence[str] | None, where: str) -> None:
        present = np.unique(self.members[:, LABEL])
        names = [str(i) for i in range(present[-1] + 1)] if names is None else list(names)
        if present[-1] >= len(names):
            raise UserError(
                f"{where}: label {present[-1]} has no name; the info file names {len(names)} classes under "
                f"'{CLASSES_KEY}'"
            )
        filled = [names[i] for i in present]
        classes = names if classes is None else classes
        check_known(filled, classes, where)
        warn_missing(filled, classes, where)
        self.class_to_idx = {name: i for i, name in enumerate(classes)}
        translated = np.array([self.class_to_idx.get(name, -1) for name in names])
        self.members[:, LABEL] = translated[self.members[:, LABEL]]

    def __len__(self) -> int:
        return len(self.members)

    def __getitem__(self, index: int) -> tuple[io.BytesIO, int]:
        offset, size, label = self.members[index].tolist()
        with open(self.files[self.shards[index]], "rb") as file:  # opened each time: nothing is shared after a fork
            file.seek(offset)
            return io.BytesIO(file.read(size)), label

    def _filename(self, index: int, basename: bool = False, absolute: bool = False) -> str:
        path = self.files[self.shards[index]]
        return f"{path.name if basename else path}:{member_name(path, self.members[index, OFFSET])}"


def is_remote(root: str) -> bool:
    """Whether ``root`` is a pipe or an address rather than a folder."""
    return root.startswith("pipe:") or "://" in root


def open_shards(
    root: str, split: str, *, wanted: str | None, classes: Sequence[str] | None, key: str, **keys: str | None
) -> ShardReader:
    """Reader of one split of a folder of shards.

    Args:
        root: folder with the tar files and, if there is one, the info file. split: ``train`` or ``val``.
        wanted: a split of the info file, or a pattern such as ``*-train-*.tar``, with its folder if it lies elsewhere;
            None for the usual names.
        classes: the map; None takes the stored names. key: what the user calls ``root``.
        keys: ``input_key`` and ``target_key``.

    Raises:
        UserError: no folder, no such split, or what :class:`ShardReader` refuses.
    """
    folder = Path(root)
    if wanted and wanted.endswith(".tar") and Path(wanted).is_absolute():
        folder, wanted = Path(wanted).parent, Path(wanted).name
    elif is_remote(root):
        raise UserError(
            f"{key}={root}: only training reads a stream; the shards of the {split} split are read at random, so copy "
            f"them to this machine and set data.{split}_split='/FOLDER/NAME-*.tar'"
        )
    if not folder.is_dir():
        raise UserError(f"{key}={root} is no folder; set {key} to the folder that holds the shards (*.tar)")
    info = read_info(folder)
    names, lengths = info.get(CLASSES_KEY), None
    if wanted and wanted.endswith(".tar"):
        files = sorted(folder.glob(wanted))
    elif info:
        entry = info["splits"][choose_split(split, info["splits"], wanted, f"{key}={root}")]
        files, lengths = [folder / name for name in entry["filenames"]], entry["shard_lengths"]
        if entry.get("alt_label") and not keys.get("target_key"):
            keys = keys | {"target_key": entry["alt_label"]}
    else:
        files = _by_name(folder, (wanted,) if wanted else USUAL_NAMES[split])
    if not files:
        raise UserError(
            f"{key}={root} has no shards of split {wanted or split} (no info.json names them, and no file is called "
            f"like NAME-{split}-0000.tar); set data.{split}_split to a pattern such as 'NAME-*.tar'"
        )
    return ShardReader(files, names=names, classes=classes, lengths=lengths, **keys)


def read_info(folder: Path) -> dict:
    """timm's info file of a folder of shards; empty where there is none.

    Raises:
        UserError: it is no JSON with "splits" as timm writes them.
    """
    path = next((folder / name for name in INFO_NAMES if (folder / name).is_file()), None)
    if path is None:
        return {}
    try:
        info = json.loads(path.read_text(encoding="utf-8"))
        for entry in info["splits"].values():
            if len(entry["filenames"]) != len(entry["shard_lengths"]):
                raise ValueError("filenames and shard_lengths differ in number")
        return info
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} is no info file as timm reads it ({error!r}); pack again, or remove it and set data.train_split "
            "and data.val_split to patterns such as 'NAME-*.tar'"
        ) from error


def _by_name(folder: Path, names: Sequence[str]) -> list[Path]:
    """Shards of the first split name that stands as a word in file names."""
    for name in names:
        word = re.compile(rf"(.*[-_.])?{re.escape(name)}([-_.].*)?\.tar")
        if files := sorted(path for path in folder.glob("*.tar") if word.fullmatch(path.name)):
            return files
    return []
