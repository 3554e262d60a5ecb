"""Detection without OpenMMLab: torchvision's Mask R-CNN and Faster R-CNN on our backbones, trained by our engine."""

from vit3.detection.models import BACKBONES, DETECTORS, faster_rcnn, mask_rcnn

__all__ = ["BACKBONES", "DETECTORS", "faster_rcnn", "mask_rcnn"]
