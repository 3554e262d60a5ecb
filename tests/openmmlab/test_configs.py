"""Every leaf is the recipe of the paper's facts, builds, and says in its header what to expect."""

from __future__ import annotations

import itertools
import re

import pytest

pytest.importorskip("mmengine", reason="needs the extra mm")

from mmengine.optim import build_optim_wrapper

from tests.helpers import ROOT
from tests.openmmlab.leaves import FILES, built, read
from vit3.data.scenes import GROUNDS, THINGS
from vit3.models.dense import DenseHViT3, DenseViT3, MapBackbone
from vit3.openmmlab.cost import count

TS, B = [64, 128, 320, 512], [96, 192, 448, 640]  # channels of the stages
# Tables 8 and 9 and the authors' settings: size, stages, stochastic depth, box AP and mask AP or mIoU
PAPER = {
    "mask_rcnn_h_vit3_tiny_1x": ("tiny", TS, 0.1, "box AP 47.3, mask AP 42.8"),
    "mask_rcnn_h_vit3_small_1x": ("small", TS, 0.1, "box AP 49.1, mask AP 44.1"),
    "mask_rcnn_h_vit3_base_1x": ("base", B, 0.1, "box AP 50.0, mask AP 44.6"),
    "mask_rcnn_h_vit3_tiny_3x": ("tiny", TS, 0.3, "box AP 48.9, mask AP 44.0"),
    "mask_rcnn_h_vit3_small_3x": ("small", TS, 0.4, "box AP 50.5, mask AP 45.0"),
    "mask_rcnn_h_vit3_base_3x": ("base", B, 0.6, "box AP 51.0, mask AP 45.3"),
    "upernet_h_vit3_tiny_160k": ("tiny", TS, 0.2, "mIoU 48.0"),
    "upernet_h_vit3_small_160k": ("small", TS, 0.4, "mIoU 50.2"),
    "upernet_h_vit3_base_160k": ("base", B, 0.5, "mIoU 51.7"),
}
OURS = {
    "cascade_mask_rcnn_h_vit3_small_3x",
    "mask_rcnn_vit3_small_1x",
    "mask_rcnn_timm_convnext_tiny_1x",
    "upernet_vit3_small_160k",
}
TOYS = {"toy_mask_rcnn", "toy_upernet"}
TWINS = {f"{toy}_no_update" for toy in TOYS}
LONGER = {leaf: leaf.replace("_3x", "_1x") for leaf in PAPER if leaf.endswith("_3x")}
DETECTION = sorted(leaf for leaf in PAPER.keys() | OURS if "rcnn" in leaf)
SEGMENTATION = sorted(leaf for leaf in PAPER.keys() | OURS if "upernet" in leaf)
MILESTONES = {"1x": (12, [8, 11]), "3x": (36, [27, 33])}
NO_DECAY_OF_NORMS = dict(custom_keys=dict(norm=dict(decay_mult=0.0)))


def header(leaf):
    lines = itertools.takewhile(lambda line: line.startswith("#"), FILES[leaf].read_text("utf-8").splitlines())
    return "\n".join(line.removeprefix("#").strip() for line in lines)


def heads(leaf):
    """Heads of a config that tell classes apart."""
    model = read(leaf).model
    if "decode_head" in model:
        return [model.decode_head, model.auxiliary_head]
    boxes = model.roi_head.bbox_head
    return [*(boxes if isinstance(boxes, list) else [boxes]), model.roi_head.mask_head]


def transforms(pipeline):
    """All transforms by name, those inside of a choice too, in order."""
    for step in pipeline:
        if isinstance(step, list):
            yield from transforms(step)
        elif step["type"] == "RandomChoice":
            yield from transforms(step["transforms"])
        else:
            yield step["type"], step


def test_no_leaf_is_forgotten():
    assert FILES.keys() == PAPER.keys() | OURS | TOYS | TWINS


@pytest.mark.parametrize("leaf", DETECTION)
def test_training_of_detectors(leaf):
    c = read(leaf)
    epochs, milestones = MILESTONES[leaf[-2:]]
    assert dict(c.optim_wrapper.optimizer) == dict(type="AdamW", lr=2e-4, betas=(0.9, 0.999), weight_decay=0.05)
    assert c.optim_wrapper.type == "AmpOptimWrapper" and c.optim_wrapper.paramwise_cfg == NO_DECAY_OF_NORMS
    assert (c.train_cfg.max_epochs, c.train_cfg.val_interval) == (epochs, 1)
    warmup, steps = c.param_scheduler
    assert dict(warmup) == dict(type="LinearLR", start_factor=0.001, by_epoch=False, begin=0, end=1000)
    assert dict(steps) == dict(type="MultiStepLR", begin=0, end=epochs, by_epoch=True, milestones=milestones, gamma=0.1)
    assert c.train_dataloader.batch_size == 4 and c.val_dataloader.batch_size == c.test_dataloader.batch_size == 2
    assert c.auto_scale_lr == dict(enable=False, base_batch_size=16)
    assert {head.num_classes for head in heads(leaf)} == {80}
    assert c.val_evaluator.metric == c.test_evaluator.metric == ["bbox", "segm"]
    assert "custom_hooks" not in c  # no average of weights


