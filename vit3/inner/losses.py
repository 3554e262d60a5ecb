"""Inner losses: how far the inner model's prediction is from the values."""

from __future__ import annotations

import math

from torch import Tensor


def dot_product(prediction: Tensor, target: Tensor, *, scale: float, token_dims: tuple[int, ...]) -> Tensor:
    """``-scale * mean over tokens of prediction * target``, channel by channel (not summed over channels).

    Unbounded below; step size and soft norm are what bound the update. Source: paper equation for the
    dot-product loss, with the released block's mean over tokens.
    """
    tokens = math.prod([target.shape[dim] for dim in token_dims])  # a list: a compiler cannot follow a generator
    return -scale * (prediction * target).sum(dim=token_dims) / tokens
