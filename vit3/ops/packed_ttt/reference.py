"""The two closed forms side by side: the clear version of ``packed_ttt``, and what the mixer computes."""

from __future__ import annotations

import torch
from torch import Tensor

from vit3.ops.dwconv_ttt import reference as dwconv
from vit3.ops.glu_ttt import reference as glu
from vit3.ops.packed_ttt.layout import split_tokens
from vit3.ops.rotary import Rotary, rotate


def branches(
    qkv: Tensor, m: int, h: int, w: int, rotary: Rotary | None
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """q, k, v of both branches as (B, M, N, D) and (B, D, h, w); q and k of the heads are rotated."""
    (q, k, v), conv = split_tokens(qkv, m, h, w)
    if rotary is not None:
        cos, sin = (t.unflatten(-1, (m, -1)).transpose(0, 1) for t in rotary.of_tokens())  # (M, N, D/2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    return (q, k, v), conv


def packed_ttt(
    qkv: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    h: int,
    w: int,
    *,
    lr: float,
    scale: float,
    rotary: Rotary | None = None,
) -> Tensor:
    """See :func:`vit3.ops.packed_ttt`."""
    heads, maps = branches(qkv, w1.shape[1], h, w, rotary)
    y_glu = glu.glu_ttt(*heads, w1, w2, lr=lr, scale=scale)  # (B, M, N, D)
    y_conv = dwconv.dwconv_ttt(*maps, w3, lr=lr, scale=scale)  # (B, D, h, w)
    return torch.cat((y_glu.transpose(1, 2).flatten(2), y_conv.flatten(2).transpose(1, 2)), dim=-1)
