"""The simple feature pyramid: maps at several strides out of the one map of a plain network."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

_LEVELS = 4  # at strides 4, 8, 16 and 32


class MapNorm(nn.LayerNorm):
    """LayerNorm over the channels of a map (B, C, h, w)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2).contiguous()


class SimpleFeaturePyramid(nn.Module):
    """One map at stride 16 to maps at strides 4, 8, 16 and 32, by deconvolution and pooling.

    Source: Li et al., Exploring Plain Vision Transformer Backbones for Object Detection, 2022, section 3.

    Args:
        in_channels: C of the map. out_channels: of each map given.
        num_outs: maps given: 4, or 5 with one at stride 64, which detectors take for large boxes.

    Raises:
        ValueError: ``in_channels`` is no multiple of 4, or ``num_outs`` is neither 4 nor 5.
    """

    def __init__(self, in_channels: int | Sequence[int], out_channels: int = 256, num_outs: int = 5):
        super().__init__()
        dim = in_channels if isinstance(in_channels, int) else in_channels[-1]
        if dim % 4 or num_outs not in (_LEVELS, _LEVELS + 1):
            raise ValueError(
                f"in_channels={dim} must be a multiple of 4 and num_outs={num_outs} must be {_LEVELS} or {_LEVELS + 1}"
            )
        self.out_channels, self.num_outs = out_channels, num_outs
        resize = (
            [_double(dim, dim // 2), MapNorm(dim // 2), nn.GELU(), _double(dim // 2, dim // 4)],
            [_double(dim, dim // 2)],
            [],
            [nn.MaxPool2d(2, ceil_mode=True)],
        )
        widths = (dim // 4, dim // 2, dim, dim)
        self.levels = nn.ModuleList(
            nn.Sequential(
                *layers,
                nn.Conv2d(width, out_channels, 1, bias=False),
                MapNorm(out_channels),
                nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False),
                MapNorm(out_channels),
            )
            for layers, width in zip(resize, widths)
        )

    def forward(self, maps: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The map (B, C, h, w), or a sequence that ends with it, to ``num_outs`` maps, the finest (B, C', 4h, 4w)."""
        x = maps if isinstance(maps, Tensor) else maps[-1]
        found = [level(x) for level in self.levels]
        if self.num_outs > _LEVELS:
            found.append(F.max_pool2d(found[-1], 1, stride=2))
        return tuple(found)


def _double(dim: int, out_dim: int) -> nn.Module:
    return nn.ConvTranspose2d(dim, out_dim, 2, stride=2)
