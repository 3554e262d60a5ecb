"""Retention: a sum over earlier tokens that fades by a fixed factor a token, one factor per head.

    S_n = γ S_(n-1) + k_nᵀ v_n,  o_n = q_n S_n;   all at once: O = (Q Kᵀ ⊙ Γ) V,  Γ_nm = γ^(n-m) for m <= n, else 0

Source: RetNet, arXiv 2307.08621.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vit3.layers.rope import RoPE2d
from vit3.mixers.heads import HeadMixer, HeadNorm
from vit3.mixers.scan import check_chunk, check_direction, chunk_lengths, chunks, passes, run_scan
from vit3.ops.precision import in_full_precision


@in_full_precision
def retain(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, *, chunk: int) -> Tensor:
    """o_n = sum over m <= n of γ^(n-m) <q_n, k_m> v_m, chunk by chunk: the first form inside, the second between.

    Inside in float32 or wider. Every power of γ has an exponent >= 0, so nothing overflows.

    Args:
        q, k, v: (..., M, N, D).
        log_decay: log γ <= 0 of each head, (M,).
        chunk: tokens per chunk; no effect on the result.

    Returns:
        (..., M, N, D) in the dtype of q.
    """
    log_decay = log_decay[:, None, None]
    state, out = q.new_zeros(*q.shape[:-2], q.shape[-1], v.shape[-1]), []
    for q_, k_, v_ in chunks(q, k, v, size=chunk):
        n = q_.shape[-2]
        i = torch.arange(n, device=q.device, dtype=q.dtype)[:, None]
        inside = torch.exp(log_decay * (i - i.mT).clamp(min=0)).tril()  # (M, n, n)
        scores = (q_ @ k_.mT) * inside  # [n, D] @ [D, n] -> [n, n]
        out.append(scores @ v_ + (q_ * torch.exp(log_decay * (i + 1))) @ state)
        state = torch.exp(log_decay * n) * state + (k_ * torch.exp(log_decay * (n - 1 - i))).mT @ v_
    return torch.cat(out, dim=-2)


def retain_macs(tokens: int, head_dim: int, chunk: int) -> int:
    """Multiply-adds of :func:`retain` per head; products inside a chunk are full squares, masked half included."""
    return sum(2 * n * n * head_dim + 2 * n * head_dim**2 for n in chunk_lengths(tokens, chunk))


class Retention(HeadMixer):
    """Multi-scale retention (B, N, C) -> (B, N, C): decays γ_h = 1 - 2^(-5-h), norm per head, swish gate.

    Tokens are in raster order; ``rope`` stands for RetNet's xPos. No 1/sqrt(D): the norm takes out any factor.

    Args:
        dim: channels C of the tokens.
        num_heads: heads M; each has D = C / M channels.
        qkv_bias: whether ``qkv`` has a bias.
        direction: ``causal``, or ``bidirectional``: mean of both ways, see :func:`vit3.mixers.scan.run_scan`.
        decay: one γ for all heads instead, 0 < γ <= 1; 1 is unnormalised linear attention.
        norm: normalise each head of each token (GroupNorm).
        gate: multiply by silu(x W_G).
        chunk: tokens that are computed at once; no effect on the result.

    Raises:
        ValueError: a value that is not allowed.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        qkv_bias: bool = True,
        *,
        direction: str = "bidirectional",
        decay: float | None = None,
        norm: bool = True,
        gate: bool = True,
        chunk: int = 64,
    ):
        super().__init__(dim, num_heads, qkv_bias)
        if decay is not None and not 0 < decay <= 1:
            raise ValueError(f"decay={decay} must lie in (0, 1], or be null for 1 - 2^(-5-h) of head h")
        self.direction, self.chunk, self.decay = check_direction(direction), check_chunk("chunk", chunk), decay
        self.norm = HeadNorm(num_heads, self.head_dim) if norm else None
        self.gate = nn.Linear(dim, dim) if gate else None

    def log_decay(self, like: Tensor) -> Tensor:
        """log γ of each head, (M,), at least in float32."""
        wide = torch.promote_types(like.dtype, torch.float32)
        h = torch.arange(self.num_heads, device=like.device, dtype=wide)
        if self.decay is not None:
            return torch.full_like(h, math.log(self.decay))
        return torch.log1p(-torch.exp2(-5 - h))

    def forward(self, x: Tensor, h: int, w: int, rope: RoPE2d | None = None) -> Tensor:
        """Mix the tokens x (B, h*w, C) of an h x w grid; ``rope`` rotates q and k."""
        q, k, v = self.project(x, h, w)
        if rope is not None:
            q, k = rope(q, h, w), rope(k, h, w)
        log_decay = self.log_decay(q)

        def scan(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return retain(q, k, v, log_decay, chunk=self.chunk)

        y = run_scan(scan, *self.widened_heads(q, k, v), direction=self.direction)
        if self.norm is not None:
            y = self.norm(y)
        y = self.join(y).to(x.dtype)
        if self.gate is not None:
            y = y * F.silu(self.gate(x))
        return self.proj(y)

    def macs(self, h: int, w: int) -> int:
        """Multiply-adds for one image of h*w tokens: projections, gate, and the scan once or twice."""
        scan = passes(self.direction) * self.num_heads * retain_macs(h * w, self.head_dim, self.chunk)
        return self.projection_macs(h, w) + (self.gate is not None) * h * w * self.dim**2 + scan

    def extra_repr(self) -> str:
        decay = "1 - 2^(-5-h)" if self.decay is None else f"{self.decay:g}"
        return f"{super().extra_repr()}, direction={self.direction!r}, decay={decay}, chunk={self.chunk}"
