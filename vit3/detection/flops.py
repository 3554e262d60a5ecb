"""Parameters and multiply-adds of torchvision's detectors, as detection papers count them."""

from __future__ import annotations

from torch import Tensor, nn

from vit3.analysis.flops import count_macs

BOXES, MASKS = 1000, 100  # regions that papers let the heads look at


class _Shared(nn.Module):
    """What is computed once per image: backbone, pyramid and the region proposal head."""

    def __init__(self, detector: nn.Module):
        super().__init__()
        self.backbone, self.head = detector.backbone, detector.rpn.head

    def forward(self, image: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        return self.head(list(self.backbone(image).values()))


def count_parts(detector: nn.Module, size: tuple[int, int]) -> dict[str, int]:
    """Multiply-adds of one image by part: ``backbone, pyramid, proposals``, ``boxes`` and, if it has them, ``masks``.

    The heads are counted by formula for 1,000 boxes and 100 masks. Norms, activations and pooling are not.

    Args:
        detector: of :func:`vit3.detection.mask_rcnn` or :func:`~vit3.detection.faster_rcnn`.
        size: (height, width) of the image as the network sees it, padded to a multiple of 32.
    """
    padded = [-(-side // 32) * 32 for side in size]
    heads = detector.roi_heads
    parts = {"backbone, pyramid, proposals": count_macs(_Shared(detector), padded)}
    parts["boxes"] = BOXES * sum(_layer(m, 1) for part in (heads.box_head, heads.box_predictor) for m in part.modules())
    if heads.has_mask():
        (side, _) = heads.mask_roi_pool.output_size
        total = 0
        for module in [*heads.mask_head.modules(), *heads.mask_predictor.modules()]:
            total += _layer(module, side * side)
            if isinstance(module, nn.ConvTranspose2d):
                side *= module.stride[0]
        parts["masks"] = MASKS * total
    return parts


def _layer(module: nn.Module, places: int) -> int:
    """Multiply-adds of one layer for one region, at so many places of its input."""
    layers = (nn.Linear, nn.Conv2d, nn.ConvTranspose2d)
    return module.weight.numel() * places if isinstance(module, layers) else 0
