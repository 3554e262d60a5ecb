"""Data, batches and the numbers that follow from them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.data import Dataset

from vit3.config import AugmentConfig, CacheConfig, DataConfig, TrainConfig
from vit3.data import (
    BatchPlan,
    CachedLatents,
    Data,
    TrainLoader,
    accumulation_for,
    make_data,
    make_eval_loader,
    make_latent_eval_loader,
    make_latent_train_loader,
    make_train_loader,
    preflight,
)
from vit3.engine.distributed import Processes
from vit3.errors import UserError


@dataclass(frozen=True)
class Derived:
    """Numbers computed from the configuration and the number of processes; logged, never written back into it."""

    world_size: int
    global_batch: int
    batch_per_process: int
    accumulation: int
    updates_per_epoch: int
    updates: int
    lr: float
    warmup_lr: float
    min_lr: float
    ema_decay: float | None


def build_plan(cfg: TrainConfig, images: int, world_size: int, model: nn.Module) -> BatchPlan:
    """Which images make up each update.

    Args:
        images: in the training data. model: asked whether it normalises over the batch.

    Raises:
        UserError: the batch cannot be dealt out, or an epoch would have no update.
    """
    e = cfg.engine
    normalises = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
    unit = 2 if mixes(cfg) or (normalises and not e.drop_last) else 1
    accumulation = accumulation_for(e.batch_size, world_size, e.max_per_process, unit)
    if normalises and e.batch_size // (world_size * accumulation) < 2:
        raise UserError(
            f"engine.batch_size={e.batch_size} leaves one image per process and forward pass, over which "
            f"{cfg.model.name} cannot normalise; use at least 2"
        )
    plan = BatchPlan(
        images, e.batch_size, world_size, accumulation, e.seed, e.drop_last, unit, max_updates=e.steps_per_epoch
    )
    if plan.updates == 0:
        raise UserError(
            f"engine.batch_size={e.batch_size} is more than the {images} training images: an epoch would have "
            f"no step; use at most {images // unit * unit}"
        )
    return plan


def derive(cfg: TrainConfig, plan: BatchPlan) -> Derived:
    """Batch, update and learning-rate arithmetic of a run."""
    factor = plan.batch / cfg.optim.lr_batch
    decay = cfg.engine.ema_decay
    return Derived(
        world_size=plan.world_size,
        global_batch=plan.batch,
        batch_per_process=-(-plan.batch // (plan.world_size * plan.accumulation)),
        accumulation=plan.accumulation,
        updates_per_epoch=plan.updates,
        updates=plan.updates * cfg.engine.epochs,
        lr=cfg.optim.lr * factor,
        warmup_lr=cfg.optim.warmup_lr * factor,
        min_lr=cfg.optim.min_lr * factor,
        ema_decay=None if decay is None else decay ** (plan.batch / cfg.engine.ema_batch),
    )


def build_data(cfg: TrainConfig | CacheConfig) -> Data:
    """Open the data and check what can be checked before the first step."""
    check_data_config(cfg.data)
    d = cfg.data
    if d.name == "latents" and cfg.diffusion is None:
        raise UserError("data=latents is for generators; add task=diffusion and diffusion=ddpm or flow")
    data = make_data(
        d.name,
        d.root,
        d.in_chans,
        d.on_bad_image,
        train_split=d.train_split,
        val_split=d.val_split,
        input_key=d.input_key,
        target_key=d.target_key,
        stream=d.stream,
        img_size=d.img_size,
    )
    preflight(data)
    return data


def check_data_config(cfg: DataConfig) -> None:
    """Raise a UserError where lists do not have the length that others ask for."""
    if cfg.name == "latents":  # which are scaled by their autoencoder's factor instead
        return
    for key in ("mean", "std"):
        if len(getattr(cfg, key)) != cfg.in_chans:
            raise UserError(f"data.{key}={getattr(cfg, key)} must have one entry for each of in_chans={cfg.in_chans}")
    if not min(cfg.std) > 0:
        raise UserError(f"data.std={cfg.std} must be positive")


def build_train_loader(cfg: TrainConfig, split: Dataset, plan: BatchPlan, processes: Processes) -> TrainLoader:
    """Loader of training batches, augmented.

    Raises:
        UserError: an image cannot be transformed as ``augment`` and ``data`` say.
    """
    a = cfg.augment
    if isinstance(split, CachedLatents):
        _check_latent_augmentation(a)
        options = dict(hflip=a.hflip, workers=cfg.data.workers, device=processes.device)
        return make_latent_train_loader(split, plan, processes.rank, **options)
    augment = dict(
        train_crop_mode=a.crop,
        scale=tuple(a.scale),
        ratio=tuple(a.ratio),
        hflip=a.hflip,
        color_jitter=a.color_jitter or None,  # 0 would still cost 0.1 ms an image
        auto_augment=a.auto_augment,
        erase_prob=a.erase_prob,
        erase_mode=a.erase_mode,
    )
    with _transform_errors():
        loader = make_train_loader(split, plan, processes.rank, **_images(cfg), device=processes.device, **augment)
        if not loader.streamed:
            split[0]  # once, here, rather than in the first step
    return loader


def build_eval_loader(
    cfg: TrainConfig | CacheConfig, split: Dataset, processes: Processes, batch_size: int,
    batches: Sequence[Sequence[int]] | None = None,
):  # fmt: skip
    """Loader of evaluation batches.

    Args:
        batch_size: per process. batches: numbers of the images of each batch of this process; None shares all out.

    Raises:
        UserError: an image cannot be transformed as ``data`` says.
    """
    share = dict(rank=processes.rank, world_size=processes.world_size, device=processes.device)
    if isinstance(split, CachedLatents):
        return make_latent_eval_loader(split, batch_size, workers=cfg.data.workers, **share)
    with _transform_errors():
        crop = dict(crop_pct=cfg.data.crop_pct, batches=batches)
        loader = make_eval_loader(split, batch_size, **_images(cfg), **crop, **share)
        split[0]
    return loader


def mixes(cfg: TrainConfig) -> bool:
    """Whether images of a batch are mixed."""
    return cfg.augment.mixup > 0 or cfg.augment.cutmix > 0


def _images(cfg: TrainConfig | CacheConfig) -> dict[str, Any]:
    names = ("img_size", "in_chans", "mean", "std", "interpolation", "workers")
    return {name: getattr(cfg.data, name) for name in names}


def _check_latent_augmentation(a: AugmentConfig) -> None:
    """Raise a UserError where latents would have to be augmented as images are."""
    neutral = dict(scale=[1, 1], ratio=[1, 1], color_jitter=0, auto_augment=None, erase_prob=0, mixup=0, cutmix=0)
    for name, value in neutral.items():
        if getattr(a, name) != value:
            raise UserError(
                f"augment.{name}={getattr(a, name)} cannot act on cached latents, of which only augment.hflip can "
                "choose; add augment=none"
            )


@contextmanager
def _transform_errors():
    try:
        yield
    except (AssertionError, ValueError, TypeError, KeyError, IndexError) as error:
        raise UserError(f"images cannot be transformed as augment.* and data.* say ({error or type(error)})") from error
