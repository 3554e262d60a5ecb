"""Whole detectors and a segmentor on torchvision's operators: average precision and gradients by two computations."""

import contextlib
import functools
import importlib
import io
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("mmengine", reason="needs the extra mm")

import vit3.openmmlab  # noqa: F401  before mmdet
from tests.openmmlab import slow_operators as slow

import mmdet.registry  # isort: skip
import mmdet.utils
import mmengine
import mmseg.registry
import mmseg.utils
from mmdet.structures import DetDataSample
from mmdet.structures.mask import BitmapMasks
from mmengine.registry import DefaultScope
from mmengine.structures import InstanceData, PixelData
from mmseg.structures import SegDataSample
from pycocotools import mask as run_length
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

SIDE, WIDTH, IMAGES = 64, 32, 10
CHANNELS = [16, 32, 64, 128]
COLOURS = np.array([[230, 40, 40], [40, 230, 40]], dtype=np.uint8)  # of rectangles and of ellipses


def shipped(package, name):
    """The model of a configuration that the installed library ships, made small."""
    config = mmengine.Config.fromfile(Path(package.__file__).parent / ".mim/configs/_base_/models" / name).model
    config.backbone.update(depth=18, base_channels=CHANNELS[0], norm_eval=False, init_cfg=None)
    return config


def build(package, config):
    """The model, in the library's own scope: names such as "ResNet" stand in both."""
    package.utils.register_all_modules(init_default_scope=False)
    torch.manual_seed(0)
    with DefaultScope.overwrite_default_scope(package.__name__):
        return package.registry.MODELS.build(config)


def small_detector(name):
    """Mask R-CNN or Cascade Mask R-CNN for two classes with a narrow ResNet-18."""
    config = shipped(mmdet, name)
    config.backbone.frozen_stages = -1
    config.neck.update(in_channels=CHANNELS, out_channels=WIDTH)
    config.rpn_head.update(in_channels=WIDTH, feat_channels=WIDTH)
    config.rpn_head.anchor_generator.scales = [3]
    head = config.roi_head
    head.bbox_roi_extractor.out_channels = head.mask_roi_extractor.out_channels = WIDTH
    for box_head in head.bbox_head if isinstance(head.bbox_head, list) else [head.bbox_head]:
        box_head.update(in_channels=WIDTH, fc_out_channels=64, num_classes=2)
    head.mask_head.update(in_channels=WIDTH, conv_out_channels=WIDTH, num_convs=1, num_classes=2)
    config.train_cfg.rpn_proposal.update(nms_pre=200, max_per_img=60)
    config.train_cfg.rpn.sampler.num = 64
    stages = config.train_cfg.rcnn
    for stage in stages if isinstance(stages, list) else [stages]:
        stage.sampler.num = 32
    config.test_cfg.rpn.update(nms_pre=100, max_per_img=50)
    return build(mmdet, config)


def shapes():
    """Images of one to three filled rectangles and ellipses on noise, with boxes, labels and masks."""
    g = np.random.default_rng(0)
    y, x = np.mgrid[:SIDE, :SIDE] + 0.5
    images, samples = [], []
    for index in range(IMAGES):
        image = g.integers(90, 140, (SIDE, SIDE, 3)).astype(np.uint8)
        masks, labels = [], g.integers(0, 2, g.integers(1, 4))
        for label in labels:
            half = g.uniform(7, 15, 2)
            u, v = ((axis - g.uniform(r, SIDE - r)) / r for axis, r in zip((x, y), half))
            mask = (u**2 + v**2 <= 1) if label else (np.maximum(abs(u), abs(v)) <= 1)
            image[mask] = COLOURS[label]
            masks = [other & ~mask for other in masks] + [mask]
        seen = [i for i, mask in enumerate(masks) if mask.sum() > 40]
        masks = BitmapMasks(np.stack([masks[i] for i in seen]).astype(np.uint8), SIDE, SIDE)
        size = dict.fromkeys(("img_shape", "ori_shape", "pad_shape", "batch_input_shape"), (SIDE, SIDE))
        sample = DetDataSample(metainfo=dict(img_id=index, scale_factor=(1.0, 1.0), **size))
        sample.gt_instances = InstanceData(
            bboxes=masks.get_bboxes("hbox").tensor, labels=torch.from_numpy(labels[seen]), masks=masks
        )
        images.append(torch.from_numpy(image).permute(2, 0, 1))
        samples.append(sample)
    return dict(inputs=images, data_samples=samples)


def losses(model, data, chosen=slice(None)):
    """Sum of the training losses on the chosen images."""
    return model.parse_losses(model.loss(data["inputs"][chosen], data["data_samples"][chosen]))[0]


@functools.cache
def trained_detector():
    """A Mask R-CNN after a few seconds of training: enough to find shapes that it has seen."""
    model = small_detector("mask-rcnn_r50_fpn.py").train()
    data = model.data_preprocessor(shapes(), True)
    steps = 40
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=steps)
    for step in range(steps):
        optimizer.zero_grad()
        losses(model, data, slice(5 * (step % 2), 5 * (step % 2) + 5)).backward()
        optimizer.step()
        schedule.step()
    return model, data


