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
from vit3.engine.checkpoint import best_checkpoint, load_checkpoint
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


def build_trained(options: TrainedConfig, complete: Callable[[dict], DictConfig], processes: Processes) -> Trained:
    """Load a checkpoint, build its network and open the test images of its data.

    Args:
        options: which, which of its weights, and how the images are read. complete: makes the configuration in a
            checkpoint one that has every key.

    Raises:
        UserError: no such checkpoint, weights that are not there, or data that cannot be opened.
    """
    path = Path(options.checkpoint)
    path = best_checkpoint(path) if path.is_dir() else path
    state = load_checkpoint(path)
    cfg: TrainConfig = typed(complete(state["config"]), TrainConfig)
    if cfg.diffusion is not None:
        raise UserError(f"checkpoint={options.checkpoint} holds the generator {cfg.model.name}; draw images from it "
                        "with python tools/sample.py, and score these with tools/eval_generation.py")  # fmt: skip
    cfg.model.pretrained, cfg.model.checkpoint = False, None  # the weights are in this checkpoint
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
        classes=state["classes"],
        wanted=d.val_split,
        input_key=d.input_key,
        target_key=d.target_key,
        img_size=d.img_size,
    )
    model = build_model(cfg, images.classes)
    kind = chosen_weights(state, options.weights, path)
    model.load_state_dict(state["state_dict_ema" if kind == "ema" else "state_dict"])
    batch = options.batch_size or max(1, min(_MAX_BATCH, cfg.engine.batch_size // processes.world_size))
    return Trained(path, cfg, model.to(processes.device), kind, saved_when(state), images, batch)


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
