"""Operators for mmcv against independent computations: values, gradients, types, nothing to do, refusals."""

import functools
import math

import pytest
import torch

pytest.importorskip("mmengine", reason="needs the extra mm")

import vit3.openmmlab  # noqa: F401  before mmcv.ops
from tests.openmmlab import slow_operators as slow
from tests.openmmlab.slow_operators import some_boxes
from vit3.openmmlab import operators

import mmcv.ops  # isort: skip

CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"))
DEVICES = ["cpu", CUDA]
GENERATOR = functools.partial(torch.Generator().manual_seed)


def some_rois(dtype=torch.float64):
    """Inside, tiny, across each border, wholly outside, of no size; two images; no sample near a whole pixel."""
    return torch.tensor(
        [
            [0, 3.13, 5.31, 17.77, 22.91],
            [1, 8.12, 8.17, 8.93, 9.41],
            [1, -9.3, -7.1, 10.2, 6.4],
            [0, 15.7, 21.3, 61.9, 58.3],
            [0, 90.1, 90.2, 99.3, 97.4],
            [1, 4.3, 2.1, 4.3, 2.1],
        ],
        dtype=dtype,
    )


# --- suppression ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("threshold", [0.1, 0.5, 0.7])
def test_nms(device, dtype, offset, threshold):
    boxes, scores = some_boxes(80, dtype=dtype)
    dets, kept = mmcv.ops.nms(boxes.to(device), scores.to(device), threshold, offset=offset)
    expected = slow.nms(boxes, scores, threshold, offset)
    assert kept.tolist() == expected.tolist() and 3 < len(kept) < 80
    assert torch.equal(dets.cpu(), torch.cat([boxes, scores[:, None]], 1)[expected])


def test_nms_offset_decides():
    """Two neighbours that overlap only if a box includes its last pixel."""
    boxes = torch.tensor([[0.0, 0, 1, 3], [1, 0, 3, 2]])
    scores = torch.tensor([0.9, 0.8])
    share = slow.iou(boxes[0].tolist(), boxes[1].tolist(), 1)
    assert share > 0 and slow.iou(boxes[0].tolist(), boxes[1].tolist()) == 0
    assert len(mmcv.ops.nms(boxes, scores, share - 0.01, offset=1)[1]) == 1
    assert len(mmcv.ops.nms(boxes, scores, share + 0.01, offset=1)[1]) == 2
    assert len(mmcv.ops.nms(boxes, scores, share - 0.01, offset=0)[1]) == 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_nms_of_half_types_is_computed_in_float32(dtype):
    boxes, scores = some_boxes(40, seed=2)
    boxes, scores = boxes.to(dtype), scores.to(dtype)
    assert operators.nms(boxes, scores, 0.4, 0).tolist() == slow.nms(boxes, scores, 0.4).tolist()


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("method", ["naive", "linear", "gaussian"])
@pytest.mark.parametrize("min_score", [0.0, 0.2])
def test_soft_nms(method, offset, min_score):
    boxes, scores = some_boxes(50, seed=1)
    options = dict(iou_threshold=0.3, sigma=0.5, min_score=min_score, method=method, offset=offset)
    dets, kept = mmcv.ops.soft_nms(boxes, scores, **options)
    expected, final = slow.soft_nms(boxes, scores, **options)
    positive = [i for i, value in zip(expected, final) if value > 0]  # zeros of "naive" tie
    assert kept.tolist()[: len(positive)] == positive and sorted(kept.tolist()) == sorted(expected)
    assert torch.equal(dets[:, :4], boxes[kept])
    torch.testing.assert_close(dets[:, 4].double(), torch.tensor(final, dtype=torch.float64), rtol=1e-5, atol=1e-7)
    assert len(kept) == 50 if min_score == 0 else 3 < len(kept) < 50
    assert dets[0, 4] == scores.max()


def test_soft_nms_keeps_the_best_box_below_min_score():
    boxes, scores = some_boxes(3)
    _, kept = mmcv.ops.soft_nms(boxes, scores / 100, min_score=0.5)
    assert kept.tolist() == [scores.argmax().item()]


def test_soft_nms_unknown_method():
    boxes, scores = some_boxes(3)
    with pytest.raises(ValueError, match="method=7; allowed are"):
        operators.softnms(boxes, scores, boxes.new_zeros(3, 5), 0.3, 0.5, 0.0, 7, 0)


@pytest.mark.parametrize("split", [10000, 10])
@pytest.mark.parametrize("device", DEVICES)
def test_batched_nms(device, split):
    """Each class by itself; above ``split_thr`` boxes mmcv loops over the classes."""
    boxes, scores = some_boxes(60)
    classes = torch.arange(60) % 3
    cfg = dict(type="nms", iou_threshold=0.4, split_thr=split)
    dets, kept = mmcv.ops.batched_nms(boxes.to(device), scores.to(device), classes.to(device), cfg)
    expected = [torch.where(classes == c)[0] for c in range(3)]
    expected = torch.cat([own[slow.nms(boxes[own], scores[own], 0.4)] for own in expected])
    expected = expected[scores[expected].argsort(descending=True)]
    assert kept.tolist() == expected.tolist() and len(kept) > len(slow.nms(boxes, scores, 0.4))
    assert torch.equal(dets[:, 4].cpu(), scores[expected])


