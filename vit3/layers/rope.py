"""Two-dimensional rotary position encoding, computed for the grid at hand and stored nowhere."""

from __future__ import annotations

import torch
from torch import Tensor, nn


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

    def forward(self, x: Tensor, h: int, w: int) -> Tensor:
        """Rotate x (B, h*w, ..., dim); dimensions between tokens and channels share the rotation."""
        wide = torch.promote_types(x.dtype, torch.float32)
        cos, sin = self._table(h, w, wide, x.device)  # (N, dim / 2)
        shape = (h * w, *([1] * (x.ndim - 3)), self.dim // 2)
        cos, sin = cos.view(shape), sin.view(shape)
        even, odd = x.to(wide).unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).to(x.dtype)

    def _table(self, h: int, w: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosine and sine of all angles, (h*w, dim / 2) each; trigonometry on h + w rows only."""
        pairs = self.dim // 4
        frequency = 1.0 / self.base ** (torch.arange(pairs, dtype=dtype, device=device) / pairs)
        rows = (torch.arange(h, dtype=dtype, device=device)[:, None] * frequency)[:, None]  # (h, 1, pairs)
        columns = (torch.arange(w, dtype=dtype, device=device)[:, None] * frequency)[None]  # (1, w, pairs)
        grid = (h, w, pairs)
        return tuple(
            torch.cat((f(rows).expand(grid), f(columns).expand(grid)), dim=-1).flatten(0, 1)
            for f in (torch.cos, torch.sin)
        )

    def extra_repr(self) -> str:
        return f"dim={self.dim}, base={self.base:g}"