@pytest.mark.parametrize("leaf", DETECTION)
def test_images_of_detectors(leaf):
    """Half of the images at one of eleven scales, the other half cropped before."""
    loader = read(leaf).train_dataloader.dataset
    steps = list(transforms(loader.pipeline))
    assert [name for name, _ in steps] == [
        "LoadImageFromFile", "LoadAnnotations", "RandomFlip",
        "RandomChoiceResize", "RandomChoiceResize", "RandomCrop", "RandomChoiceResize", "PackDetInputs",
    ]  # fmt: skip
    sides = [(side, 1333) for side in (480, 512, 544, 576, 608, 640, 672, 704, 736, 768, 800)]
    assert steps[3][1].scales == steps[6][1].scales == sides
    assert steps[4][1].scales == [(400, 1333), (500, 1333), (600, 1333)]
    crop = steps[5][1]
    assert (crop.crop_type, crop.crop_size, crop.allow_negative_crop) == ("absolute_range", (384, 600), True)
    assert all(steps[i][1].keep_ratio for i in (3, 4, 6)) and steps[1][1].with_mask
    assert (loader.ann_file, loader.data_root) == ("annotations/instances_train2017.json", "data/coco/")
    assert dict(read(leaf).test_dataloader.dataset.pipeline[1]) == dict(
        type="Resize", scale=(1333, 800), keep_ratio=True
    )


@pytest.mark.parametrize("leaf", SEGMENTATION)
def test_training_of_segmentors(leaf):
    c = read(leaf)
    assert dict(c.optim_wrapper.optimizer) == dict(type="AdamW", lr=6e-5, betas=(0.9, 0.999), weight_decay=0.01)
    assert c.optim_wrapper.type == ("AmpOptimWrapper" if "tiny" in leaf else "OptimWrapper")
    assert c.optim_wrapper.paramwise_cfg == NO_DECAY_OF_NORMS and "clip_grad" not in c.optim_wrapper
    assert (c.train_cfg.type, c.train_cfg.max_iters, c.train_cfg.val_interval) == ("IterBasedTrainLoop", 160000, 16000)
    warmup, poly = c.param_scheduler
    assert dict(warmup) == dict(type="LinearLR", start_factor=1e-6, by_epoch=False, begin=0, end=1500)
    assert dict(poly) == dict(type="PolyLR", eta_min=0.0, power=1.0, by_epoch=False, begin=1500, end=160000)
    assert c.train_dataloader.batch_size == 2 and c.val_dataloader.batch_size == c.test_dataloader.batch_size == 1
    assert c.auto_scale_lr == dict(enable=False, base_batch_size=16)
    steps = dict(transforms(c.train_dataloader.dataset.pipeline))
    assert steps["RandomCrop"].crop_size == c.model.data_preprocessor.size == (512, 512)
    assert (steps["RandomResize"].scale, steps["RandomResize"].ratio_range) == ((2048, 512), (0.5, 2.0))
    assert dict(transforms(c.test_dataloader.dataset.pipeline))["Resize"].scale == (2048, 512)  # one scale
    assert {head.num_classes for head in heads(leaf)} == {150} and c.model.test_cfg.mode == "whole"
    assert (c.model.decode_head.channels, c.model.auxiliary_head.loss_decode.loss_weight) == (512, 0.4)
    assert c.train_dataloader.dataset.data_root == "data/ade/ADEChallengeData2016"
    assert "custom_hooks" not in c


@pytest.mark.parametrize("leaf", PAPER)
def test_backbones_of_the_paper(leaf):
    arch, channels, drop_path, _ = PAPER[leaf]
    model = read(leaf).model
    detector = "rcnn" in leaf
    assert model.backbone == dict(
        type="HViT3",
        arch=arch,
        drop_path_rate=drop_path,
        init_cfg=dict(type="Pretrained", checkpoint=f"h_vit3_{arch}.safetensors"),
        **(dict(with_cp=True) if detector else {}),
    )
    assert (model.neck.in_channels if detector else model.decode_head.in_channels) == channels
    assert detector or model.auxiliary_head.in_channels == channels[2]


