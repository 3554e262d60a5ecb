"""Batch 1 in training: batch norms that see a single value of each channel."""

from __future__ import annotations

from torch import Tensor, nn

_PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def let_single_values_pass(model: nn.Module) -> None:
    """Make every plain batch norm use its running statistics where a batch has one value of each channel.

    A pooled map of 1x1 pixels of one image (UPerNet's and PSPNet's pyramid has one) has no variance, and PyTorch stops
    there. For such a batch the layer works as in evaluation: its statistics stay, its weight and bias learn. Names and
    values of the state dict do not change. Norms that are shared by processes (SyncBN) see more values and stay.
    """
    for module in model.modules():
        if type(module) in _PLAIN:
            module.register_forward_pre_hook(_before)
            module.register_forward_hook(_after, always_call=True)


def _before(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    if module.training and module.track_running_stats and inputs[0].numel() == inputs[0].shape[1]:
        module.training, module.single_value = False, True


def _after(module: nn.Module, inputs, output) -> None:
    if module.__dict__.pop("single_value", False):
        module.training = True
