"""Draw images from a generator's checkpoint: ``python tools/sample.py checkpoint=runs/NAME n=50000``."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

import torch
from omegaconf import DictConfig

from vit3.build import build_trained_generator
from vit3.cli import run_tool, stored_config
from vit3.config import SampleConfig, typed
from vit3.engine.checkpoint import run_of
from vit3.engine.distributed import start_processes
from vit3.engine.run_folder import environment
from vit3.engine.signals import stop_requests
from vit3.errors import Interrupted
from vit3.files import sha256_of
from vit3.generation.folder import SampleFolder
from vit3.generation.labels import labels_in_turn
from vit3.generation.sampling import draw, finish, wait_for_others

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
logger = logging.getLogger("vit3.sample")


def run_sample(cfg: DictConfig) -> None:
    """Write n images, all of them in one file, and a sheet; or what is missing of them."""
    options: SampleConfig = typed(cfg, SampleConfig)
    try:
        _sample(options)
    except KeyboardInterrupt:
        raise Interrupted("stopped; the images that are there are whole, the same command goes on", 130) from None


def _sample(options: SampleConfig) -> None:
    processes = start_processes(options.device)
    if not processes.main:
        logging.getLogger().setLevel(logging.WARNING)
    if options.threads:
        torch.set_num_threads(options.threads)
    generator = build_trained_generator(options, partial(stored_config, configs=CONFIGS), processes)
    in_turn = labels_in_turn(options.classes, generator.classes)
    how = generator.describe()
    on_cpu = processes.device.type == "cpu"
    path = Path(options.output) / (options.name or _default_name(generator.path, how))

    def start() -> SampleFolder:
        settings = {
            **how,
            "checkpoint": {"path": str(generator.path), "sha256": sha256_of(generator.path)},
            "batch_size": options.batch_size,
            "device": processes.device.type,
            "threads": torch.get_num_threads() if on_cpu else None,
        }
        about = {"processes": processes.world_size, **environment()}
        return SampleFolder.start(path, options.n, settings, in_turn, generator.classes, about, options.resume)

    processes.on_main(start)
    folder = SampleFolder(path)
    logger.info("%s: %d images to %s", generator.title, options.n, folder.path)
    with stop_requests() as stop:
        batches = draw(folder, generator.generate, processes, stop, batch_size=options.batch_size)
        if not processes.main:
            return
        wait_for_others(folder, batches, stop)
        title = f"{path.name}: {min(options.sheet, options.n)} of {options.n} images"
        finish(folder, stop, new=bool(batches), npz=options.npz, sheet=options.sheet, title=title)
    written = ["images/"] + ["samples.npz"] * options.npz + ["sheet.png"] * bool(options.sheet)
    logger.info("%d images are in %s: %s", options.n, folder.path, ", ".join(written))


def _default_name(checkpoint: Path, how: dict) -> str:
    """Run (or file), sampler, steps, guidance and seed."""
    run = run_of(checkpoint).resolve()
    stem = run.name if (run / "config.yaml").exists() else checkpoint.stem
    return f"{stem}-{how['sampler']}{how['steps']}-guidance{how['guidance']:g}-seed{how['seed']}"


def main() -> None:
    run_tool(run_sample, config_name="sample", schema=SampleConfig, configs=CONFIGS)


if __name__ == "__main__":
    main()
