"""Data: what is wrong with it is said before the first step, and no label ever shifts."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import auto_augment

from tests.toy import make_folder, make_image
from vit3.data import BatchPlan, make_data, make_eval_loader, make_train_loader, preflight
from vit3.data.digits import Digits
from vit3.errors import UserError


def folder(root, on_bad_image="raise", name="folder"):
    return make_data(name, str(root), 3, on_bad_image)


def loader_of(dataset, training=False, workers=0, batch_size=4):
    """Batches (images, labels) of one pass."""
    images = dict(
        img_size=(16, 16), in_chans=3, mean=(0.5,) * 3, std=(0.5,) * 3, interpolation="bicubic", workers=workers,
        device=torch.device("cpu"),
    )  # fmt: skip
    if training:
        loader = make_train_loader(dataset, BatchPlan(len(dataset), batch_size), 0, **images)
        return (batch[1:] for batch in loader.epoch(0))
    return make_eval_loader(dataset, batch_size, rank=0, world_size=1, crop_pct=1.0, **images)


def test_digits_are_split_by_class_and_fixed():
    train, val = Digits("train"), Digits("val")
    assert (len(train), len(val)) == (1437, 360)
    counts = np.bincount(val.labels)
    assert counts.min() >= 34 and counts.max() <= 38
    seen = {image.tobytes() for image in train.images}
    assert sum(image.tobytes() in seen for image in val.images) <= 2  # the set itself holds near-equal scans
    assert np.array_equal(val.images, Digits("val").images)


def test_folder_gives_classes_in_label_order(tmp_path):
    data = folder(make_folder(tmp_path))
    assert data.classes == ("class0", "class1", "class2")
    assert [data.val[i][1] for i in range(6)] == [0, 0, 1, 1, 2, 2]


def test_loader_normalises_and_keeps_order(tmp_path):
    images, labels = next(iter(loader_of(folder(make_folder(tmp_path)).val)))
    assert images.shape == (4, 3, 16, 16) and labels.tolist() == [0, 0, 1, 1]
    assert -1 <= images.min() and images.max() <= 1


def test_missing_root(tmp_path):
    with pytest.raises(UserError, match="data.root=.*nowhere is no folder"):
        folder(tmp_path / "nowhere")


def test_root_must_be_given():
    with pytest.raises(UserError, match="data.root is not set"):
        make_data("folder", None, 3, "raise")


def test_missing_split(tmp_path):
    shutil.rmtree(make_folder(tmp_path) / "val")
    with pytest.raises(UserError, match="has no folder val/"):
        folder(tmp_path)


def test_empty_class(tmp_path):
    (make_folder(tmp_path) / "train" / "class9").mkdir()
    with pytest.raises(UserError, match="class folders without an image .*png.*: class9"):
        folder(tmp_path)


def test_flat_validation_folder(tmp_path):
    root = make_folder(tmp_path)
    shutil.rmtree(root / "val")
    make_image(root / "val" / "a.png", 1)
    with pytest.raises(UserError, match="images outside of class folders .a.png"):
        folder(root)


def test_no_image_at_all(tmp_path):
    for split in ("train", "val"):
        (tmp_path / split / "a").mkdir(parents=True)
    with pytest.raises(UserError, match="holds no image"):
        folder(tmp_path)


def test_a_class_is_the_first_level_of_folders(tmp_path):
    for split in ("train", "val"):
        for label, name in enumerate(("cat", "dog")):
            for part in ("part1", "part2"):
                make_image(tmp_path / split / name / part / "a.png", label)
    data = folder(tmp_path)
    assert data.classes == ("cat", "dog") and [data.val[i][1] for i in range(4)] == [0, 0, 1, 1]


def test_hidden_folders_are_no_classes(tmp_path):
    (make_folder(tmp_path) / "train" / ".ipynb_checkpoints").mkdir()
    assert len(folder(tmp_path).classes) == 3


def test_imagenet_has_a_thousand_classes(tmp_path):
    with pytest.raises(UserError, match="holds 3 classes, ImageNet-1K has 1000; use data=folder"):
        folder(make_folder(tmp_path), name="imagenet")


def test_unknown_name_and_channels(tmp_path):
    with pytest.raises(UserError, match="data.name=cifar is unknown"):
        make_data("cifar", str(tmp_path), 3, "raise")
    with pytest.raises(UserError, match="data.in_chans=4 is not possible"):
        make_data("folder", str(make_folder(tmp_path)), 4, "raise")


@pytest.fixture
def spoilt(tmp_path):
    """A folder with a truncated JPEG, a zero-byte file, a CMYK JPEG and a 16-bit PNG among good images."""
    root = make_folder(tmp_path)
    make_image(root / "train" / "class0" / "whole.jpg", 0, (64, 64))
    whole = (root / "train" / "class0" / "whole.jpg").read_bytes()
    (root / "train" / "class0" / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    (root / "train" / "class1" / "zero.png").write_bytes(b"")
    make_image(root / "train" / "class1" / "cmyk.jpg", 1, mode="CMYK")
    ramp = np.linspace(0, 65535, 20 * 24).reshape(20, 24).astype(np.uint16)
    Image.fromarray(ramp).save(root / "train" / "class2" / "deep.png")
    return root


def test_bad_files_stop_before_the_first_step(spoilt):
    with pytest.raises(UserError, match="cannot be decoded .*data.on_bad_image=skip.*and 1 more of 17 tried"):
        preflight(folder(spoilt))


def test_bad_files_are_skipped_and_counted_on_request(spoilt, caplog):
    data = folder(spoilt, "skip")
    preflight(data)
    assert "2 of 17 tried images cannot be decoded" in caplog.text
    labels = [data.train[i][1] for i in range(len(data.train))]
    for i, (path, own) in enumerate(data.train.reader.samples):
        following = data.train.reader.samples[(i + 1) % len(labels)][1]
        bad = path.endswith(("cut.jpg", "zero.png"))
        assert labels[i] == (following if bad else own)
    assert data.bad_images == 2


def test_bad_files_are_counted_over_loader_processes(spoilt):
    data = folder(spoilt, "skip")
    assert sum(len(labels) for _, labels in loader_of(data.train, workers=2)) == 17
    assert data.bad_images == 2


def test_dangling_links_are_bad_files(tmp_path):
    (make_folder(tmp_path) / "train" / "class0" / "gone.png").symlink_to(tmp_path / "nowhere.png")
    with pytest.raises(UserError, match="gone.png cannot be decoded"):
        preflight(folder(tmp_path))


def test_bad_test_images_are_left_out_and_not_replaced(tmp_path):
    root = make_folder(tmp_path)
    (root / "val" / "class1" / "0.png").write_bytes(b"")
    with pytest.raises(UserError, match="val.class1.0.png cannot be decoded"):
        preflight(folder(root))
    data = folder(root, "skip")
    assert [data.val[i][1] for i in range(6)] == [0, 0, -1, 1, 2, 2] and data.bad_images == 1


def test_a_bad_file_in_a_loader_process_is_still_a_user_error(spoilt):
    with pytest.raises(UserError, match="cannot be decoded"):
        list(loader_of(folder(spoilt).train, workers=1))


def test_sixteen_bit_images_are_scaled(spoilt):
    data = folder(spoilt)
    index = next(i for i, (path, _) in enumerate(data.train.reader.samples) if path.endswith("deep.png"))
    pixels = np.asarray(data.train.decode(index)[0])
    assert pixels.shape == (20, 24, 3)
    assert 100 < pixels.mean() < 155 and (pixels == 255).mean() < 0.02  # Pillow alone clips almost all to white


@pytest.mark.parametrize("name", auto_augment._RAND_INCREASING_TRANSFORMS)
def test_the_paper_augmentation_runs_at_every_strength(name):
    """rand-m9-mstd0.5-inc1 draws magnitudes up to 10; rare ones must not stop a run of days."""
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (24, 24, 3), dtype=np.uint8))
    for magnitude in range(11):
        options = dict(translate_const=10, img_mean=(124, 116, 104))
        assert auto_augment.AugmentOp(name, prob=1.0, magnitude=magnitude, hparams=options)(image).size == (24, 24)
