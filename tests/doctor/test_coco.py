"""Checks of COCO-format data: fine data pass, and each fault is named with what is allowed."""

from __future__ import annotations

import copy
import json

import pytest
from PIL import Image

from vit3.doctor import FAIL, OK, WARNING, heed
from vit3.doctor.coco import check_coco
from vit3.errors import UserError

CLASSES = ("disc", "ring")
GOOD = {
    "images": [{"id": i, "file_name": f"{i}.jpg", "width": 40, "height": 30} for i in (5, 9, 12)],
    "annotations": [
        {"id": 1, "image_id": 5, "category_id": 2, "bbox": [1, 2, 10, 8], "segmentation": [[1, 2, 11, 2, 11, 10]]},
        {"id": 4, "image_id": 9, "category_id": 7, "bbox": [0, 0, 40.4, 30], "iscrowd": 0,
         "segmentation": {"size": [30, 40], "counts": [100, 50, 1050]}},
        {"id": 6, "image_id": 9, "category_id": 7, "bbox": [3, 3, 9, 9], "iscrowd": 1,
         "segmentation": {"size": [30, 40], "counts": "compressed"}},
    ],
    "categories": [{"id": 2, "name": "disc"}, {"id": 7, "name": "ring"}],
}  # fmt: skip


def found(folder, content, classes=CLASSES, **options):
    (folder / "a.json").write_text(content if isinstance(content, str) else json.dumps(content))
    for i in (5, 9, 12):
        if not (folder / f"{i}.jpg").exists():
            Image.new("RGB", (40, 30)).save(folder / f"{i}.jpg")
    checks = check_coco(folder / "a.json", folder, classes, **options)
    assert len({check.name for check in checks}) == len(checks)
    return {check.name: check for check in checks}


def changed(path, value):
    """GOOD with another value at a path of keys; None removes it."""
    content = copy.deepcopy(GOOD)
    *way, last = path
    for key in (place := [content]) and way:
        place.append(place[-1][key])
    if value is None:
        del place[-1][last]
    else:
        place[-1][last] = value
    return content


def test_all_is_well(tmp_path):
    checks = found(tmp_path, GOOD)
    assert {check.status for check in checks.values()} == {OK}, checks
    assert "disc 1, ring 1; 1 crowds, 1 images with nothing" in checks["instances"].detail
    heed(list(checks.values()))


@pytest.mark.parametrize(
    ("path", "value", "name", "words"),
    [
        (("images",), None, "annotation file", "has no list 'images'"),
        (("images",), [], "annotation file", "lists no images"),
        (("annotations", 1, "bbox"), None, "annotation file", "entry 1 of 'annotations' lacks one of id, image_id"),
        (("annotations", 1, "id"), 1, "ids", "id 1 stands more than once in 'annotations'"),
        (("images", 1, "id"), 5, "ids", "id 5 stands more than once in 'images'"),
        (("annotations", 0, "image_id"), 77, "ids", "annotation 1 has image_id=77, which is none of the 3 ids"),
        (("annotations", 0, "category_id"), 3, "ids", "annotation 1 has category_id=3, which is none of the 2 ids"),
        (("categories", 0, "name"), "disk", "classes", "that {file} does not have: disc; it has disk besides"),
        (("annotations", 0, "bbox"), [1, 2, 3], "boxes", "annotation 1 has bbox=[1, 2, 3]; write [left, top, width"),
        (("annotations", 0, "bbox"), [1, 2, 0, 5], "boxes", "bbox=[1, 2, 0, 5], without area (1 of 3 are so)"),
        (("annotations", 0, "bbox"), [20, 20, 30, 28], "boxes", "beyond its image of 40x30 pixels (1 of 3 are so)"),
        (("annotations", 0, "bbox"), [-3, 2, 10, 8], "boxes", "beyond its image of 40x30"),
        (("annotations", 0, "segmentation"), None, "segmentations", "annotation 1 has no segmentation (1 of 3"),
        (("annotations", 0, "segmentation"), [[1, 2, 3, 4]], "segmentations", "a polygon of 4 numbers"),
        (("annotations", 1, "segmentation", "size"), [40, 30], "segmentations", "size [40, 30], not [30, 40]"),
        (("annotations", 1, "segmentation", "counts"), [9, 9], "segmentations", "sum is 18, not 1,200"),
        (("images", 0, "width"), 41, "image files", "5.jpg is 40x30 pixels, {file} says 41x30"),
        (("images", 0, "file_name"), "6.jpg", "image files", "6.jpg, which {file} names, does not exist"),
    ],
)
def test_each_fault_is_named(tmp_path, path, value, name, words):
    checks = found(tmp_path, changed(path, value))
    words = words.format(file=tmp_path / "a.json")
    assert checks[name].status == FAIL and words in checks[name].sentence, checks[name].sentence
    with pytest.raises(UserError) as error:
        heed(list(checks.values()))
    if name not in ("image files", "boxes"):  # a wrong size may show in a box before
        assert words in str(error.value)


