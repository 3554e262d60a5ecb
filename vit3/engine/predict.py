"""Predictions for a sample of images, for looking at them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import numpy as np
import torch
from torch import Tensor, nn

from vit3.engine.distributed import Processes
from vit3.engine.precision import autocast


def shown_pixels(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> np.ndarray:
    """Normalised images (b, C, H, W) as pixels (b, H, W, C), uint8.

    Args:
        mean, std: per channel, to undo the normalisation.
    """
    shift, scale = (torch.tensor(v, device=images.device).view(-1, 1, 1) for v in (mean, std))
    pixels = ((images.float() * scale + shift) * 255).round().clamp(0, 255).to(torch.uint8)
    return pixels.permute(0, 2, 3, 1).cpu().numpy()


@torch.inference_mode()
def predict_sample(model: nn.Module, loader, processes: Processes, *, count: int, mean, std, amp: str | None = None):
    """Images as shown, labels and predictions of up to ``count`` images; wrong ones first, at most half of them.

    Args:
        model: images to logits. mean, std: per channel, to undo the normalisation.

    Returns:
        images (n, H, W, C) uint8, labels (n,), predictions (n,).
    """
    was_training = model.training
    model.eval()
    kept: dict[bool, list] = {True: [], False: []}  # by whether the prediction is wrong
    for images, target in islice(loader, 200):
        with autocast(processes.device, amp):
            predicted = model(images).argmax(dim=-1)
        for image, label, prediction in zip(shown_pixels(images, mean, std), target.tolist(), predicted.tolist()):
            group = kept[label != prediction]
            if label >= 0 and len(group) < count:
                group.append((image, label, prediction))
    model.train(was_training)
    wrong = kept[True][: count // 2]
    images, labels, predictions = zip(*(wrong + kept[False][: count - len(wrong)]))
    return np.stack(images), np.array(labels), np.array(predictions)
