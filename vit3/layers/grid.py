"""Between tokens (B, H*W, C) and maps (B, C, H, W), and the one padding rule of all models."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def to_map(x: Tensor, h: int, w: int) -> Tensor:
    """Tokens (B, h*w, C) as a map (B, C, h, w): a view in channels_last order."""
    return x.transpose(1, 2).unflatten(-1, (h, w))


def to_tokens(x: Tensor) -> Tensor:
    """A map (B, C, H, W) as tokens (B, H*W, C)."""
    return x.flatten(2).transpose(1, 2)


def pad_to_multiple(x: Tensor, multiple: int) -> Tensor:
    """Pad a map with zeros at the right and at the bottom until both sides are multiples of ``multiple``.

    Source: the authors' detection and segmentation backbones (stem: 4, each downsampling: 2).
    """
    # The padded side is multiple * ceil(side / multiple), in which side stands once: with side % multiple, symbolic
    # shapes would double at every stage and a compiler would take minutes.
    bottom, right = ((side + multiple - 1) // multiple * multiple - side for side in x.shape[-2:])
    # A compiler always pads, by 0 if need be: one graph for all sizes, not one for each pattern of odd sides.
    if torch.compiler.is_compiling() or right or bottom:
        x = F.pad(x, (0, right, 0, bottom))
    return x


def crop(x: Tensor, height: int, width: int) -> Tensor:
    """The upper left part of a map: what :func:`pad_to_multiple` added is gone."""
    # A compiler would ask whether a slice takes all of a side and make one graph for each answer; this it does not ask.
    if torch.compiler.is_compiling():
        return F.pad(x, (0, width - x.shape[-1], 0, height - x.shape[-2]))
    return x[..., :height, :width]
