"""One inner step of the GLU inner model per sample and head, and its application to the queries."""

from __future__ import annotations

from torch import Tensor

from vit3.ops.backend import takes_reference
from vit3.ops.glu_ttt import library, reference
from vit3.ops.precision import one_dtype


def glu_ttt(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w1: Tensor,
    w2: Tensor,
    *,
    lr: float,
    scale: float,
    backend: str = "auto",
    autotune: bool = False,
) -> Tensor:
    """Train f(W, x) = (x W1) * silu(x W2) for one step on (k, v), then apply it to q.

    Inner loss: ``-scale * mean over tokens of <f(W, k), v>``; step: ``W - lr * soft_normalise(gradient)``,
    norm per output column. Derivation: ``README.md`` beside this file; paper section 5.

    Args:
        q: queries (B, M, N, D); any strides.
        k: keys, shape of q.
        v: values, shape of q.
        w1: learned start of W1, (1, M, D, D).
        w2: learned start of W2, (1, M, D, D).
        lr: inner learning rate.
        scale: factor of the inner loss (1/3 in the released block).
        backend: ``auto``, ``reference``, ``fused`` or ``triton``.
        autotune: let the Triton backend time its launch configurations once per size class.

    Returns:
        (B, M, N, D) in the dtype of q.

    Raises:
        ValueError: shapes that do not fit, or a backend that cannot run.
    """
    if q.ndim != 4 or k.shape != q.shape or v.shape != q.shape:
        raise ValueError(
            f"q, k and v must share one shape (B, M, N, D); got {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    _, m, n, d = q.shape
    if n == 0:
        raise ValueError("q, k and v hold no token (N = 0); at least one is needed to train the inner model")
    for name, w in (("w1", w1), ("w2", w2)):
        if w.shape != (1, m, d, d):
            raise ValueError(f"{name} must be (1, M, D, D) = {(1, m, d, d)} to fit q; got {tuple(w.shape)}")
    if takes_reference(backend, q, k, v, w1, w2):
        return reference.glu_ttt(q, k, v, w1, w2, lr=lr, scale=scale)
    dtype = q.dtype
    q, k, v = one_dtype(q, k, v)
    return library.glu_ttt(q, k, v, w1, w2, lr, scale, backend, autotune)[0].to(dtype)
