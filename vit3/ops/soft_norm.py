"""Soft normalisation of an inner gradient."""

from __future__ import annotations

import torch
from torch import Tensor


def soft_normalise(g: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """``g / (||g|| + 1)`` with the L2 norm over ``dim``: the result's norm is always below 1.

    Source: the authors' released block ("clip" in their code); the paper's text does not mention it.
    """
    return g / (torch.linalg.vector_norm(g, dim=dim, keepdim=True) + 1.0)
