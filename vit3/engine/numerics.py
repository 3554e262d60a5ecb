"""Where a loss or gradient first stopped being finite: the same forward and backward pass again, watched."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import contextmanager

from timm.task import TrainingTask
from timm.utils import unwrap_model
from torch import Tensor, nn


def first_nonfinite(task: TrainingTask, images: Tensor | list[Tensor], loss_of: Callable[[], Tensor]) -> str | None:
    """Name the first module, in order of computation, whose result is not finite although what it was given is.

    Args:
        task: its model is run without DDP and compilation; gradients it had are dropped.
        images: what ``loss_of`` feeds to the task. loss_of: computes the (scaled) loss; called once.

    Returns:
        A phrase for a sentence, or None if everything is finite this time.
    """
    model = unwrap_model(task.get_trainable_module())
    if not all(map(_finite, _tensors(images))):
        return "the images themselves are not finite"
    for name, parameter in model.named_parameters():
        if not _finite(parameter.detach()):
            return f"the parameter {name} is not finite"
    with _unwrapped(task, model), _watching(model) as (forward, backward):
        loss = loss_of()
        if forward:
            return f"first in the output of {forward[0]}"
        if not _finite(loss):
            return "first in the loss itself; all outputs of modules are finite"
        loss.backward()
        model.zero_grad()
    if backward:
        return f"first in the gradient that reaches the output of {backward[0]}; the forward pass is finite"
    return None


def nonfinite_gradients(model: nn.Module) -> str | None:
    """Name parameters with gradients that are not finite, without another pass (for sharded models)."""
    names = [name for name, p in model.named_parameters() if p.grad is not None and not _finite(_local(p.grad))]
    return f"in the gradients of {', '.join(names[:3])}{', …' if names[3:] else ''}" if names else None


@contextmanager
def _unwrapped(task: TrainingTask, model: nn.Module):
    wrapped = task.trainable_module
    task.trainable_module = model
    try:
        yield
    finally:
        task.trainable_module = wrapped


@contextmanager
def _watching(model: nn.Module):
    """Context that fills two lists: modules whose output, and whose output's gradient, was not finite, in order."""
    forward: list[str] = []
    backward: list[str] = []
    names = {module: f"{name} ({type(module).__name__})" for name, module in model.named_modules() if name}

    def look(module: nn.Module, inputs, output) -> None:
        outputs = [value for value in _tensors(output) if value.is_floating_point()]
        if not all(map(_finite, outputs)):
            if all(map(_finite, _tensors(inputs))):
                forward.append(names[module])
            return
        for value in outputs:
            if value.requires_grad:
                value.register_hook(lambda grad: None if _finite(grad) else backward.append(names[module]))

    handles = [module.register_forward_hook(look) for module in names]
    try:
        yield forward, backward
    finally:
        for handle in handles:
            handle.remove()


def _tensors(tree) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, Mapping):
        tree = list(tree.values())
    if isinstance(tree, (tuple, list)):
        return [value for item in tree for value in _tensors(item)]
    return []


def _finite(value: Tensor) -> bool:
    return bool(value.isfinite().all())


def _local(value: Tensor) -> Tensor:
    return value.to_local() if hasattr(value, "to_local") else value
