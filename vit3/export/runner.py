"""Any network as one kind of thing: tensors in, a tuple of tensors out."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def runner(model: nn.Module) -> Callable[..., tuple[Tensor, ...]]:
    """``run(*inputs)`` of a network in evaluation mode, without gradients; one output is a tuple of one."""
    model.eval()

    @torch.no_grad()
    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        outputs = model(*inputs)
        return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)

    return run
