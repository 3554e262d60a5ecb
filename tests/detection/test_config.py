"""Configurations of torchvision's detectors: every file is whole, every mistake one sentence."""

from __future__ import annotations

import pytest

from tests.detection.toy import CONFIG
from tests.helpers import ROOT
from vit3.config import known_keys
from vit3.detection.config import DetectionConfig, checked, compose
from vit3.errors import UserError

FILES = sorted((ROOT / "configs" / "detection").glob("*.yaml"))


def read(*arguments, file=CONFIG):
    return checked(compose(file, list(arguments)))


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_every_file_is_whole(file):
    cfg = read(file=file)
    assert cfg.model.name == ("faster_rcnn" if "faster" in file.stem else "mask_rcnn")


def test_coco_files_have_the_papers_settings():
    """Facts section 6: AdamW 2e-4, decay 0.05, 12 epochs, steps 8 and 11, 1,000 updates of warm-up, drop path 0.1."""
    cfg = read(file=ROOT / "configs" / "detection" / "torchvision_mask_rcnn_tiny_coco.yaml")
    o, e = cfg.optim, cfg.engine
    assert (o.opt, o.lr, o.weight_decay, o.milestones, o.decay_rate) == ("adamw", 2e-4, 0.05, [8, 11], 0.1)
    assert (e.epochs, cfg.model.drop_path_rate, cfg.model.with_cp, cfg.model.max_size) == (12, 0.1, True, 1333)
    assert e.batch_size == o.lr_batch and cfg.model.min_size[-1] == 800 and len(cfg.model.min_size) == 11
    assert o.warmup_epochs * (117_266 // e.batch_size) == pytest.approx(1000, abs=1)
    assert o.warmup_lr == pytest.approx(o.lr * 1e-3)


def test_the_command_line_comes_last_and_the_base_first():
    cfg = read("engine.epochs=3", "model.options.box_nms_thresh=0.4", "name=a", "size=[64,96]")
    assert (cfg.engine.epochs, cfg.name, cfg.size) == (3, "a", [64, 96])
    assert cfg.model.options["box_nms_thresh"] == 0.4 and cfg.model.options["box_detections_per_img"] == 30
    assert cfg.model.max_size == 192 and cfg.optim.weight_decay == 0.05


def test_keys_that_other_backends_know_too():
    shared = {"output", "name", "resume", "checkpoint", "images", "data_root", "device", "seed", "threshold", "size"}
    assert shared <= set(known_keys(DetectionConfig))
    assert "optim.milestones" in known_keys(DetectionConfig), "groups of another file than vit3/config.py are known too"


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [
        ("trheshold=0.5", "trheshold is no key of this program; did you mean threshold"),
        ("engine.epoch=3", "did you mean engine.epochs"),
        ("epochs=3", "epochs is no key of this program"),
        ("train", "train is no key=value"),
        ("engine.epochs=many", "engine.epochs: Value 'many'"),
        ("model.min_size=128", "model.min_size: the value must be a list, in brackets"),
        ("engine.epochs=0", "engine.epochs=0 is not allowed; it must be at least 1"),
        ("model.name=yolo", "model.name=yolo is not allowed; use one of: mask_rcnn, faster_rcnn"),
        ("augment.crop_prob=2", "augment.crop_prob=2.0 is not allowed; it must be between 0 and 1"),
        ("size=[800]", "size=\\[800\\] is not allowed; it must be a list of 2 positive numbers"),
        ("optim.milestones=[9,3]", "must be different epochs, ascending"),
        ("model.max_size=100", "model.min_size=\\[128\\] must not exceed model.max_size=100"),
        ("optim.layer_decay=0.9", "optim.layer_decay=0.9 is not allowed; use one of: null"),
        ("model.min_size=[", "the value cannot be read"),
    ],
)
def test_mistakes_are_sentences(argument, sentence):
    with pytest.raises(UserError, match=sentence):
        read(argument)


def test_files_that_are_none(tmp_path):
    (tmp_path / "a.yaml").write_text("base: b.yaml\n")
    (tmp_path / "c.yaml").write_text("- 1\n")
    (tmp_path / "d.yaml").write_text(f"base: {CONFIG}\nmodell: {{}}\n")
    for name, sentence in (("a", "b.yaml cannot be read"), ("c", "must hold keys"), ("d", "did you mean model")):
        with pytest.raises(UserError, match=sentence):
            read(file=tmp_path / f"{name}.yaml")
