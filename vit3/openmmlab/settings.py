"""A config of MMEngine and the ``key=value`` arguments of a command, read and checked: :func:`read_settings`."""

from __future__ import annotations

import difflib
import inspect
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmengine.config import Config
from mmengine.registry import DATASETS, init_default_scope
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from vit3.config import nearest
from vit3.errors import UserError

LOADERS = ("train_dataloader", "val_dataloader", "test_dataloader")
EVALUATORS = ("val_evaluator", "test_evaluator")

# What a config says to the Runner; anything else at its top level is a variable of the file that nothing reads later.
_READ_BY_RUNNER = {
    *LOADERS, *EVALUATORS, "model", "train_cfg", "val_cfg", "test_cfg", "auto_scale_lr", "optim_wrapper",
    "param_scheduler", "default_hooks", "custom_hooks", "data_preprocessor", "load_from", "env_cfg", "log_processor",
    "log_level", "visualizer", "default_scope", "randomness", "model_wrapper_cfg", "find_unused_parameters", "sync_bn",
    "activation_checkpointing", "efficient_conv_bn_eval", "compile", "custom_imports", "tta_model", "tta_pipeline",
}  # fmt: skip


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
_TUPLES = ("scale", "img_scale", "crop_size", "ratio_range")  # mmcv refuses lists there
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
            _set_key(config, key, value, added, own)
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
        raise UserError(f"{path} cannot be read as a config of MMEngine ({_line(error)})") from error
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
        raise UserError(f"'{argument}' has a value that YAML cannot read ({_line(error)})") from error
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


def _set_key(config: Config, key: str, value: Any, added: bool, own: set[str]) -> None:
    """Set one dotted key of a config; numbers among its parts are places in a list."""
    parts = key.split(".")
    known = [k for k in config.keys() if k in _READ_BY_RUNNER]
    if parts[0] in config and parts[0] not in _READ_BY_RUNNER and not added:
        raise UserError(
            f"{key} is a variable of the config file, which nothing reads any more once the file is read; set the key "
            f"that it went into{_same_value(config, parts[0])}"
        )
    node: Any = config
    for depth, part in enumerate(parts):
        names = list(node.keys()) if hasattr(node, "keys") else [str(i) for i in range(_length(node))]
        if part not in names and not (added and hasattr(node, "keys")):
            if not depth:
                names = sorted([*known, *own])
            raise UserError(f"{key} is no key of this config; {_hint(config, parts, depth, names)}")
        if part not in names:
            break
        node = node[part] if hasattr(node, "keys") else node[int(part)]
    old = node if depth == len(parts) - 1 and not added else None
    if isinstance(value, str) and isinstance(old, int | float):  # numbers and switches; they may become null or a list
        kind = "true or false" if isinstance(old, bool) else "a number"
        raise UserError(f"{key}={value} is not allowed; it must be {kind}, such as {str(old).lower()}")
    tree: Any = _with_tuples(value, parts[-1], node if depth == len(parts) - 1 else None)
    for part in reversed(parts):
        tree = {part: tree}
    config.merge_from_dict(tree, allow_list_keys=True)


def _with_tuples(value: Any, key: str, old: Any = None) -> Any:
    """Lists, all that YAML has, as the tuples that transforms ask for: where one was before, and under some names."""
    if isinstance(value, dict):
        return {k: _with_tuples(v, k) for k, v in value.items()}
    if not isinstance(value, list):
        return value
    items = [_with_tuples(item, "scale" if key == "scales" else "") for item in value]
    pair = key in _TUPLES and all(isinstance(item, int | float) for item in items)
    return tuple(items) if pair or isinstance(old, tuple) else items


def _length(node: Any) -> int:
    return len(node) if isinstance(node, list | tuple) else 0


def _hint(config: Config, parts: list[str], depth: int, names: list[str]) -> str:
    """What could have been meant by the part of a key that is not there."""
    above = ".".join(parts[:depth])
    near = difflib.get_close_matches(parts[depth], names, n=1)
    if near:
        return f"did you mean {'.'.join([*parts[:depth], near[0], *parts[depth + 1 :]])}?"
    leaf = parts[-1]
    same = [".".join(path) for path in _paths(config) if path[-1] == leaf and path[0] in _READ_BY_RUNNER]
    if 0 < len(same) <= 4:
        return f"did you mean {' or '.join(same)}?"
    new = f"+{'.'.join(parts)}=VALUE adds it"
    if not names:
        return f"{above} is a single value"
    return f"allowed{f' below {above}' if above else ''}: {', '.join(names[:20])}{', …' if names[20:] else ''}; {new}"


