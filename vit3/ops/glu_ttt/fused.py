"""The GLU inner step and its hand-derived gradient in plain PyTorch, chunk by chunk, in cache-sized buffers.

Nothing of the length of the sequence is kept for the backward pass but q, k and v, which the caller owns: it
recomputes the rest from them and from the raw inner gradient, D x 2D numbers per sample and head. The formulas are
derived in ``README.md`` beside this file; letters as there. Results go straight into views that the caller
provides, so two branches can share one buffer.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from vit3.ops.precision import widened
from vit3.ops.rotary import Rotary, rotate
from vit3.ops.soft_norm import norm_by_squares, soft_normalise_backward

silu_backward = torch.ops.aten.silu_backward


def _chunks(x: Tensor) -> Iterator[tuple[slice, slice]]:
    """Slices of samples and tokens that cover x (B, M, N, D); several samples at a time only if they are short.

    A chunk's temporaries should stay in the cache, yet be long enough to outweigh the start of an operation. On the
    CPU, 2**16 elements measured best on one thread and four times as many on two, and short samples up to 2**17
    elements together; a GPU is fed with large ones.
    """
    b, m, n, d = x.shape
    if x.device.type == "cpu":
        together, long = 2**17, 2**16 if torch.get_num_threads() == 1 else 2**18
    else:
        together = long = 2**25
    samples, tokens = max(1, together // (m * n * d)), max(1, long // (m * d))
    if samples > 1:
        tokens = n
    for first in range(0, b, samples):
        for start in range(0, n, tokens):
            yield slice(first, min(first + samples, b)), slice(start, min(start + tokens, n))


def _load(x: Tensor, samples: slice, tokens: slice, rotary: Rotary | None = None, sign: int = 1) -> Tensor:
    """A chunk of x (B, M, N, D) as (b*M, n, D), widened; a view where one sample is taken and nothing changes."""
    x = widened(x[samples, :, tokens]).flatten(0, 1)
    return x if rotary is None else _turn(x, tokens, rotary, sign)


def _turn(x: Tensor, tokens: slice, rotary: Rotary, sign: int) -> Tensor:
    """Rotate x (b*M, n, D), or turn it back with sign -1; head m owns channels m*D to (m+1)*D of the C rotated ones."""
    pairs = x.shape[-1] // 2
    cos, sin = (
        t.unflatten(-1, (-1, pairs)).transpose(0, 1) for t in rotary.of_tokens(tokens.start, tokens.stop)
    )  # (M, n, D/2)
    return rotate(x.unflatten(0, (-1, cos.shape[0])), cos, sign * sin).flatten(0, 1)


def _store(out: Tensor, samples: slice, tokens: slice, x: Tensor, rotary: Rotary | None = None) -> None:
    """Write a chunk (b*M, n, D) into out (B, M, N, D), turned back if it was rotated at load."""
    if rotary is not None:
        x = _turn(x, tokens, rotary, -1)
    out[samples, :, tokens] = x.unflatten(0, (-1, out.shape[1]))


def _repeat(w: Tensor, samples: int) -> Tensor:
    """The learned start (1, M, D, D) for every head of some samples, (b*M, D, D); a view for one sample."""
    return w.expand(samples, -1, -1, -1).flatten(0, 1)


def _fast(w1: Tensor, w2: Tensor, g: Tensor, lr: float) -> tuple[Tensor, Tensor]:
    """W1' and W2', (B, M, D, D) each, from the raw gradient (B, M, D, 2D)."""
    step1, step2 = (g / (norm_by_squares(g, dim=-2) + 1)).split(g.shape[-2], dim=-1)
    return w1 - lr * step1, w2 - lr * step2


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w1: Tensor,
    w2: Tensor,
    out: Tensor,
    *,
    lr: float,
    scale: float,
    rotary: Rotary | None = None,
    autotune: bool = False,
) -> Tensor:
    """Write f(W', q) into ``out`` and return the raw inner gradient.

    Args:
        q: queries (B, M, N, D), any strides; k and v alike.
        w1: learned start of W1 (1, M, D, D); w2 alike.
        out: where the output goes, (B, M, N, D), any strides.
        rotary: rotation of q and k at load.
        autotune: part of the shared interface; there is nothing to tune here.

    Returns:
        (B, M, D, 2D) in float32 or wider: gradients of W1 and W2 side by side.
    """
    b, m, n, d = q.shape
    w1, w2 = widened(w1), widened(w2)
    g1, g2 = w1.new_zeros(2, b, m, d, d)
    for samples, tokens in _chunks(k):
        x, y = _load(k, samples, tokens, rotary), _load(v, samples, tokens)
        count = samples.stop - samples.start
        z1, z2 = x @ _repeat(w1, count), x @ _repeat(w2, count)  # [n, D] @ [D, D] -> [n, D]
        r1 = F.silu(z2).mul_(y)
        r2 = silu_backward(z1.mul_(y), z2)
        g1[samples].flatten(0, 1).baddbmm_(x.mT, r1)  # [D, n] @ [n, D] -> [D, D]
        g2[samples].flatten(0, 1).baddbmm_(x.mT, r2)
    g = torch.cat((g1, g2), dim=-1).mul_(-scale / n)  # after the sum, where it cannot underflow
    f1, f2 = _fast(w1, w2, g, lr)
    for samples, tokens in _chunks(q):
        x = _load(q, samples, tokens, rotary)
        y1, y2 = x @ f1[samples].flatten(0, 1), x @ f2[samples].flatten(0, 1)
        _store(out, samples, tokens, y1.mul_(F.silu(y2, inplace=True)))
    return g


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w1: Tensor,
    w2: Tensor,
    g: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    *,
    lr: float,
    scale: float,
    rotary: Rotary | None = None,
    autotune: bool = False,
) -> tuple[Tensor, Tensor]:
    """Write the gradients of q, k and v into ``dq``, ``dk`` and ``dv``; return those of w1 and w2.

    Args:
        grad: gradient of the output, (B, M, N, D), any strides, stride 0 included.
        g: what :func:`forward` returned.
    """
    b, m, n, d = q.shape
    w1, w2 = widened(w1), widened(w2)
    f1, f2 = _fast(w1, w2, g, lr)
    fast = torch.cat((f1, f2), dim=-1)
    dfast = torch.zeros_like(g)
    for samples, tokens in _chunks(q):
        x, dout = _load(q, samples, tokens, rotary), _load(grad, samples, tokens)
        y1, y2 = x @ f1[samples].flatten(0, 1), x @ f2[samples].flatten(0, 1)
        dy = torch.empty(*x.shape[:-1], 2 * d, dtype=x.dtype, device=x.device)
        torch.mul(dout, F.silu(y2), out=dy[..., :d])
        dy[..., d:] = silu_backward(y1.mul_(dout), y2)
        _store(dq, samples, tokens, dy @ fast[samples].flatten(0, 1).mT, rotary)  # [n, 2D] @ [2D, D] -> [n, D]
        dfast[samples].flatten(0, 1).baddbmm_(x.mT, dy)  # [D, n] @ [n, 2D] -> [D, 2D]

    dg = soft_normalise_backward(-lr * dfast, g, dim=-2).mul_(-scale / n)
    dw = dfast.sum(dim=0)  # (M, D, 2D)
    for samples, tokens in _chunks(k):
        count = samples.stop - samples.start
        x, y = _load(k, samples, tokens, rotary), _load(v, samples, tokens)
        start1, start2, change = _repeat(w1, count), _repeat(w2, count), dg[samples].flatten(0, 1)
        z1, z2 = x @ start1, x @ start2
        h1, h2 = x @ change[..., :d], x @ change[..., d:]
        s = torch.sigmoid(z2)
        a = z2 * s  # silu(z2)
        slope = s - s * s  # sigmoid'(z2)
        p = torch.addcmul(s, z2, slope)  # silu'(z2)
        z1p = z1 * p
        _store(dv, samples, tokens, torch.addcmul(a * h1, z1p, h2))
        pair = torch.empty(*x.shape[:-1], 4 * d, dtype=x.dtype, device=x.device)  # r1, r2, dz1, dz2
        r1, r2, dz1, dz2 = pair.unflatten(-1, (4, d)).unbind(-2)
        torch.mul(a, y, out=r1)
        torch.mul(z1p, y, out=r2)
        bend = z2.add_(2).sub_(a, alpha=2).mul_(slope).mul_(z1)  # z1 silu''(z2)
        torch.mul(h1.mul_(p).addcmul_(bend, h2), y, out=dz2)
        torch.mul(h2.mul_(p), y, out=dz1)
        back = torch.cat((change, start1, start2), dim=-1)  # (b*M, D, 4D)
        _store(dk, samples, tokens, pair @ back.mT, rotary)  # [n, 4D] @ [4D, D] -> [n, D]
        dw += (x.mT @ pair[..., 2 * d :]).unflatten(0, (count, m)).sum(dim=0)  # [D, n] @ [n, 2D] -> [D, 2D]
    return dw[None, ..., :d].clone(), dw[None, ..., d:].clone()
