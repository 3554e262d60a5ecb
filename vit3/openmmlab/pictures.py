"""What a detector or segmentor found, as arrays, and sheets of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from mmengine.config import Config
from mmengine.dataset import Compose, pseudo_collate
from mmengine.registry import TRANSFORMS
from torch import nn

from vit3.analysis.dense_plots import Instances, plot_class_maps, plot_detections
from vit3.data.image_files import read_rgb


def found_instances(sample: Any) -> Instances:
    """What mmdet's sample says of one image: boxes, labels, scores, and masks where there are any."""
    found = sample.pred_instances.cpu().numpy()
    masks = found["masks"].astype(bool) if "masks" in found else None
    return Instances(found["bboxes"], found["labels"], found["scores"], masks)


def found_map(sample: Any) -> np.ndarray:
    """Class of every pixel, (H, W), from mmseg's sample."""
    return sample.pred_sem_seg.data.squeeze(0).cpu().numpy()


def run_model(model: nn.Module, pipeline: Compose, inputs: dict[str, Any]) -> Any:
    """The sample that a model gives for one image.

    Args:
        model: in evaluation mode. pipeline: of the test data. inputs: what its first transform reads.
    """
    return model.test_step(pseudo_collate([pipeline(inputs)]))[0]


def without_truth(pipeline: list[Any]) -> list[Any]:
    """The transforms of a test pipeline less those that read annotations."""
    return [step for step in pipeline if "LoadAnnotations" not in str(step.get("type"))]


def plot_sheet(
    config: Config,
    images: list[np.ndarray],
    found: list[Any],
    classes: list[str],
    target: Path,
    title: str,
    truth: list[Any] | None = None,
    threshold: float = 0.3,
) -> None:
    """Draw what was found on some images: instances or class maps, whichever the config's library gives."""
    if config.default_scope == "mmseg":
        plot_class_maps(images, found, classes, target, title, truth=truth)
    else:
        plot_detections(images, found, classes, target, title, truth=truth, threshold=threshold)


def plot_validation(
    config: Config, model: nn.Module, dataset: Any, target: Path, title: str, threshold: float, count: int = 8
) -> None:
    """A sheet of validation images, evenly spaced, with what is true beside what was found.

    Args:
        model: the detector or segmentor itself. dataset: of the validation loader. target: the PNG file.
    """
    model.eval()
    places = np.linspace(0, len(dataset) - 1, min(count, len(dataset))).round().astype(int)
    infos = [dataset.get_data_info(int(place)) for place in places]
    images = [read_rgb(info["img_path"], upright=True) for info in infos]
    samples = [model.test_step(pseudo_collate([dataset[int(place)]]))[0] for place in places]
    if config.default_scope == "mmseg":
        found, truth = [found_map(sample) for sample in samples], [_true_map(info) for info in infos]
    else:
        found, truth = [found_instances(sample) for sample in samples], [_true_instances(info) for info in infos]
    classes = list(dataset.metainfo["classes"])
    plot_sheet(config, images, found, classes, target, title, truth=truth, threshold=threshold)


def _true_map(info: dict[str, Any]) -> np.ndarray:
    load = TRANSFORMS.build(dict(type="mmseg.LoadAnnotations"))
    return load(dict(info))["gt_seg_map"]


def _true_instances(info: dict[str, Any]) -> Instances:
    masks = any("mask" in instance for instance in info["instances"])
    load = TRANSFORMS.build(dict(type="mmdet.LoadAnnotations", with_bbox=True, with_mask=masks))
    loaded = load(dict(info, ori_shape=(info["height"], info["width"])))
    boxes = loaded["gt_bboxes"].tensor.numpy().reshape(-1, 4)
    drawn = loaded["gt_masks"].to_ndarray().astype(bool) if masks else None
    return Instances(boxes, loaded["gt_bboxes_labels"], None, drawn)
