"""The typed schema of a detector trained without OpenMMLab; values stand in configs/detection/*.yaml."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from vit3.config import LoggerConfig, check_values, known_keys, nearest, typed
from vit3.config import OptimConfig as _OptimConfig
from vit3.errors import UserError

# OmegaConf reads these annotations at run time, hence typing's spelling.


@dataclass
class DataConfig:
    """Files and folders below ``data_root``."""

    train_annotations: str
    train_images: str
    val_annotations: str
    val_images: str
    workers: int


@dataclass
class AugmentConfig:
    hflip: float
    crop_prob: float


@dataclass
class ModelConfig:
    name: str
    backbone: str
    backbone_kwargs: Dict[str, Any]
    pretrained: Optional[str]
    drop_path_rate: float
    out_channels: int
    box_channels: int
    mask_channels: int
    frozen_stages: int
    with_cp: bool
    min_size: List[int]
    max_size: int
    options: Dict[str, Any]


@dataclass
class OptimConfig(_OptimConfig):
    milestones: List[int]
    decay_rate: float


@dataclass
class EngineConfig:
    epochs: int
    batch_size: int
    max_per_process: Optional[int]
    drop_last: bool
    amp: Optional[str]
    ema_decay: Optional[float]
    ema_batch: int
    ema_warmup: bool
    max_bad_updates: int
    save_minutes: Optional[float]
    keep_last: int
    steps_per_epoch: Optional[int]
    threads: Optional[int]


@dataclass
class DetectionConfig:
    data_root: str
    data: DataConfig
    augment: AugmentConfig
    model: ModelConfig
    optim: OptimConfig
    engine: EngineConfig
    logger: LoggerConfig
    device: str
    seed: int
    output: str
    name: Optional[str]
    resume: Optional[str]
    checkpoint: Optional[str]
    images: Optional[str]
    threshold: float
    size: List[int]


# What must be equal for a checkpoint to go on, and for one to be tested.
_WIDTHS = ("out_channels", "box_channels", "mask_channels")
SAME_MODEL = ("model.name", "model.backbone", "model.backbone_kwargs", *(f"model.{name}" for name in _WIDTHS))
SAME_RUN = (*SAME_MODEL, "model.frozen_stages", "model.options", "optim.opt", "optim.decay_inner", "seed")

_CHOICES = {"model.name": ("mask_rcnn", "faster_rcnn"), "optim.layer_decay": (None,)}
_RANGES = {
    "augment.crop_prob": (0, 1),
    **{f"model.{name}": (1, None) for name in _WIDTHS},
    "model.frozen_stages": (-1, None),
    "model.max_size": (32, None),
    "optim.decay_rate": (0, 1),
    "engine.ema_decay": (0, 1),
    "seed": (0, None),
    "threshold": (0, 1),
}
_FREE = ("model.backbone_kwargs.", "model.options.")  # below these, any key may be set


def compose(config: Path, arguments: list[str]) -> DictConfig:
    """A YAML file, on top of the one that its key ``base`` names, with ``key=value`` arguments on top of both.

    Raises:
        UserError: a file that cannot be read, no key=value, or an unknown key (the nearest one is named).
    """
    cfg = _read(config)
    known = known_keys(DetectionConfig)
    for argument in arguments:
        key, equals, _ = argument.partition("=")
        if not equals:
            raise UserError(f"{argument} is no key=value; write for example output=runs")
        if key not in known and not key.startswith(_FREE):
            raise UserError(f"{key} is no key of this program; {nearest(key, known)}")
        try:
            cfg = OmegaConf.merge(cfg, OmegaConf.from_dotlist([argument]))
        except Exception as error:  # YAML's errors have no common class with OmegaConf's
            raise UserError(f"{argument}: the value cannot be read ({str(error).splitlines()[0]})") from error
    return cfg


def checked(cfg: DictConfig) -> DetectionConfig:
    """The typed configuration; raises a UserError where a key is missing or unknown, or a value not allowed."""
    run: DetectionConfig = typed(cfg, DetectionConfig)
    check_values(run, _CHOICES, _RANGES, {"size": 2, "model.min_size": len(run.model.min_size) or 1})
    if run.optim.milestones != sorted(set(run.optim.milestones)):
        raise UserError(f"optim.milestones={run.optim.milestones} must be different epochs, ascending")
    if max(run.model.min_size) > run.model.max_size:
        raise UserError(
            f"model.min_size={run.model.min_size} must not exceed model.max_size={run.model.max_size}: "
            "they are the shorter and the longer side of images"
        )
    return run


def _read(path: Path) -> DictConfig:
    try:
        cfg = OmegaConf.load(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); give a file of configs/detection/") from error
    except Exception as error:  # YAML's and OmegaConf's
        raise UserError(f"{path} is no YAML file ({str(error).splitlines()[0]})") from error
    if not isinstance(cfg, DictConfig):
        raise UserError(f"{path} must hold keys and values")
    base = cfg.pop("base", None)
    try:
        return cfg if base is None else OmegaConf.merge(_read(path.parent / base), cfg)
    except OmegaConfBaseException as error:
        raise UserError(f"{path} does not fit {base} ({str(error).splitlines()[0]})") from error
