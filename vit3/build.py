"""The only room where a configuration becomes objects."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import warnings
from collections.abc import Sequence
from contextlib import contextmanager
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
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from vit3.config import DataConfig, ModelConfig, TrainConfig, nearest
from vit3.data import (
    BatchPlan,
    Data,
    TrainLoader,
    accumulation_for,
    make_data,
    make_eval_loader,
    make_train_loader,
    preflight,
)
from vit3.engine.checkpoint import best_checkpoint
from vit3.engine.distributed import Processes
from vit3.engine.run_folder import RunFolder
from vit3.engine.sharding import LocalEma, shard
from vit3.engine.trackers import TensorBoardTracker, Tracker, Trackers, WandbTracker
from vit3.engine.train import Trainer
from vit3.engine.update import Updater
from vit3.errors import UserError
from vit3.inner import InnerSpec
from vit3.models import MODEL_NAMES, HViT3, ViT3
from vit3.models.weights import load_weights
from vit3.tasks import MESATask

logger = logging.getLogger(__name__)

# Statistics of normalisation are averaged after each update, in Updater, and not sent around in each forward pass
_NEW_NAME = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
_OWN_BUFFERS = {"forward_sync_buffers" if _NEW_NAME else "broadcast_buffers": False}


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
    unit = 2 if _mixes(cfg) or (normalises and not e.drop_last) else 1
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


def build_data(cfg: TrainConfig) -> Data:
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
    preflight(data)
    return data


def check_data_config(cfg: DataConfig) -> None:
    """Raise a UserError where lists do not have the length that others ask for."""
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
    augment = dict(
        train_crop_mode=a.crop,
        scale=tuple(a.scale),
        ratio=tuple(a.ratio),
        hflip=a.hflip,
        color_jitter=a.color_jitter,
        auto_augment=a.auto_augment,
        erase_prob=a.erase_prob,
        erase_mode=a.erase_mode,
    )
    with _transform_errors():
        loader = make_train_loader(split, plan, processes.rank, **_images(cfg), device=processes.device, **augment)
        if not loader.streamed:
            split[0]  # once, here, rather than in the first step
    return loader


def build_eval_loader(cfg: TrainConfig, split: Dataset, processes: Processes, batch_size: int):
    """Loader of evaluation batches.

    Args:
        batch_size: per process.

    Raises:
        UserError: an image cannot be transformed as ``data`` says.
    """
    share = dict(rank=processes.rank, world_size=processes.world_size, crop_pct=cfg.data.crop_pct)
    with _transform_errors():
        loader = make_eval_loader(split, batch_size, **_images(cfg), device=processes.device, **share)
        split[0]
    return loader


def _images(cfg: TrainConfig) -> dict[str, Any]:
    names = ("img_size", "in_chans", "mean", "std", "interpolation", "workers")
    return {name: getattr(cfg.data, name) for name in names}


@contextmanager
def _transform_errors():
    try:
        yield
    except (AssertionError, ValueError, TypeError, KeyError, IndexError) as error:
        raise UserError(f"images cannot be transformed as augment.* and data.* say ({error or type(error)})") from error


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
    given = dict(
        in_chans=cfg.data.in_chans, num_classes=len(classes), drop_rate=m.drop_rate, drop_path_rate=m.drop_path_rate
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
        _load_start(model, m.checkpoint, classes)
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


def build_task(cfg: TrainConfig, model: nn.Module, derived: Derived, processes: Processes) -> TrainingTask:
    """timm's classification task or MESA: loss, moving average, compilation, distribution; in this order.

    Raises:
        UserError: MESA without a moving average, or float16 with sharding.
    """
    e = cfg.engine
    model.to(processes.device)
    if e.channels_last:
        model.to(memory_format=torch.channels_last)
    loss = dict(smoothing=0.0 if _mixes(cfg) else cfg.augment.smoothing, soft_targets=_mixes(cfg))
    options = dict(criterion_kwargs=loss, device=processes.device, verbose=False)
    if cfg.task.name == "mesa":
        if derived.ema_decay is None:
            raise UserError("task=mesa learns from the moving average; set engine.ema_decay (0.9996 in the recipes)")
        task = MESATask(model, weight=cfg.task.weight, start=cfg.task.start, **options)
    else:
        task = ClassificationTask(model, **options)
    if derived.ema_decay is not None:
        average = dict(decay=derived.ema_decay, use_warmup=e.ema_warmup, exclude_buffers=e.ema_buffers == "copy")
        task.trainable_module_ema = LocalEma(model, **average)
    sharded = e.parallel == "fsdp" and processes.distributed
    if sharded:
        if e.amp == "float16":
            raise UserError(
                "engine.amp=float16 scales losses, which engine.parallel=fsdp does not; use bfloat16 or null"
            )
        shard(model, processes.device)
        if task.has_ema():
            shard(task.trainable_module_ema.module, processes.device)
    if e.compile:
        task.compile()
    if processes.distributed and not sharded:
        ids = [processes.device] if processes.device.type == "cuda" else None
        warnings.filterwarnings("ignore", message="Grad strides do not match bucket view")  # of dimensions of length 1
        task.prepare_distributed(device_ids=ids, gradient_as_bucket_view=True, **_OWN_BUFFERS)
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


def build_updater(
    cfg: TrainConfig,
    task: TrainingTask,
    optimizer: torch.optim.Optimizer,
    derived: Derived,
    batches: TrainLoader | None,
    processes: Processes,
    num_classes: int,
) -> Updater:
    """What takes the updates.

    Args:
        batches: where a bad update's batch is read again from; None where no update can be bad, as in timing.

    Raises:
        UserError: the schedule cannot be built.
    """
    return Updater(
        task=task,
        optimizer=optimizer,
        schedule=build_schedule(cfg, optimizer, derived),
        batches=batches,
        processes=processes,
        seed=cfg.engine.seed,
        amp=cfg.engine.amp,
        clip_grad=cfg.optim.clip_grad,
        channels_last=cfg.engine.channels_last,
        ema_warmup=cfg.engine.ema_warmup,
        max_bad=cfg.engine.max_bad_updates,
        mix=_build_mix(cfg, num_classes),
    )


def build_trainer(
    cfg: TrainConfig, data: Data, model: nn.Module, plan: BatchPlan, facts: dict[str, Any], processes: Processes
) -> Trainer:
    """Everything that :class:`vit3.engine.train.Trainer` needs.

    Args:
        model: not yet wrapped. plan: of the batches. facts: numbers for ``summary.json``.

    Raises:
        UserError: optimiser, schedule or transforms cannot be built.
    """
    derived = derive(cfg, plan)
    task = build_task(cfg, model, derived, processes)
    optimizer = build_optimizer(cfg, model, derived)  # after the task: sharding replaces parameters
    batches = build_train_loader(cfg, data.train, plan, processes)
    updater = build_updater(cfg, task, optimizer, derived, batches, processes, len(data.classes))
    return Trainer(
        updater=updater,
        batches=batches,
        val_loader=build_eval_loader(cfg, data.val, processes, derived.batch_per_process),
        processes=processes,
        epochs=cfg.engine.epochs,
        keep_last=cfg.engine.keep_last,
        save_minutes=cfg.engine.save_minutes,
        log_every=cfg.logger.every,
        frozen=frozen_modules(model, cfg.model.freeze),
        metadata={"config": _portable(cfg), "classes": list(data.classes)},
        facts=facts,
        bad_images=lambda: data.bad_images,
        profile_updates=cfg.engine.profile,
    )


def _build_mix(cfg: TrainConfig, num_classes: int) -> Mixup | None:
    if not _mixes(cfg):
        return None
    a = cfg.augment
    return Mixup(
        mixup_alpha=a.mixup,
        cutmix_alpha=a.cutmix,
        prob=a.mix_prob,
        switch_prob=a.switch_prob,
        label_smoothing=a.smoothing,
        num_classes=num_classes,
    )


def build_tracker(cfg: TrainConfig, run: RunFolder, processes: Processes) -> Trackers | None:
    """The trackers of the main process that are asked for, as one; None where there is none."""
    trackers: list[Tracker] = []
    if processes.main and cfg.logger.wandb is not None:
        trackers.append(
            WandbTracker(
                mode=cfg.logger.wandb,
                project=cfg.logger.project,
                entity=cfg.logger.entity,
                folder=str(run.path),
                name=run.path.name,
                config=dataclasses.asdict(cfg),
            )
        )
    if processes.main and cfg.logger.tensorboard:
        trackers.append(TensorBoardTracker(run / "tensorboard"))
    return Trackers(trackers) if trackers else None


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


def _load_start(model: nn.Module, path: str, classes: Sequence[str]) -> None:
    """Load weights to start from (of a run folder: its best) and say what was found."""
    folder = Path(path)
    file = best_checkpoint(folder) if folder.is_dir() else folder
    try:
        report = load_weights(model, file, ema=file.name == "best_ema.pt", classes=classes)
    except (ValueError, FileNotFoundError) as error:
        raise UserError(f"model.checkpoint={path}: {error}") from error
    logger.info("model.checkpoint=%s: %s", file, report)
