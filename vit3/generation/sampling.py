"""Drawing a set of images: the same batches whatever the number of processes, and only those that are not there yet."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from vit3.engine.distributed import Processes
from vit3.engine.progress import progress
from vit3.engine.signals import StopRequest
from vit3.errors import UserError
from vit3.generation.archive import archive_length, write_archive
from vit3.generation.folder import SampleFolder, read_image
from vit3.generation.sheet import save_sheet

logger = logging.getLogger(__name__)

# generate(labels (b,) int64, numbers, progress=...) -> (b, H, W, C) uint8 on the CPU
Generate = Callable[..., Tensor]

_WRITERS = 4  # threads: compression and waiting for the disk run beside each other


def missing_batches(there: set[int], n: int, batch_size: int) -> list[range]:
    """The batches of which an image is not there; batch k is images k * batch_size and following, the last one shorter.

    A batch is drawn whole: what else is in it decides the last bits of an image.
    """
    batches = (range(first, min(first + batch_size, n)) for first in range(0, n, batch_size))
    return [batch for batch in batches if not there.issuperset(batch)]


def draw(
    folder: SampleFolder, generate: Generate, processes: Processes, stop: StopRequest, *, batch_size: int
) -> list[range]:
    """Draw this process's share of the images that are not there; returns all batches that were not.

    Processes do not wait for each other here; a stop gives up the batch at hand at the next step of the sampler.

    Args:
        generate: ``(labels (b,), numbers, progress=...)`` to (b, H, W, C) uint8 on the CPU; calls ``progress`` after
            each step. batch_size: of the set; the same in each of its starts.

    Raises:
        Interrupted: ``stop`` is requested.
        UserError: an image cannot be written, or the batch does not fit into memory.
    """
    batches = processes.on_main(lambda: missing_batches(set(folder.files()), folder.n, batch_size))
    mine = batches[processes.rank :: processes.world_size]
    share = f"process 0 of {processes.world_size}: " if processes.distributed else ""
    count = sum(map(len, mine))
    if processes.main and (kept := folder.n - sum(map(len, batches))):
        logger.info("%d of %d images are there already", kept, folder.n)
    with progress(f"{share}images", count, processes.main) as advance, ThreadPoolExecutor(_WRITERS) as writers:
        pace = _Pace(count, share, enabled=processes.main and not sys.stderr.isatty())
        for batch in mine:
            _heed(stop, folder)
            labels = torch.tensor([folder.label(number) for number in batch])
            try:
                drawn = generate(labels, batch, progress=lambda *_: _heed(stop, folder))
            except torch.OutOfMemoryError as error:
                raise UserError(
                    f"batch_size={batch_size} needs more memory than {processes.device} has; use a smaller one, "
                    "with another name=NAME if there are images already"
                ) from error
            _check(drawn, len(batch))
            try:
                _write(folder, writers, dict(zip(batch, drawn.numpy())))
            except OSError as error:
                raise UserError(
                    f"{folder.images} cannot be written ({error}); free space, and the same command goes on"
                ) from error
            for _ in batch:
                advance(1)
            pace.add(len(batch))
    return batches


def wait_for_others(
    folder: SampleFolder, batches: Sequence[range], stop: StopRequest, *, patience: float = 1800, every: float = 2
) -> None:
    """Return once the images of all batches are in the folder; no process is asked, for it may be dead or slow.

    Args:
        batches: that were missing at the start. patience: seconds without a new image after which the others are
            believed to be dead. every: seconds between two looks.

    Raises:
        UserError: nothing new for that long. Interrupted: ``stop`` is requested.
    """
    wanted = {number for batch in batches for number in batch}
    left, changed = len(wanted), time.monotonic()
    while missing := wanted - folder.files().keys():
        if len(missing) < left:
            left, changed = len(missing), time.monotonic()
        if time.monotonic() - changed > patience:
            raise UserError(
                f"{left} of {folder.n} images are missing and none has come for {timedelta(seconds=int(patience))}: "
                f"the processes that draw them failed, or {folder.images} is not the same folder for all; "
                "the same command goes on"
            )
        _heed(stop, folder)
        time.sleep(every)


def finish(folder: SampleFolder, stop: StopRequest, *, new: bool, npz: bool, sheet: int, title: str) -> None:
    """Write samples.npz and sheet.png of a set that is complete.

    Args:
        new: images were drawn since samples.npz was written. npz: whether to write it. sheet: how many images
            sheet.png shows, 0 for none.
    """
    folder.tidy()
    files = folder.files()
    archive = folder.path / "samples.npz"
    if npz and (new or archive_length(archive) != folder.n):
        with progress(archive.name, folder.n, True) as advance:
            write_archive(archive, _read(files, stop, folder, advance), [folder.label(number) for number in files])
    if sheet:
        shown = dict(islice(files.items(), sheet))
        images = list(_read(shown, stop, folder))
        if images[0].shape[2] in (1, 3):
            labels = [folder.label(number) for number in shown]
            save_sheet(np.stack(images), labels, folder.classes, folder.path / "sheet.png", title)


class _Pace:
    """Says now and then in a log how far the images are, and how long the rest takes."""

    every = 60  # seconds

    def __init__(self, images: int, share: str, enabled: bool):
        self.images, self.share, self.enabled = images, share, enabled
        self.done, self.started = 0, time.monotonic()
        self.said = self.started - self.every  # the first batch tells how long all will take

    def add(self, images: int) -> None:
        self.done += images
        now = time.monotonic()
        if not self.enabled or now - self.said < self.every:
            return
        self.said, rate = now, self.done / max(now - self.started, 1e-9)
        left = timedelta(seconds=int((self.images - self.done) / rate))
        logger.info(f"{self.share}{self.done:,} of {self.images:,} images  {rate:,.3g} images/s  {left} left")


def _write(folder: SampleFolder, writers: ThreadPoolExecutor, images: dict[int, np.ndarray]) -> None:
    """Write a batch, first those that are there (it was shorter): once no image is missing, none is being written."""
    there = folder.files().keys() & images.keys()
    for numbers in (there, images.keys() - there):
        list(writers.map(lambda number: folder.write(number, images[number]), numbers))


def _read(files, stop: StopRequest, folder: SampleFolder, advance=lambda images: None) -> Iterator[np.ndarray]:
    for path in files.values():
        _heed(stop, folder)
        yield read_image(path)
        advance(1)


def _heed(stop: StopRequest, folder: SampleFolder) -> None:
    if stop.signal is not None:
        raise stop.interrupted(
            f"{len(folder.files()):,} of {folder.n:,} images are in {folder.images}; the same command goes on"
        )


def _check(drawn: Tensor, count: int) -> None:
    if drawn.dtype != torch.uint8 or drawn.ndim != 4 or len(drawn) != count or drawn.device.type != "cpu":
        raise ValueError(
            f"generate must give {count} images (b, H, W, C) as uint8 on the CPU, and gave "
            f"{tuple(drawn.shape)} as {drawn.dtype} on {drawn.device}"
        )
