"""A learned table of positions, made for one grid and resampled for every other."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class PositionTable(nn.Module):
    """Add one learned vector per place of the grid: parameter ``weight`` (1, h, w, C), truncated normal, std 0.02.

    On another grid the table is resampled (bicubic, no antialiasing, in float32 at least), which is what timm does to
    the tables of DeiT. Costs no multiply-adds on its own grid. The result has the dtype of x.

    Args:
        dim: channels C of the tokens.
        grid: (rows, columns) that the table is made for.
        shared: one more row, parameter ``shared`` (C,), which is added at every place. DeiT's tables have a row for the
            class token, and the paper's ablations count 197 rows for 196 tokens without saying what the last is for.

    Raises:
        ValueError: a side of the grid is below 1.
    """

    def __init__(self, dim: int, grid: tuple[int, int], shared: bool = False):
        super().__init__()
        if min(grid) < 1:
            raise ValueError(f"grid={tuple(grid)} must have at least 1 row and 1 column")
        self.weight = nn.Parameter(torch.empty(1, *grid, dim))
        self.shared = nn.Parameter(torch.empty(dim)) if shared else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """A fresh table."""
        for row in (self.weight, *([] if self.shared is None else [self.shared])):
            nn.init.trunc_normal_(row, std=0.02)

    def forward(self, x: Tensor, h: int, w: int) -> Tensor:
        """Tokens x (B, h*w, C) plus the table of an h x w grid."""
        table = self.weight
        if (h, w) != tuple(table.shape[1:3]):
            wide = table.to(torch.promote_types(table.dtype, torch.float32)).movedim(-1, 1)  # (1, C, h0, w0)
            table = F.interpolate(wide, size=(h, w), mode="bicubic", align_corners=False).movedim(1, -1)
        table = table if self.shared is None else table + self.shared
        return x + table.flatten(1, 2).to(x.dtype)  # under autocast x is in 16 bit, and stays so

    def extra_repr(self) -> str:
        return f"dim={self.weight.shape[-1]}, grid={tuple(self.weight.shape[1:3])}"
