"""Which images make up each update: global batches in a seeded order, dealt out to processes and forward passes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from vit3.errors import UserError
from vit3.seeding import Purpose, seed_of


@dataclass(frozen=True)
class Share:
    """What one process reads for one forward pass.

    Attributes:
        images: indices into the data set. start: place of the first of them in the epoch's order, 0 to its length.
        weight: factor of the mean loss over these images, such that the mean of gradients over the processes is the
            gradient of the mean loss over the update's images.
        total: images of the whole update, in all processes. position: images of the epoch used up by then.
        first, last: whether it is the first or last forward pass of its update.
    """

    images: tuple[int, ...]
    start: int
    weight: float
    total: int
    position: int
    first: bool
    last: bool


@dataclass(frozen=True)
class BatchPlan:
    """Batch arithmetic of an epoch; the same images in every update for any number of processes and forward passes.

    Attributes:
        images: size of the data set. batch: global batch, images per update. world_size: processes.
        accumulation: forward passes of a process per update. seed: of the order.
        drop_last: leave out the last, partial batch of an epoch; else it is used, its loss averaged over its real size.
        unit: shares are multiples of it (2 where pairs are mixed or normalised), so that fewer images can be left over.
        max_updates: cut epochs short.
    """

    images: int
    batch: int
    world_size: int = 1
    accumulation: int = 1
    seed: int = 0
    drop_last: bool = True
    unit: int = 1
    max_updates: int | None = None

    @property
    def end(self) -> int:
        """Position after the last update of an epoch that starts at 0."""
        full = self.images // self.batch * self.batch
        end = full if self.drop_last else full + (self.images - full) // self.unit * self.unit
        return end if self.max_updates is None else min(end, self.max_updates * self.batch)

    @property
    def updates(self) -> int:
        """Updates of an epoch."""
        return -(-self.end // self.batch)

    def updates_from(self, position: int) -> int:
        """Updates of an epoch that are left at a position, which need not be a multiple of the batch."""
        left = max(0, self.end - position)
        return left // self.batch if self.drop_last else -(-left // self.batch)

    def order(self, epoch: int) -> np.ndarray:
        """All indices in the order of an epoch, (images,); the same on every machine and NumPy version."""
        generator = np.random.RandomState(seed_of(self.seed, Purpose.ORDER, epoch))  # its streams are frozen
        return generator.permutation(self.images)

    def shares(self, epoch: int, rank: int, position: int = 0) -> Iterator[Share]:
        """What process ``rank`` reads in an epoch, from ``position`` (images already used) on."""
        order = self.order(epoch)
        while (total := min(self.batch, self.end - position)) > 0:
            if total < self.batch and self.drop_last:
                return
            size = -(-self.batch // (self.world_size * self.accumulation))
            passes = min(self.accumulation, -(-total // (self.world_size * size)))  # a partial batch needs fewer
            for number in range(passes):
                start, stop = self._bounds(total, passes * self.world_size, number * self.world_size + rank)
                read = slice(position + start, position + stop)
                if start == stop:  # nothing left for this process, which has to take part all the same
                    read = slice(position, position + self.unit)
                yield Share(
                    images=tuple(order[read].tolist()),
                    start=read.start,
                    weight=(stop - start) * self.world_size / total,
                    total=total,
                    position=position + total,
                    first=number == 0,
                    last=number == passes - 1,
                )
            position += total

    def _bounds(self, total: int, parts: int, number: int) -> tuple[int, int]:
        units, rest = divmod(total, self.unit)
        bounds = [units * n // parts * self.unit for n in (number, number + 1)]
        return bounds[0], bounds[1] + (rest if number == parts - 1 else 0)


def accumulation_for(batch: int, world_size: int, limit: int | None, unit: int) -> int:
    """Forward passes per update, so that no process has more than ``limit`` images in one.

    Raises:
        UserError: the batch is smaller than one share for every process, odd where pairs are mixed, or the limit low.
    """
    if batch % unit:
        raise UserError(f"engine.batch_size={batch} must be even: pairs of images are mixed or normalised together")
    if batch < world_size * unit:
        raise UserError(
            f"engine.batch_size={batch} is global and less than {unit} for each of the {world_size} processes; "
            f"use at least {world_size * unit}"
        )
    if limit is None:
        return 1
    if limit < unit:
        raise UserError(f"engine.max_per_process={limit} must be at least {unit}: pairs of images are mixed")
    units = -(-batch // (unit * world_size))  # of the process with most of them
    return -(-units // (limit // unit))
