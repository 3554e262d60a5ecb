"""How many images a second an update takes, on random images."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vit3.data.plan import Share
from vit3.engine.update import Updater

_WARM_UP = {"cuda": 5, "cpu": 1}  # updates that are not timed: compilation, choice of algorithms


@dataclass(frozen=True)
class Throughput:
    """A measurement.

    Attributes:
        images_per_s: of this process. size: images per update. updates: how many were timed.
        peak: bytes allocated at most, on a GPU.
    """

    images_per_s: float
    size: int
    updates: int
    peak: int | None = None


def measure_throughput(
    updater: Updater, make_batch: Callable[[int], tuple[Tensor, Tensor]], size: int, seconds: float = 10.0
) -> Throughput:
    """Time whole updates (passes, clipping, optimiser, moving average) for about ``seconds``, at least one.

    Args:
        make_batch: images and labels for a size, on the device; the same are used again. size: images per update.
    """
    device = updater.processes.device
    images, target = make_batch(size)
    share = Share(images=(0,) * size, start=0, weight=1.0, total=size, position=size, first=True, last=True)

    def update() -> float:
        """Seconds of one update; it ends with the device's numbers, so that there is nothing to wait for."""
        started = time.perf_counter()
        updater.run(0, share, images.clone(), target)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - started

    updater.task.train()
    for _ in range(_WARM_UP[device.type]):
        update()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    times: list[float] = []
    while not times or sum(times) < seconds and len(times) < 30:
        times.append(update())
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return Throughput(size / sorted(times)[len(times) // 2], size, len(times), peak)
