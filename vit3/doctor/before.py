"""The checks that every training run makes before its first step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from vit3.config import TrainConfig
from vit3.doctor import run
from vit3.doctor.check import Check, heed
from vit3.engine.distributed import Processes


def run_checks(
    cfg: TrainConfig,
    model: nn.Module,
    facts: dict[str, Any],
    *,
    device: torch.device,
    world_size: int,
    resumed: str | None,
) -> list[Check]:
    """Everything about a run whose objects could be built.

    Args:
        facts: derived numbers, of which ``batch_per_process``, ``updates`` and ``ema_decay`` are read.
        device: where this process computes. resumed: the checkpoint to go on from.
    """
    return [
        run.packages(cfg),
        run.precision(cfg, device),
        run.backend(cfg, model, device),
        run.average(cfg, facts["ema_decay"], facts["updates"]),
        run.workers(cfg, world_size),
        run.shared_memory(cfg, facts["batch_per_process"], world_size),
        run.disk(cfg, model, resumed),
        run.tracker(cfg),
    ]


def before_first_step(
    cfg: TrainConfig,
    model: nn.Module,
    facts: dict[str, Any],
    processes: Processes,
    resumed: str | None = None,
) -> None:
    """Stop what would fail later, and warn of what would go badly; the main process looks, all hear.

    Arguments are those of :func:`run_checks`.

    Raises:
        UserError: the first failed check.
    """
    where = dict(device=processes.device, world_size=processes.world_size, resumed=resumed)

    processes.on_main(lambda: heed(run_checks(cfg, model, facts, **where)))
