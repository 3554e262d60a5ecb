"""A trained network from its checkpoint, with the test images that it is scored on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig
from torch import nn
from torch.utils.data import Dataset

from vit3.build.model import build_model
from vit3.config import TrainConfig, TrainedConfig, typed
from vit3.data import open_split
from vit3.engine.checkpoint import best_checkpoint, load_checkpoint, newest_checkpoint
from vit3.engine.distributed import Processes
from vit3.errors import UserError

_MAX_BATCH = 256  # per process, unless it is given


@dataclass(frozen=True)
class Trained:
    """What a checkpoint holds.

    Attributes:
        path: of the checkpoint. cfg: of the training. model: with its weights, on the device.
        weights: ``raw`` or ``ema``. saved: when the weights were saved, in words. images: test images.
        batch: of them per process for evaluation.
    """

    path: Path
    cfg: TrainConfig
    model: nn.Module
    weights: str
    saved: str
    images: Dataset
    batch: int

    @property
    def title(self) -> str:
        """What was loaded, for the first line of a report."""
        return f"{self.path}: {self.weights} weights of {self.saved}, {len(self.images):,} images"


@dataclass(frozen=True)
class Stored:
    """A checkpoint as it was read.

    Attributes:
        path: of the file. cfg: of the training, without weights to start from. state: see
            :func:`vit3.engine.checkpoint.load_checkpoint`.
    """

    path: Path
    cfg: TrainConfig
    state: dict

    @property
    def classes(self) -> tuple[str, ...]:
        """Names in the order of their labels."""
        return tuple(self.state["classes"])

    @property
    def saved(self) -> str:
        """When the weights were saved, in words."""
        return saved_when(self.state)

    def check_classifier(self) -> None:
        """Raise a UserError where this is a generator."""
        if self.cfg.diffusion is not None:
            raise UserError(f"checkpoint={self.path} holds the generator {self.cfg.model.name}; draw images from it "
                            "with python tools/sample.py, and score these with tools/eval_generation.py")  # fmt: skip

    def load_into(self, model: nn.Module, wanted: str) -> str:
        """Give ``model`` the weights; returns their kind, ``raw`` or ``ema`` (see :func:`chosen_weights`)."""
        kind = chosen_weights(self.state, wanted, self.path)
        model.load_state_dict(self.state["state_dict_ema" if kind == "ema" else "state_dict"])
        return kind


def read_stored(
    checkpoint: str, complete: Callable[[dict], DictConfig], newest: bool = False, weights: str = "auto"
) -> Stored:
    """Read a checkpoint; nothing of its data or its autoencoder need be there.

    Args:
        checkpoint: a file of ours, or a run folder. complete: makes the configuration in a checkpoint one that has
            every key. newest: of a run folder take the newest checkpoint, not the best.
        weights: of a run folder, ``raw`` or ``ema`` take the best of that kind, where it was kept.

    Raises:
        UserError: no such checkpoint, or it is not ours.
    """
    path = Path(checkpoint)
    if path.is_dir() and newest:
        path, state = newest_checkpoint(path)
    else:
        wanted = path / f"best_{weights}.pt"
        path = wanted if wanted.is_file() else best_checkpoint(path) if path.is_dir() else path
        state = load_checkpoint(path)
    cfg: TrainConfig = typed(complete(state["config"]), TrainConfig)
    cfg.model.pretrained, cfg.model.checkpoint = False, None  # the weights are in this checkpoint
    return Stored(path, cfg, state)


def build_trained(options: TrainedConfig, complete: Callable[[dict], DictConfig], processes: Processes) -> Trained:
    """Load a checkpoint, build its network and open the test images of its data.

    Args:
        options: which, which of its weights, and how the images are read. complete: see :func:`read_stored`.

    Raises:
        UserError: no such checkpoint, weights that are not there, or data that cannot be opened.
    """
    stored = read_stored(options.checkpoint, complete, weights=options.weights)
    stored.check_classifier()
    cfg = stored.cfg
    cfg.data.root = cfg.data.root if options.data_root is None else options.data_root
    cfg.data.workers = cfg.data.workers if options.workers is None else options.workers
    d = cfg.data
    images = open_split(
        d.name,
        d.root,
        "val",
        d.in_chans,
        d.on_bad_image,
        key="data_root",
        classes=stored.state["classes"],
        wanted=d.val_split,
        input_key=d.input_key,
        target_key=d.target_key,
        img_size=d.img_size,
    )
    model = build_model(cfg, images.classes)
    kind = stored.load_into(model, options.weights)
    batch = options.batch_size or max(1, min(_MAX_BATCH, cfg.engine.batch_size // processes.world_size))
    return Trained(stored.path, cfg, model.to(processes.device), kind, stored.saved, images, batch)


def saved_when(state: dict) -> str:
    """When the weights were saved: best ones at the end of an epoch, others anywhere."""
    if "optimizer" not in state or state["position"]:
        part = "" if "optimizer" not in state else f" after {state['position']:,} images"
        return f"epoch {state['epoch'] + 1}{part}"
    return f"epoch {state['epoch']}"


def chosen_weights(state: dict, wanted: str, path: Path, score: str = "top1") -> str:
    """``raw`` or ``ema``; ``auto`` is the kind that is there, or of both the one that gave the best score."""
    kinds = [kind for kind, key in (("raw", "state_dict"), ("ema", "state_dict_ema")) if key in state]
    if wanted != "auto":
        if wanted not in kinds:
            raise UserError(f"weights={wanted}, but {path} holds {' and '.join(kinds)} weights; use weights={kinds[0]}")
        return wanted
    known = [kind for kind in kinds if kind in state.get("best", {})]
    return max(known or kinds[:1], key=lambda kind: state["best"][kind][score] if known else 0)
