"""What draws images: a sampler, sheets during training, and a trained generator from its checkpoint."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from timm.utils import unwrap_model

from vit3.build.generator import build_codec, build_generator, build_process, latent_grid
from vit3.build.trained import read_stored
from vit3.config import SampleConfig, SamplingConfig, TrainConfig
from vit3.diffusion import GaussianDiffusion, RectifiedFlow, Sampler
from vit3.diffusion.codec import Moments
from vit3.engine.distributed import Processes
from vit3.engine.sharding import is_sharded
from vit3.engine.train import Trainer
from vit3.errors import UserError
from vit3.generation.during import SampleSheets
from vit3.generation.generator import Generator, TrainedGenerator

logger = logging.getLogger(__name__)


def build_sampler(cfg: SamplingConfig, process: GaussianDiffusion | RectifiedFlow, key: str = "sampling") -> Sampler:
    """How images are drawn.

    Args:
        key: what the user calls ``cfg``, for the sentences.

    Raises:
        UserError: a sampler that does not fit the process, or values that it refuses.
    """
    channels, interval = cfg.guidance_channels or None, tuple(cfg.guidance_interval)
    try:
        return Sampler(process, cfg.sampler, cfg.steps, cfg.guidance, channels, interval)
    except (ValueError, ModuleNotFoundError) as error:
        sentence = re.sub(r"^(interval|channels)=", r"guidance_\1=", str(error))
        raise UserError(f"{key}.{sentence}") from error


def build_sheets(cfg: TrainConfig, trainer: Trainer, classes: tuple[str, ...], run: Path) -> SampleSheets | None:
    """What draws sheets of samples during training, by the averaged weights where there are some.

    None where nothing can make images of the latents, and where the network is sharded.

    Raises:
        UserError: a sampler that does not fit the process.
    """
    task, sheet = trainer.task, cfg.diffusion.sheet
    generator = Generator(
        model=unwrap_model(task.get_eval_model(ema=task.has_ema())),
        codec=task.codec,
        sampler=build_sampler(sheet, task.process, "diffusion.sheet"),
        classes=classes,
        img_size=task.codec.pixels(latent_grid(cfg, task.codec)),
        seed=cfg.engine.seed,
        device=trainer.processes.device,
        amp=cfg.engine.amp,
    )
    if isinstance(task.codec, Moments) and task.codec.autoencoder is None:
        logger.info("no sheets of samples: set diffusion.autoencoder=FOLDER_OR_NAME, which made the latents, for them")
        return None
    if is_sharded(task.get_eval_model()):  # the main process draws alone: it would wait for the others' shares for ever
        logger.info("no sheets of samples with engine.parallel=fsdp; tools/sample.py draws from the checkpoints")
        return None
    return SampleSheets(generator.generate, classes, run, sheet.every, sheet.images)


def build_trained_generator(
    options: SampleConfig, complete: Callable[[dict], DictConfig], processes: Processes
) -> TrainedGenerator:
    """Load a checkpoint and build its generator.

    Args:
        options: which, which of its weights, and how images are drawn; null stands for what the checkpoint says.
        complete: makes the configuration in a checkpoint one that has every key.

    Raises:
        UserError: no such checkpoint, weights that are not there, a classifier, or settings that do not fit.
    """
    stored = read_stored(options.checkpoint, complete, newest=True)
    path, cfg, state = stored.path, stored.cfg, stored.state
    if cfg.diffusion is None:
        raise UserError(
            f"checkpoint={options.checkpoint} holds the classifier {cfg.model.name}, which draws no images; give one "
            "of task=diffusion"
        )
    cfg.diffusion.autoencoder = options.autoencoder or cfg.diffusion.autoencoder
    codec = build_codec(cfg, processes.device, drawing=True, scale=state["codec"].get("scale"))
    _warn_of_other_weights(codec.describe(), state["codec"], cfg.diffusion.autoencoder)
    img_size = tuple(options.img_size or codec.pixels(latent_grid(cfg, codec)))
    try:
        codec.grid(img_size)
    except ValueError as error:
        raise UserError(str(error)) from error
    model = build_generator(cfg, state["classes"], codec)
    kinds = [kind for kind, key in (("ema", "state_dict_ema"), ("raw", "state_dict")) if key in state]
    kind = stored.load_into(model, kinds[0] if options.weights == "auto" else options.weights)
    return TrainedGenerator(
        model=model.to(processes.device),
        codec=codec,
        sampler=build_sampler(_filled(options.sampling, cfg.diffusion.sheet), build_process(cfg.diffusion)),
        classes=tuple(state["classes"]),
        img_size=img_size,
        seed=options.seed,
        device=processes.device,
        amp=options.amp,
        path=path,
        weights=kind,
        saved=stored.saved,
    )


def _warn_of_other_weights(now: dict[str, Any], before: dict[str, Any], place: str | None) -> None:
    """Say that the autoencoder is not that of the training: no refusal, for its decoder alone may be another."""
    key = "autoencoder_sha256"
    if before.get(key) and now.get(key) != before[key]:  # older checkpoints of cached latents do not know it
        logger.warning(
            "autoencoder=%s has other weights (SHA-256 %.12s…) than the one of the training (%.12s…): images are right "
            "only where both have the same encoder", place, now.get(key), before.get(key)
        )  # fmt: skip


def _filled(asked: SamplingConfig, of_run: SamplingConfig) -> SamplingConfig:
    """What is asked for; where that says nothing, what the run's own sheets were drawn with."""
    names = ("sampler", "steps", "guidance", "guidance_channels", "guidance_interval")
    values = {name: getattr(asked, name) for name in names}
    return SamplingConfig(**{name: getattr(of_run, name) if v is None else v for name, v in values.items()})
