"""What trains: task, optimiser, schedule, updater, trainer, trackers."""

from __future__ import annotations

import dataclasses
import inspect
import re
import warnings
from pathlib import Path
from typing import Any

import torch
from timm.data import Mixup
from timm.optim import create_optimizer_v2, param_groups_layer_decay, param_groups_weight_decay
from timm.scheduler import create_scheduler_v2
from timm.task import ClassificationTask, TrainingTask
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from vit3.build.data import Derived, build_eval_loader, build_train_loader, derive, mixes
from vit3.build.generator import build_process
from vit3.build.model import frozen_modules
from vit3.build.sampling import build_sampler
from vit3.config import TrainConfig
from vit3.data import (
    BatchPlan,
    Data,
    TrainLoader,
)
from vit3.engine.distributed import Processes
from vit3.engine.run_folder import RunFolder
from vit3.engine.sharding import LocalEma, shard
from vit3.engine.trackers import TensorBoardTracker, Tracker, Trackers, WandbTracker
from vit3.engine.train import Trainer
from vit3.engine.update import Updater
from vit3.errors import UserError
from vit3.generation.evaluate import SCORE, TestLoss
from vit3.tasks import DiffusionTask, MESATask

# Statistics of normalisation are averaged after each update, in Updater, and not sent around in each forward pass
_NEW_NAME = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
_OWN_BUFFERS = {"forward_sync_buffers" if _NEW_NAME else "broadcast_buffers": False}


def build_task(
    cfg: TrainConfig, model: nn.Module, derived: Derived, processes: Processes, codec: Any = None
) -> TrainingTask:
    """timm's classification task, MESA or diffusion: loss, moving average, compilation, distribution; in this order.

    Args:
        codec: of a generator, see :func:`vit3.build.generator.build_codec`.

    Raises:
        UserError: MESA without a moving average, or float16 with sharding.
    """
    e = cfg.engine
    model.to(processes.device)
    if e.channels_last:
        model.to(memory_format=torch.channels_last)
    loss = dict(smoothing=0.0 if mixes(cfg) else cfg.augment.smoothing, soft_targets=mixes(cfg))
    plain = dict(device=processes.device, verbose=False)
    options = dict(criterion_kwargs=loss, **plain)
    if cfg.task.name == "diffusion":
        process = build_process(cfg.diffusion)
        build_sampler(cfg.diffusion.sheet, process, "diffusion.sheet")  # refused before there is a run folder
        task = DiffusionTask(model, process, codec, cfg.diffusion.label_drop, **plain)
    elif cfg.task.name == "mesa":
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
    if not sharded:
        distribute(task, processes)
    return task


def distribute(task: TrainingTask, processes: Processes) -> None:
    """Let several processes share the gradients of a task (DDP); alone, nothing happens."""
    if processes.distributed:
        ids = [processes.device] if processes.device.type == "cuda" else None
        warnings.filterwarnings("ignore", message="Grad strides do not match bucket view")  # of dimensions of length 1
        task.prepare_distributed(device_ids=ids, gradient_as_bucket_view=True, **_OWN_BUFFERS)


def build_optimizer(cfg: TrainConfig, model: nn.Module, derived: Derived) -> torch.optim.Optimizer:
    """timm's optimiser; biases and 1-D tensors are not decayed, learned starts W0 as ``optim.decay_inner`` says."""
    o = cfg.optim
    undecayed = set(model.no_weight_decay()) if hasattr(model, "no_weight_decay") else set()
    if not o.decay_inner:
        undecayed |= {name for name, _ in model.named_parameters() if re.fullmatch(r"(.*\.)?w\d+", name)}
    options: dict[str, Any] = dict(weight_decay=o.weight_decay, no_weight_decay_list=undecayed)
    if o.layer_decay is None:
        groups = param_groups_weight_decay(model, **options)
    else:
        groups = param_groups_layer_decay(model, layer_decay=o.layer_decay, **options)
    try:
        return create_optimizer_v2(groups, opt=o.opt, lr=derived.lr, betas=tuple(o.betas), eps=o.eps)
    except (ValueError, TypeError, AssertionError) as error:
        raise UserError(f"optim.opt={o.opt} cannot be built: {error}") from error


def build_schedule(cfg: TrainConfig, optimizer: torch.optim.Optimizer, derived: Derived, **options):
    """timm's schedule per update; the warm-up lies inside the epochs.

    Args:
        options: more of :func:`timm.scheduler.create_scheduler_v2`.

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
        **options,
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
    cfg: TrainConfig,
    data: Data,
    model: nn.Module,
    plan: BatchPlan,
    facts: dict[str, Any],
    processes: Processes,
    codec: Any = None,
) -> Trainer:
    """Everything that :class:`vit3.engine.train.Trainer` needs.

    Args:
        model: not yet wrapped. plan: of the batches. facts: numbers for ``summary.json``. codec: of a generator.

    Raises:
        UserError: optimiser, schedule or transforms cannot be built.
    """
    derived = derive(cfg, plan)
    task = build_task(cfg, model, derived, processes, codec)
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
        metadata={
            "config": _portable(cfg),
            "classes": list(data.classes),
            **({} if codec is None else {"codec": codec.describe()}),
        },
        facts=facts,
        bad_images=lambda: data.bad_images,
        profile_updates=cfg.engine.profile,
        **({} if codec is None else _scored_by_loss(task, cfg.engine.seed)),
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


def _build_mix(cfg: TrainConfig, num_classes: int) -> Mixup | None:
    if not mixes(cfg):
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


def _scored_by_loss(task: DiffusionTask, seed: int) -> dict[str, Any]:
    return dict(evaluate=TestLoss(task.process, task.codec, seed), score=SCORE)


def _portable(cfg: TrainConfig) -> dict[str, Any]:
    """The configuration for a checkpoint: paths made absolute, so that it can be evaluated from any folder."""
    plain = dataclasses.asdict(cfg)
    if cfg.data.root and Path(cfg.data.root).exists():  # else a name on the hub or an address
        plain["data"]["root"] = str(Path(cfg.data.root).resolve())
    if cfg.diffusion and cfg.diffusion.autoencoder and Path(cfg.diffusion.autoencoder).exists():
        plain["diffusion"]["autoencoder"] = str(Path(cfg.diffusion.autoencoder).resolve())
    return plain
