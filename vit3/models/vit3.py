"""ViT³, the plain (DeiT-style) network: patches, equal blocks, mean over tokens, linear head.

No class token and no position table: positions enter through a 3x3 depthwise convolution before each block, so one
model and one checkpoint serve any image size and aspect ratio. Source: paper section 5, table 11; the authors' code.
Other ways to tell positions (``pos``) serve comparisons; the paper's ablations (section 4) had no such convolution.
"""

from __future__ import annotations

from functools import partial

import torch
from timm.layers import DropPath
from timm.models import register_model
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from vit3.layers.grid import pad_to_multiple, to_map, to_tokens
from vit3.layers.position import PositionTable
from vit3.layers.rope import RoPE2d
from vit3.mixers import create_mixer
from vit3.models.backbone import Backbone, drop_path_rates
from vit3.models.mlp import Mlp
from vit3.models.published import build, published_cfgs

POSITIONS = ("none", "cpe", "table", "absolute", "rope")
_TABLES = ("table", "absolute")
LayerNorm = partial(nn.LayerNorm, eps=1e-6)


class PatchEmbed(nn.Module):
    """Image to tokens by one strided convolution; sides are padded at right and bottom to multiples of the patch."""

    def __init__(self, in_chans: int, dim: int, patch_size: int):
        super().__init__()
        self.patch_size = patch_size
        self.proj = nn.Conv2d(in_chans, dim, patch_size, stride=patch_size)

    def forward(self, x: Tensor) -> tuple[Tensor, int, int]:
        """Image (B, in_chans, H, W) to tokens (B, h*w, dim), with the grid (h, w)."""
        x = self.proj(pad_to_multiple(x, self.patch_size))
        return to_tokens(x), x.shape[-2], x.shape[-1]


class Block(nn.Module):
    """Position encoding, token mixer, feed-forward network; each with its residual.

    Args:
        pos: as of :class:`ViT3`. grid: what a table is made for.
    """

    def __init__(
        self, dim: int, num_heads: int, mlp_ratio: float, drop_path: float, mixer, mixer_kwargs: dict,
        pos: str = "cpe", grid: tuple[int, int] | None = None,
    ):  # fmt: skip
        super().__init__()
        self.cpe = nn.Conv2d(dim, dim, 3, padding=1, groups=dim) if pos == "cpe" else None
        self.position = PositionTable(dim, grid, shared=True) if pos == "table" else None
        self.rope = RoPE2d(dim) if pos == "rope" else None
        self.norm1 = LayerNorm(dim)
        self.attn = create_mixer(mixer, dim, num_heads, **mixer_kwargs)
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()
        self.norm2 = LayerNorm(dim)
        self.mlp = Mlp(dim, int(dim * mlp_ratio))

    def forward(self, x: Tensor, h: int, w: int) -> Tensor:
        if self.cpe is not None:
            x = x + to_tokens(self.cpe(to_map(x, h, w)))  # (B, N, C)
        if self.position is not None:
            x = self.position(x, h, w)
        x = x + self.drop_path(self.attn(self.norm1(x), h, w, rope=self.rope))
        return x + self.drop_path(self.mlp(self.norm2(x)))