def test_files_that_cannot_be_read(tmp_path):
    (check,) = check_coco(tmp_path / "none.json", tmp_path, None)
    assert check.status == FAIL and "none.json cannot be read (No such file or directory)" in check.detail
    assert "is not JSON" in found(tmp_path, "{")["annotation file"].detail
    (tmp_path / "9.jpg").write_bytes(b"no image")
    assert "9.jpg cannot be decoded" in found(tmp_path, GOOD)["image files"].detail
    assert check_coco(tmp_path / "a.json", tmp_path / "no", None)[-1].detail == f"{tmp_path / 'no'} is no folder"


def test_classes_without_an_instance_are_listed(tmp_path):
    content = copy.deepcopy(GOOD)
    content["categories"].append({"id": 9, "name": "star"})
    checks = found(tmp_path, content, ("disc", "ring", "star"))
    assert (
        checks["instances"].status == WARNING
        and "no instance of star: their AP is undefined" in checks["instances"].detail
    )
    checks = found(tmp_path, content)
    assert checks["classes"].status == WARNING and "the configuration has not: star" in checks["classes"].detail
    assert checks["instances"].status == OK
    crowds = changed(("annotations", 0, "iscrowd"), 1)
    assert "no instance of disc" in found(tmp_path, crowds)["instances"].detail  # a crowd is no instance
    assert found(tmp_path, GOOD | {"annotations": []})["instances"].status == FAIL


def test_order_of_classes(tmp_path):
    check = found(tmp_path, GOOD, ("ring", "disc"))["classes"]
    assert check.status == FAIL and check.cure == "write them as disc, ring"
    assert found(tmp_path, GOOD, None)["classes"].status == OK


def test_boxes_alone_need_no_segmentation(tmp_path):
    content = changed(("annotations", 0, "segmentation"), None)
    assert "segmentations" not in found(tmp_path, content, masks=False)


def test_few_bad_boxes_of_many_are_a_warning(tmp_path):
    """COCO's training set has two boxes without area; loaders leave them out."""
    content = copy.deepcopy(GOOD)
    content["annotations"] += [GOOD["annotations"][0] | {"id": 100 + i} for i in range(2000)]
    content["annotations"][0]["bbox"] = [1, 2, 0, 5]
    assert found(tmp_path, content)["boxes"].status == WARNING
    for item in content["annotations"][:5]:
        item["bbox"] = [1, 2, 0, 5]
    assert found(tmp_path, content)["boxes"].status == FAIL


def test_large_sets_are_sampled_evenly(tmp_path):
    content = copy.deepcopy(GOOD)
    content["images"] += [content["images"][0] | {"id": 100 + i} for i in range(97)]
    assert found(tmp_path, content, sample=10)["image files"].detail.startswith("10 of 100 decoded")
    content["images"][-10]["file_name"] = "lost.jpg"  # place 90, the last of ten
    assert found(tmp_path, content, sample=10)["image files"].status == FAIL


@pytest.mark.parametrize(("segmentation", "status"), [
    ([[1, 2, 11, 2, 11, 10], [1, 2, 3, 4]], WARNING), ([[1, 2, 3, 4]], FAIL), ([[]], FAIL), (None, FAIL),
    ({"size": [40, 30], "counts": [1200]}, FAIL),
])  # fmt: skip
def test_a_single_segmentation_that_cannot_be_read_is_no_warning(tmp_path, segmentation, status):
    """pycocotools would fail on it in the midst of an epoch."""
    content = changed(("annotations", 0, "segmentation"), segmentation)
    content["annotations"] += [GOOD["annotations"][0] | {"id": 100 + i} for i in range(1100)]
    assert found(tmp_path, content)["segmentations"].status == status
