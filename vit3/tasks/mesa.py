"""Classification with MESA: the network also learns from its own moving average."""

from __future__ import annotations

import torch
from timm.task import ClassificationTask
from torch import Tensor
from torch.nn import functional as F


class MESATask(ClassificationTask):
    """loss = CE(output, target) + weight * CE(output, softmax(output of the moving average)), from some epoch on.

    The teacher is the moving average in evaluation mode, on the same mixed images, without gradient and temperature.
    It needs :meth:`setup_ema`. Source: memory-efficient sharpness-aware training (Du et al., NeurIPS 2022), as used for
    the rows marked ‡ of the paper's table 5.

    Args:
        weight: factor of the second term; 1.0, 1.5 and 2.0 for H-ViT³-T, S and B.
        start: fraction of the epochs after which it is added, 0 to 1; 0.25 in the paper's recipe.
    """

    def __init__(self, *args, weight: float, start: float, **kwargs):
        super().__init__(*args, **kwargs)
        self.weight, self.start = weight, start
        self.active = False

    def start_epoch(self, epoch: int, epochs: int) -> None:
        """Tell the task where training is: at the start of ``epoch`` (from 0) of ``epochs``."""
        self.active = epoch >= self.start * epochs

    def forward(self, input: Tensor, target: Tensor) -> dict[str, Tensor]:
        """Loss, its parts and logits.

        Args:
            input: images (b, C, H, W). target: labels (b,) or distributions (b, K).

        Returns:
            ``loss``, ``output``, the first term as ``cross_entropy`` and, once it is on, the second as ``mesa``
            (without its weight).
        """
        result = super().forward(input, target)
        result["cross_entropy"] = result["loss"]
        if self.active:
            result["mesa"] = mesa_loss(result["output"], self._teacher(input))
            result["loss"] = result["loss"] + self.weight * result["mesa"]
        return result

    @torch.no_grad()
    def _teacher(self, images: Tensor) -> Tensor:
        self.trainable_module_ema.eval()  # this task's train() reaches it too
        return self.get_eval_model(ema=True)(images)


def mesa_loss(output: Tensor, teacher: Tensor) -> Tensor:
    """Mean cross-entropy of logits (b, K) against the softmax of the teacher's logits (b, K), in at least float32."""
    return F.cross_entropy(_wide(output), _wide(teacher).softmax(dim=-1))


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
