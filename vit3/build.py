"""The only room where a configuration becomes objects."""

from __future__ import annotations

import dataclasses
import inspect
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
from timm.data import Mixup
from timm.models import get_pretrained_cfg, split_model_name_tag
from timm.optim import create_optimizer_v2, param_groups_layer_decay, param_groups_weight_decay
from timm.scheduler import create_scheduler_v2
from timm.task import ClassificationTask, TrainingTask
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from vit3.config import DataConfig, ModelConfig, TrainConfig, nearest
from vit3.data import Data, make_data, make_loader, preflight
from vit3.engine.distributed import Processes
from vit3.engine.run_folder import RunFolder
from vit3.engine.trackers import WandbTracker
from vit3.engine.train import Trainer
from vit3.errors import UserError
from vit3.inner import InnerSpec
from vit3.models import MODEL_NAMES, HViT3, ViT3
from vit3.models.weights import load_weights

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Derived:
    """Numbers computed from the configuration and the number of processes; logged, never written back into it."""

    world_size: int
    global_batch: int
    batch_per_process: int
    updates_per_epoch: int
    updates: int
    lr: float
    warmup_lr: float
    min_lr: float
    ema_decay: float | None


def derive(cfg: TrainConfig, data: Data, processes: Processes) -> Derived:
    """Batch, update and learning-rate arithmetic of a run."""
    batch, world_size = cfg.engine.batch_size, processes.world_size
    per_process = batch // world_size
    steps = -(-len(data.train) // world_size) // per_process
    steps = min(steps, cfg.engine.steps_per_epoch or steps)
    factor = batch / cfg.optim.lr_batch
    decay = cfg.engine.ema_decay
    return Derived(
        world_size=world_size,
        global_batch=batch,
        batch_per_process=per_process,
        updates_per_epoch=steps,
        updates=steps * cfg.engine.epochs,
        lr=cfg.optim.lr * factor,
        warmup_lr=cfg.optim.warmup_lr * factor,
        min_lr=cfg.optim.min_lr * factor,
        ema_decay=None if decay is None else decay ** (batch / cfg.engine.ema_batch),
    )


def build_data(cfg: TrainConfig, processes: Processes) -> Data:
    """Open the data and check what can be checked before the first step."""
    check_data_config(cfg.data)
    d = cfg.data
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
    )
    preflight(data, batch_size=cfg.engine.batch_size, world_size=processes.world_size, mixing=_mixes(cfg))
    return data


def check_data_config(cfg: DataConfig) -> None:
    """Raise a UserError where lists do not have the length that others ask for."""
    for key in ("mean", "std"):
        if len(getattr(cfg, key)) != cfg.in_chans:
            raise UserError(f"data.{key}={getattr(cfg, key)} must have one entry for each of in_chans={cfg.in_chans}")
    if not min(cfg.std) > 0:
        raise UserError(f"data.std={cfg.std} must be positive")


def build_loader(cfg: TrainConfig, split: Dataset, processes: Processes, *, training: bool, batch_size: int):
    """Loader of one split; augmentation for training only.

    Args:
        split: the images. batch_size: per process.

    Raises:
        UserError: an image cannot be transformed as ``augment`` and ``data`` say.
    """
    a, d = cfg.augment, cfg.data
    augment = dict(
        train_crop_mode=a.crop,
        scale=tuple(a.scale),
        ratio=tuple(a.ratio),
        hflip=a.hflip,
        color_jitter=a.color_jitter,
        auto_augment=a.auto_augment,
        re_prob=a.erase_prob,
        re_mode=a.erase_mode,
    )
    try:
        loader = make_loader(
            split,
            training=training,
            batch_size=batch_size,
            img_size=d.img_size,
            in_chans=d.in_chans,
            mean=d.mean,
            std=d.std,
            interpolation=d.interpolation,
            crop_pct=d.crop_pct,
            workers=d.workers,
            device=processes.device,
            distributed=processes.distributed,
            augment=augment if training else None,
        )
        if not isinstance(split, IterableDataset):
            split[0]  # once, here, rather than in the first step
    except (AssertionError, ValueError, TypeError, KeyError, IndexError) as error:
        raise UserError(f"images cannot be transformed as augment.* and data.* say ({error or type(error)})") from error
    return loader