def average_precision(model, data):
    """AP of boxes and of masks (0 to 1), and the scores of all that was found."""
    with torch.no_grad():
        found = model.eval().predict(data["inputs"], data["data_samples"], rescale=False)
    truth, results = [], []
    for sample in found:
        for target, n, instances in ((truth, 0, sample.gt_instances), (results, 1, sample.pred_instances)):
            masks = instances.masks.cpu().numpy() if n else instances.masks.masks
            for i, (x1, y1, x2, y2) in enumerate(instances.bboxes.tolist()):
                row = dict(
                    image_id=sample.img_id, category_id=int(instances.labels[i]), bbox=[x1, y1, x2 - x1, y2 - y1]
                )
                row["segmentation"] = run_length.encode(np.asfortranarray(masks[i].astype(np.uint8)))
                row.update(dict(score=float(instances.scores[i])) if n else dict(area=float(masks[i].sum()), iscrowd=0))
                target.append(row | dict(id=len(target) + 1))
    images = [dict(id=i, height=SIDE, width=SIDE) for i in range(IMAGES)]
    scores = {}
    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO()
        coco.dataset = dict(images=images, annotations=truth, categories=[dict(id=0, name="a"), dict(id=1, name="b")])
        coco.createIndex()
        for kind in ("bbox", "segm"):
            evaluation = COCOeval(coco, coco.loadRes([dict(row) for row in results]), kind)
            evaluation.evaluate()
            evaluation.accumulate()
            evaluation.summarize()
            scores[kind] = evaluation.stats[0]
    return scores, torch.tensor([row["score"] for row in results])


@pytest.fixture
def slow_calls(monkeypatch):
    """A function that puts the independent computations in place of the operators and returns the calls of each."""
    module, calls = importlib.import_module("mmcv._ext"), []

    def nms(boxes, scores, iou_threshold, offset):
        calls.append("nms")
        return slow.nms(boxes, scores, iou_threshold, offset)

    def forward(maps, rois, output, _y, _x, aligned_height, aligned_width, pool_mode, **options):
        calls.append("forward")
        output.copy_(roi_align(maps, rois, (aligned_height, aligned_width), **options))

    def backward(grad, rois, _y, _x, target, aligned_height, aligned_width, pool_mode, **options):
        calls.append("backward")
        maps = torch.zeros_like(target, requires_grad=True)
        with torch.enable_grad():
            output = roi_align(maps, rois, (aligned_height, aligned_width), **options)
        target += torch.autograd.grad(output, maps, grad)[0]

    def roi_align(maps, rois, size, spatial_scale, sampling_ratio, aligned):
        return slow.roi_align_tents(maps, rois, size, spatial_scale, sampling_ratio, aligned)

    def put():
        for name, function in (("nms", nms), ("roi_align_forward", forward), ("roi_align_backward", backward)):
            monkeypatch.setattr(module, name, function)
        return calls

    return put


def test_average_precision_is_that_of_independent_operators(slow_calls):
    model, data = trained_detector()
    fast, fast_scores = average_precision(model, data)
    calls = slow_calls()
    other, other_scores = average_precision(model, data)
    assert {"nms", "forward"} <= set(calls)
    assert min(fast.values()) > 0.2 and len(fast_scores) > 10  # or the comparison would say nothing
    assert fast == pytest.approx(other, abs=1e-3)
    torch.testing.assert_close(fast_scores, other_scores, rtol=1e-4, atol=1e-5)


def test_training_gradients_are_those_of_independent_operators(slow_calls):
    model, data = trained_detector()

    def gradients():
        torch.manual_seed(3)  # the heads sample boxes
        model.eval().zero_grad()  # eval: running statistics stay as they are
        losses(model, data).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    fast = gradients()
    calls = slow_calls()
    other = gradients()
    assert "backward" in calls and len(fast) > 80
    for name, grad in fast.items():
        assert (grad - other[name]).norm() <= 1e-3 * other[name].norm() + 1e-6, name


def test_cascade_trains_and_predicts():
    model = small_detector("cascade-mask-rcnn_r50_fpn.py")
    data = model.data_preprocessor(shapes(), True)
    total = losses(model.train(), data, slice(2))
    total.backward()
    assert total.isfinite() and all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    found = model.eval().predict(data["inputs"][:2], data["data_samples"][:2])
    assert all(sample.pred_instances.masks.shape[1:] == (SIDE, SIDE) for sample in found)


def test_upernet_trains_and_predicts():
    config = shipped(mmseg, "upernet_r50.py")
    config.pretrained = None
    norm = dict(type="BN", requires_grad=True)  # their SyncBN wants several processes
    config.backbone.norm_cfg = config.decode_head.norm_cfg = config.auxiliary_head.norm_cfg = norm
    config.decode_head.update(in_channels=CHANNELS, channels=WIDTH, num_classes=3)
    config.auxiliary_head.update(in_channels=CHANNELS[2], channels=WIDTH, num_classes=3)
    config.data_preprocessor.size = (SIDE, SIDE)
    model = build(mmseg, config)
    samples = []
    for sample in shapes()["data_samples"]:
        classes = torch.zeros(1, SIDE, SIDE, dtype=torch.long)
        for label, mask in zip(sample.gt_instances.labels, sample.gt_instances.masks.masks):
            classes[0, torch.from_numpy(mask).bool()] = label + 1
        samples.append(SegDataSample(metainfo=sample.metainfo, gt_sem_seg=PixelData(data=classes)))
    data = model.data_preprocessor(dict(inputs=shapes()["inputs"], data_samples=samples), True)
    total = losses(model.train(), data)
    total.backward()
    assert total.isfinite() and all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    found = model.eval().predict(data["inputs"], data["data_samples"])
    assert found[0].pred_sem_seg.data.shape == (1, SIDE, SIDE)
