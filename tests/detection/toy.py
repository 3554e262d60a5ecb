"""Small COCO data and a small detector for the tests of detection."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from PIL import Image

from tests.helpers import ROOT
from vit3.build import detection
from vit3.detection import mask_rcnn

CONFIG = ROOT / "configs" / "detection" / "torchvision_toy.yaml"
SIZES = [(97, 131), (64, 200), (80, 80), (97, 131)]  # height, width
CATEGORIES = ((7, "disc"), (3, "square"))  # ids out of order and with holes, as COCO's have
SHAPE = dict(dims=(8, 16), depths=(1, 1), num_heads=(1, 2), out_indices=(0, 1))
FEW = dict(
    rpn_batch_size_per_image=16, box_batch_size_per_image=16, rpn_pre_nms_top_n_train=50, rpn_post_nms_top_n_train=30,
    rpn_pre_nms_top_n_test=50, rpn_post_nms_top_n_test=20, box_detections_per_img=10,
)  # fmt: skip


def small(num_classes: int = 2, make=mask_rcnn, **options):
    """A detector of a few thousand operations an image."""
    widths = dict(out_channels=16, box_channels=16) | (dict(mask_channels=8) if make is mask_rcnn else {})
    backbone = options.pop("backbone", "h_vit3_tiny")
    shape = dict(backbone_kwargs=SHAPE) if backbone == "h_vit3_tiny" else {}
    return make(backbone, num_classes, min_size=64, max_size=128, **{**shape, **widths, **FEW, **options})


def arguments(root: Path, output: Path, *more: str) -> list[str]:
    """Command line of a run of seconds on the data below ``root``."""
    return [
        f"data_root={root}", f"output={output}", "device=cpu", "data.workers=0", "engine.epochs=2", "engine.threads=1",
        "engine.batch_size=2", "model.backbone_kwargs.dims=[8,16]", "model.backbone_kwargs.depths=[1,1]",
        "model.backbone_kwargs.num_heads=[1,2]", "model.backbone_kwargs.out_indices=[0,1]", "model.out_channels=16",
        "model.box_channels=16", "model.mask_channels=8", "model.min_size=[64]", "model.max_size=128",
        *(f"model.options.{name}={value}" for name, value in FEW.items()), "logger.every=1", *more,
    ]  # fmt: skip


def make_coco(root: Path, sizes=SIZES, categories=CATEGORIES, empty: int | None = 2, crowd: bool = True) -> Path:
    """Training and validation images of ``sizes`` with two bright squares each, in COCO's places.

    Args:
        empty: number of the image without anything. crowd: the first image has a crowd too.
    """
    rng = np.random.default_rng(0)
    (root / "annotations").mkdir(parents=True)
    for split in ("train2017", "val2017"):
        (root / split).mkdir()
        images, annotations = [], []
        for i, (height, width) in enumerate(sizes):
            pixels = rng.integers(0, 60, (height, width, 3), dtype=np.uint8)
            for k, (number, _) in enumerate(categories if i != empty else ()):
                x, y, side = 5 + 35 * k + i, 8 + 20 * k, 22 + 3 * i
                pixels[y : y + side, x : x + side, k] = 230
                annotations.append(_annotation(len(annotations) + 1, 10 + i, number, x, y, side, side))
            if crowd and i == 0:
                rle = {"size": [height, width], "counts": [0, 5 * height, (width - 5) * height]}
                annotations.append(_annotation(99, 10, categories[0][0], 0, 0, 5, height) | {
                    "iscrowd": 1, "segmentation": rle})  # fmt: skip
            name = f"{i:012d}.png"
            Image.fromarray(pixels).save(root / split / name)
            images.append({"id": 10 + i, "file_name": name, "height": height, "width": width})
        named = [{"id": number, "name": name} for number, name in categories]
        content = {"images": images, "annotations": annotations, "categories": named}
        (root / "annotations" / f"instances_{split}.json").write_text(json.dumps(content))
    return root


def no_pictures(patch) -> None:
    """Empty files for pictures, which take longer to draw than these runs to train."""
    patch(detection, "plot_scores", lambda metrics, target, *args: target.write_bytes(b""))
    patch(detection, "plot_detections", lambda images, found, classes, target, *args: target.write_bytes(b""))


def edit(root: Path, split: str, change) -> None:
    """Change the annotation file of a split: ``change(content)``."""
    path = root / "annotations" / f"instances_{split}2017.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def _annotation(number: int, image: int, category: int, x: int, y: int, w: int, h: int) -> dict:
    corners = [x, y, x + w, y, x + w, y + h, x, y + h]
    return {
        "id": number, "image_id": image, "category_id": category, "bbox": [x, y, w, h], "area": w * h, "iscrowd": 0,
        "segmentation": [corners],
    }  # fmt: skip
