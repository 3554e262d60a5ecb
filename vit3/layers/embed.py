"""What a diffusion network is told besides its image: places of tokens, time and class as vectors."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class SinCos2d(nn.Module):
    """Add fixed sines and cosines of each token's place; computed for the grid at hand, nothing is stored.

    The first half of the channels tells the column, the second the row; each half is sines, then cosines, of the place
    (0, 1, 2, ...) times dim/4 frequencies from 1 down to 1/10000. Source: DiT (2212.09748), after MAE.

    Args:
        dim: channels C of the tokens, a multiple of 4.

    Raises:
        ValueError: dim is not a multiple of 4.
    """

    def __init__(self, dim: int):
        super().__init__()
        if dim < 4 or dim % 4:
            raise ValueError(f"embed_dim={dim} must be a multiple of 4: sines and cosines of rows and of columns")
        self.dim = dim

    def forward(self, x: Tensor, h: int, w: int) -> Tensor:
        """Tokens x (B, h*w, C) plus the table of an h x w grid."""
        return x + self.table(h, w, x.device).to(x.dtype)

    def table(self, h: int, w: int, device: torch.device | None = None) -> Tensor:
        """The table (h*w, C), float32."""
        # float64, as the authors' NumPy; MPS has none, and there float32 must do
        wide = torch.float64 if device is None or device.type != "mps" else torch.float32
        steps = torch.arange(self.dim // 4, dtype=wide, device=device) / (self.dim / 4)
        rows, columns = (torch.arange(n, dtype=wide, device=device)[:, None] / 10000**steps for n in (h, w))
        rows, columns = (torch.cat([angle.sin(), angle.cos()], dim=-1) for angle in (rows, columns))
        half = (h, w, self.dim // 2)
        return torch.cat([columns[None].expand(half), rows[:, None].expand(half)], dim=-1).flatten(0, 1).float()


class TimeEmbed(nn.Module):
    """Times (B,) to vectors (B, C): cosines and sines of 128 frequencies, then Linear, SiLU, Linear.

    Times need not be whole numbers. Source: DiT, after GLIDE.
    """

    frequencies, longest = 128, 10000.0

    def __init__(self, dim: int):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(2 * self.frequencies, dim), nn.SiLU(), nn.Linear(dim, dim))

    def forward(self, t: Tensor) -> Tensor:
        steps = torch.arange(self.frequencies, dtype=torch.float32, device=t.device) / self.frequencies
        angle = t.float()[:, None] * torch.exp(-math.log(self.longest) * steps)
        return self.mlp(torch.cat([angle.cos(), angle.sin()], dim=-1).to(self.mlp[0].weight.dtype))


class LabelEmbed(nn.Module):
    """Labels (B,) to vectors (B, C); label ``num_classes`` stands for no class."""

    def __init__(self, num_classes: int, dim: int):
        super().__init__()
        self.embedding_table = nn.Embedding(num_classes + 1, dim)

    def forward(self, y: Tensor) -> Tensor:
        return self.embedding_table(y)
