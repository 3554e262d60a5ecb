"""Inner optimisers: from a gradient to new weights."""

from __future__ import annotations

from torch import Tensor

from vit3.ops.soft_norm import soft_normalise


def gradient_descent(weight: Tensor, gradient: Tensor, *, lr: float, norm_dim: tuple[int, ...]) -> Tensor:
    """One plain step along the softly normalised gradient."""
    return weight - lr * soft_normalise(gradient, dim=norm_dim)
