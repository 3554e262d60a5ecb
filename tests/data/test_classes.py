"""Labels are places in one list of names; neither a missing nor a misspelt folder moves them."""

from __future__ import annotations

import shutil

import pytest

from tests.toy import make_folder, make_image
from vit3.data import make_data, open_split
from vit3.errors import UserError


def folder(root, **options):
    return make_data("folder", str(root), 3, "raise", **options)


def labels(split):
    return [split[i][1] for i in range(len(split))]


@pytest.mark.parametrize("empty", [False, True])
def test_a_class_without_test_images_shifts_no_label(tmp_path, caplog, empty):
    gone = make_folder(tmp_path) / "val" / "class1"
    shutil.rmtree(gone)
    if empty:
        gone.mkdir()
    data = folder(tmp_path)
    assert labels(data.val) == [0, 0, 2, 2] and data.val.classes == data.classes == ("class0", "class1", "class2")
    assert caplog.text.count("has no image of 1 of 3 classes (labels stay as they are): class1") == 1


def test_a_stored_map_decides_against_the_order_of_folders(tmp_path):
    stored = ["class2", "class0", "other", "class1"]
    val = open_split("folder", str(make_folder(tmp_path)), "val", 3, "raise", classes=stored)
    assert labels(val) == [1, 1, 3, 3, 0, 0] and list(val.classes) == stored


@pytest.mark.parametrize("meant, written", [("Cat", "cat"), ("007", "7"), ("dog", "dog ")])
def test_a_folder_that_is_no_class_is_named_with_the_one_meant(tmp_path, meant, written):
    for split, name in (("train", meant), ("val", written)):
        make_image(tmp_path / split / name / "a.png", 0)
    with pytest.raises(UserError, match=f"not trained for: {written} .'{written}' differs from '{meant}' only by case"):
        folder(tmp_path)


def test_an_unknown_folder_without_a_namesake_is_refused_without_a_hint(tmp_path):
    (make_folder(tmp_path) / "val" / "zebra").mkdir()
    with pytest.raises(UserError, match=r"not trained for: zebra; known are 3: class0, class1, class2"):
        folder(tmp_path)


def test_numbers_keep_the_order_of_their_spelling_and_the_log_says_so(tmp_path, caplog):
    caplog.set_level("INFO")
    for split in ("train", "val"):
        for name in ("2", "10"):
            make_image(tmp_path / split / name / "a.png", 0)
    data = folder(tmp_path)
    assert data.classes == ("10", "2") and labels(data.val) == [1, 0]  # timm lists the files of 2 before those of 10
    assert "order of their spelling, as in ImageFolder: labels 0, 1, ... are '10', '2'" in caplog.text


def test_splits_by_other_names(tmp_path):
    root = make_folder(tmp_path)
    (root / "val").rename(root / "held_out")
    assert labels(folder(root, val_split="held_out").val) == [0, 0, 1, 1, 2, 2]
    with pytest.raises(UserError, match="has no folder elsewhere/"):
        folder(root, val_split="elsewhere")


def test_keys_of_other_kinds_are_refused(tmp_path):
    for option, value in (("stream", True), ("input_key", "jpg")):
        with pytest.raises(UserError, match=f"data.{option}={value} means nothing to data=folder"):
            folder(make_folder(tmp_path), **{option: value})
