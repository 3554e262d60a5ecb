"""Any network as one kind of thing: tensors in, a tuple of tensors out."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

Run = Callable[..., tuple[Tensor, ...]]


def as_tuple(outputs: Tensor | list | tuple) -> tuple[Tensor, ...]:
    """What a network gives, as a tuple whether it is one tensor or several."""
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


def runner(model: nn.Module) -> Run:
    """``run(*inputs)`` of a network in evaluation mode, without gradients."""
    model.eval()

    @torch.no_grad()
    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        return as_tuple(model(*inputs))

    return run
