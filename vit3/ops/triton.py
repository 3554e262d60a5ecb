"""What Triton is in this process: a compiler for CUDA devices, or its interpreter on any tensors."""

from __future__ import annotations

import os

import triton
import triton.language as tl


def interpreted(kernel) -> bool:
    """Whether ``kernel`` runs in Triton's interpreter."""
    return not isinstance(kernel, triton.JITFunction)


def refusal(kernel) -> str | None:
    """Why kernels cannot run although Triton is installed, in words; None if they can.

    TRITON_INTERPRET is read whenever a function is decorated, so setting it between the imports of triton and of our
    kernels leaves half of the functions compiled and half interpreted.
    """
    if interpreted(kernel) != interpreted(tl.sum):
        return "TRITON_INTERPRET was changed after triton had been imported; set it before the program starts"
    wanted = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")
    if wanted and not interpreted(kernel):
        return "TRITON_INTERPRET was set after triton had been imported; set it before the program starts"
    return None
