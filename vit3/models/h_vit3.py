"""H-ViT³, the hierarchical (Swin-style) network: convolutional stem, four stages, global TTT in each of them.

Rotations are computed for the grid at hand and odd grids are padded before they are halved, so one model and one
checkpoint serve any image size and aspect ratio, as classifier and as dense backbone. Source: paper section 5,
table 12; the authors' code (rotary encoding and the convolution in the feed-forward network are not in the paper).
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from timm.layers import DropPath
from timm.models import register_model
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from vit3.layers.conv import ConvDownsample, ConvMlp, ConvStem
from vit3.layers.grid import to_map, to_tokens
from vit3.layers.rope import RoPE2d
from vit3.mixers import create_mixer
from vit3.models.backbone import Backbone, drop_path_rates
from vit3.models.published import build, published_cfgs


class Block(nn.Module):
    """Position encoding by convolution, token mixer with rotated q and k, convolutional feed-forward network."""

    def __init__(self, dim: int, num_heads: int, mlp_ratio: float, drop_path: float, mixer, mixer_kwargs: dict):
        super().__init__()
        self.cpe = nn.Conv2d(dim, dim, 3, padding=1, groups=dim)
        self.norm1 = nn.LayerNorm(dim)
        self.rope = RoPE2d(dim)
        self.attn = create_mixer(mixer, dim, num_heads, **mixer_kwargs)
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = ConvMlp(dim, int(dim * mlp_ratio))

    def forward(self, x: Tensor, h: int, w: int) -> Tensor:
        x = x + to_tokens(self.cpe(to_map(x, h, w)))  # (B, N, C)
        x = x + self.drop_path(self.attn(self.norm1(x), h, w, rope=self.rope))
        return x + self.drop_path(self.mlp(self.norm2(x), h, w))


class Stage(nn.Module):
    """Blocks of one width on one grid, and the downsampling to the next stage (none after the last)."""

    def __init__(self, blocks: list[Block], downsample: nn.Module | None):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.downsample = downsample


class HViT3(Backbone):
    """Hierarchical ViT³ for images of any size; features at strides 4, 8, 16 and 32.

    Args:
        in_chans: channels of the images.
        num_classes: classes; 0 for pooled features.
        global_pool: ``avg``, or ``""`` for the unpooled map.
        dims: channels of the stages.
        depths: blocks of the stages.
        num_heads: heads of the stages' mixers.
        mlp_ratio: hidden width of the feed-forward networks, in units of the channels.
        drop_rate: dropout before the head.
        drop_path_rate: stochastic depth at the last block, growing linearly from 0.
        mixer: name of a registered mixer, or a class of the same signature.
        mixer_kwargs: keyword arguments of the mixer.
        img_size: nominal size, which timm records for data configs; nothing here depends on it.

    Raises:
        ValueError: lists of unequal length, channels no multiple of the heads, unknown mixer, wrong image shape.
    """

    def __init__(
        self,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        dims: tuple[int, ...] = (64, 128, 320, 512),
        depths: tuple[int, ...] = (1, 3, 9, 4),
        num_heads: tuple[int, ...] = (2, 4, 10, 16),
        mlp_ratio: float = 4.0,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        mixer: str | type[nn.Module] = "ttt",
        mixer_kwargs: dict | None = None,
        img_size: int | tuple[int, int] | None = None,
    ):
        super().__init__(num_classes, in_chans, global_pool, drop_rate)
        if not len(dims) == len(depths) == len(num_heads) > 0:
            raise ValueError(
                "dims, depths and num_heads must name the same stages; "
                f"got {len(dims)}, {len(depths)} and {len(num_heads)} entries"
            )
        rates = iter(drop_path_rates(drop_path_rate, sum(depths)))
        self.patch_embed = ConvStem(in_chans, dims[0])
        self.layers = nn.ModuleList()
        for dim, depth, heads, next_dim in zip(dims, depths, num_heads, (*dims[1:], None)):
            blocks = [Block(dim, heads, mlp_ratio, next(rates), mixer, mixer_kwargs or {}) for _ in range(depth)]
            self.layers.append(Stage(blocks, None if next_dim is None else ConvDownsample(dim, next_dim)))
        self.norm = nn.BatchNorm1d(dims[-1])
        self.feature_info = [dict(module=f"layers.{i}", num_chs=dim, reduction=4 * 2**i) for i, dim in enumerate(dims)]
        self._finish(dims[-1])

    def forward_features(self, x: Tensor) -> Tensor:
        """Images (B, in_chans, H, W) to the normalised map (B, C, h, w) of the last stage."""
        return self._normalise(*self._stages(x)[:3])

    def _stages(self, x: Tensor, take: Collection[int] = (), last: int | None = None) -> tuple:
        """Run the stages up to ``last``.

        Returns:
            Tokens (B, h*w, C) of that stage, h, w, and a dict from each stage in ``take`` to its (tokens, h, w).
        """
        self._check_image(x)
        last = len(self.layers) - 1 if last is None else last
        x, h, w = self.patch_embed(x)
        taken = {}
        for i, stage in enumerate(self.layers[: last + 1]):
            for block in stage.blocks:
                x = self._run(block, x, h, w)
            if i in take:
                taken[i] = x, h, w
            if i < last:
                x, h, w = stage.downsample(x, h, w)
        return x, h, w, taken

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """The map (B, C, h, w) to logits (B, num_classes); unpooled with ``global_pool=""``: (B, num_classes, h, w)."""
        if self.global_pool == "" and not pre_logits:
            return self.head(self.head_drop(x).movedim(1, -1)).movedim(-1, 1)
        return super().forward_head(x, pre_logits)

    def _normalise(self, x: Tensor, h: int, w: int) -> Tensor:
        """Final norm: tokens (B, h*w, C) to a map (B, C, h, w)."""
        return self.norm(x.transpose(1, 2)).unflatten(-1, (h, w))

    def pool(self, x: Tensor) -> Tensor:
        """Mean over the grid, (B, C, h, w) to (B, C)."""
        return x.mean(dim=(-2, -1))

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Outputs of chosen stages before their downsampling, as timm defines it.

        The final features are normalised only if the last stage was run (its width is the norm's).

        Args:
            x: images (B, in_chans, H, W).
            indices: the last n stages if an int, all if None, else these stages.
            norm: apply the final norm to the last stage's output (its width fits no other).
            stop_early: do not run the stages after the last chosen one.
            output_fmt: only ``NCHW``.
            intermediates_only: leave out the final features.

        Returns:
            The list, or a pair (final features, list).
        """
        if output_fmt != "NCHW":
            raise ValueError(f"output_fmt='{output_fmt}' must be 'NCHW': stages differ in grid and width")
        final = len(self.layers) - 1
        take, last = feature_take_indices(len(self.layers), indices)
        last = last if stop_early else final
        x, h, w, taken = self._stages(x, take, last)
        intermediates = [
            (self._normalise(*y) if norm and i == final else to_map(*y)).contiguous() for i, y in taken.items()
        ]
        if intermediates_only:
            return intermediates
        return (self._normalise(x, h, w) if last == final else to_map(x, h, w)), intermediates

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop what the chosen stages do not need; returns their indices."""
        take, last = feature_take_indices(len(self.layers), indices)
        shortened = last < len(self.layers) - 1
        self.layers = self.layers[: last + 1]
        self.layers[-1].downsample = None
        if prune_norm or shortened:
            self.norm = nn.Identity()
        if shortened:
            self.num_features = self.head_hidden_size = self.feature_info[last]["num_chs"]
        if prune_head or shortened:
            self.reset_classifier(0, "")
        return take

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict:
        """Parameter names by depth, for layer-wise learning rates."""
        if coarse:
            blocks = [(r"^layers\.(\d+)", None), (r"^norm", (99999,))]
        else:
            blocks = [
                (r"^layers\.(\d+)\.blocks\.(\d+)", None),
                (r"^layers\.(\d+)\.downsample", (99999,)),
                (r"^norm", (99999,)),
            ]
        return dict(stem=r"^patch_embed", blocks=blocks)


default_cfgs = published_cfgs(("h_vit3_tiny", "h_vit3_small", "h_vit3_base"), first_conv="patch_embed.conv.0.conv")


# Widths, depths and heads of the stages (paper, table 12)
ARCHS = {
    "tiny": dict(dims=(64, 128, 320, 512), depths=(1, 3, 9, 4), num_heads=(2, 4, 10, 16)),
    "small": dict(dims=(64, 128, 320, 512), depths=(2, 6, 18, 8), num_heads=(2, 4, 10, 16)),
    "base": dict(dims=(96, 192, 448, 640), depths=(2, 6, 18, 8), num_heads=(3, 6, 14, 20)),
}


def _h_vit3(arch: str, pretrained: bool, **kwargs) -> HViT3:
    feature_cfg = dict(out_indices=(0, 1, 2, 3), feature_cls="getter")
    return build(HViT3, f"h_vit3_{arch}", pretrained, feature_cfg=feature_cfg, **{**ARCHS[arch], **kwargs})


@register_model
def h_vit3_tiny(pretrained: bool = False, **kwargs) -> HViT3:
    """H-ViT³-T: 28.70 M parameters, 4.9 G multiply-adds at 224²."""
    return _h_vit3("tiny", pretrained, **kwargs)


@register_model
def h_vit3_small(pretrained: bool = False, **kwargs) -> HViT3:
    """H-ViT³-S: 54.36 M parameters, 8.8 G multiply-adds at 224²."""
    return _h_vit3("small", pretrained, **kwargs)


@register_model
def h_vit3_base(pretrained: bool = False, **kwargs) -> HViT3:
    """H-ViT³-B: 94.37 M parameters, 16.7 G multiply-adds at 224²."""
    return _h_vit3("base", pretrained, **kwargs)