def _paths(node: Any, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every key of a config as its parts."""
    items = node.items() if hasattr(node, "items") else enumerate(node) if isinstance(node, list | tuple) else ()
    for name, below in items:
        path = (*above, str(name))
        yield path
        yield from _paths(below, path)


def _same_value(config: Config, name: str) -> str:
    """Keys of the config called as a variable of its file, for a hint."""
    same = [".".join(p) for p in _paths(config) if p[-1] == name and p[0] in _READ_BY_RUNNER]
    return f", such as {same[0]}" if same else ""


def dicts_of(node: Any) -> Iterator[Any]:
    """Every dict of a config below ``node``, itself included."""
    if hasattr(node, "keys"):
        yield node
        for below in node.values():
            yield from dicts_of(below)
    elif isinstance(node, list | tuple):
        for below in node:
            yield from dicts_of(below)


def datasets_of(loader: Any) -> list[Any]:
    """The data sets inside of a loader of the config, those within wrappers such as RepeatDataset too."""
    found = []
    for node in dicts_of(loader.get("dataset") if loader else None):
        if "type" in node and ("data_prefix" in node or "ann_file" in node) and "dataset" not in node:
            found.append(node)
    return found


def set_data_root(config: Config, root: str) -> None:
    """Put ``root`` in the place of the data sets' root, in their paths and in those of the evaluators."""
    olds = {str(d.data_root) for key in LOADERS for d in datasets_of(config.get(key)) if d.get("data_root")}
    if config.get("data_root"):
        olds.add(str(config.data_root))
    for key in (*LOADERS, *EVALUATORS):
        for node in dicts_of(config.get(key)):
            for name, value in list(node.items()):
                if name == "data_root":
                    node[name] = root
                elif isinstance(value, str):
                    node[name] = _moved(value, olds, root)
    for loader in LOADERS:
        for dataset in datasets_of(config.get(loader)):
            dataset.setdefault("data_root", root)


def _moved(value: str, olds: set[str], root: str) -> str:
    for old in sorted(olds, key=len, reverse=True):
        base = old.rstrip("/")
        if base and (value == base or value.startswith(base + "/")):
            return root.rstrip("/") + value[len(base) :]
    return value


def read_classes(classes: list[str] | str, config: Config) -> list[str]:
    """Names of classes from the command line or a JSON file (a list, or ``{"detection": [], "segmentation": []}``)."""
    if isinstance(classes, str):
        path = Path(classes)
        try:
            classes = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise UserError(
                f"classes={path} is no readable JSON file ({_line(error)}); give one, or the names as classes=[a,b]"
            ) from error
        if isinstance(classes, dict):
            classes = classes.get("segmentation" if config.default_scope == "mmseg" else "detection")
    if not isinstance(classes, list) or not classes or not all(isinstance(name, str) for name in classes):
        raise UserError(f"classes={classes} is not allowed; it must be a list of names, such as classes=[cat,dog]")
    if len(set(classes)) != len(classes):
        raise UserError(f"classes={classes} is not allowed; every name may stand once")
    return classes


def set_classes(config: Config, classes: list[str]) -> None:
    """Make ``classes`` those of every data set, and their number that of every head."""
    for loader in LOADERS:
        for dataset in datasets_of(config.get(loader)):
            kind = class_of(dataset)
            own = (getattr(kind, "METAINFO", None) or {}).get("classes")
            if config.default_scope == "mmseg" and own and not set(classes) <= set(own):
                # a named set of mmseg takes a part of its own classes alone; the general one takes any
                for name in ("img_suffix", "seg_map_suffix", "reduce_zero_label"):
                    default = inspect.signature(kind.__init__).parameters.get(name)
                    if default is not None:
                        dataset.setdefault(name, default.default)
                dataset.type = "BaseSegDataset"
            dataset.metainfo = dict(classes=list(classes))
    for node in dicts_of(config.model):
        if "num_classes" in node:
            node.num_classes = len(classes)


def class_of(dataset: Any) -> type | None:
    """The class that the ``type`` of a data set means in the config's library, None where nobody has registered it."""
    with DATASETS.switch_scope_and_registry(None) as registry:  # the root alone does not look into the libraries
        return registry.get(dataset.type)


def classes_of(dataset: Any) -> list[str] | None:
    """Names of the classes that a data set of the config has; None where its library does not say."""
    named = (dataset.get("metainfo") or {}).get("classes")
    if named is None:
        named = (getattr(class_of(dataset), "METAINFO", None) or {}).get("classes")
    return list(named) if named is not None else None


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
