"""Operators of mmcv by torchvision, on the CPU and CUDA: NMS, soft-NMS and RoIAlign.

Names and arguments are those of mmcv's extension module (``mmcv/ops/csrc/pytorch/pybind.cpp``; the same in mmcv 2.1 and
onedl-mmcv 2.3): results are written into tensors that mmcv has made.

Numbers: float32 and float64 are computed as they are. Other types (half and bfloat16, as under autocast) are computed
in float32 and rounded once, when written; torchvision's own autocast rule does the same.
"""

from __future__ import annotations

import warnings

import torch
import torchvision
from torch import Tensor

SOFT_NMS = {0: "naive", 1: "linear", 2: "gaussian"}  # mmcv's numbers of the three methods
MAX_POOLING = 0  # mmcv's pool_mode


def _full(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def nms(boxes: Tensor, scores: Tensor, iou_threshold: float, offset: int) -> Tensor:
    """Greedy suppression of boxes by better ones that they overlap.

    Args:
        boxes: (N, 4), x1, y1, x2, y2 in pixels.
        scores: (N,).
        iou_threshold: boxes with a larger IoU are suppressed.
        offset: 0, or 1 where a box includes its last pixel: width is x2 - x1 + 1.

    Returns:
        (K,) indices of the boxes kept, best first.
    """
    boxes = _grown(_full(boxes), offset)
    return torch.ops.torchvision.nms(boxes, scores.to(boxes.dtype), iou_threshold)


def softnms(
    boxes: Tensor,
    scores: Tensor,
    dets: Tensor,
    iou_threshold: float,
    sigma: float,
    min_score: float,
    method: int,
    offset: int,
) -> Tensor:
    """Suppression that lowers scores instead of removing boxes (Bodla et al., arXiv 1704.04503); on the CPU.

    Args:
        boxes: (N, 4), x1, y1, x2, y2 in pixels.
        scores: (N,).
        dets: (N, 5), written: the first K rows become box and final score, best first.
        iou_threshold: overlap from which methods 0 and 1 act.
        sigma: width of method 2.
        min_score: boxes whose score falls below it are dropped (but never the best box).
        method: 0 naive (weight 0), 1 linear (1 - IoU), 2 gaussian (exp(-IoU²/sigma)).
        offset: as in :func:`nms`.

    Returns:
        (K,) indices of the boxes kept, in the order of ``dets``.

    Raises:
        ValueError: unknown method.
    """
    if method not in SOFT_NMS:
        raise ValueError(f"softnms got method={method}; allowed are {SOFT_NMS}.")
    full = _full(boxes)
    grown, now = _grown(full, offset), _full(scores).clone()
    areas = (grown[:, 2:] - grown[:, :2]).prod(1)  # (N,)
    left, kept = torch.arange(len(boxes)), []
    while len(left):
        best = left[now[left].argmax()]
        dets[len(kept), :4], dets[len(kept), 4] = full[best], now[best]
        kept.append(best)
        left = left[left != best]
        corners = torch.minimum(grown[best, 2:], grown[left, 2:]) - torch.maximum(grown[best, :2], grown[left, :2])
        shared = corners.clamp(min=0).prod(1)
        iou = shared / (areas[best] + areas[left] - shared)
        if method == 2:
            weight = torch.exp(-iou.square() / sigma)
        else:
            weight = torch.where(iou >= iou_threshold, 1 - iou if method == 1 else 0.0, 1.0)
        now[left] *= weight
        left = left[~(now[left] < min_score)]
    return torch.stack(kept) if kept else left


def roi_align_forward(
    input: Tensor,
    rois: Tensor,
    output: Tensor,
    argmax_y: Tensor,
    argmax_x: Tensor,
    aligned_height: int,
    aligned_width: int,
    spatial_scale: float,
    sampling_ratio: int,
    pool_mode: int,
    aligned: bool,
) -> None:
    """RoIAlign (He et al., arXiv 1703.06870): mean of bilinear samples in each bin of each box.

    Args:
        input: (B, C, H, W).
        rois: (R, 5), index of the image and x1, y1, x2, y2 in pixels.
        output: (R, C, aligned_height, aligned_width), written.
        argmax_y, argmax_x: only for max pooling.
        spatial_scale: pixels of the map per pixel of the image.
        sampling_ratio: samples per bin and axis; 0 = as many as the bin has pixels.
        pool_mode: 1 (mean); 0 (max) is not provided.
        aligned: shift by half a pixel, so that samples stand where pixels are.

    Raises:
        NotImplementedError: max pooling.
        ValueError: aligned, and a box with x2 < x1 or y2 < y1 or NaN (looked at on the CPU only, as compiled mmcv does:
            on CUDA it would wait for the device).
    """
    _check_rois("roi_align_forward", rois, pool_mode, aligned)
    maps = _full(input)
    size = (aligned_height, aligned_width)
    output.copy_(
        torch.ops.torchvision.roi_align(maps, rois.to(maps.dtype), spatial_scale, *size, sampling_ratio, aligned)
    )


def roi_align_backward(
    grad_output: Tensor,
    rois: Tensor,
    argmax_y: Tensor,
    argmax_x: Tensor,
    grad_input: Tensor,
    aligned_height: int,
    aligned_width: int,
    spatial_scale: float,
    sampling_ratio: int,
    pool_mode: int,
    aligned: bool,
) -> None:
    """Gradient of :func:`roi_align_forward` for its maps, added to ``grad_input`` (B, C, H, W).

    Args:
        grad_output: (R, C, aligned_height, aligned_width).
        rois, sampling_ratio, and so on: as in the forward pass.
    """
    _check_rois("roi_align_backward", rois, pool_mode, aligned)
    grad = _full(grad_output)
    rois, size = rois.to(grad.dtype), (aligned_height, aligned_width)
    grad_input += torch.ops.torchvision._roi_align_backward(
        grad, rois, spatial_scale, *size, *grad_input.shape, sampling_ratio, aligned
    )


def get_compiler_version() -> str:
    """For mmcv's report of the environment."""
    return f"none: operators of torchvision {torchvision.__version__}"


def get_compiling_cuda_version() -> str:
    """For mmcv's report of the environment."""
    return torch.version.cuda or "not available"


PROVIDED = (
    nms,
    softnms,
    roi_align_forward,
    roi_align_backward,
    get_compiler_version,
    get_compiling_cuda_version,
)


def _grown(boxes: Tensor, offset: int) -> Tensor:
    """Boxes whose x2 - x1 is mmcv's x2 - x1 + offset; IoUs then agree."""
    return boxes + boxes.new_tensor([0, 0, offset, offset]) if offset else boxes


def _check_rois(name: str, rois: Tensor, pool_mode: int, aligned: bool) -> None:
    if pool_mode == MAX_POOLING:
        raise NotImplementedError(
            f"{name} got pool_mode='max', and torchvision has only the mean; use pool_mode='avg' or compile mmcv."
        )
    if rois.dtype == torch.bfloat16:
        warnings.warn(
            f"{name} got boxes in bfloat16, which rounds a coordinate of 1000 pixels to a multiple of 4 (mmdet gives "
            "boxes the type of its maps); train with dtype='float16' or without autocast.",
            stacklevel=3,
        )
    if aligned and rois.device.type == "cpu":
        wrong = ~(rois[:, 3:] >= rois[:, 1:3]).all(1)  # true for NaN as well
        if wrong.any():
            raise ValueError(
                f"{name} got a box with x2 < x1 or y2 < y1 or NaN: image, x1, y1, x2, y2 = {rois[wrong][0].tolist()}; "
                "clip or drop it, and look for a loss that diverged."
            )
