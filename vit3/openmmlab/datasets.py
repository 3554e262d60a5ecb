"""Data sets as a config of MMEngine names them: where they lie, which classes they have, how both are changed."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mmengine.config import Config
from mmengine.registry import DATASETS

from vit3.errors import UserError, first_line

LOADERS = ("train_dataloader", "val_dataloader", "test_dataloader")
EVALUATORS = ("val_evaluator", "test_evaluator")


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
                f"classes={path} is no readable JSON file ({first_line(error)}); give one, or names as classes=[a,b]"
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
