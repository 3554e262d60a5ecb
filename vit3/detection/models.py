"""Mask R-CNN and Faster R-CNN: torchvision's, on our backbones."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Sequence
from pathlib import Path

from torch import nn
from torchvision.models.detection import FasterRCNN, MaskRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.transform import GeneralizedRCNNTransform
from torchvision.ops import MultiScaleRoIAlign
from torchvision.ops.poolers import initLevelMapper

from vit3.config import nearest
from vit3.detection.pyramid import PyramidBackbone
from vit3.models.dense import DenseHViT3, DenseViT3
from vit3.models.weights import load_weights

logger = logging.getLogger(__name__)

BACKBONES = tuple(f"{kind}_{arch}" for kind in ("h_vit3", "vit3") for arch in ("tiny", "small", "base"))


def mask_rcnn(
    backbone: str | nn.Module, num_classes: int, *, pretrained: str | Path | None = None, out_channels: int = 256,
    frozen_stages: int = -1, with_cp: bool = False, drop_path_rate: float = 0.0, min_size: int | Sequence[int] = 800,
    max_size: int = 1333, box_channels: int = 1024, mask_channels: int = 256, backbone_kwargs: dict | None = None,
    **options,
) -> MaskRCNN:  # fmt: skip
    """torchvision's Mask R-CNN with a ViT³ backbone and a feature pyramid network.

    >>> model = mask_rcnn("h_vit3_tiny", num_classes=80)
    >>> losses = model([image], [dict(boxes=boxes, labels=labels, masks=masks)])  # labels 1 to 80
    >>> found = model.eval()([image])  # [dict(boxes, labels, scores, masks)]

    Images are lists of (3, H, W), values 0 to 1; a batch is padded to its largest image, at right and bottom, to a
    multiple of 32, and no further.

    Args:
        backbone: one of ``BACKBONES``, or a module as :class:`vit3.detection.pyramid.PyramidBackbone` wants it.
        num_classes: of things to detect, background not counted (torchvision counts it): labels are 1 to num_classes.
        pretrained: file with weights of the backbone (a classifier's, or a dense backbone's), through
            :func:`vit3.models.weights.load_weights`.
        out_channels: width of the pyramid.
        frozen_stages: -1 nothing, 0 the stem, k also the first k stages (blocks, for the plain networks).
        with_cp: recompute blocks in the backward pass: less memory, more time.
        drop_path_rate: stochastic depth at the last block.
        min_size: shorter side that images are resized to, in pixels; of several one is drawn per image in training,
            and the last one used otherwise. max_size: the longer side at most.
        box_channels, mask_channels: widths of the heads.
        backbone_kwargs: more arguments of the backbone, where it is given by name.
        options: more arguments of :class:`torchvision.models.detection.MaskRCNN`.

    Raises:
        ValueError: unknown backbone or option, no classes, or options of the backbone given beside a module.
        FileNotFoundError, vit3.models.weights.WeightsError: no such file, or too little of it fits.
    """
    _check_options(options, MaskRCNN)
    maps = _backbone(
        backbone, num_classes, pretrained, out_channels, backbone_kwargs, frozen_stages=frozen_stages, with_cp=with_cp,
        drop_path_rate=drop_path_rate,
    )  # fmt: skip
    masks = dict(
        mask_roi_pool=FixedScaleRoIAlign(maps, 14),
        mask_head=MaskRCNNHeads(out_channels, (mask_channels,) * 4, dilation=1),
        mask_predictor=MaskRCNNPredictor(mask_channels, mask_channels, num_classes + 1),
    )
    parts = {**_parts(maps, num_classes, box_channels), **masks, **options}
    return MaskRCNN(maps, None, min_size, max_size, **parts)


def faster_rcnn(
    backbone: str | nn.Module, num_classes: int, *, pretrained: str | Path | None = None, out_channels: int = 256,
    frozen_stages: int = -1, with_cp: bool = False, drop_path_rate: float = 0.0, min_size: int | Sequence[int] = 800,
    max_size: int = 1333, box_channels: int = 1024, backbone_kwargs: dict | None = None, **options,
) -> FasterRCNN:  # fmt: skip
    """torchvision's Faster R-CNN with a ViT³ backbone and a feature pyramid network: boxes without masks.

    Arguments and errors are those of :func:`mask_rcnn`; ``options`` go to
    :class:`torchvision.models.detection.FasterRCNN`.
    """
    _check_options(options, FasterRCNN)
    maps = _backbone(
        backbone, num_classes, pretrained, out_channels, backbone_kwargs, frozen_stages=frozen_stages, with_cp=with_cp,
        drop_path_rate=drop_path_rate,
    )  # fmt: skip
    parts = {**_parts(maps, num_classes, box_channels), **options}
    return FasterRCNN(maps, None, min_size, max_size, **parts)


class FixedScaleRoIAlign(MultiScaleRoIAlign):
    """torchvision's pooling of regions, at the strides of the maps.

    torchvision guesses the scales from the first batch and keeps them: height of the map by that of the image without
    its padding. A first image of 41x128, padded to 64x128, would halve all strides for good (0.25 -> 0.5).

    Args:
        maps: has ``names`` and ``strides`` of its maps. output_size: side of what is pooled.
    """

    def __init__(self, maps: PyramidBackbone, output_size: int, sampling_ratio: int = 2):
        super().__init__(maps.names, output_size, sampling_ratio)
        self.scales = [1 / stride for stride in maps.strides[: len(maps.names)]]
        levels = [round(math.log2(stride)) for stride in maps.strides[: len(maps.names)]]
        self.map_levels = initLevelMapper(levels[0], levels[-1], self.canonical_scale, self.canonical_level)


DETECTORS = {"mask_rcnn": mask_rcnn, "faster_rcnn": faster_rcnn}


def _backbone(backbone, num_classes, pretrained, out_channels, kwargs, **options) -> PyramidBackbone:
    if num_classes < 1:
        raise ValueError(f"num_classes={num_classes} must be at least 1; background is not counted")
    if isinstance(backbone, nn.Module):
        given = [name for name, value in options.items() if value not in (-1, False, 0.0)] + ["kwargs"] * bool(kwargs)
        if given:
            raise ValueError(f"{given[0]} is an option of backbones given by name; build the module with it")
        body = backbone
    elif backbone in BACKBONES:
        kind, _, arch = backbone.rpartition("_")
        body = (DenseHViT3 if kind == "h_vit3" else DenseViT3)(arch, **options, **(kwargs or {}))
    else:
        raise ValueError(f"backbone='{backbone}' is unknown; use a module or one of: {', '.join(BACKBONES)}")
    if pretrained is not None:
        logger.info("pretrained=%s: %s", pretrained, load_weights(body, pretrained))
    return PyramidBackbone(body, out_channels)


def _check_options(options: dict, detector: type) -> None:
    """Name the nearest option where one is unknown: torchvision's last constructor takes any word and drops it."""
    known = {**inspect.signature(GeneralizedRCNNTransform).parameters, **inspect.signature(detector).parameters}
    allowed = known.keys() - {"backbone", "num_classes", "min_size", "max_size", "kwargs"}
    for name, value in options.items():
        if name not in allowed:
            raise ValueError(f"{name} is no option of torchvision's {detector.__name__}; {nearest(name, allowed)}")
        if isinstance(known[name].default, (int, float)) and not isinstance(value, (int, float)):
            raise ValueError(f"{name}={value} must be a number")  # else the first image would fail


def _parts(maps: PyramidBackbone, num_classes: int, box_channels: int) -> dict:
    """Anchors of 8 strides' length in three shapes on every map, boxes read from all maps but the last, their head."""
    sizes = tuple((8 * stride,) for stride in maps.strides)
    return dict(
        rpn_anchor_generator=AnchorGenerator(sizes, ((0.5, 1.0, 2.0),) * len(sizes)),
        box_roi_pool=FixedScaleRoIAlign(maps, 7),
        box_head=TwoMLPHead(maps.out_channels * 7**2, box_channels),
        box_predictor=FastRCNNPredictor(box_channels, num_classes + 1),
    )
