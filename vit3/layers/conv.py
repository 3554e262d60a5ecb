"""The convolutional parts of H-ViT³: stem, downsampling and the feed-forward network with a convolution inside."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from vit3.layers.grid import pad_to_multiple, to_map, to_tokens


class ConvNormAct(nn.Module):
    """Convolution, then optionally BatchNorm, then optionally ReLU; named as in the authors' checkpoints."""

    def __init__(
        self,
        in_chans: int,
        out_chans: int,
        kernel_size: int,
        *,
        stride: int = 1,
        groups: int = 1,
        bias: bool = True,
        norm: bool = True,
        act: bool = True,
    ):
        super().__init__()
        self.conv = nn.Conv2d(
            in_chans, out_chans, kernel_size, stride=stride, padding=kernel_size // 2, groups=groups, bias=bias
        )
        self.norm = nn.BatchNorm2d(out_chans) if norm else nn.Identity()
        self.act = nn.ReLU() if act else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(self.conv(x)))


class ConvStem(nn.Module):
    """Image to tokens at stride 4: five convolutions with BatchNorm, ReLU after all but the last.

    Sides that are no multiple of 4 are padded with zeros at the right and at the bottom.
    """

    stride = 4

    def __init__(self, in_chans: int, dim: int):
        super().__init__()
        half, wide = dim // 2, dim * 4
        self.conv = nn.Sequential(
            ConvNormAct(in_chans, half, 3, stride=2, bias=False),
            ConvNormAct(half, half, 3, bias=False),
            ConvNormAct(half, half, 3, bias=False),
            ConvNormAct(half, wide, 3, stride=2, bias=False),
            ConvNormAct(wide, dim, 1, bias=False, act=False),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, int, int]:
        """Image (B, in_chans, H, W) to tokens (B, h*w, dim), with the grid (h, w)."""
        x = self.conv(pad_to_multiple(x, self.stride))
        return to_tokens(x), x.shape[-2], x.shape[-1]


class ConvDownsample(nn.Module):
    """Halve the grid: 1x1 expansion to four times the output width, 3x3 depthwise at stride 2, 1x1 projection.

    Odd sides are padded with one row or column of zeros at the bottom or right.
    """

    def __init__(self, dim: int, out_dim: int, ratio: int = 4):
        super().__init__()
        wide = out_dim * ratio
        self.conv = nn.Sequential(
            ConvNormAct(dim, wide, 1, norm=False),
            ConvNormAct(wide, wide, 3, stride=2, groups=wide, norm=False),
            ConvNormAct(wide, out_dim, 1, act=False),
        )

    def forward(self, x: Tensor, h: int, w: int) -> tuple[Tensor, int, int]:
        """Tokens (B, h*w, dim) to (B, ceil(h/2)*ceil(w/2), out_dim), with the new grid."""
        x = self.conv(pad_to_multiple(to_map(x, h, w), 2))
        return to_tokens(x), x.shape[-2], x.shape[-1]


class ConvMlp(nn.Module):
    """Feed-forward network with a residual 3x3 depthwise convolution in its hidden layer, GELU before and after."""

    def __init__(self, dim: int, hidden_dim: int):
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden_dim)
        self.dwc = nn.Conv2d(hidden_dim, hidden_dim, 3, padding=1, groups=hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, dim)

    def forward(self, x: Tensor, h: int, w: int) -> Tensor:
        """Tokens (B, h*w, dim) to tokens of the same shape."""
        x = F.gelu(self.fc1(x))
        x = x + to_tokens(self.dwc(to_map(x, h, w)))
        return self.fc2(F.gelu(x))
