"""Inner models as plain functions f(weights, x), written as their definition says and nothing more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class InnerModel:
    """An inner model and what the inner loop has to know of it.

    Attributes:
        apply: ``apply(weights, x) -> prediction`` with one set of weights per sample; x and prediction share a shape.
        token_dims: dimensions of x over which the inner loss takes its mean.
        norm_dims: for each weight, the dimensions over which its gradient's soft norm is taken.
    """

    apply: Callable[[tuple[Tensor, ...], Tensor], Tensor]
    token_dims: tuple[int, ...]
    norm_dims: tuple[tuple[int, ...], ...]


def glu(weights: tuple[Tensor, ...], x: Tensor) -> Tensor:
    """(x W1) * silu(x W2): x (B, M, N, D), weights (B, M, D, D) each."""
    w1, w2 = weights
    return (x @ w1) * F.silu(x @ w2)


def dwconv(weights: tuple[Tensor, ...], x: Tensor) -> Tensor:
    """3x3 depthwise convolution with a kernel per sample: x (B, D, H, W), weight (B, D, 1, 3, 3)."""
    (w,) = weights
    b, d, height, width = x.shape
    x = x.reshape(1, b * d, height, width)
    return F.conv2d(x, w.reshape(b * d, 1, 3, 3), padding=1, groups=b * d).reshape(b, d, height, width)


GLU = InnerModel(apply=glu, token_dims=(-2,), norm_dims=((-2,), (-2,)))
DWCONV = InnerModel(apply=dwconv, token_dims=(-2, -1), norm_dims=((-2, -1),))
