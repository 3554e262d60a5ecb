"""Where the images of a WebDataset shard lie, so that each is read by one seek; found once, kept beside the shard."""

from __future__ import annotations

import json
import re
import tarfile
import zipfile
from pathlib import Path
from typing import IO

import numpy as np
from timm.data.readers.img_extensions import get_img_extensions

from vit3.errors import UserError
from vit3.files import replacing

OFFSET, SIZE, LABEL = range(3)  # columns of an index
_KEY = re.compile(r"((?:.*/|)[^./]+)\.([^/]+)")  # WebDataset: a sample's key ends at the first dot of the file name
IMAGE_ENDINGS = ";".join(sorted(ending.lstrip(".") for ending in get_img_extensions()))


def shard_index(path: Path, input_key: str | None = None, target_key: str | None = None) -> np.ndarray:
    """Offset, size and label of every image of a tar file: integers [images, 3].

    Kept in ``PATH.index.npz``, where that can be written, until size or time of the shard change.

    Args:
        path: an uncompressed tar file in WebDataset's layout: members of one sample follow each other.
        input_key: endings of images, separated by semicolons; None takes all that timm knows.
        target_key: field of the ``.json`` member that holds the label; None reads the ``.cls`` member.

    Raises:
        UserError: no such file, no whole plain tar file, an image without a label or a label below zero.
    """
    try:
        stat = path.stat()
    except OSError as error:
        raise UserError(f"shard {path} cannot be read ({error.strerror}); copy it there or pack again") from error
    stamp = np.array([str(stat.st_size), str(stat.st_mtime_ns), input_key or "", target_key or ""])
    kept = path.with_name(f"{path.name}.index.npz")
    try:
        with np.load(kept, allow_pickle=False) as file:
            if np.array_equal(file["stamp"], stamp):
                return file["members"]
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):
        pass  # none yet, or of another program: read the shard
    members = _read(path, (input_key or IMAGE_ENDINGS).split(";"), target_key)
    try:
        with replacing(kept) as file:
            np.savez_compressed(file, members=members, stamp=stamp)
    except OSError:
        pass  # a folder that is only for reading: the next start reads the shard again
    return members


def member_name(path: Path, offset: int) -> str:
    """Name of the member whose bytes start at ``offset``, from its header right before them."""
    try:
        with open(path, "rb") as file:
            file.seek(offset - tarfile.BLOCKSIZE)
            return tarfile.TarInfo.frombuf(file.read(tarfile.BLOCKSIZE), "utf-8", "replace").name
    except (OSError, tarfile.HeaderError):
        return f"byte {offset}"


def _read(path: Path, endings: list[str], target_key: str | None) -> np.ndarray:
    """Walk the headers of a shard; only labels are read, pixels are jumped over."""
    rows: list[tuple[int, int, int]] = []
    with open(path, "rb") as file:
        try:
            with tarfile.open(fileobj=file, mode="r:") as tar:
                key, sample = None, {}
                while (member := tar.next()) is not None:
                    tar.members = []  # tarfile remembers every member otherwise
                    match = _KEY.fullmatch(member.name)
                    if not member.isfile() or match is None:
                        continue
                    if match[1] != key:
                        rows += _row(path, file, key, sample, endings, target_key)
                        key, sample = match[1], {}
                    sample[match[2].lower()] = member
                rows += _row(path, file, key, sample, endings, target_key)
        except tarfile.TarError as error:
            raise UserError(
                f"shard {path} is no whole uncompressed tar file ({error}); copy or pack it again "
                "(compressed shards need data.stream=true)"
            ) from error
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


def _row(path: Path, file: IO[bytes], key: str | None, sample: dict, endings: list[str], target_key: str | None):
    """No or one row of the index, for one sample."""
    image = next((sample[ending] for ending in endings if ending in sample), None)
    if image is None:
        return []
    member = sample.get("json" if target_key else "cls")
    try:
        if member is None:
            raise ValueError(f"it has no .{'json' if target_key else 'cls'} member")
        text = _bytes_of(file, member)
        label = int(json.loads(text)[target_key] if target_key else text)
        if label < 0:
            raise ValueError(f"it is {label}")
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"shard {path}: the label of sample {key} cannot be read ({error}); data.target_key names a field of its "
            ".json member, null the .cls member with a whole number from 0"
        ) from error
    return [(image.offset_data, image.size, label)]


def _bytes_of(file: IO[bytes], member: tarfile.TarInfo) -> bytes:
    """Content of a member; tarfile seeks before it reads the next header."""
    file.seek(member.offset_data)
    return file.read(member.size)
