"""Rotary position encoding on a grid: tables with one row per grid row and grid column, and the rotation itself."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Rotary(NamedTuple):
    """Cosine and sine of all angles of an h x w grid, never expanded over its h*w tokens.

    Rows [:h] of a table hold the angles of the grid's rows, rows [h:] those of its columns, for the C/4
    frequencies of each axis. Of the C/2 channel pairs (2i, 2i+1), the first half turns with the row and the second
    half with the column.
    """

    cos: Tensor  # (h + w, C/4)
    sin: Tensor  # (h + w, C/4)
    h: int
    w: int

    def of_tokens(self, first: int = 0, last: int | None = None) -> tuple[Tensor, Tensor]:
        """Cosine and sine of tokens [first, last), (n, C/2) each."""
        if first == 0 and last is None:
            grid = (self.h, self.w, self.cos.shape[-1])
            return tuple(
                torch.cat((t[: self.h, None].expand(grid), t[None, self.h :].expand(grid)), dim=-1).flatten(0, 1)
                for t in (self.cos, self.sin)
            )
        n = torch.arange(first, last, device=self.cos.device)
        return tuple(torch.cat((t[n // self.w], t[self.h + n % self.w]), dim=-1) for t in (self.cos, self.sin))


def rotary_tables(h: int, w: int, dim: int, base: float, dtype: torch.dtype, device: torch.device) -> Rotary:
    """Tables for ``dim`` channels: position times ``base ** (-i / (dim / 4))``, trigonometry on h + w rows only."""
    pairs = dim // 4
    frequency = 1.0 / base ** (torch.arange(pairs, dtype=dtype, device=device) / pairs)
    position = torch.cat((torch.arange(h, dtype=dtype, device=device), torch.arange(w, dtype=dtype, device=device)))
    angle = position[:, None] * frequency
    return Rotary(angle.cos(), angle.sin(), h, w)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the channel pairs (2i, 2i+1) of x (..., P * 2) by the angles of cos and sin (..., P); -sin turns back.

    Computed in the dtype of the tables where that is wider; the result has the dtype of x.
    """
    even, odd = x.to(cos.dtype).unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).to(x.dtype)
