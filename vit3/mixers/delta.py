"""DeltaNet: a matrix of fast weights that corrects, token by token, what it predicts for the token's key.

    u_n = β_n (v_n - k_n S_(n-1)),  S_n = S_(n-1) + k_nᵀ u_n,  o_n = q_n S_n

One token is one gradient step of rate β_n on ½‖k_n S - v_n‖². Source: arXiv 2406.06484.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vit3.layers.rope import RoPE2d
from vit3.mixers.heads import HeadMixer, HeadNorm
from vit3.mixers.scan import check_chunk, check_direction, chunk_lengths, chunks, passes, run_scan
from vit3.ops.precision import in_full_precision, widened


@in_full_precision
def delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, *, chunk: int) -> Tensor:
    """The recurrence above from S = 0, chunk by chunk, in float32 or wider.

    Inside a chunk that starts from S the u of all tokens solve one triangular system, (I + A) U = β (V - K S) with
    A = strictly lower part of β K Kᵀ; then O = Q S + tril(Q Kᵀ) U and S' = S + Kᵀ U.

    Args:
        q, k, v: (..., N, D).
        beta: rates, (..., N, 1).
        chunk: tokens per chunk; no effect on the result.

    Returns:
        (..., N, D) in the dtype of q.
    """
    state, out = q.new_zeros(*q.shape[:-2], q.shape[-1], v.shape[-1]), []
    for q_, k_, v_, beta_ in chunks(q, k, v, beta, size=chunk):
        a = (beta_ * (k_ @ k_.mT)).tril(-1)  # [n, D] @ [D, n] -> [n, n]
        u = torch.linalg.solve_triangular(a, beta_ * (v_ - k_ @ state), upper=False, unitriangular=True)
        out.append(q_ @ state + (q_ @ k_.mT).tril() @ u)
        state = state + k_.mT @ u
    return torch.cat(out, dim=-2)


def delta_macs(tokens: int, head_dim: int, chunk: int) -> int:
    """Multiply-adds of :func:`delta_rule` per head: products as full squares, the triangular solve as a triangle."""
    lengths, d = chunk_lengths(tokens, chunk), head_dim
    return sum(3 * n * n * d + 3 * n * d * d + n * (n - 1) // 2 * d for n in lengths)


def unit_norm(x: Tensor) -> Tensor:
    """x over its norm in the last dimension; with 1e-6 under the root, so that x = 0 has a finite gradient."""
    x = widened(x)
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + 1e-6)


class DeltaNet(HeadMixer):
    """Delta-rule mixer (B, N, C) -> (B, N, C): q and k pass SiLU and an L2 norm, the output an RMS norm per head.

    Tokens are in raster order. The short convolutions of the language model are left out: our blocks begin with a
    3x3 convolution. ``rope`` rotates between SiLU and L2 norm: a step of β < 2 is stable for keys of norm 1.

    Args:
        dim: channels C of the tokens.
        num_heads: heads M; each has D = C / M channels.
        qkv_bias: whether ``qkv`` has a bias.
        direction: ``causal``, or ``bidirectional``: mean of both ways, see :func:`vit3.mixers.scan.run_scan`.
        negative_eigenvalues: β in (0, 2) instead of (0, 1): I - β k kᵀ may reflect, not only shrink.
        norm: RMS norm of the output.
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
        negative_eigenvalues: bool = False,
        norm: bool = True,
        chunk: int = 64,
    ):
        super().__init__(dim, num_heads, qkv_bias)
        self.direction, self.chunk = check_direction(direction), check_chunk("chunk", chunk)
        self.negative_eigenvalues = negative_eigenvalues
        self.beta = nn.Linear(dim, num_heads)
        self.norm = HeadNorm(num_heads, self.head_dim, centre=False) if norm else None

    def forward(self, x: Tensor, h: int, w: int, rope: RoPE2d | None = None) -> Tensor:
        """Mix the tokens x (B, h*w, C) of an h x w grid; ``rope`` rotates q and k."""
        q, k, v = self.project(x, h, w)
        q, k = F.silu(q), F.silu(k)
        if rope is not None:
            q, k = rope(q, h, w), rope(k, h, w)
        q, k, v, beta = self.widened_heads(q, k, v, self.beta(x))  # (B, M, N, D) and (B, M, N, 1)
        beta = (2 if self.negative_eigenvalues else 1) * torch.sigmoid(beta)

        def scan(*tensors: Tensor) -> Tensor:
            return delta_rule(*tensors, chunk=self.chunk)

        y = run_scan(scan, unit_norm(q), unit_norm(k), v, beta, direction=self.direction)
        if self.norm is not None:
            y = self.norm(y)
        return self.proj(self.join(y).to(x.dtype))

    def macs(self, h: int, w: int) -> int:
        """Multiply-adds for one image of h*w tokens: projections, β, and the scan once or twice."""
        scan = passes(self.direction) * self.num_heads * delta_macs(h * w, self.head_dim, self.chunk)
        return self.projection_macs(h, w) + h * w * self.dim * self.num_heads + scan

    def extra_repr(self) -> str:
        options = f"direction={self.direction!r}, negative_eigenvalues={self.negative_eigenvalues}, chunk={self.chunk}"
        return f"{super().extra_repr()}, {options}"
