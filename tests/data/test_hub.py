"""Hugging Face data sets: the same classes, labels, channels and policy for bad images as folders."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from tests.toy import make_folder, make_image
from vit3.data import make_data, open_split, preflight
from vit3.errors import UserError


@pytest.fixture(autouse=True)
def quiet(tmp_path, monkeypatch):
    """No network, and a cache that goes with the test."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()


def save(root, splits, names=None, column="label"):
    """Parquet files of (bytes, label) rows by split."""
    from datasets import ClassLabel, Dataset, Features, Image, Value

    label = ClassLabel(names=names) if names else None
    for split, rows in splits.items():
        kind = label or Value("string" if isinstance(rows[0][1], str) else "int64")
        columns = {
            "image": [None if data is None else {"bytes": data, "path": None} for data, _ in rows],
            column: [value for _, value in rows],
        }
        features = Features({"image": Image(), column: kind})
        root.mkdir(parents=True, exist_ok=True)
        Dataset.from_dict(columns, features=features).to_parquet(root / f"{split}-00000-of-00001.parquet")
    return root


def picture(tmp_path, value, ending="png"):
    path = tmp_path / f"picture.{ending}"
    make_image(path, value, (64, 64))
    return path.read_bytes()


@pytest.fixture
def rows(tmp_path):
    """Two classes, whose names do not stand in sorted order, with two images each."""
    return [(picture(tmp_path, i % 2), i % 2) for i in range(4)]


def hfds(root, on_bad_image="raise", in_chans=3, **options):
    return make_data("hfds", str(root), in_chans, on_bad_image, **options)


def labels(split):
    return [split[i][1] for i in range(len(split))]


def test_names_and_labels_of_the_data_set(tmp_path, rows):
    data = hfds(save(tmp_path / "set", {"train": rows, "validation": rows[1:]}, names=["zebra", "ant"]))
    assert data.classes == ("zebra", "ant")
    assert labels(data.train) == [0, 1, 0, 1] and labels(data.val) == [1, 0, 1]
    preflight(data)


def test_labels_are_translated_by_name(tmp_path, rows, caplog):
    root = save(tmp_path / "set", {"train": rows, "test": rows}, names=["zebra", "ant"])
    val = open_split("hfds", str(root), "val", 3, "raise", classes=["ant", "bee", "zebra"])
    assert labels(val) == [2, 0, 2, 0] and "has no image of 1 of 3 classes" in caplog.text
    with pytest.raises(UserError, match="not trained for: zebra .'zebra' differs from 'Zebra' only by case"):
        open_split("hfds", str(root), "val", 3, "raise", classes=["ant", "Zebra"])


def test_grey_images(tmp_path, rows):
    root = save(tmp_path / "set", {"train": rows, "validation": rows}, names=["zebra", "ant"])
    assert np.asarray(hfds(root, in_chans=1).train[0][0]).shape == (64, 64)


def test_bad_images(tmp_path, rows):
    jpeg = picture(tmp_path, 1, "jpg")
    bad = [*rows, (jpeg[: len(jpeg) // 2], 1), (None, 0)]
    root = save(tmp_path / "set", {"train": bad, "validation": bad}, names=["zebra", "ant"])
    with pytest.raises(UserError, match=r"set .split train., row 4 cannot be decoded .*and 1 more of 6 tried"):
        preflight(hfds(root))
    data = hfds(root, "skip")
    assert labels(data.val) == [0, 1, 0, 1, -1, -1] and data.bad_images == 2
    assert labels(data.train) == [0, 1, 0, 1, 0, 0] and data.bad_images == 2 + 2 + 1  # row 4 goes on over row 5


def test_columns_and_splits_by_other_names(tmp_path, rows):
    named = [(data, ["cat", "ape"][label]) for data, label in rows]
    root = save(tmp_path / "set", {"train": named, "test": named}, column="species")
    with pytest.raises(UserError, match="no column label; set data.target_key to one of: image, species"):
        hfds(root)
    data = hfds(root, target_key="species", val_split="test")
    assert data.classes == ("ape", "cat") and labels(data.val) == [1, 0, 1, 0]
    with pytest.raises(UserError, match="has no split dev; it has: test, train; set data.val_split"):
        hfds(root, target_key="species", val_split="dev")


def test_images_without_a_label(tmp_path, rows):
    root = save(tmp_path / "set", {"train": rows, "test": [(rows[0][0], -1)]})
    with pytest.raises(UserError, match="split test.: column label has images without a label"):
        hfds(root)


def test_an_image_folder_is_one_too(tmp_path):
    data = hfds(make_folder(tmp_path / "folder"))
    assert data.classes == ("class0", "class1", "class2") and labels(data.val) == [0, 0, 1, 1, 2, 2]
    assert "class1" in data.val.reader.filename(2, absolute=True)


def test_what_cannot_be_loaded_is_said_in_one_sentence(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="data.root=.*nowhere cannot be loaded by the package datasets"):
        hfds(tmp_path / "nowhere")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match="pip install datasets"):
        hfds(tmp_path)
