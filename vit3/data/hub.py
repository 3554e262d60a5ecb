"""Hugging Face data sets, on this machine or from the hub, on timm's reader, with labels by class name."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from contextlib import contextmanager
from typing import IO

import numpy as np
from timm.data import create_dataset
from timm.data.readers.reader import Reader

from vit3.data.classes import check_known, warn_missing
from vit3.data.splits import choose_split
from vit3.errors import UserError


class HubReader(Reader):
    """One split of a data set that the ``datasets`` package can load, for :class:`vit3.data.folder.FolderImages`.

    Args:
        root: folder (of parquet files, images, ...) or name on the hub. split: ``train`` or ``val``.
        wanted: its name in the data set; None for the usual. classes: the map that labels are translated to by name;
            None takes the names of the data set. key: what the user calls ``root``.
        input_key, target_key: columns of the images and labels; None for ``image`` and ``label``.

    Attributes:
        class_to_idx: label of each name.

    Raises:
        UserError: package missing, data set, split or column not found, images without a label, names outside of
            ``classes``.
    """

    def __init__(
        self,
        root: str,
        split: str,
        *,
        wanted: str | None,
        classes: Sequence[str] | None,
        key: str,
        input_key: str | None = None,
        target_key: str | None = None,
    ):
        super().__init__()
        if importlib.util.find_spec("datasets") is None:
            raise UserError("data=hfds needs the package datasets; pip install datasets")
        import datasets

        input_key, target_key = input_key or "image", target_key or "label"
        with _loading(f"{key}={root}"):
            available = datasets.get_dataset_split_names(root)
        name = choose_split(split, available, wanted, f"{key}={root}")
        with _loading(f"{key}={root}"):
            columns = datasets.load_dataset(root, split=name).column_names
        for option, column in (("input_key", input_key), ("target_key", target_key)):
            if column not in columns:
                raise UserError(
                    f"{key}={root} has no column {column}; set data.{option} to one of: {', '.join(columns)}"
                )
        with _loading(f"{key}={root}"):
            self.reader = create_dataset(
                f"hfds/{root}", split=name, input_key=input_key, target_key=target_key
            ).reader  # it leaves decoding to us
        self.where = f"{root} (split {name})"
        self._set_labels(target_key, classes)

    def _set_labels(self, target_key: str, classes: Sequence[str] | None) -> None:
        values = np.asarray(self.reader.dataset[target_key][:])
        if values.dtype.kind not in "iuU" or (values.dtype.kind == "i" and values.min(initial=0) < 0):
            raise UserError(
                f"{self.where}: column {target_key} has images without a label (or {values.dtype} instead of numbers "
                "or names); choose another split by data.train_split and data.val_split, or data.target_key"
            )
        present, places = np.unique(values, return_inverse=True)
        if self.reader.class_to_idx:
            names = sorted(self.reader.class_to_idx, key=self.reader.class_to_idx.get)
        elif values.dtype.kind == "U":
            names = present.tolist()
        else:
            names = [str(i) for i in range(present[-1] + 1)]
        filled = [str(value) if values.dtype.kind == "U" else names[value] for value in present]
        classes = names if classes is None else classes
        check_known(filled, classes, self.where)
        warn_missing(filled, classes, self.where)
        self.class_to_idx = {name: i for i, name in enumerate(classes)}
        self.labels = np.array([self.class_to_idx[name] for name in filled])[places]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[IO[bytes], int]:
        try:
            return self.reader[index][0], int(self.labels[index])
        except (AssertionError, TypeError) as error:  # timm's, where a row has no image
            raise OSError("there is no image") from error

    def _filename(self, index: int, basename: bool = False, absolute: bool = False) -> str:
        image = self.reader.dataset[index][self.reader.image_key] or {}
        return ", ".join([self.where, f"row {index}", *filter(None, [image.get("path")])])


@contextmanager
def _loading(what: str):
    """The many errors of loading a data set, as one sentence."""
    try:
        yield
    except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        offline = " (no network is used: HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") == "1" else ""
        raise UserError(
            f"{what} cannot be loaded by the package datasets{offline}: {reason}; give a folder of parquet files or "
            "the name of a data set on the Hugging Face hub"
        ) from error
