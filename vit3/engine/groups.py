"""How the optimiser treats each parameter, for looking at."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class ParameterRow:
    """One parameter: its weight decay and the factor of its learning rate; frozen ones have neither."""

    name: str
    shape: tuple[int, ...]
    frozen: bool
    weight_decay: float = 0.0
    lr_factor: float = 0.0


def parameter_rows(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[ParameterRow]:
    """Every parameter of ``model`` once, in its order.

    Raises:
        RuntimeError: a parameter that learns is in no group of the optimiser, or in two.
    """
    groups: dict[int, list[dict]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            groups.setdefault(id(parameter), []).append(group)
    rows = []
    for name, parameter in model.named_parameters():
        own = groups.get(id(parameter), [])
        if len(own) != int(parameter.requires_grad):
            raise RuntimeError(f"{name} is in {len(own)} groups of the optimiser")
        treatment = (own[0]["weight_decay"], own[0].get("lr_scale", 1.0)) if own else ()
        rows.append(ParameterRow(name, tuple(parameter.shape), not own, *treatment))
    return rows
