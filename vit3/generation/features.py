"""Features of images: what a network must give to be compared by, and their collection over a set."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from vit3.engine.progress import progress
from vit3.generation.image_sets import ImageSet
from vit3.generation.scores import RunningStatistics, Statistics


class Features(Protocol):
    """A network that images are compared by.

    Attributes:
        name: of the network. dims: numbers per image of each kind of output that it gives: ``features`` (pooled),
            ``logits``, and perhaps ``spatial``.
        metric_names: how the metrics that it can give are called in its features, so that no Fréchet distance in other
            features is taken for a FID.
        published: whether it is the network that published scores and statistics in files are of.
        classes: names of the logits; None where they are not ours to compare with.
    """

    name: str
    dims: Mapping[str, int]
    metric_names: Mapping[str, str]
    published: bool
    classes: Sequence[str] | None

    def __call__(self, images: Tensor) -> dict[str, Tensor]:
        """Images (b, H, W, 3) of uint8, on the CPU, to outputs (b, dims) of float32, on the CPU."""

    def describe(self) -> dict[str, Any]:
        """What it is in plain values, for a report: file, SHA-256 of its weights."""


@dataclass(frozen=True)
class Collected:
    """What was gathered of a set of images.

    Attributes:
        n: images. statistics: by kind of output. kept: outputs (n, F) themselves, in the images' order.
    """

    n: int
    statistics: dict[str, Statistics]
    kept: dict[str, Tensor]


def collect(
    network: Features, images: ImageSet, batch_size: int, *, statistics: Collection[str], keep: Collection[str]
) -> Collected:
    """Show a set of images to a network.

    Args:
        statistics: kinds of output whose mean and covariance are wanted. keep: kinds wanted one by one.

    Raises:
        UserError: an image cannot be read.
    """
    running = {kind: RunningStatistics() for kind in statistics}
    kept: dict[str, list[Tensor]] = {kind: [] for kind in keep}
    batches = -(-images.n // batch_size)
    with torch.inference_mode(), progress(f"features of {images.title}", batches, enabled=True) as advance:
        for batch in images.batches(batch_size):
            found = network(batch)
            for kind, statistic in running.items():
                statistic.add(found[kind])
            for kind, parts in kept.items():
                parts.append(found[kind])
            advance(len(batch))
    return Collected(
        images.n,
        {kind: statistic.result() for kind, statistic in running.items()},
        {kind: torch.cat(parts) for kind, parts in kept.items()},
    )
