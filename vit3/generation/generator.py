"""A network that draws images, with all that it takes: sampler, codec, sizes, seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vit3.diffusion import Sampler
from vit3.engine.precision import autocast


@dataclass(frozen=True)
class Generator:
    """A network that draws images.

    Attributes:
        model: on the device. codec, sampler: how. classes: names in label order. img_size: (height, width) in pixels.
        seed: image number i depends on it, on i and on the label alone. amp: precision of the network.
    """

    model: nn.Module
    codec: Any
    sampler: Sampler
    classes: tuple[str, ...]
    img_size: tuple[int, int]
    seed: int
    device: torch.device
    amp: str | None = None

    @torch.no_grad()
    def generate(self, labels: Tensor, numbers: Sequence[int], progress: Callable[[int], None] | None = None) -> Tensor:
        """Images ``numbers`` of classes ``labels`` (b,), as uint8 (b, H, W, C) on the CPU.

        Args:
            progress: called with 1 after every step of the sampler.
        """
        was_training = self.model.training
        self.model.eval()
        shape = (self.codec.channels, *self.codec.grid(self.img_size))
        try:
            with autocast(self.device, self.amp):
                latents = self.sampler.sample(
                    self.model, labels, numbers, shape=shape, seed=self.seed, device=self.device, progress=progress
                )
                images = self.codec.decode(latents).float()
        finally:
            self.model.train(was_training)
        images = images[..., : self.img_size[0], : self.img_size[1]]
        return ((images + 1) * 127.5).round().clamp(0, 255).to("cpu", torch.uint8).permute(0, 2, 3, 1).contiguous()


@dataclass(frozen=True)
class TrainedGenerator(Generator):
    """A generator from its checkpoint.

    Attributes:
        path: of the checkpoint. weights: ``raw`` or ``ema``. saved: when they were saved, in words.
    """

    path: Path = Path()
    weights: str = "ema"
    saved: str = ""

    @property
    def title(self) -> str:
        """What was loaded, for the first line of a report."""
        return f"{self.path}: {self.weights} weights of {self.saved}"

    def describe(self) -> dict[str, Any]:
        """Every setting that decides what the images are, as plain values."""
        s = self.sampler
        return {
            "checkpoint": str(self.path),
            "weights": self.weights,
            "sampler": s.name,
            "steps": s.steps,
            "guidance": s.guidance,
            "guidance_channels": s.channels,
            "guidance_interval": list(s.interval),
            "seed": self.seed,
            "img_size": list(self.img_size),
            "amp": self.amp,
            **self.codec.describe(),
        }
