"""Parameters, gradients and optimiser state spread over all processes (PyTorch's ``fully_shard``), beside DDP.

Order of calls; each does the plain thing where nothing is sharded, so one training loop serves all:

1. the task; ``task.trainable_module_ema = LocalEma(model, ...)``, for a sharded model cannot be copied; compilation
2. ``shard(model, device)`` and ``shard(task.trainable_module_ema, device)``, in place of ``task.prepare_distributed``
3. the optimiser, for sharding replaces the parameters
4. ``load_model`` (of the moving average too), ``load_optimizer``
5. each step: ``with synchronise(task, last): backward``, ``gradient_norm``, ``optimizer.step()``, ``task.update_ema()``
6. ``whole(...)`` in *every* process, then the main one saves: plain full tensors, for any number of processes

Every forward pass of a sharded model gathers its parameters, so all processes must do equally many, in evaluation too;
what one process does alone (pictures, predictions) needs a plain model with the tensors of :func:`whole`. Evaluate
under ``no_grad``: parameters gathered under ``inference_mode`` break the next training step.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from timm.task import TrainingTask
from timm.utils import ModelEmaV3, unwrap_model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from vit3.errors import UserError


def shard(model: nn.Module, device: torch.device) -> nn.Module:
    """Spread the parameters of ``model`` over all processes, in place; alone, nothing happens.

    They start as rank 0 has them. Every member of a container named ``blocks`` (ours, timm's transformers and others)
    is gathered when it runs and freed afterwards; what lies in none is gathered with the model. They stay float32:
    autocast narrows them.

    Args:
        model: it may be compiled, or a moving average. device: where it is and computes.

    Returns:
        ``model``. It cannot be copied any more, and runs by calling it, not its parts.

    Raises:
        UserError: the processes' backend does not average (see :func:`_check_average`).
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return model
    _check_average(device)
    root = unwrap_model(model)
    root.to(memory_format=torch.contiguous_format)  # fully_shard refuses others; images may still be channels_last
    for tensor in chain(root.parameters(), root.buffers()):
        dist.broadcast(tensor.detach(), src=0)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for module in [*reversed(_blocks(root)), root]:  # inner ones first
        fully_shard(module, mesh=mesh, shard_placement_fn=_placement)
    return model


def _check_average(device: torch.device) -> None:
    """Make sure that gradients are averaged: gloo refused that once, then summed (pytorch/pytorch issue 162338)."""
    size = dist.get_world_size()
    mean, ones = torch.zeros(1, device=device), torch.ones(size, device=device)
    try:
        dist.reduce_scatter_tensor(mean, ones, op=dist.ReduceOp.AVG)
    except (RuntimeError, ValueError):
        pass
    if mean.item() != 1:
        raise UserError(
            f"{dist.get_backend()} of torch {torch.__version__} does not average, which sharding needs; "
            "use GPUs, a newer torch, or no sharding"
        )


def _placement(parameter: nn.Parameter) -> Shard:
    """Rows; where there are fewer rows than processes (W1 and W2 have one) the first dimension that they divide."""
    size, shape = dist.get_world_size(), parameter.shape
    if shape[0] >= size:
        return Shard(0)
    return Shard(next((i for i, length in enumerate(shape) if length % size == 0), 0))


def _blocks(model: nn.Module) -> list[nn.Module]:
    containers = [module for name, module in model.named_modules() if name.split(".")[-1] == "blocks"]
    return [block for module in containers if isinstance(module, (nn.ModuleList, nn.Sequential)) for block in module]


def is_sharded(model: nn.Module) -> bool:
    """Whether :func:`shard` has spread this model (compiled or not)."""
    return isinstance(unwrap_model(model), FSDPModule)


class LocalEma(ModelEmaV3):
    """timm's moving average of a model that is sharded like its copy: each process averages its own shards."""

    def _foreach_lerp_(self, ema_values: list[Tensor], model_values: list[Tensor], weight: float) -> None:
        # for lists of sharded parameters and plain buffers there is no foreach operation
        super()._foreach_lerp_([*map(_local, ema_values)], [*map(_local, model_values)], weight)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tree: Any, device: torch.device | str | None = None) -> Any:
    """A nested state (dicts, lists, tuples) with every sharded tensor made a plain, full one.

    All processes must call it together.

    Args:
        tree: ``model.state_dict()``, ``optimizer.state_dict()`` or what contains them; it is not changed.
        device: where to put each tensor at once, so that ``"cpu"`` asks a GPU for one full tensor at a time.
    """
    if isinstance(tree, dict):
        new = copy(tree)  # keeps the versions that a state dict carries
        new.update({key: whole(value, device) for key, value in tree.items()})
        return new
    if isinstance(tree, (list, tuple)):
        return type(tree)(whole(value, device) for value in tree)
    if isinstance(tree, Tensor):
        tree = tree.full_tensor() if isinstance(tree, DTensor) else tree
        return tree if device is None else tree.to(device)
    return tree


def load_model(model: nn.Module, state: dict[str, Tensor], strict: bool = True):
    """``model.load_state_dict`` of full tensors, spread as the model's own are; of one state in all processes."""
    model = unwrap_model(model)
    if is_sharded(model):
        own = model.state_dict()
        state = {name: _spread(value, own.get(name)) for name, value in state.items()}
    return model.load_state_dict(state, strict=strict)


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """``optimizer.load_state_dict`` of full tensors, spread as the parameters are; of one state in all processes."""
    parameters = chain(*(group["params"] for group in optimizer.param_groups))
    numbers = chain(*(group["params"] for group in state["param_groups"]))
    like = dict(zip(numbers, parameters))
    spread = {
        number: {key: _spread(value, like.get(number)) for key, value in values.items()}
        for number, values in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": spread})


def _spread(value: Any, like: Tensor | None) -> Any:
    """``value`` spread like ``like`` where that is sharded and of its shape; else as it is."""
    if isinstance(like, DTensor) and isinstance(value, Tensor) and value.shape == like.shape:
        return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)
    return value


def synchronise(model: nn.Module, last: bool) -> AbstractContextManager:
    """Context of one backward pass of several that add up: gradients are averaged over processes in the last alone.

    Until then each process keeps whole gradients, of a sharded model too.

    Args:
        model: of any kind, or timm's task around it.
    """
    if isinstance(model, TrainingTask):
        model = model.get_trainable_module()
    if is_sharded(model):
        unwrap_model(model).set_requires_gradient_sync(last)
    elif isinstance(model, nn.parallel.DistributedDataParallel) and not last:
        return model.no_sync()
    return nullcontext()


def gradient_norm(parameters: Iterable[nn.Parameter], max_norm: float | None = None) -> Tensor:
    """Global norm of the gradients, a plain scalar, equal in all processes; what is not finite is no error.

    Args:
        max_norm: scale the gradients so that their norm is at most this.
    """
    parameters = [p for p in parameters if p.grad is not None]
    norm = get_total_norm([p.grad for p in parameters])
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    if max_norm is not None:
        clip_grads_with_norm_(parameters, max_norm, norm)
    return norm
