"""The one place where ``backend=`` becomes an implementation.

``reference`` is the closed form under autograd; ``fused`` and ``triton`` have a hand-written gradient and share one
interface, a ``forward`` and a ``backward`` that write into the caller's tensors.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from types import ModuleType

import torch
from torch import Tensor

from vit3.ops import launch

BACKENDS = ("auto", "reference", "fused", "triton")

logger = logging.getLogger(__name__)


def check_backend(backend: str) -> None:
    """Raise a ValueError unless ``backend`` can run on some device here, long before the first call."""
    if backend not in BACKENDS:
        raise ValueError(f"backend='{backend}' is unknown; use one of: {', '.join(BACKENDS)}")
    if backend == "triton" and importlib.util.find_spec("triton") is None:
        raise ValueError(
            "backend='triton' needs the package triton, which is not installed (pip install triton, on Linux); "
            "or use backend='auto'"
        )


def takes_reference(backend: str, *tensors: Tensor) -> bool:
    """Whether the closed form should run: when asked for, and when only it can be differentiated as wanted.

    Raises:
        ValueError: unknown backend, or a hand-written gradient asked for where it would be ignored.
    """
    check_backend(backend)
    if backend == "reference":
        return True
    if not _transformed(tensors):
        return False
    if backend == "auto":
        return True
    raise ValueError(
        f"backend='{backend}' takes part in reverse-mode differentiation alone, not in torch.func transforms (vmap, "
        "grad, jvp) or forward mode; use backend='reference' or 'auto'"
    )


def _transformed(tensors: tuple[Tensor, ...]) -> bool:
    """Whether a torch.func transform is at work, or forward-mode differentiation of one of the tensors."""
    if torch._C._are_functorch_transforms_active():
        return True
    if torch.compiler.is_compiling():
        return False
    return any(torch.autograd.forward_ad.unpack_dual(x).tangent is not None for x in tensors)


def implementation(op: str, backend: str, x: Tensor, head_dim: int) -> ModuleType:
    """The module that runs ``op`` on the device and in the dtype of ``x``: its ``fused`` or its ``triton``.

    ``auto`` takes Triton on a CUDA device that its kernels fit, else the fused one; a fall-back is logged once.

    Raises:
        ValueError: ``triton`` was asked for and cannot run.
    """
    if backend == "fused" or (backend == "auto" and x.device.type != "cuda"):
        return _module(op, "fused")
    refusal = _triton_refusal(op, x, head_dim)
    if refusal is None:
        return _module(op, "triton")
    if backend == "triton":
        raise ValueError(f"backend='triton' cannot run {op}: {refusal}; use backend='auto' or 'fused'")
    _log_once(f"{op} runs on backend='fused', not 'triton': {refusal}")
    return _module(op, "fused")


@functools.cache
def _module(op: str, backend: str) -> ModuleType:
    return importlib.import_module(f"vit3.ops.{op}.{backend}")


@functools.cache
def _log_once(message: str) -> None:
    logger.warning(message)


def _triton_refusal(op: str, x: Tensor, head_dim: int) -> str | None:
    """Why Triton cannot run ``op`` on ``x``, in words; None if it can."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed (pip install triton, on Linux)"
    state = importlib.import_module("vit3.ops.triton")
    module = _module(op, "triton")
    kernel, _ = next(iter(module.KERNELS.values()))
    reason = state.refusal(kernel)
    if reason is not None:
        return reason
    if state.interpreted(kernel):
        if x.dtype == torch.bfloat16:
            return "Triton's interpreter multiplies bfloat16 wrongly; take float32 or float16 there"
        return launch.refusal(module.LAUNCHES, head_dim, x.dtype, None)
    if x.device.type != "cuda":
        return f"it compiles for CUDA devices, and the tensors are on {x.device}"
    return launch.refusal(module.LAUNCHES, head_dim, x.dtype, launch.limits(x.device))