def build_model(cfg: TrainConfig, num_classes: int) -> nn.Module:
    """Any registered model; ours with the chosen mixer.

    Raises:
        UserError: unknown name or argument, or values that the model refuses.
    """
    m, img_size = cfg.model, tuple(cfg.data.img_size)
    arch = split_model_name_tag(m.name)[0]
    if not timm.is_model(arch):
        raise UserError(f"model.name={m.name} is no registered model; {nearest(m.name, timm.list_models())}")
    given = dict(
        in_chans=cfg.data.in_chans, num_classes=num_classes, drop_rate=m.drop_rate, drop_path_rate=m.drop_path_rate
    )
    if arch in MODEL_NAMES:
        given |= dict(img_size=img_size, mixer=cfg.mixer.name, mixer_kwargs=_mixer_kwargs(cfg))
        _check_arguments(m, given)
    elif get_pretrained_cfg(m.name).fixed_input_size:
        given |= dict(img_size=img_size)
    try:
        model = timm.create_model(m.name, pretrained=m.pretrained, **{**m.kwargs, **given})
    except (ValueError, TypeError, RuntimeError, AssertionError) as error:
        raise UserError(f"model {m.name} cannot be built: {error}") from error
    if m.checkpoint:
        _load_start(model, m.checkpoint)
    if m.grad_checkpointing:
        model.set_grad_checkpointing()
    return model


def build_task(cfg: TrainConfig, model: nn.Module, derived: Derived, processes: Processes) -> TrainingTask:
    """timm's classification task: loss, moving average, compilation, DDP; in timm's order."""
    model.to(processes.device)
    if cfg.engine.channels_last:
        model.to(memory_format=torch.channels_last)
    loss = dict(smoothing=0.0 if _mixes(cfg) else cfg.augment.smoothing, soft_targets=_mixes(cfg))
    task = ClassificationTask(model, criterion_kwargs=loss, device=processes.device, verbose=False)
    if derived.ema_decay is not None:
        task.setup_ema(decay=derived.ema_decay, use_warmup=cfg.engine.ema_warmup)
    if cfg.engine.compile:
        task.compile()
    if processes.distributed:
        task.prepare_distributed(device_ids=[processes.device] if processes.device.type == "cuda" else None)
    return task


def build_optimizer(cfg: TrainConfig, model: nn.Module, derived: Derived) -> torch.optim.Optimizer:
    """timm's optimiser; biases and 1-D tensors are not decayed, W1, W2, W3 as ``optim.decay_inner`` says."""
    o = cfg.optim
    undecayed = set(model.no_weight_decay()) if hasattr(model, "no_weight_decay") else set()
    if not o.decay_inner:
        undecayed |= {name for name, _ in model.named_parameters() if name.split(".")[-1] in ("w1", "w2", "w3")}
    options: dict[str, Any] = dict(weight_decay=o.weight_decay, no_weight_decay_list=undecayed)
    if o.layer_decay is None:
        groups = param_groups_weight_decay(model, **options)
    else:
        groups = param_groups_layer_decay(model, layer_decay=o.layer_decay, **options)
    try:
        return create_optimizer_v2(groups, opt=o.opt, lr=derived.lr, betas=tuple(o.betas), eps=o.eps)
    except (ValueError, TypeError, AssertionError) as error:
        raise UserError(f"optim.opt={o.opt} cannot be built: {error}") from error


def build_schedule(cfg: TrainConfig, optimizer: torch.optim.Optimizer, derived: Derived):
    """timm's schedule per update; the warm-up lies inside the epochs.

    Raises:
        UserError: no epoch is left after the warm-up.
    """
    if cfg.optim.warmup_epochs >= cfg.engine.epochs:
        raise UserError(
            f"optim.warmup_epochs={cfg.optim.warmup_epochs:g} must be less than engine.epochs={cfg.engine.epochs}; "
            "set optim.warmup_epochs=0 for a very short run"
        )
    schedule, _ = create_scheduler_v2(
        optimizer,
        sched=cfg.optim.sched,
        num_epochs=cfg.engine.epochs,
        warmup_epochs=cfg.optim.warmup_epochs,
        warmup_lr=derived.warmup_lr,
        min_lr=derived.min_lr,
        step_on_epochs=False,
        updates_per_epoch=derived.updates_per_epoch,
    )
    return schedule


