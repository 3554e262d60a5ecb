"""Checks of annotations in COCO's format and of the images they speak of, before the first step."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vit3.data.folder import DECODE_ERRORS
from vit3.doctor.check import FAIL, OK, WARNING, Check
from vit3.doctor.sample import listed, look_at

_RARE = 1 / 1000  # COCO itself has a few boxes without area: up to this part of bad ones is a warning
_BORDER = 1.0  # pixels that a box may reach beyond its image: rounding


def check_coco(
    annotations: Path, images: Path, classes: Sequence[str] | None, sample: int = 200, *, masks: bool = True
) -> list[Check]:
    """Look at everything in the annotation file, and at a sample of the images.

    Args:
        annotations: an ``instances_*.json``. images: folder of its ``file_name``. classes: names of the configuration
        in its order, None where the file's are taken. sample: images to decode at most, evenly spread. masks: whether
        each thing needs a segmentation.

    Returns:
        What was found; later checks are left out where the file cannot be read.
    """
    content = _read(annotations)
    if isinstance(content, Check):
        return [content]
    counts = ", ".join(f"{len(content[key]):,} {key}" for key in ("images", "annotations", "categories"))
    found = [
        Check("annotation file", OK, f"{annotations}: {counts}"),
        _check_ids(annotations, content),
        _check_classes(annotations, content, classes),
        _check_counts(annotations, content, classes),
    ]
    sizes = {image["id"]: (image["width"], image["height"]) for image in content["images"]}
    known = [item for item in content["annotations"] if item["image_id"] in sizes]
    found.append(_check_boxes(annotations, known, sizes))
    if masks:
        found.append(_check_segmentations(annotations, known, sizes))
    return [*found, _check_images(annotations, content["images"], images, sample)]


def _read(path: Path) -> dict[str, Any] | Check:
    name = "annotation file"
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        return Check(name, FAIL, f"{path} cannot be read ({error.strerror})", "give the path of an instances_*.json")
    except ValueError as error:
        return Check(name, FAIL, f"{path} is not JSON ({error})", "copy or download it again")
    needed = {
        "images": ("id", "file_name", "width", "height"),
        "annotations": ("id", "image_id", "category_id", "bbox"),
        "categories": ("id", "name"),
    }
    for key, fields in needed.items():
        items = content.get(key) if isinstance(content, dict) else None
        if not isinstance(items, list):
            return Check(name, FAIL, f"{path} has no list {key!r}", f"give a file with the lists {listed(needed)}")
        for place, item in enumerate(items):
            if not isinstance(item, dict) or any(field not in item for field in fields):
                return Check(name, FAIL, f"{path}: entry {place} of {key!r} lacks one of {listed(fields)}", "add it")
    if not content["images"]:
        return Check(name, FAIL, f"{path} lists no images", "give a file with at least one")
    return content


def _check_ids(path: Path, content: dict[str, Any]) -> Check:
    name = "ids"
    for key in ("images", "annotations", "categories"):
        twice = [value for value, count in Counter(item["id"] for item in content[key]).items() if count > 1]
        if twice:
            return Check(name, FAIL, f"{path}: id {listed(twice)} stands more than once in {key!r}",
                         "number them anew")  # fmt: skip
    for field, key in (("image_id", "images"), ("category_id", "categories")):
        there = {item["id"] for item in content[key]}
        lost = [item for item in content["annotations"] if item[field] not in there]
        if lost:
            more = f" (and {len(lost) - 1:,} more)" if lost[1:] else ""
            what = f"annotation {lost[0]['id']} has {field}={lost[0][field]!r}{more}"
            return Check(name, FAIL, f"{path}: {what}, which is none of the {len(there):,} ids in {key!r}",
                         "correct it or remove the annotation")  # fmt: skip
    return Check(name, OK, "all different, and each annotation has its image and category")


def _check_classes(path: Path, content: dict[str, Any], classes: Sequence[str] | None) -> Check:
    name = "classes"
    there = [category["name"] for category in content["categories"]]
    if classes is None:
        return Check(name, OK, f"{len(there)} of {path}: {listed(there)}")
    missing = [c for c in classes if c not in there]
    extra = [c for c in there if c not in classes]
    if missing:
        return Check(name, FAIL, f"classes of the configuration that {path} does not have: {listed(missing)}; it has "
                     f"{listed(extra or there)}{' besides' if extra else ''}", "use the file's names")  # fmt: skip
    if [c for c in there if c in classes] != list(classes):
        return Check(name, FAIL, f"the configuration's classes stand in another order than those of {path}, which "
                     "numbers them", f"write them as {listed(c for c in there if c in classes)}")  # fmt: skip
    if extra:
        return Check(name, WARNING, f"{path} has classes that the configuration has not: {listed(extra)}",
                     "add them, or their things are left out")  # fmt: skip
    return Check(name, OK, f"{len(there)}, as in the configuration")


def _check_counts(path: Path, content: dict[str, Any], classes: Sequence[str] | None) -> Check:
    name = "instances"
    names = {category["id"]: category["name"] for category in content["categories"]}
    wanted = list(names.values()) if classes is None else list(classes)
    single = [item for item in content["annotations"] if not item.get("iscrowd")]
    counts = Counter(names.get(item["category_id"]) for item in single)
    empty = len(content["images"]) - len({item["image_id"] for item in single})
    crowds = len(content["annotations"]) - len(single)
    detail = f"{path}: {listed(f'{c} {counts[c]:,}' for c in wanted)}; {crowds:,} crowds, {empty:,} images with nothing"
    absent = [c for c in wanted if not counts[c]]
    if not single or len(absent) == len(wanted):
        return Check(name, FAIL, f"{path} has no instance of any class", "give another file")
    if absent:
        return Check(name, WARNING, f"{path} has no instance of {listed(absent)}: their AP is undefined and left out "
                     "of the mean")  # fmt: skip
    return Check(name, OK, detail)


def _check_boxes(path: Path, items: list[dict], sizes: dict[Any, tuple[int, int]]) -> Check:
    name = "boxes"
    for item in items:
        box = item["bbox"]
        if not (isinstance(box, list) and len(box) == 4 and all(isinstance(v, (int, float)) for v in box)):
            return Check(name, FAIL, f"{path}: annotation {item['id']} has bbox={box!r}",
                         "write [left, top, width, height] in pixels")  # fmt: skip
    boxes = np.array([item["bbox"] for item in items], float).reshape(-1, 4)
    limits = np.array([sizes[item["image_id"]] for item in items], float).reshape(-1, 2)
    flat = ~(boxes[:, 2:] > 0).all(1)
    outside = (boxes[:, :2] < -_BORDER).any(1) | (boxes[:, :2] + boxes[:, 2:] > limits + _BORDER).any(1)
    bad = np.flatnonzero(flat | outside | ~np.isfinite(boxes).all(1))
    if not len(bad):
        return Check(name, OK, "all within their images, none without area")
    first = int(bad[0])
    what = "without area" if flat[first] else f"beyond its image of {limits[first, 0]:g}x{limits[first, 1]:g} pixels"
    which = f"annotation {items[first]['id']} has bbox={items[first]['bbox']}"
    detail = f"{path}: {which}, {what} ({len(bad):,} of {len(items):,} are so)"
    if len(bad) > _RARE * len(items):
        return Check(name, FAIL, detail, "write [left, top, width, height] in pixels of the image")
    return Check(name, WARNING, detail, "loaders cut or leave them out")


def _check_segmentations(path: Path, items: list[dict], sizes: dict[Any, tuple[int, int]]) -> Check:
    name = "segmentations"
    bad = [(item, fault) for item in items if (fault := _fault(item.get("segmentation"), sizes[item["image_id"]]))]
    if not bad:
        return Check(name, OK, "every thing has one")
    unreadable = [(item, fault) for item, fault in bad if not _readable(item.get("segmentation"))]
    item, fault = (unreadable or bad)[0]
    detail = f"{path}: annotation {item['id']} has {fault} ({len(bad):,} of {len(items):,} are so)"
    cure = "write polygons [[x, y, x, y, …], …] or run lengths, or train a detector of boxes alone"
    return Check(name, FAIL if unreadable or len(bad) > _RARE * len(items) else WARNING, detail, cure)


def _readable(segmentation: Any) -> bool:
    """Whether pycocotools makes a mask of a faulty segmentation: of polygons whose first one has three points."""
    return isinstance(segmentation, list) and bool(segmentation) and isinstance(segmentation[0], list) \
        and len(segmentation[0]) >= 6  # fmt: skip


def _fault(segmentation: Any, size: tuple[int, int]) -> str | None:
    if not segmentation:
        return "no segmentation"
    if isinstance(segmentation, list):
        for line in segmentation:
            if not isinstance(line, list) or len(line) < 6 or len(line) % 2:
                return f"a polygon of {len(line) if isinstance(line, list) else line!r} numbers"
        return None
    if not isinstance(segmentation, dict) or not isinstance(segmentation.get("counts"), (str, list)):
        return "a segmentation that is neither polygons nor run lengths"
    lengths = segmentation["counts"]
    if list(segmentation.get("size", ())) != [size[1], size[0]]:
        return f"run lengths of size {segmentation.get('size')}, not [{size[1]}, {size[0]}] as its image"
    if isinstance(lengths, list) and sum(lengths) != size[0] * size[1]:
        return f"run lengths whose sum is {sum(lengths):,}, not {size[0] * size[1]:,} as its image has pixels"
    return None


def _check_images(path: Path, entries: list[dict], folder: Path, sample: int) -> Check:
    name = "image files"
    if not folder.is_dir():
        return Check(name, FAIL, f"{folder} is no folder", "give the folder of the images")

    def fault_of(entry: dict) -> str | None:
        file = folder / entry["file_name"]
        if not file.is_file():
            return f"{file}, which {path} names, does not exist"
        try:
            with Image.open(file) as image:
                image.load()
        except DECODE_ERRORS as error:
            return f"{file} cannot be decoded ({error})"
        if image.size != (entry["width"], entry["height"]):
            return f"{file} is {image.width}x{image.height} pixels, {path} says {entry['width']}x{entry['height']}"
        return None

    faults, looked = look_at(entries, fault_of, sample)
    if faults:
        more = f" (and {len(faults) - 1:,} more of {looked:,} looked at)" if faults[1:] else ""
        return Check(name, FAIL, faults[0] + more, "correct the folder, the file or the annotation")
    return Check(name, OK, f"{looked:,} of {len(entries):,} decoded, sizes as annotated")
