"""What detectors and segmentors cost: the paper's figures, and a counter of dispatched operations."""

from __future__ import annotations

import copy

import pytest

pytest.importorskip("mmengine", reason="needs the extra mm")

import torch
from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tests.openmmlab.leaves import FILES, built, quick_bases, read
from vit3.analysis.flops import macs_of_run
from vit3.errors import UserError
from vit3.openmmlab.cost import BOXES, MASKS, count, one_image, show_cost, total_parameters, usual_size

# README of the authors (parameters) and tables 8 and 9 (multiply-adds), in 1e6 and 1e9
FIGURES = {
    "mask_rcnn_h_vit3_tiny_1x": (48.4, 271),
    "mask_rcnn_h_vit3_small_1x": (74.0, 349),
    "mask_rcnn_h_vit3_base_1x": (114, 510),
    "upernet_h_vit3_tiny_160k": (57.9, 946),
    "upernet_h_vit3_small_160k": (83.6, 1026),
    "upernet_h_vit3_base_160k": (124, 1195),
}
SIZES = {"rcnn": (800, 1280), "upernet": (512, 2048)}


@pytest.mark.parametrize("leaf", FIGURES)
def test_figures_of_the_paper(leaf):
    parameters, macs = FIGURES[leaf]
    kind = next(kind for kind in SIZES if kind in leaf)
    assert usual_size(built(leaf)) == SIZES[kind]
    found = count(built(leaf), SIZES[kind])
    assert total_parameters(found) / 1e6 == pytest.approx(parameters, rel=0.005)
    assert sum(found["macs"].values()) / 1e9 == pytest.approx(macs, rel=0.02)


def on_cpu(leaf):
    """A toy with values, on the CPU."""
    config = copy.deepcopy(read(leaf))
    with DefaultScope.overwrite_default_scope(config.default_scope):
        return MODELS.build(config.model).eval()


@pytest.mark.parametrize("leaf", ["toy_mask_rcnn", "toy_upernet"])
def test_equals_a_counter_of_dispatched_operations(leaf, monkeypatch):
    """PyTorch's counter sees products of matrices, convolutions, transposed ones too, and our operators."""
    monkeypatch.setattr("vit3.openmmlab.cost.BOXES", 7)
    monkeypatch.setattr("vit3.openmmlab.cost.MASKS", 3)
    model, size = on_cpu(leaf), (97, 131)
    with FlopCounterMode(display=False) as counter:
        one_image(model, size)
    assert sum(count(model, size)["macs"].values()) == counter.get_total_flops() // 2


def test_parts_by_hand():
    """Heads of Mask R-CNN: fully connected layers on each box of 7x7, convolutions on each mask of 14x14 and 28x28."""
    found = count(built("mask_rcnn_h_vit3_tiny_1x"), (256, 320))
    assert list(found["parameters"]) == list(found["macs"]) == [
        "backbone", "neck", "rpn_head", "bbox_head", "mask_head"
    ]  # fmt: skip
    assert found["macs"]["bbox_head"] == BOXES * (256 * 49 * 1024 + 1024 * 1024 + 1024 * (81 + 320))
    convs, doubled, scores = 4 * 9 * 256 * 256 * 14**2, 256 * 256 * 28**2, 80 * 256 * 28**2
    assert found["macs"]["mask_head"] == MASKS * (convs + doubled + scores)
    cells = sum(-(-256 // stride) * -(-320 // stride) for stride in (4, 8, 16, 32, 64))
    assert found["macs"]["rpn_head"] == cells * (9 * 256 * 256 + 256 * (3 + 12))


def test_a_cascade_runs_all_its_heads():
    plain, cascade = (count(built(leaf), (64, 64)) for leaf in
                      ("mask_rcnn_h_vit3_small_1x", "cascade_mask_rcnn_h_vit3_small_3x"))  # fmt: skip
    assert cascade["macs"]["mask_head"] == 3 * plain["macs"]["mask_head"]
    agnostic = 3 * (plain["macs"]["bbox_head"] - BOXES * 1024 * (320 - 4))  # its boxes do not depend on the class
    assert cascade["macs"]["bbox_head"] == agnostic


def test_the_auxiliary_head_serves_training_alone():
    found = count(built("toy_upernet"), (64, 64))
    assert found["parameters"]["auxiliary_head"] > 0 == found["macs"]["auxiliary_head"]
    whole = sum(found["parameters"].values())
    assert total_parameters(found) == whole - found["parameters"]["auxiliary_head"]
    assert whole == sum(p.numel() for p in built("toy_upernet").parameters())


def test_the_inner_step_is_counted():
    """The twin without inner training saves it and nothing else."""
    plain, twin = (count(built(leaf), (64, 96)) for leaf in ("toy_mask_rcnn", "toy_mask_rcnn_no_update"))
    mixers = [
        (block.attn, 64 // 2**i // 4, 96 // 2**i // 4)
        for i, stage in enumerate(built("toy_mask_rcnn").backbone.layers)
        for block in stage.blocks
    ]
    without = [block.attn for stage in built("toy_mask_rcnn_no_update").backbone.layers for block in stage.blocks]
    saved = sum(mixer.macs(h, w) - other.macs(h, w) for (mixer, h, w), other in zip(mixers, without))
    assert plain["macs"]["backbone"] - twin["macs"]["backbone"] == saved > 0
    assert plain["parameters"] == twin["parameters"]


def test_transposed_convolution():
    layer = nn.ConvTranspose2d(6, 4, 3, stride=2, groups=2)
    with FlopCounterMode(display=False) as counter:
        layer(torch.zeros(2, 6, 5, 7))
    found = macs_of_run(nn.Sequential(layer), lambda model: model(torch.zeros(2, 6, 5, 7, device="meta")))
    assert found == {"0": counter.get_total_flops() // 2} == {"0": 2 * 6 * 35 * 2 * 9}


def test_table(capsys):
    with quick_bases():
        show_cost(FILES["toy_upernet"], (64, 64))
    shown = capsys.readouterr().out
    parameters = count(built("toy_upernet"), (64, 64))["parameters"]
    for part, number in parameters.items():
        assert f"{part}" in shown and f"{number / 1e6:,.2f} M" in shown
    assert "64x64" in shown and "as papers count" in shown and "training only" in shown


def test_no_file_is_read(monkeypatch):
    """Weights that a config names are not looked for; the config stays as it is."""
    config = Config(read("toy_mask_rcnn").to_dict())
    config.model.backbone.init_cfg = dict(type="Pretrained", checkpoint="absent.safetensors")
    before = copy.deepcopy(config.to_dict())
    count(config, (64, 64))
    assert config.to_dict() == before


@pytest.mark.parametrize("size", [(64,), (0, 64), "64x64", (64, 64, 3), 64])
def test_sizes_in_words(size):
    with pytest.raises(UserError, match=r"size=.* must be \[height,width\] in pixels"):
        count(built("toy_upernet"), size)


def test_other_networks_in_words():
    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = nn.Conv2d(3, 4, 1)

    with pytest.raises(UserError, match="Classifier has no decode_head, bbox_head or roi_head"):
        count(Classifier(), (8, 8))