def build_trainer(
    cfg: TrainConfig, data: Data, model: nn.Module, derived: Derived, facts: dict[str, Any], processes: Processes
) -> Trainer:
    """Everything that :class:`vit3.engine.train.Trainer` needs.

    Args:
        model: not yet wrapped. facts: numbers for ``summary.json``.

    Raises:
        UserError: optimiser, schedule or transforms cannot be built.
    """
    optimizer = build_optimizer(cfg, model, derived)
    mix = None
    if _mixes(cfg):
        a = cfg.augment
        mix = Mixup(
            mixup_alpha=a.mixup,
            cutmix_alpha=a.cutmix,
            prob=a.mix_prob,
            switch_prob=a.switch_prob,
            label_smoothing=a.smoothing,
            num_classes=len(data.classes),
        )
    return Trainer(
        task=build_task(cfg, model, derived, processes),
        optimizer=optimizer,
        schedule=build_schedule(cfg, optimizer, derived),
        train_loader=build_loader(cfg, data.train, processes, training=True, batch_size=derived.batch_per_process),
        val_loader=build_loader(cfg, data.val, processes, training=False, batch_size=derived.batch_per_process),
        processes=processes,
        epochs=cfg.engine.epochs,
        steps_per_epoch=derived.updates_per_epoch,
        seed=cfg.engine.seed,
        amp=cfg.engine.amp,
        clip_grad=cfg.optim.clip_grad,
        channels_last=cfg.engine.channels_last,
        ema_warmup=cfg.engine.ema_warmup,
        mix=mix,
        metadata={"config": _portable(cfg), "classes": list(data.classes)},
        facts=facts,
        bad_images=lambda: data.bad_images,
    )


def build_tracker(cfg: TrainConfig, run: RunFolder, processes: Processes) -> WandbTracker | None:
    """The wandb tracker of the main process, if one is asked for."""
    if cfg.logger.wandb is None or not processes.main:
        return None
    return WandbTracker(
        mode=cfg.logger.wandb,
        project=cfg.logger.project,
        entity=cfg.logger.entity,
        folder=str(run.path),
        name=run.path.name,
        config=dataclasses.asdict(cfg),
    )


def _mixes(cfg: TrainConfig) -> bool:
    return cfg.augment.mixup > 0 or cfg.augment.cutmix > 0


def _portable(cfg: TrainConfig) -> dict[str, Any]:
    """The configuration for a checkpoint: paths made absolute, so that it can be evaluated from any folder."""
    plain = dataclasses.asdict(cfg)
    if cfg.data.root and Path(cfg.data.root).exists():  # else a name on the hub or an address
        plain["data"]["root"] = str(Path(cfg.data.root).resolve())
    return plain


def _mixer_kwargs(cfg: TrainConfig) -> dict[str, Any]:
    if cfg.mixer.name != "ttt":
        return {}
    try:
        inner = InnerSpec(lr=cfg.inner.lr, scale=cfg.inner.scale)
        return dict(backend=cfg.mixer.backend, autotune=cfg.mixer.autotune, inner=inner)
    except ValueError as error:
        raise UserError(str(error)) from error


def _check_arguments(cfg: ModelConfig, given: dict[str, Any]) -> None:
    """Name the nearest argument where ``model.kwargs`` has one that our models lack or that is ``given`` elsewhere."""
    cls = HViT3 if cfg.name.startswith("h_") else ViT3
    allowed = set(inspect.signature(cls).parameters) - given.keys()
    for name in cfg.kwargs:
        if name not in allowed:
            raise UserError(f"model.kwargs.{name} is no argument of {cfg.name}; {nearest(name, allowed)}")


def _load_start(model: nn.Module, path: str) -> None:
    """Load weights to start from (of a run folder: its best) and say what was found."""
    if Path(path).is_dir():
        path = str(Path(path) / "best.pt")
    try:
        report = load_weights(model, path)
    except (ValueError, FileNotFoundError) as error:
        raise UserError(f"model.checkpoint={path}: {error}") from error
    logger.info("model.checkpoint=%s: %s", path, report)
