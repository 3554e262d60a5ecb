"""Softmax attention with the mixer signature: the DeiT- and Swin-style control. Quadratic in tokens."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from vit3.layers.rope import RoPE2d
from vit3.mixers.check import check_tokens, head_dim


class SoftmaxAttention(nn.Module):
    """Multi-head softmax attention over all tokens of the grid (PyTorch's scaled_dot_product_attention).

    Args:
        dim: channels C of the tokens.
        num_heads: heads M.
        qkv_bias: whether ``qkv`` has a bias.

    Raises:
        ValueError: dim is not a multiple of num_heads.
    """

    def __init__(self, dim: int, num_heads: int, qkv_bias: bool = True):
        super().__init__()
        self.dim, self.num_heads, self.head_dim = dim, num_heads, head_dim(dim, num_heads)
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, h: int, w: int, rope: RoPE2d | None = None) -> Tensor:
        """Mix the tokens x (B, h*w, C) of an h x w grid; ``rope`` rotates q and k."""
        check_tokens(x, self.dim, h, w)
        q, k, v = self.qkv(x).unflatten(-1, (3, self.dim)).unbind(2)  # (B, N, C)
        if rope is not None:
            q, k = rope(q, h, w), rope(k, h, w)
        q, k, v = (t.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for t in (q, k, v))
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def macs(self, h: int, w: int) -> int:
        """Multiply-adds for one image of h*w tokens: projections and the two N x N products."""
        n = h * w
        return n * 4 * self.dim * self.dim + 2 * n * n * self.dim

    def extra_repr(self) -> str:
        return f"dim={self.dim}, num_heads={self.num_heads}"
