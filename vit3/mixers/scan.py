"""In which order a recurrent mixer meets the tokens of a grid: one way or both ways, chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

DIRECTIONS = ("bidirectional", "causal")


def check_direction(direction: str) -> str:
    """``direction`` if it is one.

    Raises:
        ValueError: otherwise.
    """
    if direction not in DIRECTIONS:
        raise ValueError(f"direction='{direction}' is unknown; use one of: {', '.join(DIRECTIONS)}")
    return direction


def check_chunk(name: str, tokens: int) -> int:
    """``tokens`` if it is a positive number.

    Raises:
        ValueError: otherwise.
    """
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
        raise ValueError(f"{name}={tokens} must be a number of tokens, 1 or more")
    return tokens


def run_scan(scan: Callable[..., Tensor], *tensors: Tensor, direction: str) -> Tensor:
    """Run a causal scan over the raster order, or both ways.

    ``causal``: token n sees tokens 0 ... n. ``bidirectional``: the mean of that and of the same scan from the last
    token to the first, with the same weights. Token n itself is seen by both, every other token by one of them: where
    the scan is a sum over tokens, its own part counts once and those of all others a half.

    Args:
        scan: takes the tensors, tokens in dimension -2, any dimensions in front; returns (..., N, D).
        tensors: each (..., N, any).
        direction: one of :data:`DIRECTIONS`.
    """
    if check_direction(direction) == "causal":
        return scan(*tensors)
    forth, back = scan(*(torch.stack((t, t.flip(-2))) for t in tensors))  # both ways as one batch
    return (forth + back.flip(-2)) / 2


def chunks(*tensors: Tensor, size: int) -> Iterator[tuple[Tensor, ...]]:
    """The tensors (..., N, any) in pieces of ``size`` tokens, in order; the last piece may be shorter."""
    return zip(*(t.split(size, dim=-2) for t in tensors))


def chunk_lengths(tokens: int, size: int) -> list[int]:
    """Lengths of the pieces of :func:`chunks`."""
    full, rest = divmod(tokens, size)
    return [size] * full + [rest] * (rest > 0)


def passes(direction: str) -> int:
    """How many scans one call runs."""
    return 2 if direction == "bidirectional" else 1
