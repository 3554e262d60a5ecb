"""Closed form of the depthwise-convolution inner step, as nine shifted products.

Nine products and no grouped convolution with B*D groups: the latter costs more on a CPU and breaks ONNX and
symbolic shapes once the batch size is dynamic.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vit3.ops.precision import in_full_precision
from vit3.ops.soft_norm import soft_normalise


def _shifts(x: Tensor) -> list[Tensor]:
    """The nine neighbours of every position, row by row, zero outside the grid: views of one padded x."""
    height, width = x.shape[-2:]
    padded = F.pad(x, (1, 1, 1, 1))
    return [padded[..., dy : dy + height, dx : dx + width] for dy in range(3) for dx in range(3)]


def gradient(k: Tensor, v: Tensor, *, scale: float) -> Tensor:
    """Gradient (B, D, 1, 3, 3) of the inner loss with respect to the kernel, before normalisation.

    The loss is linear in the kernel, so the gradient does not depend on it: it is the cross-correlation of
    keys and values at nine offsets.
    """
    e = -scale * v
    taps = torch.stack([(shift * e).sum(dim=(-2, -1)) for shift in _shifts(k)], dim=-1)  # (B, D, 9)
    return (taps / (k.shape[-2] * k.shape[-1])).unflatten(-1, (1, 3, 3))


def fast_weights(k: Tensor, v: Tensor, w: Tensor, *, lr: float, scale: float) -> Tensor:
    """The kernel of every sample after the inner step, (B, D, 1, 3, 3)."""
    return w - lr * soft_normalise(gradient(k, v, scale=scale), dim=(-2, -1))


@in_full_precision
def dwconv_ttt(q: Tensor, k: Tensor, v: Tensor, w: Tensor, *, lr: float, scale: float) -> Tensor:
    """See :func:`vit3.ops.dwconv_ttt`."""
    taps = fast_weights(k, v, w, lr=lr, scale=scale).flatten(-3)  # (B, D, 9)
    return sum(shift * taps[..., i, None, None] for i, shift in enumerate(_shifts(q)))
