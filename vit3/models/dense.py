"""Backbones for detection and segmentation: the same networks and weights, giving maps instead of logits.

Source: the authors' dense backbone, whose names of tensors and padding rule are kept: one LayerNorm per map
(``norm0`` … ``norm3``), images padded with zeros at right and bottom to a multiple of 4, odd grids to even ones.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence

import timm
import torch
from timm.models import group_parameters, register_model
from torch import Tensor, nn

from vit3.layers.grid import to_map
from vit3.models import h_vit3, vit3
from vit3.models.h_vit3 import HViT3
from vit3.models.published import build_dense
from vit3.models.vit3 import ViT3


class MapBackbone(nn.Module):
    """What the backbones share: parts that are frozen stay frozen, their statistics too.

    Attributes:
        channels, strides: of each map.
        frozen_stages: -1 nothing, 0 what comes before the first stage, k also the first k stages.
        fresh: prefixes of the tensors that files of classifiers lack.
    """

    channels: tuple[int, ...]
    strides: tuple[int, ...]
    frozen_stages: int
    fresh: tuple[str, ...] = ()

    def frozen_parts(self) -> Iterator[nn.Module]:
        """The modules that ``frozen_stages`` freezes."""
        raise NotImplementedError

    def freeze(self) -> None:
        """Take the frozen parts out of training."""
        for part in self.frozen_parts():
            part.eval().requires_grad_(False)

    def train(self, mode: bool = True):
        """As ``nn.Module.train``; dropout and statistics of frozen parts stay in evaluation mode."""
        super().train(mode)
        for part in self.frozen_parts():
            part.eval()
        return self


class DenseHViT3(MapBackbone, HViT3):
    """H-ViT³ that gives the maps of its stages, at strides 4, 8, 16 and 32.

    Stages after the last one wanted are not built, so that every parameter learns.

    Args:
        arch: ``tiny``, ``small`` or ``base``; or None, with dims, depths and num_heads given.
        dims, depths, num_heads: channels, blocks and heads of the stages; instead of those of ``arch``.
        out_indices: stages whose maps are wanted, from 0.
        frozen_stages: see :class:`MapBackbone`.
        with_cp: recompute blocks in the backward pass: less memory, more time.
        in_chans, mlp_ratio, drop_path_rate, mixer, mixer_kwargs: as of :class:`vit3.models.HViT3`.

    Raises:
        ValueError: unknown ``arch``, none and no dims, stages that do not exist, or what HViT3 refuses.
    """

    def __init__(
        self,
        arch: str | None = None,
        *,
        dims: Sequence[int] | None = None,
        depths: Sequence[int] | None = None,
        num_heads: Sequence[int] | None = None,
        out_indices: Sequence[int] = (0, 1, 2, 3),
        frozen_stages: int = -1,
        with_cp: bool = False,
        in_chans: int = 3,
        mlp_ratio: float = 4.0,
        drop_path_rate: float = 0.0,
        mixer: str | type[nn.Module] = "ttt",
        mixer_kwargs: dict | None = None,
    ):
        shape = _shape("HViT3", h_vit3.ARCHS, arch, dims=dims, depths=depths, num_heads=num_heads)
        super().__init__(
            in_chans=in_chans, num_classes=0, global_pool="", mlp_ratio=mlp_ratio, drop_path_rate=drop_path_rate,
            mixer=mixer, mixer_kwargs=mixer_kwargs, **shape,
        )  # fmt: skip
        self.out_indices = _checked_indices(out_indices, len(self.layers))
        self.frozen_stages = _checked_frozen(frozen_stages, len(self.layers))
        self.prune_intermediate_layers(list(self.out_indices), prune_norm=True)
        taken = [self.feature_info[i] for i in self.out_indices]
        self.channels = tuple(info["num_chs"] for info in taken)
        self.strides = tuple(info["reduction"] for info in taken)
        for i, dim in zip(self.out_indices, self.channels):
            self.add_module(f"norm{i}", nn.LayerNorm(dim))
        self.fresh = tuple(f"norm{i}." for i in self.out_indices)
        self.set_grad_checkpointing(with_cp)
        self.freeze()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Images (B, in_chans, H, W) to maps (B, C_i, h_i, w_i), h_i = ceil(H / stride_i) and so on."""
        taken = self._stages(x, self.out_indices)[3]
        return tuple(self._map(i, *taken[i]) for i in self.out_indices)

    def _map(self, i: int, x: Tensor, h: int, w: int) -> Tensor:
        return to_map(getattr(self, f"norm{i}")(x), h, w).contiguous()

    def frozen_parts(self) -> Iterator[nn.Module]:
        if self.frozen_stages >= 0:
            yield self.patch_embed
        for i, stage in enumerate(self.layers[: max(self.frozen_stages, 0)]):
            yield stage
            if i in self.out_indices:
                yield getattr(self, f"norm{i}")


