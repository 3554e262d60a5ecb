"""The paper's own recipes, Mask R-CNN and UPerNet with H-ViT³-T as published, train and are evaluated on this machine.

Only what costs time is smaller: two updates, images of some 64 pixels, few proposals.
"""

from __future__ import annotations

import json

import pytest

pytest.importorskip("mmdet", reason="needs the extra mm")
pytest.importorskip("mmseg", reason="needs the extra mm")

from scripts.make_toy_data import write_data  # noqa: E402
from tests.openmmlab.leaves import FILES, quick_bases  # noqa: E402
from vit3.openmmlab import commands  # noqa: E402

LOAD = "{type: LoadImageFromFile}"
RESIZE = "{type: Resize, scale: [64, 64], keep_ratio: true}"
DETECTION = [
    f"train_dataloader.dataset.pipeline=[{LOAD}, {{type: LoadAnnotations, with_bbox: true, with_mask: true}}, "
    f"{RESIZE}, {{type: PackDetInputs}}]",
    f"val_dataloader.dataset.pipeline=[{LOAD}, {RESIZE}, {{type: LoadAnnotations, with_bbox: true, with_mask: true}}, "
    "{type: PackDetInputs, meta_keys: [img_id, img_path, ori_shape, img_shape, scale_factor]}]",
    "train_cfg.max_epochs=1",
    "train_dataloader.batch_size=1",
    "model.train_cfg.rpn_proposal.max_per_img=20",
    "model.test_cfg.rpn.max_per_img=20",
    "model.test_cfg.rcnn.max_per_img=5",
]
SEGMENTATION = [
    f"train_dataloader.dataset.pipeline=[{LOAD}, {{type: LoadAnnotations, reduce_zero_label: true}}, {RESIZE}, "
    "{type: PackSegInputs}]",
    f"val_dataloader.dataset.pipeline=[{LOAD}, {RESIZE}, {{type: LoadAnnotations, reduce_zero_label: true}}, "
    "{type: PackSegInputs}]",
    "train_cfg.max_iters=2",
    "train_cfg.val_interval=2",
    "model.data_preprocessor.size=[64, 64]",
]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy") / "data"
    write_data(folder, train=2, val=8, size=64, seed=0)
    return folder


@pytest.mark.parametrize(
    "leaf, kind, changes, score",
    [
        ("mask_rcnn_h_vit3_tiny_1x", "detection", DETECTION, "val/segm_AP50"),
        ("upernet_h_vit3_tiny_160k", "segmentation", SEGMENTATION, "val/mIoU"),
    ],
)
def test_two_updates_and_an_evaluation(tmp_path, monkeypatch, data, leaf, kind, changes, score):
    for name in ("pictures.plot_class_maps", "pictures.plot_detections", "runs.plot_scores"):
        monkeypatch.setattr(f"vit3.openmmlab.{name}", lambda *args, **kwargs: None)
    folder = data / {"detection": "coco", "segmentation": "ade"}[kind]
    classes = json.loads((data / "classes.json").read_text())[kind]
    arguments = [
        f"output={tmp_path}", "name=run", "device=cpu", "workers=0", f"data_root={folder}",
        f"classes=[{','.join(classes)}]", "model.backbone.init_cfg=null",
        "+default_hooks.checkpoint.save_optimizer=false", *changes,
    ]  # fmt: skip
    with quick_bases():
        commands.train(FILES[leaf], arguments)
    (line,) = [json.loads(text) for text in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert line["updates"] == 2 and 0 < line["train/loss"] < 100 and line[score] is not None
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["best"]["score"]
