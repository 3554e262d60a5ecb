"""The task of a generator: noise, times and labels are drawn, the loss is the diffusion process's."""

from __future__ import annotations

from typing import Any

import torch
from timm.task import ClassificationTask, TrainingTask
from torch import Tensor, nn


class DiffusionTask(TrainingTask):
    """loss = the process's loss of the network at times, and with noise, that are drawn for each image.

    Args:
        model: ``model(x, t, y)``, with ``null_label``. process: of :mod:`vit3.diffusion`: what is added and learnt.
        codec: of :mod:`vit3.diffusion.codec`: makes what the network sees of what the loader gives.
        label_drop: share of the labels that are replaced by the one for no class, 0 to 1.
        kwargs: of :class:`timm.task.TrainingTask`.
    """

    def __init__(self, model: nn.Module, process: Any, codec: Any, label_drop: float = 0.1, **kwargs):
        super().__init__(**kwargs)
        self.trainable_module = model
        self.process, self.codec = process, codec
        self.label_drop, self.null_label = label_drop, model.null_label

    prepare_distributed = ClassificationTask.prepare_distributed  # one module in DDP, here too

    def forward(self, input: Tensor, target: Tensor) -> dict[str, Tensor]:
        """Loss and its parts, means over the batch.

        Args:
            input: images (b, C, H, W), or what the codec takes in their place. target: labels (b,).

        Returns:
            ``loss``; with a learned variance also ``mse`` and ``vb``, see
            :meth:`vit3.diffusion.gaussian.GaussianDiffusion.losses`.
        """
        x0 = self.codec.encode(input).float()
        dropped = torch.rand(len(target), device=target.device) < self.label_drop
        y = torch.where(dropped, self.null_label, target)
        t = self.process.draw_times(len(x0), x0.device)
        losses = self.process.losses(self.trainable_module, x0, t, y, torch.randn_like(x0))
        return {name: value.mean() for name, value in losses.items()}
