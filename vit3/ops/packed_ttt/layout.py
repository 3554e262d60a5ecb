"""Where each branch finds its part of a packed tensor."""

from __future__ import annotations

from torch import Tensor


def heads(x: Tensor, m: int) -> Tensor:
    """Tokens (B, N, M*D) as (B, M, N, D), a view."""
    return x.unflatten(-1, (m, -1)).transpose(1, 2)


def grid(x: Tensor, h: int, w: int) -> Tensor:
    """Tokens (B, h*w, D) as a map (B, D, h, w), a view."""
    return x.transpose(1, 2).unflatten(-1, (h, w))


def split_tokens(qkv: Tensor, m: int, h: int, w: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """q, k, v of both branches as views of qkv (B, h*w, 3C + 3D): (B, M, h*w, D) and (B, D, h, w) each."""
    d = qkv.shape[-1] // (3 * (m + 1))
    glu, conv = qkv.split((3 * m * d, 3 * d), dim=-1)
    return tuple(heads(t, m) for t in glu.split(m * d, dim=-1)), tuple(grid(t, h, w) for t in conv.split(d, dim=-1))


def split_output(y: Tensor, m: int, h: int, w: int) -> tuple[Tensor, Tensor]:
    """Both branches' parts of y (B, h*w, C + D) as views: (B, M, h*w, D) and (B, D, h, w)."""
    d = y.shape[-1] // (m + 1)
    glu, conv = y.split((m * d, d), dim=-1)
    return heads(glu, m), grid(conv, h, w)
