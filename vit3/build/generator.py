"""What a generator is made of: network, diffusion process, codec, sampler; and a trained one from its checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
from omegaconf import DictConfig
from timm.utils import unwrap_model
from torch import Tensor, nn

from vit3.build.data import mixes
from vit3.build.model import build_model, check_arguments, frozen_modules, load_start, mixer_kwargs
from vit3.build.trained import chosen_weights, saved_when
from vit3.config import DiffusionConfig, SampleConfig, SamplingConfig, TrainConfig, nearest, typed
from vit3.data.latent_shards import read_index
from vit3.diffusion import GaussianDiffusion, RectifiedFlow
from vit3.diffusion.codec import Autoencoder, Moments, Pixels, load_autoencoder
from vit3.diffusion.samplers import Sampler
from vit3.engine.checkpoint import load_checkpoint, newest_checkpoint
from vit3.engine.distributed import Processes
from vit3.engine.precision import autocast
from vit3.engine.sharding import is_sharded
from vit3.engine.train import Trainer
from vit3.errors import UserError
from vit3.generation.during import SampleSheets
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
        img_size=_grid(cfg, codec),
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


def build_sampler(cfg: SamplingConfig, process: GaussianDiffusion | RectifiedFlow, key: str = "sampling") -> Sampler:
    """How images are drawn.

    Args:
        key: what the user calls ``cfg``, for the sentences.

    Raises:
        UserError: a sampler that does not fit the process, or values that it refuses.
    """
    interval = tuple(cfg.guidance_interval)
    if len(interval) != 2 or not 0 <= interval[0] <= interval[1] <= 1:
        raise UserError(
            f"{key}.guidance_interval={list(interval)} must be two times from 0 (image) to 1 (noise), in order"
        )
    try:
        return Sampler(process, cfg.sampler, cfg.steps, cfg.guidance, cfg.guidance_channels or None, interval)
    except (ValueError, ModuleNotFoundError) as error:
        raise UserError(f"{key}.{error}") from error


@dataclass(frozen=True)
class Generator:
    """A network that draws images.

    Attributes:
        model: on the device. codec, sampler: how. classes: names in label order. img_size: (height, width) in pixels.
        seed: image number i depends on it, on i and on the label alone. amp: precision of the network.
    """

    model: nn.Module
    codec: Any
    sampler: Sampler
    classes: tuple[str, ...]
    img_size: tuple[int, int]
    seed: int
    device: torch.device
    amp: str | None = None

    @torch.no_grad()
    def generate(self, labels: Tensor, numbers: Sequence[int], progress: Callable[[int], None] | None = None) -> Tensor:
        """Images ``numbers`` of classes ``labels`` (b,), as uint8 (b, H, W, C) on the CPU.

        Args:
            progress: called with 1 after every step of the sampler.
        """
        was_training = self.model.training
        self.model.eval()
        shape = (self.codec.channels, *self.codec.grid(self.img_size))
        try:
            with autocast(self.device, self.amp):
                latents = self.sampler.sample(
                    self.model, labels, numbers, shape=shape, seed=self.seed, device=self.device, progress=progress
                )
                images = self.codec.decode(latents).float()
        finally:
            self.model.train(was_training)
        images = images[..., : self.img_size[0], : self.img_size[1]]
        return ((images + 1) * 127.5).round().clamp(0, 255).to("cpu", torch.uint8).permute(0, 2, 3, 1).contiguous()


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
        img_size=task.codec.pixels(_grid(cfg, task.codec)),
        seed=cfg.engine.seed,
        device=trainer.processes.device,
        amp=cfg.engine.amp,
    )
    if isinstance(task.codec, Moments) and task.codec.autoencoder is None:
        logger.info("no sheets of samples: set diffusion.autoencoder=FOLDER_OR_NAME, which made the latents, for them")
        return None
    if is_sharded(
        task.get_eval_model()
    ):  # the main process draws alone, and would wait for the others' shares for ever
        logger.info("no sheets of samples with engine.parallel=fsdp; tools/sample.py draws from the checkpoints")
        return None
    return SampleSheets(generator.generate, classes, run, sheet.every, sheet.images)


@dataclass(frozen=True)
class TrainedGenerator(Generator):
    """A generator from its checkpoint.

    Attributes:
        path: of the checkpoint. weights: ``raw`` or ``ema``. saved: when they were saved, in words.
    """

    path: Path = Path()
    weights: str = "ema"
    saved: str = ""

    @property
    def title(self) -> str:
        """What was loaded, for the first line of a report."""
        return f"{self.path}: {self.weights} weights of {self.saved}"

    def describe(self) -> dict[str, Any]:
        """Every setting that decides what the images are, as plain values."""
        s = self.sampler
        return {
            "checkpoint": str(self.path),
            "weights": self.weights,
            "sampler": s.name,
            "steps": s.steps,
            "guidance": s.guidance,
            "guidance_channels": s.channels,
            "guidance_interval": list(s.interval),
            "seed": self.seed,
            "img_size": list(self.img_size),
            "amp": self.amp,
            **self.codec.describe(),
        }


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
    path = Path(options.checkpoint)
    path, state = newest_checkpoint(path) if path.is_dir() else (path, load_checkpoint(path))
    cfg: TrainConfig = typed(complete(state["config"]), TrainConfig)
    if cfg.diffusion is None:
        raise UserError(
            f"checkpoint={options.checkpoint} holds the classifier {cfg.model.name}, which draws no images; give one "
            "of task=diffusion"
        )
    cfg.model.pretrained, cfg.model.checkpoint = False, None  # the weights are in this checkpoint
    cfg.diffusion.autoencoder = options.autoencoder or cfg.diffusion.autoencoder
    codec = build_codec(cfg, processes.device, drawing=True, scale=state["codec"].get("scale"))
    _warn_of_other_weights(codec.describe(), state["codec"], cfg.diffusion.autoencoder)
    img_size = tuple(options.img_size or codec.pixels(_grid(cfg, codec)))
    try:
        codec.grid(img_size)
    except ValueError as error:
        raise UserError(str(error)) from error
    model = build_generator(cfg, state["classes"], codec)
    kinds = [kind for kind, key in (("ema", "state_dict_ema"), ("raw", "state_dict")) if key in state]
    kind = kinds[0] if options.weights == "auto" else chosen_weights(state, options.weights, path)
    model.load_state_dict(state["state_dict_ema" if kind == "ema" else "state_dict"])
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
        saved=saved_when(state),
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


def _grid(cfg: TrainConfig, codec: Any) -> tuple[int, int]:
    """(height, width) of what the network sees; data of cached latents has that size itself."""
    size = tuple(cfg.data.img_size)
    try:
        return size if cfg.data.name == CACHED else codec.grid(size)
    except ValueError as error:
        raise UserError(f"data.{error}") from error
