"""What a detector's training is made of: data, network, batches, task, trainer."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from vit3.build.data import derive
from vit3.build.model import load_start
from vit3.build.training import build_optimizer, build_schedule, distribute
from vit3.data.coco import CocoImages, make_coco_eval_loader, make_coco_train_loader
from vit3.data.plan import BatchPlan, accumulation_for
from vit3.detection import BACKBONES, DETECTORS
from vit3.detection.config import DetectionConfig
from vit3.detection.evaluate import evaluate_detections
from vit3.detection.task import DetectionTask
from vit3.engine.distributed import Processes
from vit3.engine.run_place import Score
from vit3.engine.sharding import LocalEma
from vit3.engine.train import Trainer
from vit3.engine.update import Updater
from vit3.errors import UserError

logger = logging.getLogger(__name__)

SCORE = Score("bbox_AP", "box AP", "{:6.4f}")


def build_images(cfg: DetectionConfig, split: str, classes: Sequence[str] | None = None) -> CocoImages:
    """The images of ``split`` (train or val); classes are those of the training, None takes the file's.

    Raises:
        UserError: files that cannot be read, or nothing in them to learn from or to be scored on.
    """
    root = Path(cfg.data_root)
    annotations, images = (root / getattr(cfg.data, f"{split}_{what}") for what in ("annotations", "images"))
    data = CocoImages(annotations, images, classes=classes, masks=cfg.model.name == "mask_rcnn")
    absent = data.absent()
    if not len(data) or len(absent) == len(data.classes):
        raise UserError(f"{annotations} has {len(data)} images and no instance on them; choose another file")
    if absent and split == "val":
        logger.warning("%s: no instance of %s, which no average precision counts", annotations, ", ".join(absent))
    return data


def build_detector(cfg: DetectionConfig, num_classes: int, pretrained: bool = True) -> nn.Module:
    """The network; ``pretrained`` says whether to load ``model.pretrained``.

    Raises:
        UserError: values that the network refuses, or weights that do not fit.
    """
    m = cfg.model
    widths = dict(out_channels=m.out_channels, box_channels=m.box_channels)
    if m.name == "mask_rcnn":
        widths["mask_channels"] = m.mask_channels
    if m.backbone not in BACKBONES:
        raise UserError(f"model.backbone={m.backbone} is unknown; use one of: {', '.join(BACKBONES)}")
    if (channels := m.backbone_kwargs.get("in_chans", 3)) != 3:
        raise UserError(f"model.backbone_kwargs.in_chans={channels} is not possible: images are read in 3 channels")
    try:
        model = DETECTORS[m.name](
            m.backbone, num_classes, frozen_stages=m.frozen_stages, with_cp=m.with_cp, drop_path_rate=m.drop_path_rate,
            min_size=tuple(m.min_size), max_size=m.max_size, backbone_kwargs=m.backbone_kwargs, **widths, **m.options,
        )  # fmt: skip
    except (ValueError, TypeError) as error:
        raise UserError(f"model cannot be built as model.* says: {error}") from error
    if pretrained and m.pretrained:
        load_start(model.backbone.body, m.pretrained, "model.pretrained")
    return model


def build_batches(cfg: DetectionConfig, images: int, world_size: int) -> BatchPlan:
    """Which of the training ``images`` make up each update.

    Raises:
        UserError: the batch cannot be dealt out, or an epoch would have no update.
    """
    e = cfg.engine
    accumulation = accumulation_for(e.batch_size, world_size, e.max_per_process, unit=1)
    plan = BatchPlan(
        images, e.batch_size, world_size, accumulation, cfg.seed, e.drop_last, max_updates=e.steps_per_epoch
    )
    if plan.updates == 0:
        raise UserError(
            f"engine.batch_size={e.batch_size} is more than the {images} training images: an epoch would have no step; "
            f"use at most {images}"
        )
    return plan


def build_detection_trainer(
    cfg: DetectionConfig, train: CocoImages, val: CocoImages, model: nn.Module, plan: BatchPlan, facts: dict[str, Any],
    processes: Processes,
) -> Trainer:  # fmt: skip
    """Everything that :class:`vit3.engine.train.Trainer` needs.

    Args:
        model: not yet wrapped. plan: of the batches. facts: numbers for ``summary.json``.

    Raises:
        UserError: optimiser or schedule cannot be built.
    """
    derived, e = derive(cfg, plan), cfg.engine
    task = DetectionTask(model.to(processes.device), device=processes.device, verbose=False)
    if derived.ema_decay is not None:
        task.trainable_module_ema = LocalEma(model, decay=derived.ema_decay, use_warmup=e.ema_warmup)
    distribute(task, processes)
    optimizer = build_optimizer(cfg, model, derived)
    batches = make_coco_train_loader(
        train, plan, processes.rank, workers=cfg.data.workers, device=processes.device, hflip=cfg.augment.hflip,
        crop=cfg.augment.crop_prob,
    )  # fmt: skip
    o = cfg.optim
    updater = Updater(
        task=task, optimizer=optimizer, batches=batches, processes=processes, seed=cfg.seed, amp=e.amp,
        schedule=build_schedule(cfg, optimizer, derived, decay_milestones=o.milestones, decay_rate=o.decay_rate),
        clip_grad=o.clip_grad, ema_warmup=e.ema_warmup, max_bad=e.max_bad_updates,
    )  # fmt: skip
    return Trainer(
        updater=updater, batches=batches, val_loader=build_val_loader(cfg, val, processes), processes=processes,
        epochs=e.epochs, keep_last=e.keep_last, save_minutes=e.save_minutes, log_every=cfg.logger.every,
        metadata={"config": _portable(cfg), "classes": list(train.classes), "category_ids": list(train.category_ids)},
        facts=facts, evaluate=evaluate_detections, score=SCORE,
    )  # fmt: skip


def build_val_loader(cfg: DetectionConfig, val: CocoImages, processes: Processes):
    """Loader of evaluation batches, as large for a process as its share of a training batch."""
    size = max(1, cfg.engine.batch_size // processes.world_size)
    size = min(size, cfg.engine.max_per_process or size)
    where = dict(rank=processes.rank, world_size=processes.world_size, device=processes.device)
    return make_coco_eval_loader(val, size, workers=cfg.data.workers, **where)


def _portable(cfg: DetectionConfig) -> dict[str, Any]:
    """The configuration for a checkpoint: paths made absolute, so that it can be tested from any folder."""
    return dataclasses.asdict(cfg) | {"data_root": str(Path(cfg.data_root).resolve())}
