"""Encode every image of a data set once: ``python tools/cache_latents.py data=… data.root=… autoencoder=… output=…``.

Keys stand in configs/cache_latents.yaml. Under torchrun, file s is made by process s modulo their number. What is
written does not depend on how many processes there are, nor on how often it was stopped.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor
from torch.utils.data import IterableDataset

from vit3.build import build_data, build_eval_loader
from vit3.cli import run_tool
from vit3.config import CacheConfig, typed
from vit3.data import Data
from vit3.data.folder import FolderImages
from vit3.data.latent_shards import LatentShard, checked_finite, finish_cache, plan_shards, start_cache, write_shard
from vit3.diffusion.codec import Autoencoder, load_autoencoder
from vit3.engine.distributed import Processes, start_processes
from vit3.engine.precision import autocast
from vit3.engine.progress import progress
from vit3.errors import UserError

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
_LONGEST_MINUTES = 24 * 60  # that processes wait at the end for the one with the most left to do
logger = logging.getLogger("vit3.cache_latents")


def cache_latents(cfg: DictConfig) -> None:
    """Make the folder of latents, or go on with it."""
    options: CacheConfig = typed(cfg, CacheConfig)
    check_images(options)
    processes = start_processes(options.device, timeout_minutes=_LONGEST_MINUTES)
    if not processes.main:
        logging.getLogger().setLevel(logging.WARNING)
    autoencoder = load_autoencoder(options.autoencoder, options.latent_scale, processes.device)
    size = latent_size(options, autoencoder)
    data = build_data(options)
    sources = {"train": data.train, "val": data.val}
    for split in sources.values():
        if isinstance(split, IterableDataset):
            raise UserError("data.stream=true and remote shards are read in one go; caching needs data.stream=false")
        if isinstance(split, FolderImages):
            split.training = False  # a bad image is marked as one, not replaced by the next
    shards = plan_shards({name: len(split) for name, split in sources.items()}, options.shard_size)
    out = Path(options.output)
    facts = facts_of(options, autoencoder, size)
    processes.on_main(lambda: start_cache(out, settings_of(options, autoencoder, data), facts, data.classes))
    own = shards[processes.rank :: processes.world_size]
    todo = [shard for shard in own if not (out / shard.name).is_file()]
    logger.info(
        f"{len(data.train):,} training and {len(data.val):,} test images to {out}: {len(shards)} files, of which this "
        f"process makes {len(todo)}; latents of {autoencoder.channels}x{size[0]}x{size[1]}, {options.dtype}"
        f"{', and those of mirrored images' if options.flips else ''}"
    )
    encode_all(options, autoencoder, sources, todo, processes)
    processes.total(0)  # all have written their files
    counts = processes.on_main(lambda: finish_cache(out, shards))
    if bad := sum(map(len, sources.values())) - sum(counts.values()):
        logger.warning("%d images could not be decoded and were left out", bad)
    logger.info(
        f"whole        {counts['train']:,} training and {counts['val']:,} test images, scale {autoencoder.scale:g}\n"
        f"train        python tools/train.py task=diffusion diffusion=ddpm augment=none data=latents data.root={out} "
        f"data.img_size=[{size[0]},{size[1]}] data.in_chans={autoencoder.channels}"
    )


def check_images(options: CacheConfig) -> None:
    """Raise a UserError where images would not come as autoencoders take them."""
    d = options.data
    if d.name == "latents":
        raise UserError("data=latents holds latents already; choose a data set of images")
    for key in ("mean", "std"):
        if any(value != 0.5 for value in getattr(d, key)):
            raise UserError(
                f"data.{key}={getattr(d, key)}: autoencoders take images in [-1, 1]; set data.{key}="
                f"[{','.join(['0.5'] * d.in_chans)}]"
            )


def latent_size(options: CacheConfig, autoencoder: Autoencoder) -> tuple[int, int]:
    """(h, w) of the latents.

    Raises:
        UserError: size or channels of the images do not suit the autoencoder.
    """
    chans = autoencoder.vae.config.in_channels
    if options.data.in_chans != chans:
        raise UserError(f"data.in_chans={options.data.in_chans}, but the autoencoder takes {chans}; set it to {chans}")
    try:
        return autoencoder.grid(options.data.img_size)
    except ValueError as error:
        raise UserError(f"data.{error}") from error


def settings_of(options: CacheConfig, autoencoder: Autoencoder, data: Data) -> dict[str, Any]:
    """What decides the numbers in the files, by key; of places only what is in them."""
    d = options.data
    names = (
        "name", "img_size", "in_chans", "interpolation", "crop_pct", "train_split", "val_split", "input_key",
        "target_key",
    )  # fmt: skip
    return {
        "autoencoder": f"{autoencoder.digest()[:16]} (hash of its weights)",
        "latent_scale": autoencoder.scale,
        **{key: getattr(options, key) for key in ("flips", "dtype", "amp", "shard_size")},
        **{f"data.{name}": getattr(d, name) for name in names},
        "data.root": f"{len(data.train)} + {len(data.val)} images",
    }


def facts_of(options: CacheConfig, autoencoder: Autoencoder, size: Sequence[int]) -> dict[str, Any]:
    """What the readers of the latents want to know."""
    place = Path(options.autoencoder)
    return {
        "autoencoder": str(place.resolve()) if place.is_dir() else options.autoencoder,
        "weights": autoencoder.digest(),
        "scale": autoencoder.scale,
        "shift": autoencoder.shift,
        "channels": autoencoder.channels,
        "latent_size": list(size),
        "img_size": list(options.data.img_size),
        "flips": options.flips,
        "dtype": options.dtype,
        "source": options.data.root or options.data.name,
        "versions": {package: version(package) for package in ("torch", "timm", "diffusers")},
    }


def encode_all(
    options: CacheConfig, autoencoder: Autoencoder, sources: dict[str, Any], todo: Sequence[LatentShard],
    processes: Processes,
) -> None:  # fmt: skip
    """Make the files of this process; says rate and time left after each."""
    images, done, started = sum(len(shard.images) for shard in todo), 0, time.monotonic()
    for split, source in sources.items():
        shards = [shard for shard in todo if shard.split == split]
        groups = [batches_of(shard, options.batch_size) for shard in shards]
        if not shards:
            continue
        numbers = [batch for group in groups for batch in group]
        loader = build_eval_loader(options, source, processes, options.batch_size, numbers)
        with progress(f"encode {split}", len(loader), processes.main) as advance:
            encoded = encode(options, autoencoder, loader, advance)
            for shard, group in zip(shards, groups):
                write_shard(Path(options.output) / shard.name, *joined([next(encoded) for _ in group]))
                done += len(shard.images)
                rate = done / (time.monotonic() - started)
                logger.info(f"{shard.name}  {rate:,.1f} images/s a process, {(images - done) / rate / 60:.1f} min left")


def batches_of(shard: LatentShard, size: int) -> list[range]:
    """Batches that end where the file ends, so that a run that was stopped encodes the same ones again."""
    return [shard.images[first : first + size] for first in range(0, len(shard.images), size)]


def encode(options: CacheConfig, autoencoder: Autoencoder, loader, advance) -> Iterator[tuple]:
    """Moments, those of the mirrored images or None, and labels of each batch, on the CPU."""
    dtype = getattr(torch, options.dtype)

    def moments(images: Tensor) -> Tensor:
        if not len(images):
            return torch.empty(0, 2 * autoencoder.channels, *autoencoder.grid(images.shape[-2:]), dtype=dtype)
        with autocast(images.device, options.amp):
            found = autoencoder.moments(images)
        return checked_finite(found.to(dtype).cpu(), options.amp)

    for images, labels in loader:
        images = images[labels >= 0]  # the others could not be decoded
        flipped = moments(images.flip(-1)) if options.flips else None
        yield moments(images), flipped, labels[labels >= 0].cpu()
        advance(len(labels))


def joined(parts: Sequence[tuple]) -> list[Tensor | None]:
    """Moments, mirrored moments and labels of several batches."""
    return [None if column[0] is None else torch.cat(column) for column in zip(*parts)]


def main() -> None:
    run_tool(cache_latents, config_name="cache_latents", schema=CacheConfig, configs=CONFIGS)


if __name__ == "__main__":
    main()
