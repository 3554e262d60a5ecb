"""The network: any registered model, ours with the chosen mixer, weights to start from, frozen parts."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import timm
from timm.models import get_pretrained_cfg, split_model_name_tag
from torch import nn

from vit3.config import ModelConfig, TrainConfig, nearest
from vit3.engine.checkpoint import best_checkpoint
from vit3.errors import UserError
from vit3.mixers import MIXERS
from vit3.models import DENSE_NAMES, GENERATOR_NAMES, MODEL_NAMES, DiT3, HViT3, ViT3
from vit3.models.places import WEIGHTS
from vit3.models.weights import load_weights

logger = logging.getLogger(__name__)

_FAMILIES = {"h_vit3": HViT3, "vit3": ViT3, "dit3": DiT3}


def build_model(cfg: TrainConfig, classes: Sequence[str]) -> nn.Module:
    """Any registered model; ours with the chosen mixer.

    Args:
        classes: names in the order of their labels.

    Raises:
        UserError: unknown name or argument, or values that the model refuses.
    """
    m, img_size = cfg.model, tuple(cfg.data.img_size)
    arch = split_model_name_tag(m.name)[0]
    if not timm.is_model(arch):
        raise UserError(f"model.name={m.name} is no registered model; {nearest(m.name, timm.list_models())}")
    if arch in GENERATOR_NAMES:
        raise UserError(f"model.name={m.name} is a generator; train it with task=diffusion diffusion=ddpm (or flow)")
    if arch in DENSE_NAMES:
        raise UserError(f"model.name={m.name} gives maps, no classes; train it as a backbone with tools/det.py")
    given = dict(
        in_chans=cfg.data.in_chans, num_classes=len(classes), drop_rate=m.drop_rate, drop_path_rate=m.drop_path_rate
    )
    if arch in MODEL_NAMES:
        given |= dict(img_size=img_size, mixer=cfg.mixer.name, mixer_kwargs=mixer_kwargs(cfg))
        check_arguments(m, given)
    elif get_pretrained_cfg(m.name).fixed_input_size:
        given |= dict(img_size=img_size)
    try:
        model = timm.create_model(m.name, pretrained=m.pretrained, **{**m.kwargs, **given})
    except (ValueError, TypeError, RuntimeError, AssertionError) as error:
        raise UserError(f"model {m.name} cannot be built: {error}") from error
    if m.checkpoint:
        load_start(model, m.checkpoint, "model.checkpoint", classes)
    if m.grad_checkpointing:
        model.set_grad_checkpointing()
    frozen_modules(model, m.freeze)
    return model


def frozen_modules(model: nn.Module, prefixes: list[str]) -> tuple[nn.Module, ...]:
    """Switch off learning of all parts whose names begin with one of ``prefixes``; returns these parts.

    Raises:
        UserError: nothing begins with a prefix, or nothing is left to learn.
    """
    frozen = []
    for prefix in prefixes:
        found = [m for name, m in model.named_modules() if name == prefix or name.startswith(f"{prefix}.")]
        if not found:
            raise UserError(f"model.freeze: no part of the model is called {prefix}; "
                            f"{nearest(prefix, [name for name, _ in model.named_modules() if name])}")  # fmt: skip
        frozen += found
    for module in frozen:
        module.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError(f"model.freeze={prefixes} leaves nothing to learn; freeze less")
    return tuple(frozen)


def mixer_kwargs(cfg: TrainConfig) -> dict[str, Any]:
    m = cfg.mixer
    if m.name not in MIXERS:  # the model says it
        return {}
    given = dict(backend=m.backend, autotune=m.autotune, inner=cfg.inner) if m.name == "ttt" else {}
    allowed = set(inspect.signature(MIXERS[m.name]).parameters) - {"dim", "num_heads"} - given.keys()
    for name in m.kwargs:
        if name not in allowed:
            raise UserError(f"mixer.kwargs.{name} is no argument of mixer {m.name}; {nearest(name, allowed)}")
    return {**m.kwargs, **given}


def check_arguments(cfg: ModelConfig, given: dict[str, Any]) -> None:
    """Name the nearest argument where ``model.kwargs`` has one that our models lack or that is ``given`` elsewhere."""
    cls = next(cls for start, cls in _FAMILIES.items() if cfg.name.startswith(start))
    allowed = set(inspect.signature(cls).parameters) - given.keys()
    for name in cfg.kwargs:
        if name not in allowed:
            raise UserError(f"model.kwargs.{name} is no argument of {cfg.name}; {nearest(name, allowed)}")


def load_start(model: nn.Module, place: str, key: str, classes: Sequence[str] | None = None) -> None:
    """Load weights to start from (of a run folder: its best) and say what was found.

    Args:
        place: a run folder, or see :func:`vit3.models.places.resolve`. key: what gave it.
        classes: of the model, see :func:`vit3.models.weights.load_weights`.

    Raises:
        UserError: no such place or run, unreadable, or too little of it fits.
    """
    folder = Path(place)
    if folder.is_dir() and not (folder / WEIGHTS).is_file():
        place = best_checkpoint(folder)
    try:
        report = load_weights(model, place, ema=Path(place).name == "best_ema.pt", classes=classes)
    except (ValueError, FileNotFoundError) as error:
        raise UserError(f"{key}={place}: {error}") from error
    logger.info("%s=%s: %s", key, place, report)
