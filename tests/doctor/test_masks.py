"""Checks of masks of classes: a stray label is refused, an absent class listed (R19), files in pairs."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from vit3.doctor import FAIL, OK, WARNING, heed
from vit3.doctor.masks import check_masks
from vit3.errors import UserError

CLASSES = ("ground", "thing")


@pytest.fixture
def folders(tmp_path):
    """Two images of 129x65, one below a folder, whose masks hold 0, 1 and 255."""
    for kind in ("images", "masks"):
        (tmp_path / kind / "deep").mkdir(parents=True)
    for name in ("a", "deep/b"):
        Image.new("RGB", (129, 65)).save(tmp_path / "images" / f"{name}.jpg")
        write(tmp_path, name, {0: 0, 10: 1, 20: 255})
    return tmp_path


def write(root, name, labels, mode="L", size=(129, 65)):
    """A mask with a row of each label at its place; 0 elsewhere."""
    mask = np.zeros(size[::-1], np.uint8)
    for row, label in labels.items():
        mask[row] = label
    Image.fromarray(mask).convert(mode).save(root / "masks" / f"{name}.png")


def found(root, classes=CLASSES, **options):
    checks = check_masks(root / "images", root / "masks", classes, **options)
    assert len({check.name for check in checks}) == len(checks)
    return {check.name: check for check in checks}


def test_all_is_well(folders):
    checks = found(folders)
    assert {check.status for check in checks.values()} == {OK}
    assert "2 of 2 masks read: ground 97 %, thing 1.5 %" in checks["classes"].detail
    heed(list(checks.values()))


def test_a_stray_label_is_refused(folders):
    write(folders, "deep/b", {3: 7, 5: 255})
    checks = found(folders)
    assert checks["labels"].sentence == (
        f"{folders}/masks/deep/b.png has label 7 (129 pixels of 7), allowed are 0 to 1 (2 classes) and 255 (no class); "
        "relabel it, add its class, or correct the number of classes"
    )
    with pytest.raises(UserError, match="has label 7"):
        heed(list(checks.values()))
    assert found(folders, [str(i) for i in range(8)])["labels"].status == OK


def test_another_ignore_index(folders):
    assert "has label 255" in found(folders, ignore_index=254)["labels"].detail
    for name in ("a", "deep/b"):
        write(folders, name, {1: 1, 2: 9})
    assert found(folders, ignore_index=9)["labels"].status == OK


def test_an_absent_class_is_listed(folders):
    check = found(folders, (*CLASSES, "bird", "fish"))["classes"]
    assert (
        check.status == WARNING and "no pixel of bird, fish (2 of 2 masks read): their IoU is undefined" in check.detail
    )
    for name in ("a", "deep/b"):
        write(folders, name, {5: 255})
    assert "no pixel of thing" in found(folders)["classes"].detail


def test_zero_as_no_class(folders):
    """With reduce_zero_label labels are 1 to K, and both 0 and 255 are no class."""
    for name in ("a", "deep/b"):
        write(folders, name, {1: 1, 2: 2, 3: 255})
    checks = found(folders, reduce_zero_label=True)
    assert {check.status for check in checks.values()} == {OK} and "ground 1.5 %, thing 1.5 %" in checks[
        "classes"
    ].detail
    check = found(folders)["labels"]
    assert check.status == FAIL and "has label 2" in check.detail and "reduce_zero_label=true" in check.cure
    write(folders, "a", {1: 1, 2: 3})
    assert "has label 3" in found(folders, reduce_zero_label=True)["labels"].detail


def test_masks_without_any_class(folders):
    for name in ("a", "deep/b"):
        write(folders, name, {})
    assert "no pixel of 2 masks has a class" in found(folders, reduce_zero_label=True)["labels"].detail


@pytest.mark.parametrize("mode", ["RGB", "LA", "RGBA"])
def test_colours_are_not_labels(folders, mode):
    write(folders, "a", {0: 1}, mode)
    check = found(folders)["mask form"]
    assert check.status == FAIL and f"a.png is of mode {mode} ({len(mode)} channels)" in check.detail


@pytest.mark.parametrize("mode", ["P", "1", "I"])
def test_other_forms_of_indices(folders, mode):
    if mode == "P":  # the index is the label, whatever its colour
        image = Image.fromarray(np.ones((65, 129), np.uint8))
        image.putpalette([0, 0, 0, 250, 120, 7])
        image.save(folders / "masks" / "a.png")
    else:
        write(folders, "a", {0: 1}, mode)
    assert found(folders)["mask form"].status == OK


def test_pairs_and_sizes(folders):
    write(folders, "c", {})
    check = found(folders)["pairs"]
    assert check.status == WARNING and "1 masks without an image, the first is c.png" in check.detail
    write(folders, "a", {}, size=(128, 65))
    check = found(folders)["mask sizes"]
    assert check.status == FAIL and "a.png is 128x65 pixels, its image 129x65" in check.detail
    (folders / "masks" / "a.png").write_bytes(b"no image")
    assert "a.png cannot be decoded" in found(folders)["mask form"].detail
    (folders / "masks" / "a.png").unlink()
    (check,) = found(folders).values()
    assert check.status == FAIL and "images/a.jpg has no mask" in check.detail
    assert "holds no file that ends in .tif" in found(folders, image_suffix=".tif")["pairs"].detail
    (check,) = check_masks(folders / "no", folders / "masks", CLASSES)
    assert check.detail == f"{folders / 'no'} is no folder"


def test_suffixes(folders):
    (folders / "masks" / "a.png").rename(folders / "masks" / "a_labels.png")
    (folders / "masks" / "deep" / "b.png").rename(folders / "masks" / "deep" / "b_labels.png")
    assert found(folders)["pairs"].status == FAIL
    assert found(folders, mask_suffix="_labels.png")["pairs"].status == OK


def test_a_list_of_images_is_all_that_counts(folders):
    """Some sets have masks for a part of their images, and name them in a file."""
    (folders / "masks" / "a.png").unlink()
    assert found(folders)["pairs"].status == FAIL
    checks = found(folders, only=["deep/b"])
    assert checks["pairs"].status == OK and "1 of 1 masks read" in checks["classes"].detail
    assert "c.jpg is listed and does not exist" in found(folders, only=["deep/b", "c"])["pairs"].detail


def test_large_sets_are_sampled(folders):
    check = found(folders, sample=1)["classes"]
    assert "1 of 2 masks read" in check.detail
