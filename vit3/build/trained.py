"""A trained network from its checkpoint, with the test images that it is scored on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig
from torch import nn
from torch.utils.data import Dataset

from vit3.build.model import build_model
from vit3.config import TrainConfig, typed
from vit3.data import open_split
from vit3.engine.distributed import Processes
from vit3.errors import UserError

_MAX_BATCH = 256  # per process, unless it is given


@dataclass(frozen=True)
class Trained:
    """What a checkpoint holds.

    Attributes:
        cfg: of the training. model: with its weights, on the device. weights: ``raw`` or ``ema``.
        images: test images. saved: when the weights were saved, in words. batch: images per process for evaluation.
    """

    cfg: TrainConfig
    model: nn.Module
    weights: str
    images: Dataset
    saved: str
    batch: int


def build_trained(
    path: Path, state: dict, stored: DictConfig, processes: Processes, *, weights: str = "auto",
    data_root: str | None = None, workers: int | None = None, batch_size: int | None = None,
) -> Trained:  # fmt: skip
    """Build the network of a checkpoint and open the test images of its data.

    Args:
        path: of the checkpoint, for the sentences. state: what is in it. stored: its configuration, complete.
        weights: ``auto`` (the kind that scored best in training), ``raw`` or ``ema``.
        data_root: another place of the same data. workers: loader processes, None as in training.
        batch_size: images per process, None as in training.

    Raises:
        UserError: weights that are not there, or data that cannot be opened.
    """
    cfg: TrainConfig = typed(stored, TrainConfig)
    cfg.model.pretrained, cfg.model.checkpoint = False, None  # the weights are in this checkpoint
    cfg.data.root = cfg.data.root if data_root is None else data_root
    cfg.data.workers = cfg.data.workers if workers is None else workers
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
    kind = _chosen_weights(state, weights, path)
    model.load_state_dict(state["state_dict_ema" if kind == "ema" else "state_dict"])
    batch = batch_size or max(1, min(_MAX_BATCH, cfg.engine.batch_size // processes.world_size))
    return Trained(cfg, model.to(processes.device), kind, images, _saved(state), batch)


def _saved(state: dict) -> str:
    """When the weights were saved: best ones at the end of an epoch, others anywhere."""
    if "optimizer" not in state or state["position"]:
        part = "" if "optimizer" not in state else f" after {state['position']:,} images"
        return f"epoch {state['epoch'] + 1}{part}"
    return f"epoch {state['epoch']}"


def _chosen_weights(state: dict, wanted: str, path: Path) -> str:
    """``raw`` or ``ema``; ``auto`` is the kind that is there, or of both the one that gave the best score."""
    kinds = [kind for kind, key in (("raw", "state_dict"), ("ema", "state_dict_ema")) if key in state]
    if wanted != "auto":
        if wanted not in kinds:
            raise UserError(f"weights={wanted}, but {path} holds {' and '.join(kinds)} weights; use weights={kinds[0]}")
        return wanted
    known = [kind for kind in kinds if kind in state.get("best", {})]
    return max(known or kinds[:1], key=lambda kind: state["best"][kind]["top1"] if known else 0)