def test_nothing_to_suppress():
    none, no_scores = torch.zeros(0, 4), torch.zeros(0)
    assert mmcv.ops.nms(none, no_scores, 0.5)[0].shape == (0, 5)
    assert mmcv.ops.soft_nms(none, no_scores)[1].shape == (0,)


# --- RoIAlign -------------------------------------------------------------------------------------------------------

CASES = [(scale, sampling, aligned) for scale in (1.0, 0.25) for sampling in (0, 1, 2, 3) for aligned in (True, False)]


def some_maps(dtype=torch.float64, c=2, h=23, w=19):
    return torch.randn(2, c, h, w, generator=GENERATOR(4), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale, sampling, aligned", CASES)
def test_roi_align(device, scale, sampling, aligned):
    maps, rois = some_maps().to(device).requires_grad_(), some_rois().to(device)
    output = mmcv.ops.roi_align(maps, rois, (3, 2), scale, sampling, "avg", aligned)
    expected = slow.roi_align_loops(maps, rois, (3, 2), scale, sampling, aligned)
    torch.testing.assert_close(output.detach().cpu(), expected, rtol=1e-6, atol=1e-8)  # the scale is a float there

    theirs = maps.detach().cpu().requires_grad_()
    other = slow.roi_align_tents(theirs, rois.cpu(), (3, 2), scale, sampling, aligned)
    torch.testing.assert_close(other.detach(), expected, rtol=1e-9, atol=1e-11)
    grad = torch.randn(output.shape, generator=GENERATOR(5), dtype=torch.float64)
    output.backward(grad.to(device))
    other.backward(grad)
    torch.testing.assert_close(maps.grad.cpu(), theirs.grad, rtol=1e-6, atol=1e-8)
    assert theirs.grad.abs().max() > 0.1


def test_roi_align_in_single_precision():
    maps, rois = some_maps(torch.float32).requires_grad_(), some_rois(torch.float32)
    output = mmcv.ops.RoIAlign((7, 7), 0.25, 0)(maps, rois)
    expected = slow.roi_align_loops(maps, rois, (7, 7), 0.25, 0, True)
    torch.testing.assert_close(output.detach().double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:roi_align")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_roi_align_of_half_types_is_computed_in_float32(dtype):
    """Values and gradients are those of float32, rounded once."""
    maps, rois = some_maps(dtype).requires_grad_(), some_rois(dtype)
    full = maps.detach().float().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = mmcv.ops.roi_align(maps, rois, (3, 3), 0.5, 2)
    expected = mmcv.ops.roi_align(full, rois.float(), (3, 3), 0.5, 2)
    assert output.dtype == dtype and torch.equal(output, expected.to(dtype))
    grad = torch.randn(output.shape, generator=GENERATOR(5)).to(dtype)
    output.backward(grad)
    expected.backward(grad.float())
    assert maps.grad.dtype == dtype and torch.equal(maps.grad, full.grad.to(dtype))


def test_boxes_in_bfloat16_are_warned_about():
    with pytest.warns(UserWarning, match="multiple of 4.*float16"):
        mmcv.ops.roi_align(some_maps(torch.bfloat16), some_rois(torch.bfloat16), 2)


def test_roi_align_without_boxes():
    maps = some_maps().requires_grad_()
    output = mmcv.ops.roi_align(maps, torch.zeros(0, 5, dtype=torch.float64), 7)
    output.sum().backward()
    assert output.shape == (0, 2, 7, 7) and maps.grad.count_nonzero() == 0


def test_roi_align_gradient_is_added():
    grad, rois, none = torch.ones(6, 2, 2, 2), some_rois(torch.float32), torch.zeros(0)
    once, twice = torch.zeros(2, 2, 23, 19), torch.zeros(2, 2, 23, 19)
    for target in (once, twice, twice):
        operators.roi_align_backward(grad, rois, none, none, target, 2, 2, 1.0, 2, 1, True)
    torch.testing.assert_close(twice, 2 * once)


def test_roi_align_refuses_in_words():
    none, maps = torch.zeros(0), some_maps(torch.float32)

    def call(rois, mode=1, aligned=True):
        output = torch.zeros(len(rois), 2, 2, 2)
        operators.roi_align_forward(maps, rois, output, none, none, 2, 2, 1.0, 0, mode, aligned)
        return output

    with pytest.raises(NotImplementedError, match="pool_mode='max'.*use pool_mode='avg'"):
        call(some_rois(torch.float32), mode=0)
    turned = torch.tensor([[0, 1, 1, 2, 2], [0, 5, 1, 1, 5.0]])
    for wrong in (turned, turned.where(turned != 5, math.nan)):
        with pytest.raises(ValueError, match=r"got a box with x2 < x1.*\[0.0, (5.0|nan), 1.0, 1.0, (5.0|nan)\]"):
            call(wrong)
    assert call(turned, aligned=False).isfinite().all()
