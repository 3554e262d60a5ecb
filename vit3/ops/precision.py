"""The precision rule of the inner step: float32 or wider inside, the caller's dtype outside."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor


def widened(x: Tensor) -> Tensor:
    """``x`` in float32, or in float64 where it already is: never narrower than float32."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def one_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the widest of their dtypes."""
    dtype = functools.reduce(torch.promote_types, (x.dtype for x in tensors))
    return tuple(x.to(dtype) for x in tensors)


def without_autocast(device: torch.device):
    """Context in which autocast is off for ``device``; where it is off already, graphs see nothing of it."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):  # meta has no autocast
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def in_full_precision(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Run ``fn`` on widened tensors with autocast off; its output gets the first argument's dtype.

    Sums over N tokens and the soft norm lose whole updates in 16 bit (at N = 65,536 a bfloat16 sum is
    off by several per cent), so gradient, norm, step and fast weights never see less than float32.
    """

    @functools.wraps(fn)
    def wrapper(*tensors: Tensor, **options) -> Tensor:
        with without_autocast(tensors[0].device):
            return fn(*map(widened, tensors), **options).to(tensors[0].dtype)

    return wrapper
