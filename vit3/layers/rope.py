"""Two-dimensional rotary position encoding, computed for the grid at hand and stored nowhere."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vit3.ops.rotary import Rotary, rotary_tables, rotate


class RoPE2d(nn.Module):
    """Rotate channel pairs (2i, 2i+1) by angles that grow with a token's row and column.

    The first half of the pairs turns with the row, the second half with the column, at frequencies
    ``base ** (-i / (dim / 4))``. Angles are computed in float32 (float64 for float64 input), whatever the dtype
    of x; the result has the dtype of x. Source: the authors' H-ViT³ code, whose tables have the size of one grid.

    Args:
        dim: channels to rotate, a multiple of 4.
        base: ratio between the fastest and (almost) the slowest frequency.

    Raises:
        ValueError: dim is not a multiple of 4.
    """

    def __init__(self, dim: int, base: float = 10000.0):
        super().__init__()
        if dim % 4:
            raise ValueError(f"dim={dim} must be a multiple of 4: two axes, two channels a pair")
        self.dim = dim
        self.base = base

    def tables(self, h: int, w: int, like: Tensor) -> Rotary:
        """Cosine and sine of an h x w grid, on the device of ``like`` and at least in float32."""
        wide = torch.promote_types(like.dtype, torch.float32)
        return rotary_tables(h, w, self.dim, self.base, wide, like.device)

    def forward(self, x: Tensor, h: int, w: int) -> Tensor:
        """Rotate x (B, h*w, ..., dim); dimensions between tokens and channels share the rotation."""
        shape = (h * w, *([1] * (x.ndim - 3)), self.dim // 2)
        return rotate(x, *(table.view(shape) for table in self.tables(h, w, x).of_tokens()))

    def extra_repr(self) -> str:
        return f"dim={self.dim}, base={self.base:g}"
