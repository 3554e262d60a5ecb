"""The only room where a configuration becomes objects."""

from __future__ import annotations

import dataclasses
import inspect
import logging
from dataclasses import dataclass
from typing import Any

import timm
import torch
from timm.data import Mixup
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.task import ClassificationTask, TrainingTask
from torch import nn

from vit3.config import DataConfig, InnerConfig, MixerConfig, ModelConfig, TrainConfig, nearest
from vit3.data import Data, make_data, make_loader, preflight
from vit3.engine.distributed import Processes
from vit3.engine.run_folder import RunFolder
from vit3.engine.trackers import WandbTracker
from vit3.engine.train import Trainer
from vit3.errors import UserError
from vit3.inner import InnerSpec
from vit3.models import MODEL_NAMES
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
    data = make_data(cfg.data.name, cfg.data.root, cfg.data.in_chans, cfg.data.on_bad_image)
    preflight(data, batch_size=cfg.engine.batch_size, world_size=processes.world_size, mixing=_mixes(cfg))
    return data


def check_data_config(cfg: DataConfig) -> None:
    """Raise a UserError where lists do not have the length that others ask for."""
    if len(cfg.img_size) != 2 or min(cfg.img_size) < 1:
        raise UserError(f"data.img_size={cfg.img_size} must be [height, width], both at least 1")
    for key in ("mean", "std"):
        if len(getattr(cfg, key)) != cfg.in_chans:
            raise UserError(f"data.{key}={getattr(cfg, key)} must have one entry for each of in_chans={cfg.in_chans}")


def build_loader(cfg: TrainConfig, data: Data, processes: Processes, *, training: bool, batch_size: int):
    """Loader of one split; augmentation for training only."""
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
    return make_loader(
        data.train if training else data.val,
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


def build_model(
    cfg: ModelConfig, mixer: MixerConfig, inner: InnerConfig, *, in_chans: int, num_classes: int, img_size: list[int]
) -> nn.Module:
    """Any registered model; ours with the chosen mixer.

    Raises:
        UserError: unknown name or argument, or values that the model refuses.
    """
    if not timm.is_model(timm.models.split_model_name_tag(cfg.name)[0]):
        raise UserError(f"model.name={cfg.name} is no registered model; {nearest(cfg.name, timm.list_models())}")
    arguments: dict[str, Any] = dict(
        in_chans=in_chans,
        num_classes=num_classes,
        drop_rate=cfg.drop_rate,
        drop_path_rate=cfg.drop_path_rate,
        **cfg.kwargs,
    )
    try:
        if cfg.name.split(".")[0] in MODEL_NAMES:
            _check_arguments(cfg)
            arguments |= dict(
                img_size=tuple(img_size), mixer=mixer.name, mixer_kwargs=_mixer_kwargs(mixer, inner)
            )
        model = timm.create_model(cfg.name, pretrained=cfg.pretrained, **arguments)
    except (ValueError, TypeError, RuntimeError) as error:
        raise UserError(f"model {cfg.name} cannot be built: {error}") from error
    if cfg.checkpoint:
        _load_start(model, cfg.checkpoint)
    if cfg.grad_checkpointing:
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
    if not o.decay_inner:
        undecayed = {name for name, _ in model.named_parameters() if name.split(".")[-1] in ("w1", "w2", "w3")}
        undecayed |= set(model.no_weight_decay())
        model.no_weight_decay = lambda: undecayed
    try:
        return create_optimizer_v2(
            model,
            opt=o.opt,
            lr=derived.lr,
            weight_decay=o.weight_decay,
            layer_decay=o.layer_decay,
            betas=tuple(o.betas),
            eps=o.eps,
        )
    except (ValueError, TypeError, AssertionError) as error:
        raise UserError(f"optim.opt={o.opt} cannot be built: {error}") from error


def build_schedule(cfg: TrainConfig, optimizer: torch.optim.Optimizer, derived: Derived):
    """timm's schedule per update; the warm-up lies inside the epochs.

    Raises:
        UserError: no epoch is left after the warm-up, or the schedule is unknown.
    """
    if cfg.optim.warmup_epochs >= cfg.engine.epochs:
        raise UserError(
            f"optim.warmup_epochs={cfg.optim.warmup_epochs:g} must be less than engine.epochs={cfg.engine.epochs}"
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
    """Everything that :class:`vit3.engine.train.Trainer` needs."""
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
        train_loader=build_loader(cfg, data, processes, training=True, batch_size=derived.batch_per_process),
        val_loader=build_loader(cfg, data, processes, training=False, batch_size=derived.batch_per_process),
        processes=processes,
        epochs=cfg.engine.epochs,
        steps_per_epoch=derived.updates_per_epoch,
        seed=cfg.engine.seed,
        amp=cfg.engine.amp,
        clip_grad=cfg.optim.clip_grad,
        channels_last=cfg.engine.channels_last,
        ema_warmup=cfg.engine.ema_warmup,
        mix=mix,
        metadata={"config": dataclasses.asdict(cfg), "classes": list(data.classes)},
        facts=facts,
        bad_images=lambda: data.bad_images,
    )


def check_resumable(cfg: TrainConfig, state: dict[str, Any], classes: tuple[str, ...]) -> None:
    """Make sure that a checkpoint is of the run that ``cfg`` describes; schedules and paths may differ.

    Raises:
        UserError: another model, mixer, inner step or data; or nothing is left to train.
    """
    here, there = dataclasses.asdict(cfg), state["config"]
    fixed = [(group, key) for group in ("model", "mixer", "inner") for key in here[group]]
    fixed += [("data", key) for key in ("name", "img_size", "in_chans")]
    for group, key in fixed:
        ours, theirs = here[group][key], there[group].get(key)
        if ours != theirs and key not in ("pretrained", "checkpoint", "grad_checkpointing", "backend"):
            raise UserError(
                f"resume={cfg.resume}: {group}.{key} is {ours} here and {theirs} in the run; give the run's own settings"
            )
    if list(classes) != state["classes"]:
        raise UserError(f"resume={cfg.resume}: data.root={cfg.data.root} has other classes than the run was trained on")
    if state["epoch"] + 1 >= cfg.engine.epochs:
        raise UserError(
            f"resume={cfg.resume}: {state['epoch'] + 1} epochs are done already; set engine.epochs higher to go on"
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


def _mixer_kwargs(mixer: MixerConfig, inner: InnerConfig) -> dict[str, Any]:
    if mixer.name != "ttt":
        return {}
    return dict(backend=mixer.backend, inner=InnerSpec(lr=inner.lr, scale=inner.scale))


def _check_arguments(cfg: ModelConfig) -> None:
    """Name the nearest argument where ``model.kwargs`` has one that our models do not take."""
    from vit3.models import HViT3, ViT3

    cls = HViT3 if cfg.name.startswith("h_") else ViT3
    allowed = set(inspect.signature(cls).parameters) - {"mixer", "mixer_kwargs", "in_chans", "num_classes", "img_size"}
    for name in cfg.kwargs:
        if name not in allowed:
            raise UserError(f"model.kwargs.{name} is no argument of {cfg.name}; {nearest(name, allowed)}")


def _load_start(model: nn.Module, path: str) -> None:
    """Load weights to start from and say what was found."""
    try:
        report = load_weights(model, path)
    except (ValueError, FileNotFoundError) as error:
        raise UserError(f"model.checkpoint={path}: {error}") from error
    logger.info("model.checkpoint=%s: %s", path, report)
