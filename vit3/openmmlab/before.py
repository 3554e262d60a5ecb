"""What is looked at before the first step: classes against heads, files of the data, values in them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mmengine.config import Config

from vit3.doctor.check import FAIL, OK, WARNING, Check, heed
from vit3.doctor.coco import check_coco
from vit3.doctor.masks import check_masks
from vit3.openmmlab.datasets import class_of, classes_of, datasets_of, dicts_of


def before_first_step(config: Config, loaders: Sequence[str] = ("train_dataloader", "val_dataloader")) -> None:
    """Stop what would fail later or be silently wrong, and warn of what would go badly.

    Args:
        loaders: those whose data are looked at.

    Raises:
        UserError: the first failed check.
    """
    heed([*check_classes(config), *check_losses(config), *check_evaluator(config), *check_data(config, loaders)])


def check_classes(config: Config) -> list[Check]:
    """Whether every head has as many classes as the data, and training and validation the same ones."""
    named = {
        loader: classes_of(dataset)
        for loader in ("val_dataloader", "train_dataloader")
        for dataset in datasets_of(config.get(loader))
    }
    known = {loader: classes for loader, classes in named.items() if classes is not None}
    if len({tuple(classes) for classes in known.values()}) > 1:
        detail = f"train_dataloader has the classes {_some(known['train_dataloader'])} and val_dataloader " \
                 f"{_some(known['val_dataloader'])}"  # fmt: skip
        return [Check("classes", FAIL, detail, "set both by classes=[a,b] or classes=FILE.json")]
    if not known:
        return [Check("classes", WARNING, "the data set of the config does not name its classes",
                      "set them by classes=[a,b] or classes=FILE.json")]  # fmt: skip
    classes = next(iter(known.values()))
    wrong = {node.num_classes for node in dicts_of(config.model) if "num_classes" in node} - {len(classes)}
    if wrong:
        detail = f"a head of the model has num_classes={wrong.pop()}, and the data {len(classes)} classes"
        detail += f" ({_some(classes)})"
        return [Check("classes", FAIL, detail, "classes=[a,b] or classes=FILE.json sets data and heads alike")]
    return [Check("classes", OK, f"{len(classes)} classes in data and heads")]


def check_losses(config: Config) -> list[Check]:
    """Whether a segmentor's head with a single channel has a loss that can learn from it."""
    for node in dicts_of(config.model):
        channels = node.get("out_channels") or node.get("num_classes")
        losses = [loss for loss in dicts_of(node.get("loss_decode")) if loss.get("type") == "CrossEntropyLoss"]
        if channels == 1 and any(not loss.get("use_sigmoid") for loss in losses):
            return [Check("losses", FAIL, "a head with one output channel has a softmax loss, which is always 0",
                          "give two classes, such as classes=[background,thing]; one channel for them needs "
                          "loss_decode.use_sigmoid=true")]  # fmt: skip
    return []


def check_evaluator(config: Config) -> list[Check]:
    """Whether COCO's scores are computed from the annotations of the images that are evaluated."""
    sets = datasets_of(config.get("val_dataloader"))
    read = [Path(dataset.get("data_root") or "") / dataset.ann_file for dataset in sets if dataset.get("ann_file")]
    for node in dicts_of(config.get("val_evaluator")):
        if node.get("type") == "CocoMetric" and node.get("ann_file") and len(read) == 1:
            if Path(node.ann_file).absolute() != read[0].absolute():
                detail = f"val_evaluator.ann_file={node.ann_file} is not what val_dataloader reads, {read[0]}"
                return [Check("evaluator", FAIL, detail, f"set val_evaluator.ann_file={read[0]}")]
    return []


def check_data(config: Config, loaders: Sequence[str]) -> list[Check]:
    """The files of the data, as :mod:`vit3.doctor` looks at them."""
    checks: list[Check] = []
    for loader in loaders:
        for dataset in datasets_of(config.get(loader)):
            missing = _missing(dataset)
            if missing is not None:
                detail = f"{loader}: {missing} does not exist"
                checks.append(Check("data", FAIL, detail, "set data_root=FOLDER, or make the data there"))
            else:
                checks += _look_inside(config, dataset)
    return checks


def _look_inside(config: Config, dataset: Any) -> Iterable[Check]:
    classes = classes_of(dataset)
    root, prefix = Path(dataset.get("data_root") or ""), dataset.get("data_prefix") or {}
    if config.default_scope == "mmdet" and dataset.get("ann_file", "").endswith(".json"):
        return check_coco(root / dataset.ann_file, root / prefix.get("img", ""), classes)
    if config.default_scope == "mmseg" and prefix.get("seg_map_path") is not None and classes is not None:
        names = ("img_suffix", "seg_map_suffix", "reduce_zero_label", "ignore_index")
        suffix, mask_suffix, reduce, ignore = (_of_dataset(dataset, name) for name in names)
        own = (getattr(class_of(dataset), "METAINFO", None) or {}).get("classes")
        split = dataset.get("ann_file") or ""
        return check_masks(
            root / prefix.img_path,
            root / prefix.seg_map_path,
            own or classes,  # masks have the labels of a named set; mmseg takes those of some classes out of them
            only=[line.strip() for line in (root / split).read_text().splitlines()] if split else None,
            ignore_index=255 if ignore is None else ignore,
            reduce_zero_label=bool(reduce),
            image_suffix=suffix or ".jpg",
            mask_suffix=mask_suffix or ".png",
        )
    return []


def _of_dataset(dataset: Any, name: str) -> Any:
    """A setting of a data set: the config's, or the default that its class gives, or its parent."""
    if dataset.get(name) is not None:
        return dataset[name]
    for kind in getattr(class_of(dataset), "__mro__", ()):
        parameter = inspect.signature(kind.__init__).parameters.get(name)
        if parameter is not None and parameter.default is not inspect.Parameter.empty:
            return parameter.default
    return None


def _missing(dataset: Any) -> Path | None:
    """The first file or folder of a data set that is not there."""
    root = Path(dataset.get("data_root") or "")
    places = [root] if dataset.get("data_root") else []
    places += [root / dataset.ann_file] if dataset.get("ann_file") else []
    places += [root / folder for folder in (dataset.get("data_prefix") or {}).values() if folder]
    return next((place for place in places if not place.exists()), None)


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f", … ({len(names)})" if len(names) > 5 else "")
