"""The one evaluation of detectors: average precision as COCO counts it; training and ``tools/det.py test`` call it."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from timm.task import evaluation_sample_limit
from torch import Tensor, nn

from vit3.engine.distributed import Processes
from vit3.engine.precision import autocast
from vit3.engine.progress import progress

_SHOWN = {"AP": 0, "AP50": 1, "AP75": 2}  # places in COCOeval's statistics


@torch.no_grad()
def evaluate_detections(
    model: nn.Module,
    loader,
    processes: Processes,
    *,
    amp: str | None = None,
    channels_last: bool = False,
    title: str = "evaluate",
    stop: Callable[[], bool] | None = None,
) -> dict[str, float] | None:
    """Average precision of boxes, and of masks where the data has them; every image counts once.

    Args:
        model: images to detections, as torchvision's; its training mode is restored afterwards.
        loader: of :func:`vit3.data.coco.make_coco_eval_loader`.
        amp: precision of the forward pass. channels_last: not used, images differ in size.
        stop: asked before each batch whether to give up; one process's yes counts for all.

    Returns:
        ``bbox_AP``, ``bbox_AP50``, ``bbox_AP75`` and the same with ``segm``, 0 to 1; None if it was stopped.
    """
    results = collect_results(model, loader, processes, amp=amp, title=title, stop=stop)
    if results is None:
        return None
    return processes.on_main(lambda: coco_scores(loader.dataset.coco, results, masks=loader.dataset.masks))


@torch.no_grad()
def collect_results(
    model: nn.Module, loader, processes: Processes, *, amp: str | None = None, title: str = "evaluate",
    stop: Callable[[], bool] | None = None,
) -> list[dict[str, Any]] | None:  # fmt: skip
    """Detections of all images in COCO's result format, in the main process; elsewhere those of its own share.

    Arguments are those of :func:`evaluate_detections`; None if it was stopped.
    """
    found: list[dict[str, Any]] = []
    left = evaluation_sample_limit(loader)  # None: all
    was_training = model.training
    model.eval()
    try:
        with progress(title, len(loader), processes.main) as advance:
            for images, targets in loader:
                if stop is not None and processes.total(float(stop())):
                    return None
                with autocast(processes.device, amp):
                    outputs = model(images)
                for output, target in zip(outputs[:left], targets[:left]):
                    found += coco_results(int(target["image_id"]), output, loader.dataset.category_ids)
                left = None if left is None else max(0, left - len(targets))
                advance(len(images) * processes.world_size)
    finally:
        model.train(was_training)
    if not processes.distributed:
        return found
    shares: list | None = [None] * processes.world_size if processes.main else None
    dist.gather_object(found, shares)
    return [result for share in shares for result in share] if processes.main else found


def coco_results(image_id: int, output: dict[str, Tensor], category_ids: Sequence[int | None]) -> list[dict[str, Any]]:
    """Detections of one image in COCO's result format; those of classes that the file lacks are left out.

    Args:
        output: ``boxes`` (n, 4) from corner to corner, ``labels`` from 1, ``scores`` and possibly ``masks``
            (n, 1, H, W), probabilities. category_ids: of the classes in their order.
    """
    boxes = output["boxes"].float().cpu()
    boxes = torch.cat([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], dim=1).tolist()
    labels, scores = output["labels"].tolist(), output["scores"].float().tolist()
    results = []
    masks = _encode(output["masks"]) if "masks" in output else [None] * len(labels)
    for box, label, score, mask in zip(boxes, labels, scores, masks):
        category = category_ids[label - 1]
        if category is None:
            continue
        result = {"image_id": image_id, "category_id": category, "bbox": box, "score": score}
        results.append(result if mask is None else {**result, "segmentation": mask})
    return results


def coco_scores(coco, results: list[dict[str, Any]], *, masks: bool) -> dict[str, float]:
    """Average precision by pycocotools' COCOeval.

    Args:
        coco: index of the annotations. results: of all images. masks: score them too.
    """
    from pycocotools.cocoeval import COCOeval

    scores = {}
    for kind in ("bbox", "segm") if masks else ("bbox",):
        with contextlib.redirect_stdout(io.StringIO()):  # it prints tables
            evaluation = COCOeval(coco, _loaded(coco, results, kind), kind)
            evaluation.evaluate()
            evaluation.accumulate()
            evaluation.summarize()
        scores |= {f"{kind}_{name}": float(evaluation.stats[place]) for name, place in _SHOWN.items()}
    return scores


def _loaded(coco, results: list[dict[str, Any]], kind: str):
    """The results as pycocotools wants them: for masks without boxes, so that areas are those of masks."""
    if results:
        drop = "segmentation" if kind == "bbox" else "bbox"
        return coco.loadRes([{k: v for k, v in result.items() if k != drop} for result in results])
    empty = type(coco)()  # loadRes refuses an empty list
    empty.dataset = {**{k: coco.dataset[k] for k in ("images", "categories")}, "annotations": []}
    empty.createIndex()
    return empty


def _encode(masks: Tensor) -> list[dict[str, Any]]:
    """Masks (n, 1, H, W) of probabilities, run-length encoded as text."""
    from pycocotools import mask

    binary = (masks[:, 0] >= 0.5).cpu().numpy().astype(np.uint8)
    encoded = [mask.encode(np.asfortranarray(one)) for one in binary]
    return [{"size": list(one["size"]), "counts": one["counts"].decode()} for one in encoded]
