"""Linear attention: every query reads one D x D sum over all tokens, with or without a normaliser.

    normalised:    o_n = φ(q_n) mean_m φ(k_m)ᵀ v_m / (φ(q_n) · mean_m φ(k_m) + ε)
    unnormalised:  o_n = φ(q_n) mean_m φ(k_m)ᵀ v_m,  or with the sum over m

Sources: arXiv 2006.16236; normaliser and rotation (numerator alone) as in MLLA, arXiv 2405.16605.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vit3.layers.rope import RoPE2d
from vit3.mixers.heads import HeadMixer
from vit3.mixers.retention import retain, retain_macs
from vit3.mixers.scan import check_chunk, check_direction
from vit3.ops.precision import in_full_precision, widened

FEATURE_MAPS = ("elu", "identity")


@in_full_precision
def _all_to_all(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q_n times the mean over all tokens of k_mᵀ v_m."""
    return q @ (k.mT @ v / k.shape[-2])  # [N, D] @ [D, D]


def _positive(x: Tensor) -> Tensor:
    """elu(x) + 1 without its cancellation: in 16 bit elu(-8) + 1 is 0, and exp(-8) is not."""
    x = widened(x)
    return torch.where(x >= 0, x + 1, x.clamp(max=0).exp())  # >=: clamp has no gradient at 0


class LinearAttention(HeadMixer):
    """Linear attention (B, N, C) -> (B, N, C) over all tokens of the grid.

    Args:
        dim: channels C of the tokens.
        num_heads: heads M; each has D = C / M channels.
        qkv_bias: whether ``qkv`` has a bias.
        feature_map: φ of q and k: ``elu`` (elu(x) + 1, positive) or ``identity``.
        normalise: divide by φ(q_n) · mean φ(k) + 1e-6, so that tokens are averaged with positive weights.
        average: without the normaliser: the mean over the tokens that a token sees (1/N, as in the inner gradient of
            ViT³) or, switched off, their sum.
        direction: ``bidirectional``: every token sees all tokens, each once (no scan); ``causal``: those up to itself.
        chunk: causal: tokens that are computed at once; no effect on the result.

    Raises:
        ValueError: a value that is not allowed, or a combination without meaning.
    """

    eps = 1e-6

    def __init__(
        self,
        dim: int,
        num_heads: int,
        qkv_bias: bool = True,
        *,
        feature_map: str = "elu",
        normalise: bool = True,
        average: bool = True,
        direction: str = "bidirectional",
        chunk: int = 64,
    ):
        super().__init__(dim, num_heads, qkv_bias)
        if feature_map not in FEATURE_MAPS:
            raise ValueError(f"feature_map='{feature_map}' is unknown; use one of: {', '.join(FEATURE_MAPS)}")
        if normalise and feature_map == "identity":
            raise ValueError("normalise=True divides by a sum that feature_map='identity' lets pass through 0; "
                             "use feature_map='elu', or normalise=False")  # fmt: skip
        if normalise and not average:
            raise ValueError("average=False means nothing with normalise=True, which cancels it; "
                             "use normalise=False as well")  # fmt: skip
        self.feature_map, self.normalise, self.average = feature_map, normalise, average
        self.direction, self.chunk = check_direction(direction), check_chunk("chunk", chunk)

    def forward(self, x: Tensor, h: int, w: int, rope: RoPE2d | None = None) -> Tensor:
        """Mix the tokens x (B, h*w, C) of an h x w grid; ``rope`` rotates φ(q) and φ(k), not in the normaliser."""
        q, k, v = self.project(x, h, w)
        if self.feature_map == "elu":
            q, k = _positive(q), _positive(k)
        plain = q, k
        if rope is not None:
            q, k = rope(q, h, w), rope(k, h, w)
        q, k, v = self.widened_heads(q, k, v)
        seen = torch.full((h * w, 1), h * w, device=q.device, dtype=q.dtype)
        if self.direction == "causal":
            seen = seen.fill_(1).cumsum(dim=0)
            y = retain(q, k, v, q.new_zeros(self.num_heads), chunk=self.chunk) / seen
        else:
            y = _all_to_all(q, k, v)
        if self.normalise:
            y = y / (self._weights(*self.widened_heads(*plain), seen) + self.eps)
        elif not self.average:
            y = y * seen
        return self.proj(self.join(y).to(x.dtype))

    def _weights(self, q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
        """φ(q_n) · mean φ(k) over the tokens seen, (B, M, N, 1)."""
        k = k.cumsum(dim=-2) / seen if self.direction == "causal" else k.mean(dim=-2, keepdim=True)
        return (q * k).sum(dim=-1, keepdim=True)

    def macs(self, h: int, w: int) -> int:
        """Multiply-adds for one image of h*w tokens: projections and products; the normaliser's N·C count as well."""
        n = h * w
        if self.direction == "causal":
            products = self.num_heads * retain_macs(n, self.head_dim, self.chunk)
        else:
            products = 2 * n * self.dim * self.head_dim
        return self.projection_macs(h, w) + products + self.normalise * n * self.dim

    def extra_repr(self) -> str:
        return (
            f"{super().extra_repr()}, feature_map={self.feature_map!r}, normalise={self.normalise}, "
            f"average={self.average}, direction={self.direction!r}"
        )
