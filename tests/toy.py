"""Small data and composed configurations for the tests of training."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from PIL import Image

from tests.helpers import ROOT
from vit3.build import build_data, build_model, build_network, build_plan, build_trainer
from vit3.config import TrainConfig, typed
from vit3.engine.distributed import Processes
from vit3.engine.train import Trainer

CONFIGS = ROOT / "configs"
CPU = Processes(torch.device("cpu"))


def compose_config(*overrides: str, root: str = "train") -> DictConfig:
    """What Hydra composes for a command line."""
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose(root, overrides=list(overrides))


def short_run(output: Path, *overrides: str, epochs: int = 1) -> DictConfig:
    """The default training, cut to two steps an epoch."""
    return compose_config(
        f"output={output}",
        f"engine.epochs={epochs}",
        "engine.steps_per_epoch=2",
        "engine.batch_size=16",
        "engine.device=cpu",
        "engine.ema_decay=null",
        "optim.warmup_epochs=0",
        "++model.kwargs.depth=1",
        *overrides,
    )


def configured(*overrides: str) -> TrainConfig:
    """The typed configuration of a command line."""
    return typed(compose_config(*overrides), TrainConfig)


def model_of(cfg: TrainConfig, classes=tuple("0123456789")):
    return build_model(cfg, classes)


def trainer_of(cfg: TrainConfig, processes: Processes = CPU, images: int | None = None) -> Trainer:
    """What ``tools/train.py`` builds; of the digits only the first ``images`` to train on."""
    data = build_data(cfg)
    if images is not None:
        data.train.images = data.train.images[:images]
    torch.manual_seed(cfg.engine.seed)
    model, codec = build_network(cfg, data.classes, processes.device)
    plan = build_plan(cfg, len(data.train), processes.world_size, model)
    return build_trainer(cfg, data, model, plan, {}, processes, codec)


def updates_of(trainer: Trainer, epoch: int = 0):
    """Train an epoch, update by update: yields what became of each."""
    trainer.task.train()
    for batch in trainer.batches.epoch(epoch):
        outcome = trainer.updater.run(epoch, *batch)
        if outcome is not None:
            yield outcome


def one_update(trainer: Trainer):
    """The first update of the first epoch."""
    return next(updates_of(trainer))


def train_epoch(trainer: Trainer, epoch: int = 0) -> dict[str, float]:
    """Train an epoch; returns its mean losses."""
    outcomes = [outcome for outcome in updates_of(trainer, epoch) if outcome.taken]
    return {name: float(np.mean([o.losses[name] for o in outcomes])) for name in outcomes[0].losses}


def no_pictures(patch) -> None:
    """Let ``tools/train.py`` leave empty files for pictures, which take longer to draw than a short run to train."""

    def empty(*args):
        for path in args:
            if isinstance(path, Path) and path.suffix == ".png":
                path.write_bytes(b"")

    for name in ("plot_curves", "plot_predictions"):
        patch(f"vit3.tools.train.{name}", empty)


def trained(folder: Path, *overrides: str) -> Path:
    """A run folder of two updates, below ``folder``, without pictures."""
    from vit3.tools.train import train

    with pytest.MonkeyPatch.context() as patch:
        no_pictures(patch.setattr)
        train(short_run(folder, "name=r", *overrides))
    return folder / "r"


def make_image(path: Path, color: int, size: tuple[int, int] = (20, 24), mode: str = "RGB") -> None:
    """A noisy image around one colour, so that classes can be told apart."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(color + len(path.name))
    base = np.array([40 * color % 256, 90 * color % 256, 200 - 30 * color % 200])
    pixels = (base + rng.integers(0, 40, (*size, 3))).clip(0, 255).astype(np.uint8)
    Image.fromarray(pixels).convert(mode).save(path)


def make_folder(root: Path, classes: int = 3, train: int = 4, val: int = 2) -> Path:
    """An ImageFolder of ``classes`` classes with so many images each."""
    for split, count in (("train", train), ("val", val)):
        for label in range(classes):
            for i in range(count):
                make_image(root / split / f"class{label}" / f"{i}.png", label)
    return root
