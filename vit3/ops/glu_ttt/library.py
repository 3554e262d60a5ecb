"""``vit3::glu_ttt`` as PyTorch sees it: one operator for its fused and its Triton implementation."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vit3.ops.backend import implementation
from vit3.ops.glu_ttt import reference
from vit3.ops.library import register


def _empty(q: Tensor) -> Tensor:
    """Room for (B, M, N, D) with the heads of a token side by side, as projections read and write them."""
    b, m, n, d = q.shape
    return q.new_empty(b, n, m, d).transpose(1, 2)


def _state(q: Tensor) -> Tensor:
    b, m, _, d = q.shape
    return q.new_empty(b, m, d, 2 * d, dtype=torch.promote_types(q.dtype, torch.float32))


def _forward(q, k, v, w1, w2, lr, scale, backend, autotune):
    out = _empty(q)
    module = implementation("glu_ttt", backend, q, q.shape[-1])
    return out, module.forward(q, k, v, w1, w2, out, lr=lr, scale=scale, autotune=autotune)


def _backward(grad, g, q, k, v, w1, w2, lr, scale, backend, autotune):
    dq, dk, dv = _empty(q), _empty(q), _empty(q)
    module = implementation("glu_ttt", backend, q, q.shape[-1])
    dw1, dw2 = module.backward(grad, q, k, v, w1, w2, g, dq, dk, dv, lr=lr, scale=scale, autotune=autotune)
    return dq, dk, dv, dw1.to(w1.dtype), dw2.to(w2.dtype)


glu_ttt = register(
    "glu_ttt",
    "Tensor q, Tensor k, Tensor v, Tensor w1, Tensor w2, float lr, float scale, str backend, bool autotune",
    differentiable=5,
    states=1,
    forward=_forward,
    backward=_backward,
    like=lambda q, *_: (_empty(q), _state(q)),
    like_backward=lambda grad, g, q, k, v, w1, w2, *_: (
        *(_empty(q) for _ in range(3)),
        w1.new_empty(w1.shape),
        w2.new_empty(w2.shape),
    ),
    reference=lambda q, k, v, w1, w2, lr, scale, *_: reference.glu_ttt(q, k, v, w1, w2, lr=lr, scale=scale),
    macs=lambda q, *_: 6 * math.prod(q) * q[-1],
    macs_backward=lambda grad, g, q, *_: 16 * math.prod(q) * q[-1],
)
