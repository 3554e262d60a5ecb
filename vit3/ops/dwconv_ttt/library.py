"""``vit3::dwconv_ttt`` as PyTorch sees it: one operator for its fused and its Triton implementation."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vit3.ops.backend import implementation
from vit3.ops.dwconv_ttt import reference
from vit3.ops.library import register


def _empty(q: Tensor) -> Tensor:
    """Room for (B, D, H, W) with the channels of a token side by side, as projections read and write them."""
    b, d, h, w = q.shape
    return q.new_empty(b, h, w, d).permute(0, 3, 1, 2)


def _state(q: Tensor) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], 9, dtype=torch.promote_types(q.dtype, torch.float32))


def _forward(q, k, v, w, lr, scale, backend, autotune):
    out = _empty(q)
    module = implementation("dwconv_ttt", backend, q, q.shape[1])
    return out, module.forward(q, k, v, w, out, lr=lr, scale=scale, autotune=autotune)


def _backward(grad, g, q, k, v, w, lr, scale, backend, autotune):
    dq, dk, dv = _empty(q), _empty(q), _empty(q)
    module = implementation("dwconv_ttt", backend, q, q.shape[1])
    dw = module.backward(grad, q, k, v, w, g, dq, dk, dv, lr=lr, scale=scale, autotune=autotune)
    return dq, dk, dv, dw.to(w.dtype)


dwconv_ttt = register(
    "dwconv_ttt",
    "Tensor q, Tensor k, Tensor v, Tensor w, float lr, float scale, str backend, bool autotune",
    differentiable=4,
    states=1,
    forward=_forward,
    backward=_backward,
    like=lambda q, *_: (_empty(q), _state(q)),
    like_backward=lambda grad, g, q, k, v, w, *_: (*(_empty(q) for _ in range(3)), w.new_empty(w.shape)),
    reference=lambda q, k, v, w, lr, scale, *_: reference.dwconv_ttt(q, k, v, w, lr=lr, scale=scale),
    macs=lambda q, *_: 18 * math.prod(q),
    macs_backward=lambda grad, g, q, *_: 36 * math.prod(q),
)
