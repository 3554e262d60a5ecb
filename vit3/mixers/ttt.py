"""The ViT³ mixer: train a small inner model on the keys and values of one image, then apply it to the queries.

    x --qkv--> q, k, v   --one inner step on (k, v)-->   f(W', .)   --apply to q-->   --proj--> y

All M heads run a gated linear unit; one extra branch of a head's width runs a 3x3 depthwise convolution. The cost
is linear in the number of tokens. Source: paper section 5 and the authors' released block.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vit3.inner import DWCONV, GLU, InnerSpec, inner_report
from vit3.layers.rope import RoPE2d
from vit3.mixers.check import check_tokens, head_dim
from vit3.ops import check_backend, packed_ttt
from vit3.ops.dwconv_ttt import reference as dwconv_step
from vit3.ops.glu_ttt import reference as glu_step
from vit3.ops.packed_ttt.reference import branches
from vit3.ops.precision import widened, without_autocast
from vit3.ops.rotary import Rotary


class TTT(nn.Module):
    """Test-time-training token mixer (B, N, C) -> (B, N, C) for tokens on an h x w grid.

    Parameters are named and shaped as in the authors' block: ``qkv`` (C -> 3C + 3D), ``w1`` and ``w2``
    (1, M, D, D), ``w3`` (D, 1, 3, 3), ``proj`` (C + D -> C). The fast weights live for one call and one sample.

    Args:
        dim: channels C of the tokens.
        num_heads: heads M; each has D = C / M channels.
        qkv_bias: whether ``qkv`` has a bias.
        inner: how the inner model is trained.
        backend: implementation of both inner steps: ``auto``, ``reference``, ``fused`` or ``triton``.
        autotune: let the Triton backend time its launch configurations once per size class (kept on disk).

    Raises:
        ValueError: dim is not a multiple of num_heads, or the backend is not available.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        qkv_bias: bool = True,
        *,
        inner: InnerSpec = InnerSpec(),
        backend: str = "auto",
        autotune: bool = False,
    ):
        super().__init__()
        self.dim, self.num_heads, self.head_dim = dim, num_heads, head_dim(dim, num_heads)
        check_backend(backend)
        self.inner, self.backend, self.autotune = inner, backend, autotune
        d = self.head_dim
        self.qkv = nn.Linear(dim, 3 * dim + 3 * d, bias=qkv_bias)
        self.w1 = nn.Parameter(torch.empty(1, num_heads, d, d))
        self.w2 = nn.Parameter(torch.empty(1, num_heads, d, d))
        self.w3 = nn.Parameter(torch.empty(d, 1, 3, 3))
        self.proj = nn.Linear(dim + d, dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fresh learned starts W1, W2, W3 (truncated normal, std 0.02)."""
        for w in (self.w1, self.w2, self.w3):
            nn.init.trunc_normal_(w, std=0.02)

    def forward(
        self, x: Tensor, h: int, w: int, rope: RoPE2d | None = None, return_inner: bool = False
    ) -> Tensor | tuple[Tensor, dict]:
        """Mix the tokens of an h x w grid.

        Args:
            x: tokens (B, h*w, C), row by row.
            h: rows of the grid.
            w: columns of the grid.
            rope: rotation of q and k of the GLU branch.
            return_inner: also return what the inner step did.

        Returns:
            (B, h*w, C); with ``return_inner`` a pair of that (unchanged) and a dict with one
            :func:`vit3.inner.inner_report` each under ``glu`` and ``dwconv``.

        Raises:
            ValueError: x does not fit the grid or dim.
        """
        check_tokens(x, self.dim, h, w)
        qkv = self.qkv(x)  # (B, N, 3C + 3D): q, k, v of M heads, then of the convolution
        rotary = None if rope is None else rope.tables(h, w, like=qkv)
        y = packed_ttt(
            qkv,
            self.w1,
            self.w2,
            self.w3,
            h,
            w,
            lr=self.inner.lr,
            scale=self.inner.scale,
            rotary=rotary,
            backend=self.backend,
            autotune=self.autotune,
        )  # (B, N, C + D)
        y = self.proj(y)
        return (y, self._describe(qkv, h, w, rotary)) if return_inner else y

    @torch.no_grad()
    def _describe(self, qkv: Tensor, h: int, w: int, rotary: Rotary | None) -> dict:
        """Reports of both inner steps, recomputed beside the output so that asking changes nothing."""
        lr, scale = self.inner.lr, self.inner.scale
        (_, *glu_kv), (_, *conv_kv) = branches(qkv, self.num_heads, h, w, rotary)
        with without_autocast(qkv.device):
            (k, v), start = map(widened, glu_kv), (widened(self.w1), widened(self.w2))
            gradients = glu_step.gradients(k, v, *start, scale=scale)
            fast = glu_step.fast_weights(k, v, *start, lr=lr, scale=scale)
            glu = inner_report(GLU, ("w1", "w2"), start, gradients, fast, k, v, self.inner)
            (k, v), start = map(widened, conv_kv), (widened(self.w3)[None],)
            gradients = (dwconv_step.gradient(k, v, scale=scale),)
            fast = (dwconv_step.fast_weights(k, v, start[0], lr=lr, scale=scale),)
            conv = inner_report(DWCONV, ("w3",), start, gradients, fast, k, v, self.inner)
        return {"glu": glu, "dwconv": conv}

    def macs(self, h: int, w: int) -> int:
        """Multiply-adds for one image of h*w tokens, inner step included (projections, 6 D C + 18 D a token)."""
        c, d = self.dim, self.head_dim
        per_token = c * (3 * c + 3 * d) + (c + d) * c + 6 * d * c + 18 * d
        return h * w * per_token

    def extra_repr(self) -> str:
        return f"dim={self.dim}, num_heads={self.num_heads}, inner={self.inner}, backend={self.backend!r}"
