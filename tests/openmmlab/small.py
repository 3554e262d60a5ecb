"""Small data and configs for tests of the commands: images of random pixels, networks of a few channels."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from PIL import Image

SEGMENTOR = """
_base_ = ["mmseg::_base_/models/upernet_r50.py", "mmseg::_base_/default_runtime.py",
          "mmseg::_base_/schedules/schedule_20k.py"]
custom_imports = dict(imports=["vit3.openmmlab"], allow_failed_imports=False)
dims = [8, 8, 8, 16]
model = dict(
    pretrained=None, data_preprocessor=dict(size_divisor=1),
    backbone=dict(_delete_=True, type="HViT3", dims=dims, depths=(1, 1, 1, 1), num_heads=(1, 1, 1, 1)),
    decode_head=dict(in_channels=dims, channels=8, num_classes=2, dropout_ratio=0.0),
    auxiliary_head=dict(in_channels=8, channels=8, num_classes=2, dropout_ratio=0.0),
)
pipeline = [dict(type="LoadImageFromFile"), dict(type="LoadAnnotations"), dict(type="PackSegInputs")]
train_dataloader = dict(
    batch_size=1, num_workers=0, sampler=dict(type="InfiniteSampler", shuffle=True),
    dataset=dict(type="BaseSegDataset", data_root="data/small", pipeline=pipeline,
                 metainfo=dict(classes=("ground", "thing")),
                 data_prefix=dict(img_path="images/training", seg_map_path="annotations/training")))
val_dataloader = dict(
    batch_size=1, num_workers=0, sampler=dict(type="DefaultSampler", shuffle=False),
    dataset=dict(type="BaseSegDataset", data_root="data/small", pipeline=pipeline,
                 metainfo=dict(classes=("ground", "thing")),
                 data_prefix=dict(img_path="images/validation", seg_map_path="annotations/validation")))
test_dataloader = val_dataloader
val_evaluator = dict(type="IoUMetric", iou_metrics=["mIoU"])
test_evaluator = val_evaluator
train_cfg = dict(max_iters=4, val_interval=2)
default_hooks = dict(checkpoint=dict(interval=2), logger=dict(interval=2))
auto_scale_lr = dict(base_batch_size=16)
"""

DETECTOR = """
_base_ = ["mmdet::_base_/models/mask-rcnn_r50_fpn.py", "mmdet::_base_/datasets/coco_instance.py",
          "mmdet::_base_/default_runtime.py", "mmdet::_base_/schedules/schedule_1x.py"]
custom_imports = dict(imports=["vit3.openmmlab"], allow_failed_imports=False)
dims = [8, 8, 8, 16]
model = dict(
    backbone=dict(_delete_=True, type="HViT3", dims=dims, depths=(1, 1, 1, 1), num_heads=(1, 1, 1, 1)),
    neck=dict(in_channels=dims, out_channels=8),
    rpn_head=dict(in_channels=8, feat_channels=8),
    roi_head=dict(
        bbox_roi_extractor=dict(out_channels=8), mask_roi_extractor=dict(out_channels=8),
        bbox_head=dict(in_channels=8, fc_out_channels=8, num_classes=2),
        mask_head=dict(in_channels=8, conv_out_channels=8, num_convs=1, num_classes=2)),
    train_cfg=dict(rpn_proposal=dict(nms_pre=20, max_per_img=20), rcnn=dict(sampler=dict(num=16))),
    test_cfg=dict(rpn=dict(nms_pre=20, max_per_img=20), rcnn=dict(score_thr=0.0, max_per_img=5)),
)
classes = dict(classes=("cat", "dog"))
load, resize = dict(type="LoadImageFromFile"), dict(type="Resize", scale=(64, 64), keep_ratio=True)
truth = dict(type="LoadAnnotations", with_bbox=True, with_mask=True)
keys = ("img_id", "img_path", "ori_shape", "img_shape", "scale_factor")
train_dataloader = dict(
    batch_size=1, num_workers=0, persistent_workers=False,
    dataset=dict(metainfo=classes, pipeline=[load, truth, resize, dict(type="PackDetInputs")], filter_cfg=None))
val_dataloader = dict(
    batch_size=1, num_workers=0, persistent_workers=False,
    dataset=dict(metainfo=classes, pipeline=[load, resize, truth, dict(type="PackDetInputs", meta_keys=keys)]))
test_dataloader = val_dataloader
train_cfg = dict(max_epochs=2, val_interval=2)
param_scheduler = [dict(type="MultiStepLR", begin=0, end=2, by_epoch=True, milestones=[1], gamma=0.1)]
auto_scale_lr = dict(base_batch_size=1)
"""


def write_config(folder: Path, text: str) -> Path:
    """A config file; returns its path."""
    path = folder / ("segmentor.py" if text is SEGMENTOR else "detector.py")
    path.write_text(text)
    return path


def write_masks(root: Path, size: tuple[int, int] = (129, 65), seed: int = 0) -> Path:
    """Images and masks in ADE20K's layout: labels 0, 1 and 255, in validation no 1. Args: size: (height, width)."""
    random = np.random.default_rng(seed)
    for split, count, labels in (("training", 3, (0, 1, 255)), ("validation", 2, (0, 255))):
        images, masks = root / "images" / split, root / "annotations" / split
        images.mkdir(parents=True), masks.mkdir(parents=True)
        for i in range(count):
            Image.fromarray(random.integers(0, 256, (*size, 3), dtype=np.uint8)).save(images / f"{i}.jpg")
            mask = np.asarray(labels, dtype=np.uint8)[np.arange(size[0]) * len(labels) // size[0]]
            Image.fromarray(np.repeat(mask[:, None], size[1], axis=1)).save(masks / f"{i}.png")
    return root


def write_coco(root: Path, images: int = 3, seed: int = 0) -> Path:
    """Images and boxes of two classes in COCO's layout; the ids of the categories are 3 and 7."""
    random = np.random.default_rng(seed)
    (root / "annotations").mkdir(parents=True)
    for split in ("train2017", "val2017"):
        (root / split).mkdir()
        entries, boxes = [], []
        for i in range(images):
            height, width = 64 + 9 * i, 97
            Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(root / split / f"{i}.jpg")
            entries.append(dict(id=10 + i, file_name=f"{i}.jpg", height=height, width=width))
            for category, x in ((3, 4), (7, 50)):
                x1, y1 = x + 30, 40
                boxes.append(dict(
                    id=len(boxes) + 1, image_id=10 + i, category_id=category, bbox=[x, 5, 30, 35], area=1050, iscrowd=0,
                    segmentation=[[x, 5, x1, 5, x1, y1, x, y1]],
                ))  # fmt: skip
        categories = [dict(id=3, name="cat"), dict(id=7, name="dog")]
        content = dict(images=entries, annotations=boxes, categories=categories)
        (root / "annotations" / f"instances_{split}.json").write_text(json.dumps(content))
    return root
