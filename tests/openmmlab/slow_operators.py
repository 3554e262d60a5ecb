"""mmcv's operators computed independently: plain Python in float64, RoIAlign as products of tent functions too."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def some_boxes(n, seed=0, dtype=torch.float32, span=30.0):
    """Boxes that overlap a lot, partly off the image (of about ``span`` pixels), and scores without ties."""
    g = torch.Generator().manual_seed(seed)
    corners = torch.rand(n, 2, generator=g, dtype=torch.float64) * span - 10
    boxes = torch.cat([corners, corners + 4 + torch.rand(n, 2, generator=g, dtype=torch.float64) * 30], 1)
    scores = (torch.randperm(n, generator=g) + 1.0) / (n + 1)
    return boxes.to(dtype), scores.to(dtype)


def iou(a: list[float], b: list[float], offset: int = 0) -> float:
    """Of two boxes x1, y1, x2, y2."""
    shared = max(0.0, min(a[2], b[2]) - max(a[0], b[0]) + offset) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]) + offset)
    sizes = [(box[2] - box[0] + offset) * (box[3] - box[1] + offset) for box in (a, b)]
    return shared / (sum(sizes) - shared)


def nms(boxes: Tensor, scores: Tensor, iou_threshold: float, offset: int = 0) -> Tensor:
    """Indices of the boxes kept, best first."""
    places, values = boxes.double().tolist(), scores.double().tolist()
    kept: list[int] = []
    for i in sorted(range(len(values)), key=lambda i: -values[i]):
        if all(iou(places[i], places[j], offset) <= iou_threshold for j in kept):
            kept.append(i)
    return torch.tensor(kept, dtype=torch.long)


def soft_nms(boxes, scores, iou_threshold, sigma, min_score, method, offset) -> tuple[list[int], list[float]]:
    """Indices and final scores, best first."""
    places, values = boxes.double().tolist(), scores.double().tolist()
    left, kept, final = list(range(len(values))), [], []
    while left:
        best = max(left, key=lambda i: values[i])
        kept.append(best)
        final.append(values[best])
        remaining = []
        for i in left:
            if i == best:
                continue
            overlap = iou(places[best], places[i], offset)
            if method == "gaussian":
                values[i] *= math.exp(-(overlap**2) / sigma)
            elif overlap >= iou_threshold:
                values[i] *= 1 - overlap if method == "linear" else 0
            if values[i] >= min_score:
                remaining.append(i)
        left = remaining
    return kept, final


def bins(start: float, end: float, scale: float, n: int, sampling: int, aligned: bool) -> list[list[float]]:
    """Sample positions in each of n bins of one axis of one box."""
    shift = 0.5 if aligned else 0.0
    start, end = start * scale - shift, end * scale - shift
    size = end - start if aligned else max(end - start, 1.0)
    samples = sampling if sampling > 0 else math.ceil(size / n)
    return [[start + (i + (s + 0.5) / samples) * size / n for s in range(samples)] for i in range(n)]


def sample(plane: list[list[float]], y: float, x: float) -> float:
    """One bilinear sample; up to one pixel outside counts as the border, farther as zero."""
    h, w = len(plane), len(plane[0])
    if y < -1 or y > h or x < -1 or x > w:
        return 0.0
    y, x = min(max(y, 0.0), h - 1), min(max(x, 0.0), w - 1)
    top, left = min(int(y), h - 2), min(int(x), w - 2)
    dy, dx = y - top, x - left
    upper = (1 - dx) * plane[top][left] + dx * plane[top][left + 1]
    lower = (1 - dx) * plane[top + 1][left] + dx * plane[top + 1][left + 1]
    return (1 - dy) * upper + dy * lower


def roi_align_loops(maps: Tensor, rois: Tensor, size, scale: float, sampling: int, aligned: bool) -> Tensor:
    """RoIAlign, sample by sample, in float64: (R, C, *size)."""
    output = torch.zeros(len(rois), maps.shape[1], *size, dtype=torch.float64)
    for r, (image, x1, y1, x2, y2) in enumerate(rois.double().tolist()):
        rows = bins(y1, y2, scale, size[0], sampling, aligned)
        columns = bins(x1, x2, scale, size[1], sampling, aligned)
        for c, plane in enumerate(maps[int(image)].double().tolist()):
            for i, ys in enumerate(rows):
                for j, xs in enumerate(columns):
                    values = [sample(plane, y, x) for y in ys for x in xs]
                    output[r, c, i, j] = sum(values) / max(len(values), 1)
    return output


def tents(starts: Tensor, ends: Tensor, scale: float, n: int, sampling: int, aligned: bool, pixels: int) -> Tensor:
    """Weight of every pixel in every bin of one axis: (R, n, pixels)."""
    weights = starts.new_zeros(len(starts), n, pixels)
    for r, (start, end) in enumerate(zip(starts.tolist(), ends.tolist())):
        at = starts.new_tensor(bins(start, end, scale, n, sampling, aligned))  # (n, samples)
        if at.numel():
            inside = (at >= -1) & (at <= pixels)
            distance = at.clamp(0, pixels - 1)[..., None] - torch.arange(pixels)
            weights[r] = ((1 - distance.abs()).clamp(min=0) * inside[..., None]).mean(1)
    return weights


def roi_align_tents(maps: Tensor, rois: Tensor, size, scale: float, sampling: int, aligned: bool) -> Tensor:
    """RoIAlign as two matrix products per box, which autograd differentiates: (R, C, *size)."""
    h, w = maps.shape[2:]
    rows = tents(rois[:, 2], rois[:, 4], scale, size[0], sampling, aligned, h).to(maps.dtype)
    columns = tents(rois[:, 1], rois[:, 3], scale, size[1], sampling, aligned, w).to(maps.dtype)
    return torch.einsum("rih,rchw,rjw->rcij", rows, maps[rois[:, 0].long()], columns)
