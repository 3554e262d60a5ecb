"""Sheets of samples while a generator is trained, always from the same noise and labels, so that they compare."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from vit3.generation.sheet import save_sheet

logger = logging.getLogger(__name__)

FOLDER = "sheets"  # below the run folder


@dataclass
class SampleSheets:
    """Draws ``sheets/epoch-0010.png`` and so on.

    Attributes:
        generate: (labels, numbers) to uint8 images (n, H, W, C), see :class:`vit3.generation.generator.Generator`.
        classes: names in label order. folder: of the run. every: epochs between sheets, 0 for none. images: on a sheet.
    """

    generate: Callable[..., Tensor]
    classes: tuple[str, ...]
    folder: Path
    every: int
    images: int
    _drawn: Path | None = field(default=None, init=False)

    def __call__(self, epoch: int, last: bool = False) -> Path | None:
        """Draw the sheet of an epoch (from 1) if one is due; ``last`` wants it in any case, but draws it once."""
        if not last and (not self.every or epoch % self.every):
            return None
        labels = torch.arange(self.images) % len(self.classes)
        path = self.folder / FOLDER / f"epoch-{epoch:04d}.png"
        if path == self._drawn and path.exists():
            return path
        path.parent.mkdir(exist_ok=True)
        images = self.generate(labels, range(self.images))
        save_sheet(images.numpy(), labels.tolist(), self.classes, path, f"{self.folder.name}, epoch {epoch}")
        self._drawn = path
        return path
