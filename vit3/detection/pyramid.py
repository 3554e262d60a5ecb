"""A backbone as torchvision's detectors want it: named maps of one width, finest first."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn
from torchvision.ops.feature_pyramid_network import FeaturePyramidNetwork, LastLevelMaxPool


class PyramidBackbone(nn.Module):
    """Maps of a backbone, brought to one width by a feature pyramid network.

    A backbone of several maps gets torchvision's :class:`FeaturePyramidNetwork`; one of a single map (a plain network)
    a simple feature pyramid, as in ViTDet: strides from a quarter to four times its own.

    Args:
        body: images (B, 3, H, W) to maps (B, C_i, h_i, w_i), finest first; it has ``channels``, one per map, and
            possibly ``strides`` (else 4, 8, 16, 32 are taken, or the last of them; 16 for a single map).
        out_channels: width of all maps.

    Attributes:
        out_channels: as torchvision reads it. strides: of the maps, the last one pooled from the one before.

    Raises:
        ValueError: ``body`` has no ``channels``, they are none, or a single map has a stride that cannot be quartered;
            in ``forward``, other maps than ``channels`` and ``strides`` say.
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
        usual = (16,) if len(channels) == 1 else (4, 8, 16, 32)[-len(channels) :]
        self._given = tuple(getattr(body, "strides", usual))
        if len(channels) == 1:
            from vit3.models.pyramid import SimpleFeaturePyramid

            (stride,) = self._given
            if stride not in (4, 8, 16, 32):  # torchvision pads images to multiples of 32
                raise ValueError(f"backbone={type(body).__name__} has stride {stride}; one map needs 4, 8, 16 or 32")
            self.fpn = SimpleFeaturePyramid(channels[0], out_channels, num_outs=5)
            self.strides = tuple(stride * 2**k // 4 for k in range(5))
        else:
            self.fpn = FeaturePyramidNetwork(list(channels), out_channels, LastLevelMaxPool())
            self.strides = (*self._given, 2 * self._given[-1])
        self.names = [str(i) for i in range(len(self.strides) - 1)]  # of the maps that boxes are read from

    def forward(self, images: Tensor) -> OrderedDict[str, Tensor]:
        """Images (B, 3, H, W) to maps (B, out_channels, h, w) by the names ``0``, ``1``, …, ``pool``."""
        maps = self.body(images)
        sides = [tuple(-(-side // stride) for side in images.shape[-2:]) for stride in self._given]
        if [tuple(y.shape[-2:]) for y in maps] != sides:  # boxes would be read from other places than they are at
            raise ValueError(
                f"backbone={type(self.body).__name__} gives maps of {[tuple(y.shape[-2:]) for y in maps]} for images "
                f"of {tuple(images.shape[-2:])}, but strides {self._given} mean {sides}; set its .channels and .strides"
            )
        if len(maps) == 1:
            return OrderedDict(zip((*self.names, "pool"), self.fpn(maps)))
        return self.fpn(OrderedDict(zip(self.names, maps)))
