"""Which tokens make up each inner mini-batch."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from vit3.inner.constants import constant_result

_SEED = 0  # of the random order: the same in every call, so that a mixer stays a function


def batch_sizes(batch: str, tokens: int) -> list[int]:
    """Sizes of the mini-batches of one pass over ``tokens`` tokens.

    Args:
        batch: ``N`` for all, ``N/k`` for k parts that differ by one token at most, or a number of tokens, of which the
            last mini-batch has what is left.

    Raises:
        ValueError: more parts than tokens.
    """
    if batch.startswith("N"):
        parts = int(batch[2:] or 1)
        if parts > tokens:
            raise ValueError(f"inner.batch={batch} wants {parts} mini-batches, but there are {tokens} tokens; use less")
        return [tokens // parts + (i < tokens % parts) for i in range(parts)]
    size = int(batch)
    return [min(size, tokens - at) for at in range(0, tokens, size)]


@constant_result
def token_batches(batch: str, order: str, h: int, w: int) -> tuple[Tensor, ...] | None:
    """Indices of the tokens of each mini-batch of an h x w grid; None where one mini-batch has all of them.

    Args:
        batch: as of :func:`batch_sizes`. order: ``raster`` (runs of the raster, the paper's), ``strided`` (every k-th
            of k mini-batches, even in size), ``blockwise`` (rectangles of the grid) or ``random`` (a fixed shuffle).

    Raises:
        ValueError: more parts than tokens.
    """
    return _dealt(batch, order, h, w)


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)  # what is kept serves later calls, which may be of another mode or place
def _dealt(batch: str, order: str, h: int, w: int) -> tuple[Tensor, ...] | None:
    sizes = batch_sizes(batch, h * w)
    if len(sizes) == 1:
        return None
    raster, parts = torch.arange(h * w, device="cpu"), len(sizes)
    if order == "strided":
        return tuple(raster[i::parts] for i in range(parts))
    if order == "random":
        raster = torch.randperm(h * w, generator=torch.Generator().manual_seed(_SEED), device="cpu")
    elif order == "blockwise":
        rows, columns = _tiling(parts, h, w)
        bands = raster.view(h, w).tensor_split(rows, dim=0)
        tiles = [tile.flatten() for band in bands for tile in band.tensor_split(columns, dim=1)]
        if batch.startswith("N") or [len(tile) for tile in tiles] == sizes:
            return tuple(tiles)
        raster = torch.cat(tiles)
    return raster.split(sizes)


def _tiling(parts: int, h: int, w: int) -> tuple[int, int]:
    """Rows and columns of ``parts`` rectangles that are as square as can be."""
    fits = [(r, parts // r) for r in range(1, parts + 1) if parts % r == 0 and r <= h and parts // r <= w]
    if not fits:
        raise ValueError(f"inner.order=blockwise cannot cut a grid of {h} x {w} tokens into {parts} rectangles; "
                         "use another inner.batch or inner.order")  # fmt: skip
    return min(fits, key=lambda rc: abs(h / rc[0] - w / rc[1]))
