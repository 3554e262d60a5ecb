"""Cached latents as a data set: means and deviations by number, mirrored ones at random in training; their loaders."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from timm.data.distributed_sampler import OrderedDistributedSampler
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from vit3.data.classes import check_known, warn_missing
from vit3.data.latent_shards import open_shard, read_index
from vit3.data.loader import DeviceLoader, TrainLoader, outlive_signals
from vit3.data.plan import BatchPlan
from vit3.data.splits import choose_split
from vit3.errors import UserError


class CachedLatents(Dataset):
    """Moments (2C, h, w) in float32, mean and standard deviation, with a label; files are mapped when first read.

    Args:
        root: folder that ``tools/cache_latents.py`` wrote. split: ``train`` or ``val``.
        classes: names in label order; None takes those of the folder. wanted: another name of the split.
        key: what the user calls ``root``, for the sentences.

    Attributes:
        facts: of the latents: ``autoencoder`` (its place), ``weights`` (their hash), ``scale``, ``shift``,
            ``channels``, ``latent_size`` (h, w), ``img_size`` (height, width in pixels), ``flips``, ``dtype``.
        hflip: probability of the mirrored image's moments; loaders set it. transform: not used.

    Raises:
        UserError: no complete folder of latents, no such split, a file is missing, or other classes.
    """

    def __init__(
        self, root: str | Path, split: str, *, classes: Sequence[str] | None = None, wanted: str | None = None,
        key: str = "data.root",
    ):  # fmt: skip
        index = read_index(root, key)
        entry = index["splits"][choose_split(split, index["splits"], wanted, f"{key}={root}")]
        self.root, self.facts, self.hflip, self.transform = Path(root), index["facts"], 0.0, None
        self.classes = tuple(index["classes"] if classes is None else classes)
        check_known(index["classes"], self.classes, str(root))
        warn_missing(index["classes"], self.classes, str(root))
        self._labels = [self.classes.index(name) for name in index["classes"]]
        self._files, self._ends = entry["files"], list(accumulate(entry["counts"]))
        if missing := [name for name in self._files if not (self.root / name).is_file()]:
            raise UserError(
                f"{key}={root} lacks {len(missing)} of its {len(self._files)} files ({missing[0]}); run the same "
                "tools/cache_latents.py command again"
            )
        self._open: dict[int, Any] = {}

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"latent {index} of {len(self)}")
        number = bisect_right(self._ends, index)
        file = self._shard(number)
        place = index - (self._ends[number - 1] if number else 0)
        flip = self.hflip > 0 and torch.rand(()).item() < self.hflip
        moments = file["flipped" if flip else "moments"][place : place + 1][0].float()
        return moments, self._labels[int(file["labels"][place : place + 1])]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}  # each process maps the files itself

    def _shard(self, number: int) -> dict[str, Any]:
        if number not in self._open:
            file = open_shard(self.root / self._files[number])
            self._open[number] = {name: file.get_slice(name) for name in file.keys()}
        return self._open[number]


def open_latents(
    root: str | Path, split: str, *, img_size: Sequence[int] | None, in_chans: int, key: str = "data.root", **place
) -> CachedLatents:
    """:class:`CachedLatents` that are as large as a run expects.

    Args:
        img_size: (h, w) of the latents; None for any. in_chans: their channels. place: as of :class:`CachedLatents`.

    Raises:
        UserError: of another size; and as of :class:`CachedLatents`.
    """
    latents = CachedLatents(root, split, key=key, **place)
    own = dict(in_chans=latents.facts["channels"], img_size=latents.facts["latent_size"])
    given = dict(in_chans=in_chans, img_size=own["img_size"] if img_size is None else list(img_size))
    for name, value in own.items():
        if given[name] != value:
            raise UserError(
                f"data.{name}={given[name]}, but {key}={root} holds latents of {own['in_chans']}x"
                f"{own['img_size'][0]}x{own['img_size'][1]} (channels x height x width); set data.{name}={value}"
            )
    return latents


def make_latent_train_loader(
    dataset: CachedLatents, plan: BatchPlan, rank: int, *, hflip: float, workers: int, device: torch.device
) -> TrainLoader:
    """The loader of training batches: moments (b, 2C, h, w) and labels (b,).

    Args:
        hflip: probability of the mirrored image.

    Raises:
        UserError: mirrored images are asked for and were not cached.
    """
    if hflip > 0 and not dataset.facts["flips"]:
        raise UserError(
            f"augment.hflip={hflip:g} needs latents of mirrored images, which {dataset.root} was cached without; set "
            "augment.hflip=0, or cache again with flips=true"
        )
    dataset.hflip = hflip
    return TrainLoader(
        dataset, plan, rank, prefetch=partial(DeviceLoader, device=device), collate=default_collate, workers=workers,
        transform=None, pin_memory=device.type == "cuda",
    )  # fmt: skip


def make_latent_eval_loader(
    dataset: CachedLatents, batch_size: int, *, rank: int, world_size: int, workers: int, device: torch.device
) -> DeviceLoader:
    """The loader of evaluation batches: in order, never mirrored, dealt out as :func:`vit3.data.make_eval_loader` does.

    ``batch_size`` is per process.
    """
    dataset.hflip = 0.0
    sampler = OrderedDistributedSampler(dataset, num_replicas=world_size, rank=rank)
    loader = DataLoader(
        dataset, batch_size, sampler=sampler, num_workers=workers, worker_init_fn=outlive_signals,
        pin_memory=device.type == "cuda",
    )  # fmt: skip
    return DeviceLoader(loader, device)
