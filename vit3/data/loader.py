"""Loaders: timm's transforms, collation and prefetching; what is read when is decided by a plan or a sampler."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from timm.data import create_transform
from timm.data.distributed_sampler import OrderedDistributedSampler
from timm.data.loader import PrefetchLoader, fast_collate
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from vit3.data.plan import BatchPlan, Share
from vit3.errors import UserError
from vit3.seeding import Purpose, seed_everything, seed_image


class TrainLoader:
    """Batches of one process in training, repeatable from any position of any epoch.

    Args:
        dataset: its ``transform`` is set here; map-style, or a stream (:class:`torch.utils.data.IterableDataset`).
        plan: what is read when. rank: number of this process.
        prefetch: makes a loader of device batches (timm's, or another) out of a loader of CPU batches.
        transform: of one image, or of image and target together. workers: loader processes.
        collate: makes a CPU batch of what the data set gives for its images.
    """

    def __init__(
        self, dataset: Dataset, plan: BatchPlan, rank: int, *, prefetch, transform, workers: int,
        collate=fast_collate, **options,
    ):  # fmt: skip
        dataset.transform = transform
        self.plan, self.rank = plan, rank
        self.streamed = isinstance(dataset, IterableDataset)
        self._dataset, self._prefetch, self._side_stream, self._collate = dataset, prefetch, None, collate
        options |= dict(num_workers=workers, collate_fn=collate, worker_init_fn=outlive_signals)
        if self.streamed:
            self._loader = DataLoader(dataset, batch_size=_stream_batch(plan), drop_last=True, **options)
        else:
            self._dataset, self._keys = _Keyed(dataset, plan.seed), _Keys()
            options |= dict(persistent_workers=workers > 0)  # what they draw depends on no state of theirs
            self._loader = DataLoader(self._dataset, batch_sampler=self._keys, **options)

    def epoch(self, epoch: int, position: int = 0) -> Iterator[tuple[Share, Any, Any]]:
        """Shares with their images and targets on the device: (b, C, H, W) and labels (b,), or what was collated.

        Args:
            epoch: number of the epoch. position: images of it that were used before, in all processes together.
        """
        shares = list(self.plan.shares(epoch, self.rank, position))
        batches = self._device_batches(self._stream(epoch, position) if self.streamed else self._loader, epoch, shares)
        if not self.streamed:
            self._keys.set(epoch, shares)
        for share, (images, target) in zip(shares, batches):
            yield share, images, target

    def load(self, epoch: int, share: Share) -> tuple[Any, Any] | None:
        """Read one share again, exactly as :meth:`epoch` gave it; None where the data is a stream."""
        if self.streamed:
            return None
        batch = self._collate([self._dataset[(epoch, index)] for index in share.images])
        return next(iter(self._device_batches([batch], epoch, [share])))

    def _device_batches(self, loader, epoch: int, shares: list[Share]):
        device_loader = self._prefetch(loader)
        if not hasattr(device_loader, "random_erasing"):  # not timm's
            return device_loader
        if device_loader.is_cuda:  # one stream for all epochs: freed memory of another stream would stay reserved
            self._side_stream = self._side_stream or torch.cuda.Stream(device=device_loader.device)
            device_loader.stream = self._side_stream
        if device_loader.random_erasing is not None:
            places = [(epoch, share.start) for share in shares]
            device_loader.random_erasing = _SeededErasing(device_loader.random_erasing, self.plan.seed, places)
        return device_loader

    def _stream(self, epoch: int, position: int) -> Iterator:
        """CPU batches of an epoch; those before ``position`` are read and thrown away."""
        self._dataset.set_epoch(epoch)
        seed_everything(self.plan.seed, Purpose.STREAM, epoch, self.rank)  # of the workers' seeds
        skipped = position // self.plan.batch * self.plan.accumulation

        def endless():
            while True:
                empty = True
                for batch in self._loader:
                    empty = False
                    yield batch
                if empty:
                    raise UserError(
                        "the stream holds less than one batch for a loader process; lower data.workers or "
                        "engine.batch_size, or read the shards at random (data.stream=false)"
                    )

        return islice(endless(), skipped, None)


class DeviceLoader:
    """A loader of CPU batches of floating-point tensors, in lists or mappings or alone, moved to a device."""

    def __init__(self, loader, device: torch.device):
        self.loader, self.device = loader, device
        self.sampler = getattr(loader, "sampler", None)
        self.dataset = getattr(loader, "dataset", None)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        return (self._moved(batch) for batch in self.loader)

    def _moved(self, batch):
        if isinstance(batch, Tensor):
            return batch.to(self.device, non_blocking=True)
        if isinstance(batch, dict):
            return {name: self._moved(part) for name, part in batch.items()}
        return type(batch)(self._moved(part) for part in batch)


class _Keyed(Dataset):
    """A map-style data set read by (epoch, index), random numbers of the transform being a function of both."""

    def __init__(self, dataset: Dataset, seed: int):
        self.dataset, self.seed = dataset, seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: tuple[int, int]):
        epoch, index = key
        seed_image(self.seed, epoch, index)
        return self.dataset[index]


class _Keys:
    """Batch sampler of one epoch's shares."""

    def __init__(self):
        self._batches: list[list[tuple[int, int]]] = []

    def set(self, epoch: int, shares: list[Share]) -> None:
        self._batches = [[(epoch, index) for index in share.images] for share in shares]

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)


