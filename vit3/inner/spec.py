"""Every knob of inner training, each with its place in the paper."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class InnerSpec:
    """How the inner model is trained: dot-product loss, one full-batch gradient step, soft gradient norm.

    Attributes:
        lr: inner learning rate (paper table 3; 1.0 in the released models).
        scale: factor of the inner loss. The paper writes 1/sqrt(D); the released block uses 1/3 in both
            branches, the square root of the nine taps of its convolution.
    """

    lr: float = 1.0
    scale: float = 1.0 / 3.0

    def __post_init__(self):
        for name in ("lr", "scale"):
            value = getattr(self, name)
            if not (isinstance(value, (int, float)) and math.isfinite(value)):
                raise ValueError(f"inner.{name}={value!r} must be a finite number")
