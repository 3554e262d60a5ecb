"""Multiply-adds of a network, inner step included.

Counted: linear layers, convolutions and the mixers by their own formula. Not counted: norms, activations, additions,
pooling (together below half a per cent). The formulas do not depend on the backend that runs the inner step.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn


def count_macs(model: nn.Module, img_size: tuple[int, int] | list[int]) -> int:
    """Multiply-adds of one forward pass of one image.

    Works for any model of linear and convolutional layers and of mixers that have ``macs(h, w)``; nothing is
    computed (the model is copied to the meta device).

    Args:
        model: with ``in_chans``. img_size: (height, width) in pixels.
    """
    model = copy.deepcopy(model).to("meta").eval()
    total = 0

    def add_layer(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal total
        if isinstance(module, nn.Linear):
            total += output.numel() * module.in_features
        else:
            total += output.numel() * module.weight[0].numel()

    def add_mixer(module: nn.Module, inputs: tuple, output: Tensor) -> None:
        nonlocal total
        total += module.macs(*inputs[1:3])

    mixers = [module for module in model.modules() if hasattr(module, "macs")]
    inside = {part for mixer in mixers for part in mixer.modules()}
    for module in model.modules():
        if module in mixers:
            module.register_forward_hook(add_mixer)
        elif isinstance(module, (nn.Linear, nn.Conv2d)) and module not in inside:
            module.register_forward_hook(add_layer)
    with torch.no_grad():
        model(torch.empty(1, getattr(model, "in_chans", 3), *img_size, device="meta"))
    return total
