"""Both inner steps of the ViT³ mixer on the one tensor that its projection makes, into the one that the next reads."""

from __future__ import annotations

from torch import Tensor

from vit3.ops.backend import takes_reference
from vit3.ops.packed_ttt import library, reference
from vit3.ops.rotary import Rotary


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
    backend: str = "auto",
    autotune: bool = False,
) -> Tensor:
    """``glu_ttt`` on M heads and ``dwconv_ttt`` on one more, without a copy of q, k, v or of the two outputs.

    Equal in values to the two operators on slices of ``qkv`` with their outputs side by side.

    Args:
        qkv: tokens (B, h*w, 3C + 3D), C = M*D, row by row: q, k, v of all heads, then q, k, v of the convolution.
        w1: learned start of W1, (1, M, D, D).
        w2: learned start of W2, (1, M, D, D).
        w3: learned start of the 3x3 kernel, (D, 1, 3, 3).
        h: rows of the grid.
        w: columns of the grid.
        lr: inner learning rate.
        scale: factor of the inner loss (1/3 in the released block).
        rotary: rotation of q and k of the M heads (:meth:`vit3.layers.rope.RoPE2d.tables`).
        backend: ``auto``, ``reference``, ``fused`` or ``triton``.
        autotune: let the Triton backend time its launch configurations once per size class.

    Returns:
        (B, h*w, C + D) in the dtype of qkv.

    Raises:
        ValueError: shapes that do not fit, or a backend that cannot run.
    """
    if w1.ndim != 4 or w1.shape != (1, w1.shape[1], w1.shape[-1], w1.shape[-1]) or w2.shape != w1.shape:
        raise ValueError(f"w1 and w2 must both be (1, M, D, D); got {tuple(w1.shape)} and {tuple(w2.shape)}")
    m, d = w1.shape[1], w1.shape[-1]
    if w3.shape != (d, 1, 3, 3):
        raise ValueError(f"w3 must be (D, 1, 3, 3) = {(d, 1, 3, 3)} to fit w1; got {tuple(w3.shape)}")
    if qkv.ndim != 3 or qkv.shape[2] != 3 * m * d + 3 * d:
        raise ValueError(f"qkv must be (B, h*w, 3C + 3D) = (B, {h * w}, {3 * m * d + 3 * d}); got {tuple(qkv.shape)}")
    if h < 1 or w < 1 or qkv.shape[1] != h * w:
        raise ValueError(f"qkv has {qkv.shape[1]} tokens, but the grid h={h}, w={w} has {h * w}")
    if rotary is not None and (rotary.h, rotary.w, 4 * rotary.cos.shape[-1]) != (h, w, m * d):
        raise ValueError(
            f"rotary is for a grid of {rotary.h} x {rotary.w} and {4 * rotary.cos.shape[-1]} channels; "
            f"qkv needs {h} x {w} and {m * d}"
        )
    options = dict(lr=lr, scale=scale)
    if takes_reference(backend, qkv, w1, w2, w3):
        return reference.packed_ttt(qkv, w1, w2, w3, h, w, rotary=rotary, **options)
    cos, sin = (None, None) if rotary is None else (rotary.cos, rotary.sin)
    return library.packed_ttt(qkv, w1, w2, w3, cos, sin, h, w, lr, scale, backend, autotune)[0]


__all__ = ["packed_ttt"]