class _SeededErasing:
    """timm's random erasing with random numbers that depend on the batch's place alone, whenever it is prefetched."""

    def __init__(self, erasing, seed: int, places: list[tuple[int, int]]):
        self._erasing, self._seed, self._places = erasing, seed, iter(places)

    def __call__(self, images: Tensor) -> Tensor:
        place = next(self._places, None)
        if place is None:  # a stream is read one batch ahead of what is used
            return images
        seed_everything(self._seed, Purpose.ERASE, *place)
        return self._erasing(images)


def outlive_signals(worker: int) -> None:
    """Let a loader process ignore signals to stop, which SLURM and terminals send to it too.

    The training process obeys them and needs its batches until it has saved; its own SIGTERM still ends the loader.
    """
    for name in ("SIGINT", "SIGUSR1", "SIGUSR2"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # not on macOS
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_obey_parent, daemon=True).start()


def _obey_parent() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)


def _stream_batch(plan: BatchPlan) -> int:
    size, rest = divmod(plan.batch, plan.world_size * plan.accumulation)
    if rest:
        raise UserError(
            f"engine.batch_size={plan.batch} must be a multiple of {plan.world_size} processes x {plan.accumulation} "
            "forward passes for streamed data; change engine.batch_size or engine.max_per_process"
        )
    return size


def make_train_loader(
    dataset: Dataset, plan: BatchPlan, rank: int, *, img_size, in_chans: int, mean, std, interpolation: str,
    workers: int, device: torch.device, erase_prob: float = 0.0, erase_mode: str = "pixel", **transform,
) -> TrainLoader:  # fmt: skip
    """The loader of training batches.

    Args:
        img_size: (height, width). mean, std: per channel, of values between 0 and 1.
        transform: further arguments of :func:`timm.data.create_transform`.
    """
    prefetch = partial(
        PrefetchLoader, mean=tuple(mean), std=tuple(std), channels=in_chans, device=device, re_prob=erase_prob,
        re_mode=erase_mode,
    )  # fmt: skip
    transform = create_transform(
        (in_chans, *img_size), is_training=True, use_prefetcher=True, mean=tuple(mean), std=tuple(std),
        interpolation=interpolation, **transform,
    )  # fmt: skip
    pin = dict(pin_memory=device.type == "cuda")
    return TrainLoader(dataset, plan, rank, prefetch=prefetch, transform=transform, workers=workers, **pin)


def make_eval_loader(
    dataset: Dataset, batch_size: int, *, rank: int, world_size: int, img_size, in_chans: int, mean, std,
    interpolation: str, crop_pct: float, workers: int, device: torch.device, crop_mode: str = "center",
    batches: Sequence[Sequence[int]] | None = None,
) -> PrefetchLoader:  # fmt: skip
    """The loader of evaluation batches: every image in order, dealt out to the processes.

    Shares are made equal by reading some images twice, so that all processes have the same number of batches;
    :func:`vit3.engine.evaluate.evaluate` does not count these.

    Args:
        batch_size: per process.
        crop_mode: timm's name for how an image comes to the wanted size; all data of ours take the middle.
        batches: numbers of the images of each batch, instead of the above.
    """
    normalise = dict(mean=tuple(mean), std=tuple(std))
    dataset.transform = create_transform(
        (in_chans, *img_size), use_prefetcher=True, interpolation=interpolation, crop_pct=crop_pct, crop_mode=crop_mode,
        **normalise,
    )  # fmt: skip
    if batches is None:
        sampler = OrderedDistributedSampler(dataset, num_replicas=world_size, rank=rank)
        order = dict(batch_size=batch_size, sampler=sampler)
    else:
        order = dict(batch_sampler=batches)
    loader = DataLoader(
        dataset, num_workers=workers, collate_fn=fast_collate, worker_init_fn=outlive_signals,
        pin_memory=device.type == "cuda", **order,
    )  # fmt: skip
    return PrefetchLoader(loader, channels=in_chans, device=device, **normalise)
