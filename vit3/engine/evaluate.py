"""The one evaluation: training and ``tools/eval.py`` both call it, so they give the same numbers."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from timm.task import ClassificationEvaluator, evaluation_sample_limit
from torch import nn

from vit3.engine.distributed import Processes
from vit3.engine.precision import autocast
from vit3.engine.progress import progress


@torch.no_grad()  # inference tensors would stay in a sharded model
def evaluate(
    model: nn.Module,
    loader,
    processes: Processes,
    *,
    amp: str | None = None,
    channels_last: bool = False,
    title: str = "evaluate",
    stop: Callable[[], bool] | None = None,
) -> dict[str, float] | None:
    """Loss, top-1 and top-5 (in per cent) over a loader; every image counts once, whatever the processes and batches.

    Left out: what a distributed sampler adds to make shares equal, and images that could not be decoded (label -1).

    Args:
        model: images to logits; its training mode is restored afterwards.
        amp: precision of the forward pass, as in training.
        stop: asked before each batch whether to give up; one process's yes counts for all.

    Returns:
        ``loss``, ``top1`` and ``top5``; None if it was stopped.
    """
    evaluator = ClassificationEvaluator(processes.device)
    left = evaluation_sample_limit(loader)  # None: all
    was_training = model.training
    model.eval()
    with progress(title, len(loader), processes.main) as advance:
        for images, target in loader:
            if stop is not None and _any(stop(), processes):
                return None
            if channels_last:
                images = images.contiguous(memory_format=torch.channels_last)
            with autocast(processes.device, amp):
                output = model(images)
            own = target[:left] >= 0
            evaluator.update(output[:left][own], target[:left][own])
            left = None if left is None else max(0, left - len(target))
            advance(len(images) * processes.world_size)
    model.train(was_training)
    return dict(evaluator.compute(distributed=processes.distributed))


def _any(yes: bool, processes: Processes) -> bool:
    if not processes.distributed:
        return yes
    flag = torch.tensor(float(yes), device=processes.device)
    dist.all_reduce(flag)
    return bool(flag)