class DenseViT3(MapBackbone, ViT3):
    """Plain ViT³ that gives one map, at the stride of its patches, for a simple feature pyramid.

    Args:
        arch: ``tiny``, ``small`` or ``base``; or None, with embed_dim, depth and num_heads given.
        embed_dim, depth, num_heads: instead of those of ``arch``.
        frozen_stages: see :class:`MapBackbone`; a stage is a block here.
        with_cp: recompute blocks in the backward pass.
        patch_size, in_chans, mlp_ratio, drop_path_rate, mixer, mixer_kwargs, pos, img_size: as of
            :class:`vit3.models.ViT3`.

    Raises:
        ValueError: unknown ``arch``, none and no embed_dim, blocks that do not exist, or what ViT3 refuses.
    """

    def __init__(
        self,
        arch: str | None = None,
        *,
        embed_dim: int | None = None,
        depth: int | None = None,
        num_heads: int | None = None,
        frozen_stages: int = -1,
        with_cp: bool = False,
        patch_size: int = 16,
        in_chans: int = 3,
        mlp_ratio: float = 4.0,
        drop_path_rate: float = 0.0,
        mixer: str | type[nn.Module] = "ttt",
        mixer_kwargs: dict | None = None,
        pos: str = "cpe",
        img_size: int | tuple[int, int] | None = None,
    ):
        shape = _shape("ViT3", vit3.ARCHS, arch, embed_dim=embed_dim, depth=depth, num_heads=num_heads)
        super().__init__(
            patch_size=patch_size, in_chans=in_chans, num_classes=0, global_pool="", mlp_ratio=mlp_ratio,
            drop_path_rate=drop_path_rate, mixer=mixer, mixer_kwargs=mixer_kwargs, pos=pos, img_size=img_size, **shape,
        )  # fmt: skip
        self.frozen_stages = _checked_frozen(frozen_stages, len(self.blocks))
        self.channels, self.strides = (self.embed_dim,), (patch_size,)
        self.set_grad_checkpointing(with_cp)
        self.freeze()

    def forward(self, x: Tensor) -> tuple[Tensor]:
        """Images (B, in_chans, H, W) to one normalised map (B, C, ceil(H / patch), ceil(W / patch)), in a tuple."""
        (y,) = self.forward_intermediates(x, 1, norm=True, intermediates_only=True)
        return (y,)

    def frozen_parts(self) -> Iterator[nn.Module]:
        if self.frozen_stages >= 0:
            yield self.patch_embed
            if self.position is not None:
                yield self.position
        yield from self.blocks[: max(self.frozen_stages, 0)]
        if self.frozen_stages == len(self.blocks):
            yield self.norm


