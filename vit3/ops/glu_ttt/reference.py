"""Closed form of the GLU inner step: the clear one, which every faster backend must equal."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vit3.ops.precision import in_full_precision
from vit3.ops.soft_norm import soft_normalise


def gradients(k: Tensor, v: Tensor, w1: Tensor, w2: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
    """Gradients (B, M, D, D) of the inner loss with respect to W1 and W2, before normalisation."""
    n = k.shape[-2]
    z1, z2 = k @ w1, k @ w2  # [N, D] @ [D, D] -> [N, D]
    s = torch.sigmoid(z2)
    e = -scale * v  # N times the derivative of the loss by the prediction
    kt = k.transpose(-2, -1)
    # [D, N] @ [N, D] -> [D, D]; 1/N comes after the sum, where it cannot underflow
    g1 = kt @ (e * (z2 * s)) / n
    g2 = kt @ (e * z1 * (s * (1 + z2 * (1 - s)))) / n
    return g1, g2


def fast_weights(k: Tensor, v: Tensor, w1: Tensor, w2: Tensor, *, lr: float, scale: float) -> tuple[Tensor, Tensor]:
    """W1 and W2 of every sample after the inner step, each (B, M, D, D)."""
    g1, g2 = gradients(k, v, w1, w2, scale=scale)
    return w1 - lr * soft_normalise(g1, dim=-2), w2 - lr * soft_normalise(g2, dim=-2)


@in_full_precision
def glu_ttt(q: Tensor, k: Tensor, v: Tensor, w1: Tensor, w2: Tensor, *, lr: float, scale: float) -> Tensor:
    """See :func:`vit3.ops.glu_ttt`."""
    f1, f2 = fast_weights(k, v, w1, w2, lr=lr, scale=scale)
    return (q @ f1) * F.silu(q @ f2)
