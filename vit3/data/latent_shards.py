"""A folder of cached latents: which image goes into which file, an index of settings, files that are whole or absent.

``latents.json`` says what the folder holds and is ``complete`` once every file is there. A file
``{split}-{number:05d}.safetensors`` has ``moments`` [n, 2C, h, w] (mean and standard deviation, neither shifted nor
scaled), where asked for ``flipped``, those of the mirrored images, and ``labels`` [n].
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from vit3.errors import UserError, first_line
from vit3.files import replacing

INDEX_NAME = "latents.json"


@dataclass(frozen=True)
class LatentShard:
    """One file.

    Attributes:
        split: ``train`` or ``val``. number: within the split. images: numbers of its images in the source's split.
    """

    split: str
    number: int
    images: range

    @property
    def name(self) -> str:
        return f"{self.split}-{self.number:05d}.safetensors"


def plan_shards(counts: Mapping[str, int], size: int) -> list[LatentShard]:
    """The files for so many images of each split, ``size`` in each."""
    return [
        LatentShard(split, number, range(first, min(first + size, count)))
        for split, count in counts.items()
        for number, first in enumerate(range(0, count, size))
    ]


def start_cache(folder: Path, settings: Mapping[str, Any], facts: Mapping[str, Any], classes: Sequence[str]) -> None:
    """Make the folder, or check that it was begun with the same settings.

    Args:
        settings: what decides the numbers in the files, by configuration key. facts: what its readers want to know.
        classes: names in label order.

    Raises:
        UserError: it cannot be written, holds other files, or was begun with other settings.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError as error:
        raise UserError(f"output={folder} cannot be made ({error.strerror}); choose another folder") from error
    if not writable:
        raise UserError(f"output={folder} is not writable; choose another folder")
    if not (folder / INDEX_NAME).is_file():
        if any(folder.glob("*.safetensors")):
            raise UserError(f"output={folder} holds .safetensors files and no {INDEX_NAME}; choose an empty folder")
        _write_index(folder, dict(complete=False, settings=settings, facts=facts, classes=classes))
        return
    index = _load_index(folder, "output")
    wanted = json.loads(json.dumps(dict(settings)))  # as it comes back from a file
    for key in {**index["settings"], **wanted}:
        if index["settings"].get(key) != wanted.get(key):
            raise UserError(
                f"output={folder} was cached with {key}={_told(index['settings'].get(key))}, not "
                f"{_told(wanted.get(key))}; choose an empty folder, or the same settings to go on with it"
            )
    if index["classes"] != list(classes):
        raise UserError(f"output={folder} was cached with other classes than data.root has; choose an empty folder")


def write_shard(path: Path, moments: Tensor, flipped: Tensor | None, labels: Tensor) -> None:
    """Write one file; it has its name only when it is whole."""
    tensors = dict(moments=moments, labels=labels) | ({} if flipped is None else dict(flipped=flipped))
    with replacing(path) as file:
        file.write(save({name: tensor.contiguous() for name, tensor in tensors.items()}))


def finish_cache(folder: Path, shards: Sequence[LatentShard]) -> dict[str, int]:
    """Count what the files hold and mark the folder complete.

    Returns:
        Images by split, without those that could not be decoded.

    Raises:
        UserError: a file is missing or broken.
    """
    index, splits = _load_index(folder, "output"), {}
    for shard in shards:
        entry = splits.setdefault(shard.split, {"images": 0, "files": [], "counts": []})
        with open_shard(folder / shard.name) as file:
            count = file.get_slice("labels").get_shape()[0]
        entry["images"] += count
        entry["files"].append(shard.name)
        entry["counts"].append(count)
    _write_index(folder, {**index, "complete": True, "splits": splits})
    return {split: entry["images"] for split, entry in splits.items()}


def read_index(root: str | Path, key: str = "data.root") -> dict[str, Any]:
    """What ``latents.json`` of a complete folder says: ``facts``, ``classes``, ``splits``, ``settings``.

    Args:
        key: what the user calls ``root``, for the sentences.

    Raises:
        UserError: no such folder, no folder of cached latents, or caching it has not ended.
    """
    if not (Path(root) / INDEX_NAME).is_file():
        raise UserError(f"{key}={root} has no {INDEX_NAME}; give the output folder of tools/cache_latents.py")
    index = _load_index(Path(root), key)
    if not index["complete"]:
        raise UserError(f"{key}={root}: caching has not ended; the same tools/cache_latents.py command goes on with it")
    return index


def open_shard(path: Path):
    """safetensors' lazy file: slices of its tensors are read from the mapped file.

    Raises:
        UserError: it is missing or broken.
    """
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{path} cannot be read ({first_line(error)}); remove it and run the same tools/cache_latents.py command"
        ) from error


def checked_finite(moments: Tensor, amp: str | None) -> Tensor:
    """``moments`` as they are.

    Raises:
        UserError: one of them is no finite number.
    """
    if not torch.isfinite(moments).all():
        raise UserError(
            f"latents of an image are not finite with amp={'null' if amp is None else amp} and dtype="
            f"{str(moments.dtype).removeprefix('torch.')}; use amp=null or bfloat16, and dtype=float32"
        )
    return moments


def _load_index(folder: Path, key: str) -> dict[str, Any]:
    try:
        index = json.loads((folder / INDEX_NAME).read_text(encoding="utf-8"))
        if {"complete", "settings", "facts", "classes"} <= index.keys():
            return index
        reason = "a part is missing"
    except (OSError, ValueError, AttributeError) as error:
        reason = first_line(error)
    raise UserError(f"{key}={folder}: {INDEX_NAME} cannot be read ({reason}); cache the latents again")


def _write_index(folder: Path, content: Mapping[str, Any]) -> None:
    with replacing(folder / INDEX_NAME) as file:
        file.write(json.dumps(content, indent=1, ensure_ascii=False).encode())


def _told(value: Any) -> str:
    return "null" if value is None else str(value)
