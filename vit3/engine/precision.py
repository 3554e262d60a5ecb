"""Mixed precision of the outer network; the inner step keeps to float32 by itself."""

from __future__ import annotations

from contextlib import nullcontext

import torch


def autocast(device: torch.device, amp: str | None):
    """Context of the forward pass: autocast to ``float16`` or ``bfloat16``, or nothing for None."""
    return nullcontext() if amp is None else torch.autocast(device.type, dtype=getattr(torch, amp))
