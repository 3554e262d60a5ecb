"""Multiply-adds of a network, inner training included.

Counted: linear layers, convolutions and the mixers by their own formula. Not counted: norms (unless asked for),
activations, additions, pooling (together below half a per cent). The formulas do not depend on the backend that runs
the inner training. :func:`counted_macs` runs the network under PyTorch's own counter instead, as a check.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

_PER_NORMALISED = 5  # operations an element of a LayerNorm, as fvcore counts them, and with it the paper's ablations


def count_macs(model: nn.Module, img_size: tuple[int, int] | list[int], layer_norms: bool = False) -> int:
    """Multiply-adds of one forward pass of one image.

    Works for any model of linear and convolutional layers and of mixers that have ``macs(h, w)``; nothing is
    computed (the model is copied to the meta device).

    Args:
        model: with ``in_chans``, or with ``example_inputs(img_size, batch, device)`` where it takes more than images.
        img_size: (height, width) in pixels; of a generator, of the latents that it sees.
        layer_norms: add five operations an element of each LayerNorm, as fvcore does.
    """
    return sum(macs_by_part(model, img_size, layer_norms).values())


def macs_by_part(model: nn.Module, img_size: tuple[int, int] | list[int], layer_norms: bool = False) -> dict[str, int]:
    """Multiply-adds of every counted layer and mixer by its name, in the order of the model; as :func:`count_macs`."""

    def run(model: nn.Module) -> None:
        model(*_inputs(model, img_size, torch.device("meta")))

    return macs_of_run(model, run, layer_norms)


def macs_of_run(model: nn.Module, run: Callable[[nn.Module], object], layer_norms: bool = False) -> dict[str, int]:
    """As :func:`macs_by_part`, of whatever ``run`` does with the model.

    Args:
        run: gets a copy of the model on the meta device, in evaluation mode; for networks that do not map one image
            to one result, such as detectors.
        layer_norms: as in :func:`count_macs`.
    """
    model = copy.deepcopy(model).to("meta").eval()
    mixers = [module for module in model.modules() if hasattr(module, "macs")]
    inside = {part for mixer in mixers for part in mixer.modules()} - set(mixers)
    found: dict[str, int] = {}

    def add(name: str, macs) -> None:
        def hook(module: nn.Module, inputs: tuple, output: Tensor) -> None:
            found[name] = found.get(name, 0) + macs(module, inputs, output)

        model.get_submodule(name).register_forward_hook(hook)

    for name, module in model.named_modules():
        if module in inside:
            continue
        if module in mixers:
            module.forward = _unmixed
            add(name, lambda module, inputs, output: module.macs(*inputs[1:3]))
        elif isinstance(module, nn.Linear):
            add(name, lambda module, inputs, output: output.numel() * module.in_features)
        elif isinstance(module, nn.Conv2d):
            add(name, lambda module, inputs, output: output.numel() * module.weight[0].numel())
        elif isinstance(module, nn.ConvTranspose2d):  # each input value meets all weights of its channel
            add(name, lambda module, inputs, output: inputs[0].numel() * module.weight[0].numel())
        elif layer_norms and isinstance(module, nn.LayerNorm):
            add(name, lambda module, inputs, output: output.numel() * _PER_NORMALISED)
    with torch.no_grad():
        run(model)
    order = {name: i for i, (name, _) in enumerate(model.named_modules())}
    return dict(sorted(found.items(), key=lambda item: order[item[0]]))


def _unmixed(x: Tensor, h: int, w: int, rope: nn.Module | None = None) -> Tensor:
    """In the place of a mixer, whose cost is known by formula: tokens keep their shape."""
    return x


def _inputs(model: nn.Module, img_size: tuple[int, int] | list[int], device: torch.device) -> tuple[Tensor, ...]:
    """What a forward pass of one image takes."""
    if hasattr(model, "example_inputs"):
        return model.example_inputs(tuple(img_size), 1, device)
    return (torch.zeros(1, getattr(model, "in_chans", 3), *img_size, device=device),)


@torch.no_grad()
def counted_macs(model: nn.Module, img_size: tuple[int, int] | list[int]) -> int:
    """Multiply-adds that PyTorch's counter sees while one image runs: products of matrices, convolutions, operators."""
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    try:
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            model(*_inputs(model, img_size, device))
    finally:
        model.train(training)
    return counter.get_total_flops() // 2
