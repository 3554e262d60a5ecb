"""``vit3::packed_ttt`` as PyTorch sees it: both branches read one tensor and write into one, forward and backward."""

from __future__ import annotations

import torch
from torch import Tensor

from vit3.ops.backend import implementation
from vit3.ops.library import register
from vit3.ops.packed_ttt import reference
from vit3.ops.packed_ttt.layout import split_output, split_tokens
from vit3.ops.rotary import Rotary


def _rotary(cos: Tensor | None, sin: Tensor | None, h: int, w: int) -> Rotary | None:
    return None if cos is None else Rotary(cos, sin, h, w)


def _empty(qkv: Tensor) -> Tensor:
    return qkv.new_empty(qkv.shape)


def _output(qkv: Tensor, w1: Tensor) -> Tensor:
    return qkv.new_empty(qkv.shape[0], qkv.shape[1], (w1.shape[1] + 1) * w1.shape[-1])


def _modules(qkv: Tensor, d: int, backend: str):
    return (implementation(op, backend, qkv, d) for op in ("glu_ttt", "dwconv_ttt"))


def _forward(qkv, w1, w2, w3, cos, sin, h, w, lr, scale, backend, autotune):
    y, m = _output(qkv, w1), w1.shape[1]
    heads, maps = split_tokens(qkv, m, h, w)
    y_heads, y_map = split_output(y, m, h, w)
    glu, dwconv = _modules(qkv, w1.shape[-1], backend)
    options = dict(lr=lr, scale=scale, autotune=autotune)
    g = glu.forward(*heads, w1, w2, y_heads, rotary=_rotary(cos, sin, h, w), **options)
    return y, g, dwconv.forward(*maps, w3, y_map, **options)


def _backward(grad, g, g_conv, qkv, w1, w2, w3, cos, sin, h, w, lr, scale, backend, autotune):
    dqkv, m = _empty(qkv), w1.shape[1]
    heads, maps = split_tokens(qkv, m, h, w)
    dheads, dmaps = split_tokens(dqkv, m, h, w)
    grad_heads, grad_map = split_output(grad, m, h, w)
    glu, dwconv = _modules(qkv, w1.shape[-1], backend)
    options = dict(lr=lr, scale=scale, autotune=autotune)
    dw1, dw2 = glu.backward(grad_heads, *heads, w1, w2, g, *dheads, rotary=_rotary(cos, sin, h, w), **options)
    dw3 = dwconv.backward(grad_map, *maps, w3, g_conv, *dmaps, **options)
    return dqkv, dw1.to(w1.dtype), dw2.to(w2.dtype), dw3.to(w3.dtype)


def _like(qkv, w1, *_):
    b, m, d = qkv.shape[0], w1.shape[1], w1.shape[-1]
    state = dict(dtype=torch.promote_types(qkv.dtype, torch.float32))
    return _output(qkv, w1), qkv.new_empty(b, m, d, 2 * d, **state), qkv.new_empty(b, d, 9, **state)


def _reference(qkv, w1, w2, w3, cos, sin, h, w, lr, scale, *_):
    return reference.packed_ttt(qkv, w1, w2, w3, h, w, lr=lr, scale=scale, rotary=_rotary(cos, sin, h, w))


def _macs(qkv, w1, glu: int, dwconv: int) -> int:
    (b, n, _), (_, m, d, _) = qkv, w1
    return b * n * d * (glu * m * d + dwconv)


packed_ttt = register(
    "packed_ttt",
    "Tensor qkv, Tensor w1, Tensor w2, Tensor w3, Tensor? cos, Tensor? sin, SymInt h, SymInt w, float lr, float scale, "
    "str backend, bool autotune",
    differentiable=4,
    states=2,
    forward=_forward,
    backward=_backward,
    like=_like,
    like_backward=lambda grad, g, g_conv, qkv, w1, w2, w3, *_: (_empty(qkv), *map(_empty, (w1, w2, w3))),
    reference=_reference,
    macs=lambda qkv, w1, *_: _macs(qkv, w1, 6, 18),
    macs_backward=lambda grad, g, g_conv, qkv, w1, *_: _macs(qkv, w1, 16, 36),
)
