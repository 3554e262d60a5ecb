"""Detections of single images, for looking at and for files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor, nn

from vit3.analysis.dense_plots import Instances
from vit3.engine.precision import autocast


@torch.no_grad()
def detect(
    model: nn.Module, images: Iterable[np.ndarray], device: torch.device, amp: str | None = None
) -> Iterator[dict[str, Tensor]]:
    """What a detector finds on images (H, W, 3) uint8, one after the other; the model is left evaluating."""
    model.eval()
    for image in images:
        pixels = torch.from_numpy(image).to(device).permute(2, 0, 1).float() / 255
        with autocast(device, amp):
            yield model([pixels])[0]


def instances(output: dict[str, Tensor]) -> Instances:
    """A detector's output (or a target) of one image for drawing; labels count from 0 there."""
    masks = output.get("masks")
    if masks is not None:
        masks = ((masks[:, 0] >= 0.5) if masks.ndim == 4 else masks.bool()).cpu().numpy()
    scores = output["scores"].float().cpu().numpy() if "scores" in output else None
    return Instances(output["boxes"].float().cpu().numpy(), output["labels"].cpu().numpy() - 1, scores, masks)
