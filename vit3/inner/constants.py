"""Tensors that follow from plain numbers alone: a compiled or an exported mixer takes them as they are."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

T = TypeVar("T", bound=Callable)


def constant_result(fn: T) -> T:
    """Decorator: the result of ``fn`` is a constant of the graph.

    ``torch.compile`` runs ``fn`` while it traces. ``torch.export`` would trace into it: random numbers would become
    other ones in each run of the exported graph, and a cache would keep tensors without values.
    """

    @torch.compiler.assume_constant_result
    @functools.wraps(fn)
    def wrapper(*args):
        if not torch.compiler.is_compiling():  # which torch.export counts as, too
            return fn(*args)
        with _disable_current_modes():
            return fn(*args)

    return wrapper
