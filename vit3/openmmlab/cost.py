"""Parameters and multiply-adds of a detector or segmentor by part, the inner step counted, nothing computed.

The convention of papers: 1000 boxes go through each box head and 100 through each mask head; an auxiliary head serves
training alone, so that it is left out of a segmentor's multiply-adds, and of its parameters too (the printed 57.9 M of
H-ViT³-T are those without it). Norms, activations, the resampling of boxes and maps, and the sorting of boxes are not
counted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from vit3.analysis.flops import macs_of_run
from vit3.errors import UserError

BOXES, MASKS = 1000, 100
TRAINING_ONLY = ("auxiliary_head",)  # no part of what papers count
DETECTION, SEGMENTATION = (800, 1280), (512, 2048)  # height and width in pixels at which papers count


def count(model_or_config: nn.Module | Config | Path | str, size: tuple[int, int] | None = None) -> dict[str, dict]:
    """Parameters and multiply-adds of one image by part.

    Args:
        model_or_config: a model of mmdet or mmseg, or its config or the config's file; no weights are read.
        size: (height, width) of the image in pixels; None for 800 x 1280 (detectors) or 512 x 2048 (segmentors).

    Returns:
        ``{"parameters": {part: number}, "macs": {part: number}}``, see :func:`total_parameters`. Parts: ``backbone``,
        ``neck``, ``rpn_head``, ``bbox_head``, ``mask_head``, ``decode_head``, ``auxiliary_head``, those it has.

    Raises:
        UserError: the size is no two positive numbers, or the model is neither a detector of one or two stages nor an
            encoder and decoder.
    """
    model = model_or_config if isinstance(model_or_config, nn.Module) else _built(model_or_config)
    size = usual_size(model) if size is None else _checked(size)
    parameters: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        parameters[_part(name)] = parameters.get(_part(name), 0) + parameter.numel()
    macs = dict.fromkeys(parameters, 0)
    for name, number in macs_of_run(model, lambda model: one_image(model, size)).items():
        macs[_part(name)] += number
    return dict(parameters=parameters, macs=macs)


def show_cost(config: Config | Path | str, size: tuple[int, int] | None = None) -> None:
    """Print :func:`count` as a table."""
    model = _built(config)
    size = usual_size(model) if size is None else _checked(size)
    found = count(model, size)
    parameters, macs = found["parameters"], found["macs"]
    table = Table("part", "parameters", f"multiply-adds at {size[0]}x{size[1]} (height x width)", box=None)
    for part in parameters:
        table.add_row(part, f"{parameters[part] / 1e6:,.2f} M", f"{macs[part] / 1e9:,.1f} G")
    total, counted = sum(macs.values()), total_parameters(found)
    if counted < (whole := sum(parameters.values())):
        table.add_row("as papers count", f"{counted / 1e6:,.2f} M", f"{total / 1e9:,.1f} G")
    table.add_row("all", f"{whole / 1e6:,.2f} M", f"{total / 1e9:,.1f} G")
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    if counted < whole:
        console.print("The auxiliary head is there in training only: it has no multiply-adds here.")
    elif "rpn_head" in parameters:
        console.print(f"{BOXES} boxes pass each box head and {MASKS} each mask head, as detection papers count.")


def total_parameters(found: dict[str, dict[str, int]]) -> int:
    """The parameters of :func:`count` as papers give them: without heads that only serve training."""
    return sum(number for part, number in found["parameters"].items() if part not in TRAINING_ONLY)


def usual_size(model: nn.Module) -> tuple[int, int]:
    """(height, width) at which papers count such a model."""
    return SEGMENTATION if hasattr(model, "decode_head") else DETECTION


@torch.no_grad()
def one_image(model: nn.Module, size: tuple[int, int]) -> None:
    """Run every counted part once on an image of zeros, on the device of the model."""
    device = next(model.parameters()).device
    maps = model.backbone(torch.zeros(1, 3, *size, device=device))
    if getattr(model, "neck", None) is not None:
        maps = model.neck(maps)
    if hasattr(model, "decode_head"):
        for head in _each(model.decode_head):
            head(maps)
        return
    if not hasattr(model, "bbox_head") and not hasattr(model, "roi_head"):
        raise UserError(f"{type(model).__name__} has no decode_head, bbox_head or roi_head, so no parts are known; "
                        "count its backbone")  # fmt: skip
    for name in ("rpn_head", "bbox_head"):
        if hasattr(model, name):
            getattr(model, name)(maps)
    if hasattr(model, "roi_head"):
        for name, boxes in (("bbox", BOXES), ("mask", MASKS)):
            _heads_on_boxes(model.roi_head, name, boxes, maps[0])


def _heads_on_boxes(roi_head: nn.Module, name: str, boxes: int, like: Tensor) -> None:
    """All heads of one kind on so many boxes; a cascade has several."""
    heads = getattr(roi_head, f"{name}_head", None)
    if heads is None:
        return
    extractors = _each(getattr(roi_head, f"{name}_roi_extractor"))
    for head, extractor in zip(_each(heads), extractors):
        side = extractor.roi_layers[0].output_size
        head(like.new_zeros(boxes, extractor.out_channels, *side))


def _each(part: nn.Module) -> Iterable[nn.Module]:
    return part if isinstance(part, nn.ModuleList) else [part]


def _part(name: str) -> str:
    """The part that a parameter or layer belongs to: ``roi_head.bbox_head.0.fc`` is of ``bbox_head``."""
    return name.removeprefix("roi_head.").split(".")[0]


def _built(config: Config | Path | str) -> nn.Module:
    """The model of a config on the meta device, without weights."""
    if not isinstance(config, Config):
        config = Config.fromfile(config)
    with DefaultScope.overwrite_default_scope(config.get("default_scope")), torch.device("meta"):
        return MODELS.build(without_weights(config.model))


def without_weights(node: Any) -> Any:
    """A copy of a model's config that names no files and no addresses of weights."""
    if isinstance(node, dict):
        return type(node)({k: None if k in ("init_cfg", "pretrained") else without_weights(v) for k, v in node.items()})
    return [without_weights(v) for v in node] if isinstance(node, list) else node


def _checked(size: Any) -> tuple[int, int]:
    try:
        height, width = (int(side) for side in size)
    except (TypeError, ValueError):
        height = width = 0
    if height < 1 or width < 1:
        raise UserError(f"size={size} must be [height,width] in pixels, such as size=[800,1280]")
    return height, width
