"""Around every mixer of heads: tokens to q, k, v, their split into heads and back, and a norm per head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vit3.mixers.check import check_tokens, head_dim
from vit3.ops.precision import widened


class HeadMixer(nn.Module):
    """Base of the mixers whose heads see q, k and v of one width: the projections ``qkv`` and ``proj``.

    Args:
        dim: channels C of the tokens.
        num_heads: heads M; each has D = C / M channels.
        qkv_bias: whether ``qkv`` has a bias.

    Raises:
        ValueError: dim is not a multiple of num_heads.
    """

    def __init__(self, dim: int, num_heads: int, qkv_bias: bool = True):
        super().__init__()
        self.dim, self.num_heads, self.head_dim = dim, num_heads, head_dim(dim, num_heads)
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)

    def project(self, x: Tensor, h: int, w: int) -> tuple[Tensor, ...]:
        """q, k and v, each (B, N, C), of the tokens x (B, h*w, C).

        Raises:
            ValueError: x does not fit the grid or dim.
        """
        check_tokens(x, self.dim, h, w)
        return self.qkv(x).unflatten(-1, (3, self.dim)).unbind(2)

    def split(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Each (B, N, M * D) as (B, M, N, D)."""
        return tuple(t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in tensors)

    def widened_heads(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """:meth:`split`, in float32 or wider: what scans and their states need."""
        return tuple(map(widened, self.split(*tensors)))

    def join(self, y: Tensor) -> Tensor:
        """(B, M, N, D) back to (B, N, C)."""
        return y.transpose(1, 2).flatten(2)

    def projection_macs(self, h: int, w: int) -> int:
        """Multiply-adds of ``qkv`` and ``proj``."""
        return h * w * 4 * self.dim * self.dim

    def extra_repr(self) -> str:
        return f"dim={self.dim}, num_heads={self.num_heads}"


class HeadNorm(nn.Module):
    """Normalise the D channels of every token and head in float32 or wider, with a learned factor per channel.

    Parameters are 1-D, (C,), so that weight decay leaves them out.

    Args:
        num_heads: heads M.
        head_dim: channels D of a head.
        centre: subtract the mean first and add a learned shift (LayerNorm; over the heads of a token this is
            GroupNorm); otherwise divide by the root mean square alone (RMSNorm).
    """

    eps = 1e-6

    def __init__(self, num_heads: int, head_dim: int, centre: bool = True):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, head_dim
        self.weight = nn.Parameter(torch.ones(num_heads * head_dim))
        self.bias = nn.Parameter(torch.zeros(num_heads * head_dim)) if centre else None

    def affine(self) -> tuple[Tensor, Tensor | None]:
        """Factor and shift, each (M, 1, D), in float32 or wider."""
        shape = (self.num_heads, 1, self.head_dim)
        return widened(self.weight).view(shape), None if self.bias is None else widened(self.bias).view(shape)

    def forward(self, y: Tensor) -> Tensor:
        """y (B, M, N, D) normalised, in float32 or wider."""
        y, (weight, bias) = widened(y), self.affine()
        if bias is None:
            return y * torch.rsqrt(y.square().mean(dim=-1, keepdim=True) + self.eps) * weight
        return F.layer_norm(y, y.shape[-1:], eps=self.eps) * weight + bias

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, head_dim={self.head_dim}, centre={self.bias is not None}"