class TimmMaps(MapBackbone):
    """Any timm model that gives maps, as (B, C, h, w).

    Args:
        model_name: as of :func:`timm.create_model`.
        out_indices: maps that are wanted, as timm counts them; None for all that the model offers.
        frozen_stages: see :class:`MapBackbone`; stages are timm's coarse parameter groups.
        with_cp: recompute blocks in the backward pass.
        pretrained, kwargs: passed to :func:`timm.create_model`.

    Raises:
        ValueError: no such model, no maps, or the model names no stages to freeze.
    """

    def __init__(
        self, model_name: str, out_indices: Sequence[int] | None = None, frozen_stages: int = -1,
        with_cp: bool = False, pretrained: bool = False, **kwargs,
    ):  # fmt: skip
        super().__init__()
        if not timm.is_model(model_name):
            raise ValueError(f"model_name='{model_name}' is no model that timm knows; timm.list_models() lists them")
        wanted = {} if out_indices is None else dict(out_indices=tuple(out_indices))
        try:
            self.model = timm.create_model(
                model_name, features_only=True, pretrained=pretrained, scriptable=False, **wanted, **kwargs
            )
        except (RuntimeError, AssertionError, IndexError) as error:
            raise ValueError(f"model_name='{model_name}' gives no maps {out_indices or ''}: {error}") from error
        self.channels = tuple(self.model.feature_info.channels())
        self.strides = tuple(self.model.feature_info.reduction())
        self.frozen_stages = frozen_stages
        self._frozen = self._parameters_to_freeze(model_name, kwargs) if frozen_stages >= 0 else frozenset()
        if with_cp:
            self.model.set_grad_checkpointing()
        self.freeze()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Images (B, in_chans, H, W) to maps (B, C_i, h_i, w_i)."""
        maps = self.model(x)
        return tuple(
            y.permute(0, 3, 1, 2).contiguous() if y.shape[1] != c and y.shape[-1] == c else y
            for y, c in zip(maps, self.channels)
        )

    def frozen_parts(self) -> Iterator[nn.Module]:
        for name, module in self.named_modules():
            own = [f"{name}.{leaf}" for leaf, _ in module.named_parameters()]
            if name and own and self._frozen.issuperset(own):
                yield module

    def freeze(self) -> None:
        super().freeze()
        for name, parameter in self.named_parameters():  # those of modules that go on, such as class tokens
            if name in self._frozen:
                parameter.requires_grad_(False)

    def _parameters_to_freeze(self, model_name: str, kwargs: dict) -> frozenset[str]:
        """Names of the parameters that belong to a frozen group."""
        with torch.device("meta"):
            whole = timm.create_model(model_name, **kwargs)
        if not hasattr(whole, "group_matcher"):
            raise ValueError(f"frozen_stages={self.frozen_stages}: {model_name} names no stages; use frozen_stages=-1")
        group = group_parameters(whole, whole.group_matcher(coarse=True), reverse=True)
        group = {name.replace(".", "_"): number for name, number in group.items()}  # timm flattens some of the names
        own = {n: n.removeprefix("model.").removeprefix("model.").replace(".", "_") for n, _ in self.named_parameters()}
        frozen = frozenset(n for n, name in own.items() if group.get(name, math.inf) <= self.frozen_stages)
        if not frozen:
            raise ValueError(f"frozen_stages={self.frozen_stages}: no part of {model_name} was found; use -1")
        return frozen


def _shape(what: str, archs: dict[str, dict], arch: str | None, **given) -> dict:
    """The sizes of ``arch``, with those given in their place."""
    if arch is not None and arch not in archs:
        raise ValueError(f"arch='{arch}' of {what} is unknown; use one of: {', '.join(archs)}")
    chosen = {name: value for name, value in given.items() if value is not None}
    shape = {**archs.get(arch, {}), **{k: v if isinstance(v, int) else tuple(v) for k, v in chosen.items()}}
    missing = set(archs["tiny"]) - shape.keys()
    if missing:
        raise ValueError(f"{what} without arch needs {', '.join(sorted(missing))}; or use arch: {', '.join(archs)}")
    return shape


def _checked_indices(out_indices: Sequence[int], stages: int) -> tuple[int, ...]:
    indices = tuple(out_indices)
    if not indices or list(indices) != sorted(set(indices)) or indices[0] < 0 or indices[-1] >= stages:
        raise ValueError(f"out_indices={list(indices)} must be different stages, ascending, of 0 to {stages - 1}")
    return indices


def _checked_frozen(frozen_stages: int, stages: int) -> int:
    if not -1 <= frozen_stages <= stages:
        raise ValueError(f"frozen_stages={frozen_stages} must be -1 (nothing), 0 (the stem) or up to {stages} stages")
    return frozen_stages


DENSE_NAMES = tuple(f"h_vit3_{arch}_dense" for arch in h_vit3.ARCHS)


def _entrypoint(arch: str):
    """What timm calls for one of ``DENSE_NAMES``."""

    def create(pretrained: bool = False, **kwargs) -> DenseHViT3:
        return build_dense(DenseHViT3, create.__name__, pretrained, **{"arch": arch, **kwargs})

    create.__name__ = create.__qualname__ = f"h_vit3_{arch}_dense"
    create.__doc__ = f"The maps of H-ViT³-{arch[0].upper()} for detection and segmentation."
    return create


for _name in DENSE_NAMES:
    setattr(sys.modules[__name__], _name, register_model(_entrypoint(_name.split("_")[2])))
