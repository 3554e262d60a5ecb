"""Detections or class maps of image files: PNG sheets, and the numbers as JSON or PNG."""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mmengine.config import Config
from mmengine.dataset import Compose
from PIL import Image

from vit3.analysis.dense_plots import Instances
from vit3.data.image_files import readable
from vit3.openmmlab.datasets import classes_of, datasets_of
from vit3.openmmlab.files import load_safely
from vit3.openmmlab.pictures import found_instances, found_map, plot_sheet, run_model, without_truth
from vit3.openmmlab.runner import build_model, require_all

logger = logging.getLogger(__name__)

_PER_SHEET = 16


def predict_images(
    config: Config, checkpoint: Path, images: list[Path], target: Path, device: torch.device, threshold: float
) -> None:
    """Run a model over image files; no data set is needed.

    Args:
        config: as adapted to this machine. checkpoint: with the weights. target: folder for what is written:
            ``sheet_001.png`` … and ``detections.json`` (COCO's result format) or ``class_maps/NAME.png``.
        threshold: score from which on detections are drawn and written.
    """
    state = load_safely(str(checkpoint), "cpu")
    model = build_model(config, device)
    require_all(state, model, checkpoint)
    tensors = state.get("state_dict", state)
    model.load_state_dict({name.removeprefix("module."): value for name, value in tensors.items()}, strict=False)
    dataset = (datasets_of(config.get("test_dataloader")) or datasets_of(config.get("val_dataloader")))[0]
    meta = state.get("meta") or {}
    classes = list((meta.get("dataset_meta") or {}).get("classes") or classes_of(dataset) or ())
    pipeline = Compose(without_truth(dataset.pipeline))
    results: list[dict[str, Any]] = []
    names = _map_names(images)
    begun, read = time.monotonic(), 0
    for first in range(0, len(images), _PER_SHEET):
        chunk = images[first : first + _PER_SHEET]
        pictures, found = [], []
        for number, (path, pixels) in enumerate(readable(chunk, upright=True), start=first):
            pictures.append(pixels)
            with torch.no_grad():
                sample = run_model(model, pipeline, dict(img_path=str(path), img_id=number))
            if config.default_scope == "mmseg":
                found.append(found_map(sample))
                _write_map(found[-1], target / "class_maps" / names[path])
            else:
                found.append(found_instances(sample))
                results += coco_results(found[-1], number, path.name, classes, threshold)
        read += len(pictures)
        if not pictures:
            continue
        sheet = target / f"sheet_{first // _PER_SHEET + 1:03d}.png"
        plot_sheet(config, pictures, found, classes, sheet, checkpoint.name, threshold=threshold)
    if config.default_scope != "mmseg":
        (target / "detections.json").write_text(json.dumps(results))
    seconds = time.monotonic() - begun
    logger.info(f"{read} images in {seconds:.1f} s; sheets and {_numbers(config)} in {target}")


def _numbers(config: Config) -> str:
    return "class_maps/" if config.default_scope == "mmseg" else "detections.json"


def coco_results(
    found: Instances, image_id: int, name: str, classes: list[str], threshold: float
) -> list[dict[str, Any]]:
    """What was found in one image in COCO's result format, names beside the numbers.

    Args:
        found: from the detector. image_id, name: of the image. classes: ``category_id`` counts them from 1.
        threshold: lowest score that is written.
    """
    from pycocotools import mask as coco_mask

    results = []
    for i in np.flatnonzero(found.scores >= threshold):
        x0, y0, x1, y1 = (float(v) for v in found.boxes[i])
        label = int(found.labels[i])
        result: dict[str, Any] = dict(
            image_id=image_id, file_name=name, category_id=label + 1, category=classes[label] if classes else None,
            bbox=[x0, y0, x1 - x0, y1 - y0], score=float(found.scores[i]),
        )  # fmt: skip
        if found.masks is not None:
            encoded = coco_mask.encode(np.asfortranarray(found.masks[i].astype(np.uint8)))
            result["segmentation"] = dict(size=encoded["size"], counts=encoded["counts"].decode())
        results.append(result)
    return results


def _map_names(images: list[Path]) -> dict[Path, Path]:
    """What the class map of each image is called: as the image below the folder of all, with ``.png``."""
    folder = Path(os.path.commonpath([path.parent for path in images]))
    names = {path: path.relative_to(folder).with_suffix(".png") for path in images}
    if len(set(names.values())) < len(names):  # a.jpg and a.png
        names = {path: path.relative_to(folder).with_suffix(f"{path.suffix}.png") for path in images}
    return names


def _write_map(classes: np.ndarray, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(classes.astype(np.uint8)).save(target)
