"""Bytes of what a run writes."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from timm.optim import create_optimizer_v2
from torch import nn


@dataclass(frozen=True)
class CheckpointBytes:
    """Sizes of a run's files.

    Attributes:
        weights: of a best checkpoint, weights alone. whole: of one to resume, with moving average and optimiser.
        kinds: of best checkpoints: raw, and averaged where there is an average.
    """

    weights: int
    whole: int
    kinds: int

    def needed(self, keep_last: int) -> int:
        """Bytes of all that a run holds at its fullest: ``keep_last`` and the next one, the best of each kind."""
        return (keep_last + 1) * self.whole + self.kinds * self.weights

    @property
    def least(self) -> int:
        """Bytes without which a run cannot even replace its only checkpoint."""
        return 2 * self.whole + self.kinds * self.weights


def checkpoint_bytes(model: nn.Module, opt: str, averaged: bool) -> CheckpointBytes:
    """Sizes of the checkpoints of a model trained by timm's optimiser ``opt``."""
    weights = sum(x.nbytes for x in model.state_dict().values())
    learning = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    kinds = 2 if averaged else 1
    return CheckpointBytes(weights, round(kinds * weights + state_per_weight(opt) * learning), kinds)


@functools.cache
def state_per_weight(opt: str) -> float:
    """Bytes that an optimiser remembers for each byte of weights, found on a matrix of 64 x 64; 2 for AdamW."""
    matrix = nn.Parameter(torch.zeros(64, 64))
    optimizer = create_optimizer_v2([matrix], opt=opt, lr=0.1)
    matrix.grad = torch.zeros_like(matrix)
    optimizer.step()
    state = [x for x in optimizer.state[matrix].values() if isinstance(x, torch.Tensor)]
    return sum(x.nbytes for x in state) / matrix.nbytes