class ViT3(Backbone):
    """Plain ViT³ for images of any size.

    Args:
        patch_size: side of a patch, in pixels.
        in_chans: channels of the images.
        num_classes: classes; 0 for pooled features.
        global_pool: ``avg``, or ``""`` for unpooled tokens.
        embed_dim: channels C of the tokens.
        depth: number of blocks.
        num_heads: heads of the mixer.
        mlp_ratio: hidden width of the feed-forward network, in units of C.
        drop_rate: dropout before the head.
        drop_path_rate: stochastic depth at the last block, growing linearly from 0.
        mixer: name of a registered mixer, or a class of the same signature.
        mixer_kwargs: keyword arguments of the mixer.
        img_size: nominal size, which timm records for data configs; position tables are made for its grid, nothing
            else here depends on it.
        pos: how tokens are told where they are: ``cpe``, the published network's 3x3 depthwise convolution before each
            block; ``table``, a learned table before each block (about the 0.91 M parameters without multiply-adds that
            the paper's ablations seem to have had); ``absolute``, one table after the patches; ``rope``, rotation of q
            and k, over all C channels, in each mixer; ``none``. Tables are resampled for other sizes of images.

    Raises:
        ValueError: embed_dim is not a multiple of num_heads, unknown mixer or pos, a table without img_size, wrong
            image shape.
    """

    def __init__(
        self,
        patch_size: int = 16,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        embed_dim: int = 192,
        depth: int = 12,
        num_heads: int = 6,
        mlp_ratio: float = 4.0,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        mixer: str | type[nn.Module] = "ttt",
        mixer_kwargs: dict | None = None,
        img_size: int | tuple[int, int] | None = None,
        pos: str = "cpe",
    ):
        super().__init__(num_classes, in_chans, global_pool, drop_rate)
        if patch_size < 1 or depth < 1:
            raise ValueError(f"patch_size={patch_size} and depth={depth} must be at least 1")
        self.embed_dim, self.patch_size, self.pos = embed_dim, patch_size, pos
        grid = _nominal_grid(pos, img_size, patch_size)
        self.patch_embed = PatchEmbed(in_chans, embed_dim, patch_size)
        self.position = PositionTable(embed_dim, grid) if pos == "absolute" else None
        self.blocks = nn.ModuleList(
            Block(embed_dim, num_heads, mlp_ratio, rate, mixer, mixer_kwargs or {}, pos, grid)
            for rate in drop_path_rates(drop_path_rate, depth)
        )
        self.norm = LayerNorm(embed_dim)
        self.feature_info = [dict(module=f"blocks.{i}", num_chs=embed_dim, reduction=patch_size) for i in range(depth)]
        self._finish(embed_dim)

    def forward_features(self, x: Tensor) -> Tensor:
        """Images (B, in_chans, H, W) to normalised tokens (B, h*w, C), h = ceil(H/patch), w = ceil(W/patch)."""
        self._check_image(x)
        x, h, w = self._embed(x)
        for block in self.blocks:
            x = self._run(block, x, h, w)
        return self.norm(x)

    def _embed(self, x: Tensor) -> tuple[Tensor, int, int]:
        """Images to tokens (B, h*w, C), with the table that all blocks share, and the grid (h, w)."""
        x, h, w = self.patch_embed(x)
        return (x if self.position is None else self.position(x, h, w)), h, w

    def pool(self, x: Tensor) -> Tensor:
        """Mean over tokens, (B, N, C) to (B, C)."""
        return x.mean(dim=1)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Outputs of chosen blocks, as timm defines it; the final features are normalised.

        Args:
            x: images (B, in_chans, H, W).
            indices: the last n blocks if an int, all if None, else these blocks.
            norm: apply the final norm to each.
            stop_early: do not run the blocks after the last chosen one.
            output_fmt: ``NCHW`` maps or ``NLC`` tokens.
            intermediates_only: leave out the final features.

        Returns:
            The list, or a pair (final features, list).
        """
        if output_fmt not in ("NCHW", "NLC"):
            raise ValueError(f"output_fmt='{output_fmt}' must be 'NCHW' or 'NLC'")
        self._check_image(x)
        take, last = feature_take_indices(len(self.blocks), indices)
        x, h, w = self._embed(x)
        intermediates = []
        for i, block in enumerate(self.blocks[: last + 1] if stop_early else self.blocks):
            x = self._run(block, x, h, w)
            if i in take:
                y = self.norm(x) if norm else x
                intermediates.append(to_map(y, h, w).contiguous() if output_fmt == "NCHW" else y)
        return intermediates if intermediates_only else (self.norm(x), intermediates)

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop what the chosen blocks do not need; returns their indices."""
        take, last = feature_take_indices(len(self.blocks), indices)
        self.blocks = self.blocks[: last + 1]
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0, "")
        return take

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """Position tables: offsets like biases, one for each place, and timm leaves them out of the decay too."""
        return {f"{name}.weight" for name, module in self.named_modules() if isinstance(module, PositionTable)}

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict:
        """Parameter names by depth, for layer-wise learning rates."""
        return dict(stem=r"^patch_embed|^position", blocks=[(r"^blocks\.(\d+)", None), (r"^norm", (99999,))])


def _nominal_grid(pos: str, img_size: int | tuple[int, int] | None, patch_size: int) -> tuple[int, int] | None:
    """The grid that tables are made for; None where ``pos`` has none."""
    if pos not in POSITIONS:
        raise ValueError(f"pos='{pos}' is unknown; use one of: {', '.join(POSITIONS)}")
    if pos not in _TABLES:
        return None
    if img_size is None:
        raise ValueError(f"pos='{pos}' is a table for one size of images; give that size as img_size=(height, width)")
    h, w = (img_size, img_size) if isinstance(img_size, int) else img_size
    return -(-h // patch_size), -(-w // patch_size)


default_cfgs = published_cfgs(("vit3_tiny", "vit3_small", "vit3_base"), first_conv="patch_embed.proj")


# Width, depth and heads (paper, table 11)
ARCHS = {
    "tiny": dict(embed_dim=192, depth=12, num_heads=6),
    "small": dict(embed_dim=384, depth=12, num_heads=6),
    "base": dict(embed_dim=768, depth=12, num_heads=12),
}


def _vit3(arch: str, pretrained: bool, **kwargs) -> ViT3:
    feature_cfg = dict(out_indices=3, feature_cls="getter")
    return build(ViT3, f"vit3_{arch}", pretrained, feature_cfg=feature_cfg, **{**ARCHS[arch], **kwargs})


@register_model
def vit3_tiny(pretrained: bool = False, **kwargs) -> ViT3:
    """ViT³-T: 6.15 M parameters, 1.2 G multiply-adds at 224²."""
    return _vit3("tiny", pretrained, **kwargs)


@register_model
def vit3_small(pretrained: bool = False, **kwargs) -> ViT3:
    """ViT³-S: 23.80 M parameters, 4.8 G multiply-adds at 224²."""
    return _vit3("small", pretrained, **kwargs)


@register_model
def vit3_base(pretrained: bool = False, **kwargs) -> ViT3:
    """ViT³-B: 90.06 M parameters, 17.9 G multiply-adds at 224²."""
    return _vit3("base", pretrained, **kwargs)
