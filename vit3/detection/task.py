"""The task of the training loop: a detector's losses, added up."""

from __future__ import annotations

from timm.task import ClassificationTask, TrainingTask
from torch import Tensor, nn


class DetectionTask(TrainingTask):
    """loss = sum of the losses that a torchvision detector returns in training.

    Args:
        model: ``model(images, targets)`` gives a dict of losses in training, ``model(images)`` detections otherwise.
        kwargs: of :class:`timm.task.TrainingTask`.
    """

    def __init__(self, model: nn.Module, **kwargs):
        super().__init__(**kwargs)
        self.trainable_module = model

    prepare_distributed = ClassificationTask.prepare_distributed  # one module in DDP, here too

    def forward(self, input: list[Tensor], target: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Loss and its parts.

        Args:
            input: images (C, H, W) of any sizes, values 0 to 1. target: ``boxes`` (n, 4), ``labels`` (n,) from 1 and,
                for masks, ``masks`` (n, H, W).

        Returns:
            ``loss`` and the parts by torchvision's names: ``loss_classifier``, ``loss_box_reg``, ``loss_mask``,
            ``loss_objectness``, ``loss_rpn_box_reg``.
        """
        losses = self.trainable_module(input, target)
        return {"loss": sum(losses.values()), **losses}
