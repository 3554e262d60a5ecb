"""From folders of images to WebDataset shards with timm's info file; bytes are copied as they are."""

from __future__ import annotations

import hashlib
import io
import json
import random
import re
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from vit3.data.shards import CLASSES_KEY, INFO_NAMES
from vit3.errors import UserError
from vit3.files import replacing

_PLAN_NAME = "pack.json"  # what the shards of a folder were packed from and how, so that a stopped packing can go on
_ENDINGS = {"jpeg": "jpg"}  # timm looks for jpg, png and webp


@dataclass(frozen=True)
class Shard:
    """One tar file to write.

    Attributes:
        name: of the file. split: ``train`` or ``val``. images: path, label and number within the split of each image.
    """

    name: str
    split: str
    images: Sequence[tuple[Path, int, int]]


@dataclass(frozen=True)
class Packing:
    """All shards to write, and what identifies them.

    Attributes:
        out: folder for them. shards: in order. classes: names in label order. digest: of paths, sizes, labels, order.
    """

    out: Path
    shards: Sequence[Shard]
    classes: Sequence[str]
    digest: str


def plan_packing(
    splits: dict[str, Sequence[tuple[str, int]]], classes: Sequence[str], out: Path, *, name: str,
    images_per_shard: int | None, bytes_per_shard: int | None, seed: int,
) -> Packing:  # fmt: skip
    """Decide which image goes into which shard.

    Args:
        splits: path and label of each image, by split. classes: names in label order. out: folder for the shards.
        name: first part of the shards' names. images_per_shard, bytes_per_shard: one of them; a shard is full once it
            has so many. seed: of the order; the same images and seed give the same shards.

    Raises:
        UserError: neither or both sizes, a size below 1, or ``out`` holds shards of another packing.
    """
    if (images_per_shard is None) == (bytes_per_shard is None) or max(images_per_shard or 0, bytes_per_shard or 0) < 1:
        raise UserError(
            f"images_per_shard={images_per_shard}, bytes_per_shard={bytes_per_shard}: give one of them, at least 1"
        )
    digest, shards = hashlib.sha256(json.dumps([name, list(classes), images_per_shard, bytes_per_shard]).encode()), []
    for split, samples in splits.items():
        order = list(range(len(samples)))
        random.Random(f"{seed} {split}").shuffle(order)
        groups: list[list[tuple[Path, int, int]]] = []
        filled = limit = images_per_shard or bytes_per_shard
        for number, index in enumerate(order):
            path, label = Path(samples[index][0]), samples[index][1]
            size = path.stat().st_size
            digest.update(f"{split} {path.parent.name}/{path.name} {size} {label}\n".encode("utf-8", "surrogateescape"))
            if filled >= limit:
                groups.append([])
                filled = 0
            groups[-1].append((path, label, number))
            filled += 1 if images_per_shard else size
        shards += [Shard(f"{name}-{split}-{i:06d}.tar", split, images) for i, images in enumerate(groups)]
    packing = Packing(out, shards, tuple(classes), digest.hexdigest())
    _check_folder(packing)
    return packing


def write_shards(packing: Packing, advance: Callable[[int], None] = lambda images: None) -> dict[str, int]:
    """Write what is missing, then timm's info file; a shard has its name only when it is whole.

    Args:
        packing: what to write. advance: called with the number of images after each shard.

    Returns:
        Numbers of ``written`` and ``kept`` shards, and of ``images`` and ``bytes`` in all.
    """
    packing.out.mkdir(parents=True, exist_ok=True)
    _write_json(packing.out / _PLAN_NAME, {"digest": packing.digest})
    counts = dict(written=0, kept=0, images=0, bytes=0)
    for shard in packing.shards:
        path = packing.out / shard.name
        counts["kept" if path.exists() else "written"] += 1
        if not path.exists():
            _write_shard(path, shard, packing.classes)
        counts["images"] += len(shard.images)
        counts["bytes"] += path.stat().st_size
        advance(len(shard.images))
    _write_json(packing.out / INFO_NAMES[1], _info(packing))
    return counts


def _check_folder(packing: Packing) -> None:
    """Stop where the folder holds anything that this packing would mix with."""
    plan = packing.out / _PLAN_NAME
    if plan.is_file():
        same = json.loads(plan.read_text(encoding="utf-8")).get("digest") == packing.digest
    else:
        same = not (packing.out.is_dir() and any(packing.out.glob("*.tar")))
    if not same:
        raise UserError(
            f"{packing.out} holds shards of other images, sizes or another seed; choose an empty folder, or the "
            "arguments of that packing to finish it"
        )


def _write_shard(path: Path, shard: Shard, classes: Sequence[str]) -> None:
    with replacing(path) as file, tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for image, label, number in shard.images:
            # WebDataset's key of a sample ends at the first dot of the file name and has to be unique
            key = f"{_plain(classes[label])}/{number:08d}-{_plain(image.stem)}"
            ending = image.suffix.lower().lstrip(".")
            _add(tar, f"{key}.{_ENDINGS.get(ending, ending)}", image.read_bytes())
            _add(tar, f"{key}.cls", str(label).encode())


def _plain(name: str) -> str:
    return re.sub(r"[^\w-]", "_", name)


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)  # time, owner and mode are fixed, so equal images give equal shards
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


def _info(packing: Packing) -> dict:
    """timm's description of the splits (its ``reader_wds.py``), and the class names, which timm ignores."""
    splits = {}
    for shard in packing.shards:
        entry = splits.setdefault(
            shard.split, {"name": shard.split, "num_samples": 0, "filenames": [], "shard_lengths": []}
        )
        entry["num_samples"] += len(shard.images)
        entry["filenames"].append(shard.name)
        entry["shard_lengths"].append(len(shard.images))
    return {CLASSES_KEY: list(packing.classes), "splits": splits}


def _write_json(path: Path, content: dict) -> None:
    with replacing(path) as file:
        file.write(json.dumps(content, indent=1, ensure_ascii=False).encode())
