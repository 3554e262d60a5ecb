"""Softmax attention with the mixer signature: the DeiT- and Swin-style control. Quadratic in tokens."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from vit3.layers.rope import RoPE2d
from vit3.mixers.heads import HeadMixer


class SoftmaxAttention(HeadMixer):
    """Multi-head softmax attention over all tokens of the grid (PyTorch's scaled_dot_product_attention).

    Args:
        dim: channels C of the tokens.
        num_heads: heads M.
        qkv_bias: whether ``qkv`` has a bias.

    Raises:
        ValueError: dim is not a multiple of num_heads.
    """

    def forward(self, x: Tensor, h: int, w: int, rope: RoPE2d | None = None) -> Tensor:
        """Mix the tokens x (B, h*w, C) of an h x w grid; ``rope`` rotates q and k."""
        q, k, v = self.project(x, h, w)
        if rope is not None:
            q, k = rope(q, h, w), rope(k, h, w)
        return self.proj(self.join(F.scaled_dot_product_attention(*self.split(q, k, v))))

    def macs(self, h: int, w: int) -> int:
        """Multiply-adds for one image of h*w tokens: projections and the two N x N products."""
        return self.projection_macs(h, w) + 2 * (h * w) ** 2 * self.dim
