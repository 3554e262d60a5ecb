"""One inner step of the depthwise-convolution inner model per sample, and its application to the queries."""

from __future__ import annotations

from torch import Tensor

from vit3.ops.backend import takes_reference
from vit3.ops.dwconv_ttt import library, reference
from vit3.ops.precision import one_dtype


def dwconv_ttt(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    *,
    lr: float,
    scale: float,
    backend: str = "auto",
    autotune: bool = False,
) -> Tensor:
    """Train a 3x3 depthwise convolution (zero padding) for one step on (k, v), then apply it to q.

    Inner loss: ``-scale * mean over the grid of <conv(W, k), v>``; step: ``W - lr * soft_normalise(gradient)``,
    norm per channel over the nine taps. Derivation: ``README.md`` beside this file; paper section 5.

    Args:
        q: queries (B, D, H, W); any strides.
        k: keys, shape of q.
        v: values, shape of q.
        w: learned start of the kernel, (D, 1, 3, 3).
        lr: inner learning rate.
        scale: factor of the inner loss (1/3 in the released block).
        backend: ``auto``, ``reference``, ``fused`` or ``triton``.
        autotune: let the Triton backend time its launch configurations once per size class.

    Returns:
        (B, D, H, W) in the dtype of q.

    Raises:
        ValueError: shapes that do not fit, or a backend that cannot run.
    """
    if q.ndim != 4 or k.shape != q.shape or v.shape != q.shape:
        raise ValueError(
            f"q, k and v must share one shape (B, D, H, W); got {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    _, d, height, width = q.shape
    if height == 0 or width == 0:
        raise ValueError("q, k and v hold no token (H or W is 0); at least one is needed to train the inner model")
    if w.shape != (d, 1, 3, 3):
        raise ValueError(f"w must be (D, 1, 3, 3) = {(d, 1, 3, 3)} to fit q; got {tuple(w.shape)}")
    if takes_reference(backend, q, k, v, w):
        return reference.dwconv_ttt(q, k, v, w, lr=lr, scale=scale)
    dtype = q.dtype
    q, k, v = one_dtype(q, k, v)
    return library.dwconv_ttt(q, k, v, w, lr, scale, backend, autotune)[0].to(dtype)
