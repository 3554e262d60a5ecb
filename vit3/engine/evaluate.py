"""The one evaluation: training and ``tools/eval.py`` both call it, so they give the same numbers."""

from __future__ import annotations

import torch
from timm.task import ClassificationEvaluator, evaluation_sample_limit
from torch import nn

from vit3.engine.distributed import Processes
from vit3.engine.precision import autocast
from vit3.engine.progress import progress


@torch.inference_mode()
def evaluate(
    model: nn.Module,
    loader,
    processes: Processes,
    *,
    amp: str | None = None,
    channels_last: bool = False,
    title: str = "evaluate",
) -> dict[str, float]:
    """Loss, top-1 and top-5 (in per cent) over a loader; every image counts once, whatever the processes and batches.

    Left out: what a distributed sampler adds to make shares equal, and images that could not be decoded (label -1).

    Args:
        model: images to logits; its training mode is restored afterwards.
        amp: precision of the forward pass, as in training.
    """
    evaluator = ClassificationEvaluator(processes.device)
    left = evaluation_sample_limit(loader)  # None: all
    was_training = model.training
    model.eval()
    with progress(title, len(loader), processes.main) as advance:
        for images, target in loader:
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
