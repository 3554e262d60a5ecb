"""Detections of single images, for looking at and for files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from vit3.analysis.dense_plots import Instances
from vit3.engine.precision import autocast
from vit3.errors import UserError

_ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff")


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


def image_files(where: str | None) -> list[Path]:
    """The image files that ``images=FILE_OR_FOLDER`` names, those of a folder by name.

    Raises:
        UserError: nothing given, or nothing there.
    """
    if where is None:
        raise UserError("images has no value yet; give images=FILE_OR_FOLDER")
    path = Path(where)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix.lower() in _ENDINGS)
    else:
        files = [path] if path.is_file() else []
    if not files:
        raise UserError(f"images={where}: no such image, or no {', '.join(_ENDINGS)} file in that folder")
    return files