@pytest.mark.parametrize("leaf", FILES)
def test_header(leaf):
    """It holds the command for this very file, what to expect and on what."""
    text, path = header(leaf), FILES[leaf].relative_to(ROOT).as_posix()
    tool = "det" if "detection" in path else "seg"
    assert re.search(rf"^command +python tools/{tool}\.py train {re.escape(path)}( |$)", text, re.MULTILINE)
    if leaf in TWINS:
        return
    assert re.search(r"^hardware +\S", text, re.MULTILINE)
    expected = re.search(r"^expected +(.*)$", text, re.MULTILINE)
    if leaf in PAPER:
        figures = PAPER[leaf][-1]
        assert expected[1].startswith(figures) and "not run here" in expected[1]
        assert float(re.search(r"mIoU ([\d.]+)|AP ([\d.]+)", figures)[0].split()[-1]) > 40
    elif leaf in OURS:
        assert "no published number" in expected[1] and re.search("[Nn]ot in the paper", text.splitlines()[0])


@pytest.mark.parametrize("leaf", sorted(FILES.keys() - LONGER.keys()))
def test_builds_and_fits_together(leaf):
    """All maps pass from part to part, at a size that nothing divides."""
    model, config = built(leaf), read(leaf)
    assert isinstance(model.backbone, MapBackbone)
    assert model.backbone.strides == ((16,) if isinstance(model.backbone, DenseViT3) else (4, 8, 16, 32))
    assert config.custom_imports == dict(imports=["vit3.openmmlab"], allow_failed_imports=False)
    assert all(count(model, (97, 131))["parameters"].values())
    if config.model.backbone.get("with_cp"):
        assert model.backbone.grad_checkpointing


@pytest.mark.parametrize("leaf", LONGER)
def test_longer_training_is_of_the_same_network(leaf):
    longer, shorter = (read(name).model.to_dict() for name in (leaf, LONGER[leaf]))
    for model in (longer, shorter):
        del model["backbone"]["drop_path_rate"]
    assert longer == shorter


@pytest.mark.parametrize("toy", sorted(TOYS))
def test_twins_differ_in_the_inner_step_alone(toy):
    plain, twin = (read(leaf).to_dict() for leaf in (toy, f"{toy}_no_update"))
    assert twin["model"]["backbone"].pop("mixer_kwargs") == dict(inner=dict(epochs=0))
    assert twin == plain
    inner = {leaf: {m.inner.epochs for m in built(leaf).modules() if hasattr(m, "inner")} for leaf in
             (toy, f"{toy}_no_update")}  # fmt: skip
    assert inner == {toy: {1}, f"{toy}_no_update": {0}}


@pytest.mark.parametrize("toy", sorted(TOYS))
def test_toys_agree_with_their_data(toy):
    c = read(toy)
    classes = tuple(c.classes)
    assert classes == (THINGS if "rcnn" in toy else (*GROUNDS, *THINGS))  # as the toy data has them, in order
    assert {head.num_classes for head in heads(toy)} == {len(classes)}
    for loader in (c.train_dataloader, c.val_dataloader, c.test_dataloader):
        assert loader.dataset.metainfo.classes == classes and loader.dataset.data_root.startswith("data/toy/")
        assert (loader.num_workers, loader.persistent_workers) == (0, False)
    end = c.train_cfg.get("max_epochs") or c.train_cfg.max_iters
    assert c.param_scheduler[-1].end == end and end % c.train_cfg.val_interval == 0
    assert isinstance(built(toy).backbone, DenseHViT3)


def test_what_is_decayed():
    """Norms are not; biases, matrices and the starts of inner models are, as in the authors' training."""
    config = read("mask_rcnn_h_vit3_tiny_1x").optim_wrapper
    model = built("toy_mask_rcnn")
    wrapper = build_optim_wrapper(model, {**config, "type": "OptimWrapper"})
    decay = {id(p): group["weight_decay"] for group in wrapper.optimizer.param_groups for p in group["params"]}
    found = {name: decay[id(p)] for name, p in model.named_parameters()}
    assert {name for name, value in found.items() if value == 0} == {name for name in found if "norm" in name}
    assert {value for name, value in found.items() if "norm" not in name} == {0.05}
    assert {"backbone.layers.0.blocks.0.attn.w1", "backbone.layers.0.blocks.0.attn.qkv.bias"} <= found.keys()
    assert "backbone.norm0.weight" in found and len({group["lr"] for group in wrapper.optimizer.param_groups}) == 1
