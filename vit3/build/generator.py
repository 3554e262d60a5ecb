"""What a generator is made of: network, diffusion process, codec."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import timm
import torch
from torch import nn

from vit3.build.data import mixes
from vit3.build.model import build_model, check_arguments, frozen_modules, load_start, mixer_kwargs
from vit3.config import DiffusionConfig, TrainConfig, nearest
from vit3.data.latent_shards import read_index
from vit3.diffusion import GaussianDiffusion, RectifiedFlow
from vit3.diffusion.codec import Autoencoder, Moments, Pixels, load_autoencoder
from vit3.errors import UserError
from vit3.models import GENERATOR_NAMES

logger = logging.getLogger(__name__)

CACHED = "latents"  # the data set of cached latents


def build_generator(cfg: TrainConfig, classes: Sequence[str], codec: Any) -> nn.Module:
    """A generator with the chosen mixer.

    Args:
        classes: names in the order of their labels. codec: says what the network sees of the images.

    Raises:
        UserError: unknown name or argument, or values that the network refuses.
    """
    m = cfg.model
    if mixes(cfg) or cfg.augment.smoothing:
        raise UserError("augment.mixup, cutmix and smoothing mix labels, which a generator cannot; use augment=none")
    if m.name not in GENERATOR_NAMES:
        raise UserError(f"model.name={m.name} is no generator; {nearest(m.name, GENERATOR_NAMES)}")
    for key in ("drop_rate", "drop_path_rate"):
        if getattr(m, key):
            raise UserError(f"model.{key}={getattr(m, key)} means nothing to {m.name}, which drops nothing; use 0")
    given = dict(
        in_chans=codec.channels,
        num_classes=len(classes),
        learn_sigma=cfg.diffusion.learn_sigma,
        img_size=latent_grid(cfg, codec),
        mixer=cfg.mixer.name,
        mixer_kwargs=mixer_kwargs(cfg),
    )
    check_arguments(m, given)
    try:
        model = timm.create_model(m.name, pretrained=m.pretrained, **{**m.kwargs, **given})
    except (ValueError, TypeError, RuntimeError, AssertionError) as error:
        raise UserError(f"model {m.name} cannot be built: {error}") from error
    if m.checkpoint:
        load_start(model, m.checkpoint, "model.checkpoint")
    if m.grad_checkpointing:
        model.set_grad_checkpointing()
    frozen_modules(model, m.freeze)
    return model


def build_network(cfg: TrainConfig, classes: Sequence[str], device: torch.device) -> tuple[nn.Module, Any]:
    """The network of a run, and for a generator also its codec (None for a classifier).

    Raises:
        UserError: task and diffusion that do not belong together, or what :func:`build_generator` or
            :func:`vit3.build.model.build_model` refuse.
    """
    if (cfg.task.name == "diffusion") != (cfg.diffusion is not None):
        raise UserError(
            f"task={cfg.task.name} with diffusion={cfg.diffusion and cfg.diffusion.process or 'none'}: a generator "
            "needs task=diffusion and diffusion=ddpm or flow, a classifier diffusion=none"
        )
    if cfg.diffusion is None:
        return build_model(cfg, classes), None
    codec = build_codec(cfg, device)
    return build_generator(cfg, classes, codec), codec


def build_process(cfg: DiffusionConfig) -> GaussianDiffusion | RectifiedFlow:
    """What noise is added and what is learnt of it.

    Raises:
        UserError: a learned variance where the process has none.
    """
    if cfg.process == "ddpm":
        return GaussianDiffusion(cfg.steps, cfg.betas, cfg.learn_sigma)
    if cfg.learn_sigma:
        raise UserError("diffusion.learn_sigma=true means nothing to diffusion.process=flow; use false")
    return RectifiedFlow(cfg.time_sampling)


def build_codec(
    cfg: TrainConfig, device: torch.device, drawing: bool = False, scale: float | None = None
) -> Pixels | Autoencoder | Moments:
    """What makes latents of images and images of latents; pixels where there is no autoencoder.

    Args:
        drawing: images are wanted, so that cached latents need their autoencoder and no more. scale: of the latents,
            where the configuration does not say it.

    Raises:
        UserError: the autoencoder cannot be loaded, or is not the one that made the cached latents.
    """
    d, scale = cfg.diffusion, cfg.diffusion.latent_scale or scale
    if cfg.data.name != CACHED:
        if d.autoencoder is None:
            return Pixels(cfg.data.in_chans)
        return load_autoencoder(d.autoencoder, scale, device, key="diffusion.autoencoder")
    facts = {} if drawing else read_index(cfg.data.root)["facts"]
    scale = scale or facts.get("scale")
    if d.autoencoder is None and drawing:
        raise UserError("the run learnt from cached latents; to draw images set autoencoder=FOLDER_OR_NAME, which made "
                        "them")  # fmt: skip
    if d.autoencoder is None:
        return Moments(facts["channels"], scale, shift=facts["shift"], weights=facts["weights"])
    try:
        autoencoder = load_autoencoder(d.autoencoder, scale, device, key="diffusion.autoencoder")
    except UserError as error:
        more = "" if drawing else "; diffusion.autoencoder=null trains from cached latents without sheets of samples"
        raise UserError(f"{error}{more}") from error
    if facts and autoencoder.digest() != facts["weights"]:
        raise UserError(f"diffusion.autoencoder={d.autoencoder} has other weights than what made the latents in "
                        f"data.root={cfg.data.root} ({facts['autoencoder']}); give that one")  # fmt: skip
    return Moments(autoencoder.channels, None, autoencoder)


def latent_grid(cfg: TrainConfig, codec: Any) -> tuple[int, int]:
    """(height, width) of what the network sees; data of cached latents has that size itself."""
    size = tuple(cfg.data.img_size)
    try:
        return size if cfg.data.name == CACHED else codec.grid(size)
    except ValueError as error:
        raise UserError(f"data.{error}") from error
