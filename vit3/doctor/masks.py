"""Checks of images and masks of classes in ADE20K's layout, before the first step."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from vit3.doctor.check import FAIL, OK, WARNING, Check
from vit3.doctor.sample import listed, look_at

_MODES = ("L", "P", "1", "I", "I;16", "I;16B", "I;16L")  # of Pillow: one channel of whole numbers


@dataclass(frozen=True)
class _Read:
    """A mask file: what is wrong with it, or how many pixels have each label."""

    file: Path
    kind: str = ""  # "size", "form" or "" where nothing is wrong
    fault: str = ""
    values: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()


def check_masks(
    images: Path,
    masks: Path,
    classes: Sequence[str],
    *,
    ignore_index: int = 255,
    reduce_zero_label: bool = False,
    image_suffix: str = ".jpg",
    mask_suffix: str = ".png",
    sample: int = 200,
    only: Collection[str] | None = None,
) -> list[Check]:
    """Look for the mask of every image, and read a sample of them.

    Args:
        images, masks: folders; a mask has its image's path with the other suffix. classes: names of labels 0, 1, ….
        ignore_index: label of pixels without a class. reduce_zero_label: 0 in a file is no class and 1 the first one.
        sample: masks to read at most, evenly spread. only: paths of images without suffix, where not all are used.

    Returns:
        What was found; later checks are left out where files are missing.
    """
    stems, first = _pairs(images, masks, image_suffix, mask_suffix, only)
    if first.status == FAIL:
        return [first]

    def read(stem: str) -> _Read:
        return _read(images / f"{stem}{image_suffix}", masks / f"{stem}{mask_suffix}")

    results, _ = look_at(stems, read, sample)
    looked = f"{len(results):,} of {len(stems):,} masks read"
    found = [first]
    for name, kind, fine, cure in (
        ("mask sizes", "size", "as their images", "use the mask that belongs to the image, not resized"),
        ("mask form", "form", "one channel of whole numbers", "save class indices as a PNG of one channel"),
    ):
        bad = [result.fault for result in results if result.kind == kind]
        more = f" (and {len(bad) - 1:,} more)" if bad[1:] else ""
        found.append(Check(name, FAIL, bad[0] + more, cure) if bad else Check(name, OK, f"{looked}, {fine}"))
    usable = [result for result in results if result.values]
    labels = _check_labels(usable, classes, ignore_index, reduce_zero_label)
    found.append(labels)
    if labels.status != FAIL:
        found.append(_check_classes(masks, usable, classes, int(reduce_zero_label), looked))
    return found


def _pairs(
    images: Path, masks: Path, image_suffix: str, mask_suffix: str, only: Collection[str] | None
) -> tuple[list[str], Check]:
    """Paths of images below their folder, without suffix."""
    name = "pairs"
    for folder in (images, masks):
        if not folder.is_dir():
            return [], Check(name, FAIL, f"{folder} is no folder", "give the folders of images and of masks")
    stems, others = (
        {path.relative_to(folder).as_posix().removesuffix(suffix) for path in folder.rglob(f"*{suffix}")}
        for folder, suffix in ((images, image_suffix), (masks, mask_suffix))
    )
    if not stems:
        return [], Check(name, FAIL, f"{images} holds no file that ends in {image_suffix}",
                         "give the folder of the images, or their suffix")  # fmt: skip
    if only is not None:
        absent = sorted(set(only) - stems)
        if absent:
            detail = f"{images / absent[0]}{image_suffix} is listed and does not exist ({len(absent):,} are so)"
            return [], Check(name, FAIL, detail, "correct the list, or give the images' suffix")
        stems, others = set(only), others & set(only)
    lost = sorted(stems - others)
    if lost:
        more = f" (and {len(lost) - 1:,} more of {len(stems):,} images)" if lost[1:] else ""
        detail = f"{images / lost[0]}{image_suffix} has no mask {masks / lost[0]}{mask_suffix}{more}"
        return [], Check(name, FAIL, detail, "add the mask, remove the image, or give the masks' suffix")  # fmt: skip
    extra = sorted(others - stems)
    if extra:
        return sorted(stems), Check(name, WARNING, f"{masks} has {len(extra):,} masks without an image, the first is "
                                    f"{extra[0]}{mask_suffix}", "they are not used")  # fmt: skip
    return sorted(stems), Check(name, OK, f"{len(stems):,} images of {images}, each with its mask")


def _read(image_file: Path, mask_file: Path) -> _Read:
    try:
        with Image.open(image_file) as image:
            size = image.size  # from the head of the file alone
    except (OSError, ValueError, SyntaxError) as error:
        return _Read(mask_file, "form", f"{image_file} cannot be decoded ({error})")
    try:
        with Image.open(mask_file) as mask:
            mask.load()
    except (OSError, ValueError, SyntaxError) as error:
        return _Read(mask_file, "form", f"{mask_file} cannot be decoded ({error})")
    if mask.mode not in _MODES:
        what = f"is of mode {mask.mode} ({len(mask.getbands())} channels)"
        return _Read(mask_file, "form", f"{mask_file} {what}, allowed is one channel of whole numbers")
    if mask.size != size:
        return _Read(
            mask_file, "size", f"{mask_file} is {mask.width}x{mask.height} pixels, its image {size[0]}x{size[1]}"
        )
    values, counts = np.unique(np.asarray(mask).astype(np.int64), return_counts=True)
    return _Read(mask_file, "", "", tuple(values.tolist()), tuple(counts.tolist()))


def _check_labels(results: list[_Read], classes: Sequence[str], ignore_index: int, reduce_zero: bool) -> Check:
    name, count, shift = "labels", len(classes), int(reduce_zero)
    # 255 stays no class when 0 is one less than the first: so do the libraries
    ignored = sorted({0, 255} if reduce_zero else {ignore_index})
    allowed = {*range(shift, count + shift), *ignored}
    rule = f"{shift} to {count + shift - 1} ({count} classes) and {listed(ignored)} (no class)"
    for result in results:
        stray = [value for value in result.values if value not in allowed]
        if stray:
            cure = "relabel it, add its class, or correct the number of classes"
            if not reduce_zero and stray == [count]:
                cure += " (if 0 is no class in these masks: reduce_zero_label=true)"
            pixels = result.counts[result.values.index(stray[0])]
            what = f"label {listed(stray)} ({pixels:,} pixels of {stray[0]})"
            return Check(name, FAIL, f"{result.file} has {what}, allowed are {rule}", cure)
    if results and all(set(result.values) <= set(ignored) for result in results):
        return Check(name, FAIL, f"no pixel of {len(results):,} masks has a class, allowed are {rule}",
                     "give masks of class indices")  # fmt: skip
    return Check(name, OK, f"all of {rule}")


def _check_classes(masks: Path, results: list[_Read], classes: Sequence[str], shift: int, looked: str) -> Check:
    pixels = np.zeros(len(classes), np.int64)
    total = 0
    for result in results:
        for value, count in zip(result.values, result.counts):
            total += count
            if 0 <= value - shift < len(classes):
                pixels[value - shift] += count
    absent = [name for name, count in zip(classes, pixels) if not count]
    if absent:
        return Check("classes", WARNING, f"{masks} has no pixel of {listed(absent)} ({looked}): their IoU is undefined "
                     "and left out of the mean")  # fmt: skip
    shares = listed(f"{name} {100 * count / total:.2g} %" for name, count in zip(classes, pixels))
    return Check("classes", OK, f"{looked}: {shares}")
