"""A backbone as torchvision's detectors want it: named maps of one width, finest first."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn
from torchvision.ops.feature_pyramid_network import FeaturePyramidNetwork, LastLevelMaxPool


class PyramidBackbone(nn.Module):
    """Maps of a backbone, brought to one width by a feature pyramid network.

    A backbone of several maps gets torchvision's :class:`FeaturePyramidNetwork`; one of a single map (a plain network,
    stride 16) a simple feature pyramid, as in ViTDet.

    Args:
        body: images (B, 3, H, W) to maps (B, C_i, h_i, w_i), finest first; it has ``channels``, one per map, and
            possibly ``strides`` (else 4, 8, 16, 32 are taken, or the last of them).
        out_channels: width of all maps.

    Attributes:
        out_channels: as torchvision reads it. strides: of the maps, the last one pooled from the one before.

    Raises:
        ValueError: ``body`` has no ``channels``, or they are none.
    """

    def __init__(self, body: nn.Module, out_channels: int = 256):
        super().__init__()
        channels = tuple(getattr(body, "channels", ()))
        if not channels:
            raise ValueError(
                f"backbone={type(body).__name__} must have .channels, the widths of the maps it gives; "
                "vit3.models.dense has such backbones"
            )
        self.body, self.out_channels = body, out_channels
        if len(channels) == 1:
            from vit3.models.pyramid import SimpleFeaturePyramid

            self.fpn = SimpleFeaturePyramid(channels[0], out_channels, num_outs=5)
            self.strides = (4, 8, 16, 32, 64)
        else:
            self.fpn = FeaturePyramidNetwork(list(channels), out_channels, LastLevelMaxPool())
            strides = tuple(getattr(body, "strides", (4, 8, 16, 32)[-len(channels) :]))
            self.strides = (*strides, 2 * strides[-1])
        self.names = [str(i) for i in range(len(self.strides) - 1)]  # of the maps that boxes are read from

    def forward(self, images: Tensor) -> OrderedDict[str, Tensor]:
        """Images (B, 3, H, W) to maps (B, out_channels, h, w) by the names ``0``, ``1``, …, ``pool``."""
        maps = self.body(images)
        if len(maps) == 1:
            return OrderedDict(zip((*self.names, "pool"), self.fpn(maps)))
        return self.fpn(OrderedDict(zip(self.names, maps)))
