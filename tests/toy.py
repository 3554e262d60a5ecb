"""Small data and composed configurations for the tests of training."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from PIL import Image

from tests.helpers import ROOT

CONFIGS = ROOT / "configs"


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
