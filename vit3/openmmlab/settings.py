"""A config of MMEngine and the ``key=value`` arguments of a command, read and checked: :func:`read_settings`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmengine.config import Config
from mmengine.registry import init_default_scope
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from vit3.config import nearest
from vit3.errors import UserError, first_line
from vit3.openmmlab.datasets import read_classes, set_classes, set_data_root
from vit3.openmmlab.keys import set_key


@dataclass
class Options:
    """Keys of the commands themselves; everything else on the command line is a key of the config.

    Attributes:
        output, name: the run folder is OUTPUT/NAME. resume: ``auto``, a run folder or a checkpoint file.
        checkpoint: what to test or predict with, a file or a run folder. images: a file or a folder of them.
        data_root: folder of the data set in the place of the config's. device: ``auto``, ``cpu`` or ``cuda``.
        threshold: score from which on detections are drawn and written. size: (height, width) to count at.
        classes: names of the classes, or a JSON file of them. scale_lr: learning rate in proportion to the batch.
        workers: loader processes of each loader. wandb: ``offline`` or ``online``; project, entity: where there.
    """

    output: str = "runs"
    name: str | None = None
    resume: str | None = None
    checkpoint: str | None = None
    images: str | None = None
    data_root: str | None = None
    device: str = "auto"
    seed: int | None = None
    threshold: float = 0.3
    size: list[int] | None = None
    classes: Any = None
    scale_lr: bool = True
    workers: int | None = None
    wandb: str | None = None
    project: str = "vit3"
    entity: str | None = None
    given: list[str] = field(default_factory=list)  # the arguments themselves


# Keys of :class:`Options` that each command takes
_START = {"data_root", "device", "classes", "seed", "workers"}
KEYS = {
    "train": _START | {"output", "name", "resume", "scale_lr", "wandb", "project", "entity", "threshold"},
    "test": _START | {"checkpoint"},
    "predict": {"device", "classes", "seed", "output", "name", "checkpoint", "images", "threshold", "data_root"},
    "flops": {"size", "classes"},
}
_CHOICES = {"device": ("auto", "cpu", "cuda"), "wandb": (None, "offline", "online")}
_TYPES = {
    "output": str, "name": str, "resume": str, "checkpoint": str, "images": str, "data_root": str, "device": str,
    "seed": int, "threshold": (int, float), "scale_lr": bool, "workers": int, "wandb": str, "project": str,
    "entity": str, "size": list, "classes": (list, str),
}  # fmt: skip


@dataclass
class Settings:
    """One command: the config as composed (nothing derived in it), and the options."""

    config: Config
    options: Options


def read_settings(path: Path, arguments: list[str], command: str = "train") -> Settings:
    """Read a config, put the arguments into it, and check both.

    Args:
        path: a config file of MMEngine; what it names in ``custom_imports`` is imported.
        arguments: ``key=value`` each, values by the rules of YAML; ``+key=value`` adds a key that the config lacks.
        command: one of :data:`KEYS`, which says what keys besides those of the config there are.

    Raises:
        UserError: no such file, no ``key=value``, an unknown key (the nearest is named), a value of a wrong type.
    """
    config = _read_config(Path(path))
    options = Options(given=list(arguments))
    own, known = KEYS[command], {key for keys in KEYS.values() for key in keys}
    for argument in arguments:
        key, value, added = _split(argument)
        if key in own and not added:
            _set_option(options, key, value)
        elif key in known and not added and key not in config:
            users = ", ".join(name for name, keys in KEYS.items() if key in keys)
            raise UserError(f"{key} is no key of {command}, but of {users}; {nearest(key, own)}")
        else:
            set_key(config, key, value, added, own)
    if options.seed is not None:
        config.merge_from_dict({"randomness": {"seed": options.seed}})
    if not config.get("randomness"):
        config.randomness = dict(seed=0)
    if options.data_root is not None:
        set_data_root(config, options.data_root)
    if options.classes is not None:
        set_classes(config, read_classes(options.classes, config))
    return Settings(config, options)


def _read_config(path: Path) -> Config:
    if path.suffix != ".py" or not path.is_file():
        raise UserError(f"{path}: no such config file; give one that ends in .py, such as those below configs/")
    try:
        config = Config.fromfile(str(path))
    except (ImportError, FileNotFoundError, KeyError, SyntaxError, AttributeError) as error:
        raise UserError(f"{path} cannot be read as a config of MMEngine ({first_line(error)})") from error
    if not config.get("model") or not config.get("default_scope"):
        raise UserError(f"{path} has no model and default_scope; a config inherits them from mmdet's or mmseg's _base_")
    init_default_scope(config.default_scope)
    return config


def _split(argument: str) -> tuple[str, Any, bool]:
    """Key, value and whether the key may be new, of one argument."""
    key, equals, text = argument.partition("=")
    added = key.startswith("+")
    if not equals or not key.lstrip("+"):
        raise UserError(f"'{argument}' is no key=value; write for example train_dataloader.batch_size=4")
    try:
        value = OmegaConf.to_container(OmegaConf.create(f"value: {text}"), resolve=False)["value"]
    except (OmegaConfBaseException, ValueError, TypeError) as error:
        raise UserError(f"'{argument}' has a value that YAML cannot read; put quotes around text") from error
    except Exception as error:  # PyYAML's own, which is no dependency of ours
        raise UserError(f"'{argument}' has a value that YAML cannot read ({first_line(error)})") from error
    return key.lstrip("+"), value, added


def _set_option(options: Options, key: str, value: Any) -> None:
    if key == "output" and value is None:
        raise UserError("output=null is not allowed; it must be a folder")
    wanted = _TYPES[key]
    if value is not None and (not isinstance(value, wanted) or isinstance(value, bool) != (wanted is bool)):
        if wanted is not str or isinstance(value, dict | list | bool):
            name = wanted.__name__ if isinstance(wanted, type) else " or ".join(kind.__name__ for kind in wanted)
            raise UserError(f"{key}={value} is not allowed; it must be of type {name}")
        value = str(value)  # name=1 is a name
    if key in _CHOICES and value not in _CHOICES[key]:
        names = ", ".join("null" if choice is None else choice for choice in _CHOICES[key])
        raise UserError(f"{key}={value} is not allowed; use one of: {names}")
    if key == "size" and value is not None and (len(value) != 2 or not all(type(v) is int and v > 0 for v in value)):
        raise UserError(f"size={value} is not allowed; it must be [height,width] in pixels")
    if key == "workers" and value is not None and value < 0:
        raise UserError(f"workers={value} is not allowed; it must be at least 0")
    if key == "threshold" and (value is None or not 0 <= value <= 1):
        raise UserError(f"threshold={value} is not allowed; it must be between 0 and 1")
    setattr(options, key, value)
