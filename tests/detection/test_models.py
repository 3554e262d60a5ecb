"""torchvision's detectors on our backbones: shapes, classes, odd images, what is refused."""

from __future__ import annotations

import logging
import re

import pytest
import torch
from torch import nn
from torchvision.models.detection import FasterRCNN, MaskRCNN

from tests.detection.toy import SHAPE, SIZES, make_coco, small
from tests.helpers import ROOT
from tests.test_import import files, imports
from vit3.analysis.flops import count_macs, counted_macs
from vit3.detection import BACKBONES, faster_rcnn, mask_rcnn
from vit3.detection.flops import count_parts
from vit3.detection.pyramid import PyramidBackbone
from vit3.models.dense import DenseHViT3, DenseViT3
from vit3.models.weights import WeightsError, write_tensors


class Body(nn.Module):
    """Two maps at strides 4 and 8 from two convolutions."""

    channels, strides = (8, 16), (4, 8)

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 4, 4), nn.Conv2d(8, 16, 2, 2)

    def forward(self, x):
        return (y := self.a(x)), self.b(y)


def sample(sizes=SIZES, boxes=1, masks=True):
    """Images and targets; ``boxes`` of them on each."""
    images = [torch.rand(3, *size) for size in sizes]
    targets = []
    for h, w in sizes:
        target = dict(boxes=torch.tensor([[4.0, 6, 30, 40]])[:boxes], labels=torch.tensor([2])[:boxes])
        if masks:
            target["masks"] = torch.zeros(boxes, h, w, dtype=torch.uint8)
            target["masks"][:, 6:40, 4:30] = 1
        targets.append(target)
    return images, targets


def loss_of(model, images, targets):
    return sum(model.train()(images, targets).values())


def test_no_file_needs_openmmlab():
    """R17 (a): this backend works where no mm package is installed."""
    paths = [*files("detection/"), "data/coco.py", "build/detector.py", "build/detection.py", "commands.py"]
    assert not {name for path in paths for name in imports(path) if name.startswith(("mm", "vit3.openmmlab"))}


@pytest.mark.parametrize("make", [mask_rcnn, faster_rcnn])
def test_two_steps_on_images_of_odd_sizes(make):
    """R17 (a): four images of 97x131 and 64x200."""
    model = small(make=make)
    images, targets = sample([(97, 131), (64, 200)] * 2, masks=make is mask_rcnn)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(2):
        loss = loss_of(model, images, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert loss.isfinite()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    changed = [not torch.equal(a, b) for a, b in zip(before, model.parameters())]
    assert sum(changed) > 0.9 * len(changed)
    found = model.eval()(images)
    for image, one in zip(images, found):
        assert one["boxes"].shape == (len(one["labels"]), 4) and (one["boxes"][:, 2] <= image.shape[2]).all()
        assert ("masks" in one) == (make is mask_rcnn)
        if make is mask_rcnn:
            assert one["masks"].shape == (len(one["labels"]), 1, *image.shape[1:])


@pytest.mark.parametrize("boxes", [0, 1])
def test_one_image_with_or_without_boxes_reaches_every_parameter(boxes):
    """What DDP without find_unused_parameters needs."""
    model = small()
    loss_of(model, *sample([(64, 96)], boxes)).backward()
    assert not [name for name, p in model.named_parameters() if p.grad is None]
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_classes_are_counted_without_background():
    model = small(num_classes=5)
    assert model.roi_heads.box_predictor.cls_score.out_features == 6
    assert model.roi_heads.mask_predictor.mask_fcn_logits.out_channels == 6
    with pytest.raises(ValueError, match="num_classes=0 must be at least 1"):
        small(num_classes=0)


@pytest.mark.parametrize(("make", "theirs"), [(mask_rcnn, MaskRCNN), (faster_rcnn, FasterRCNN)])
def test_defaults_are_torchvisions(make, theirs):
    """Our heads, anchors and pooling have the shapes that torchvision builds by itself for four maps."""
    shape = dict(dims=(8, 8, 8, 8), depths=(1, 1, 1, 1), num_heads=(1, 1, 1, 1))
    with torch.device("meta"):
        ours = make("h_vit3_tiny", 3, backbone_kwargs=shape)
        plain = theirs(PyramidBackbone(DenseHViT3("tiny", **shape)), num_classes=4)
    for a, b in ((ours, plain),):
        assert {k: v.shape for k, v in a.state_dict().items()} == {k: v.shape for k, v in b.state_dict().items()}
        assert a.rpn.anchor_generator.sizes == b.rpn.anchor_generator.sizes == ((32,), (64,), (128,), (256,), (512,))
        assert a.rpn.anchor_generator.aspect_ratios == b.rpn.anchor_generator.aspect_ratios
        for name in ("box_roi_pool", "mask_roi_pool"):
            pools = [getattr(model.roi_heads, name) for model in (a, b)]
            assert (
                len({str(pool and (pool.featmap_names, pool.output_size, pool.sampling_ratio)) for pool in pools}) == 1
            )


@pytest.mark.parametrize("size", [(64, 96), (97, 131)])
def test_batches_are_padded_to_a_multiple_of_32_and_no_further(size):
    model = faster_rcnn(Body(), 2, min_size=min(size), max_size=max(size), out_channels=8, box_channels=8).eval()
    seen = []
    model.backbone.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].shape[-2:]))
    model([torch.rand(3, *size)])
    assert seen == [tuple(-(-side // 32) * 32 for side in size)]


def test_a_module_of_several_maps_and_its_names():
    maps = PyramidBackbone(Body(), 8)
    out = maps(torch.rand(1, 3, 64, 96))
    assert {name: tuple(y.shape[1:]) for name, y in out.items()} == {
        "0": (8, 16, 24), "1": (8, 8, 12), "pool": (8, 4, 6)
    }  # fmt: skip
    assert maps.names == ["0", "1"] and maps.out_channels == 8 and maps.strides == (4, 8, 16)


def test_maps_that_are_not_at_the_strides_are_refused(monkeypatch):
    """Without .strides the last ones of 4, 8, 16, 32 are taken: boxes would be read from a quarter of the map."""
    monkeypatch.delattr(Body, "strides")
    maps = PyramidBackbone(Body(), 8)
    assert maps.strides == (16, 32, 64)
    with pytest.raises(ValueError, match=r"gives maps of \[\(16, 24\), \(8, 12\)\] for images of \(64, 96\), but str"):
        maps(torch.rand(1, 3, 64, 96))
    monkeypatch.setattr(Body, "channels", (8, 16, 16))
    with pytest.raises(ValueError, match="set its .channels and .strides"):
        PyramidBackbone(Body(), 8)(torch.rand(1, 3, 64, 96))


@pytest.mark.parametrize(("patch", "strides"), [(8, (2, 4, 8, 16, 32)), (16, (4, 8, 16, 32, 64))])
def test_strides_of_a_simple_feature_pyramid_follow_the_patch(patch, strides):
    maps = PyramidBackbone(DenseViT3("tiny", embed_dim=16, depth=1, num_heads=1, patch_size=patch), 8)
    assert maps.strides == strides
    assert [64 // y.shape[-2] for y in maps(torch.rand(1, 3, 64, 64)).values()] == list(strides)
    with pytest.raises(ValueError, match="stride 14; one map needs 4, 8, 16 or 32"):
        PyramidBackbone(DenseViT3("tiny", embed_dim=16, depth=1, num_heads=1, patch_size=14), 8)


@pytest.mark.parametrize("make", [mask_rcnn, faster_rcnn])
def test_options_that_torchvision_lacks_are_refused(make):
    """It takes any word and drops it."""
    with pytest.raises(ValueError, match="box_nms_tresh is no option .* did you mean box_nms_thresh"):
        small(make=make, box_nms_tresh=0.4)
    with pytest.raises(ValueError, match="box_nms_thresh=0,4 must be a number"):
        small(make=make, box_nms_thresh="0,4")
    assert small(make=make, box_nms_thresh=0.4, fixed_size=(64, 64)).roi_heads.nms_thresh == 0.4


def test_a_plain_network_gets_a_simple_feature_pyramid():
    shape = dict(embed_dim=16, depth=1, num_heads=1)
    out = PyramidBackbone(DenseViT3("tiny", **shape), 8)(torch.rand(1, 3, 64, 96))
    sides = {name: tuple(y.shape[-2:]) for name, y in out.items()}
    assert sides == {"0": (16, 24), "1": (8, 12), "2": (4, 6), "3": (2, 3), "pool": (1, 2)}
    model = small(backbone="vit3_tiny", backbone_kwargs=shape)
    loss_of(model, *sample([(64, 96)])).backward()
    assert not [name for name, p in model.named_parameters() if p.grad is None]


def test_frozen_stages_and_weights_of_a_file(tmp_path, caplog):
    body = DenseHViT3("tiny", **SHAPE)
    write_tensors(tmp_path / "body.safetensors", body.state_dict())
    with caplog.at_level(logging.INFO):
        model = small(pretrained=tmp_path / "body.safetensors", frozen_stages=1)
    assert f"body.safetensors: matched {len(body.state_dict())} tensors" in caplog.text
    assert all(torch.equal(value, model.backbone.body.state_dict()[name]) for name, value in body.state_dict().items())
    loss_of(model, *sample([(64, 96)])).backward()
    learning = {name for name, p in model.named_parameters() if p.grad is not None}
    frozen = {f"backbone.body.{name}" for name, p in body.named_parameters() if name.startswith("layers.0.")}
    assert frozen and not frozen & learning and any(name.startswith("backbone.body.layers.1") for name in learning)
    write_tensors(tmp_path / "other.safetensors", {"foreign": torch.zeros(3)})
    with pytest.raises(WeightsError, match="other.safetensors fits 0.0 %"):
        small(pretrained=tmp_path / "other.safetensors")


def test_wrong_backbones_are_refused():
    with pytest.raises(ValueError, match="backbone='resnet' is unknown; use a module or one of: h_vit3_tiny"):
        mask_rcnn("resnet", 2)
    with pytest.raises(ValueError, match="backbone=Linear must have .channels"):
        mask_rcnn(nn.Linear(1, 1), 2)
    with pytest.raises(ValueError, match="frozen_stages is an option of backbones given by name"):
        mask_rcnn(Body(), 2, frozen_stages=1)


def test_heads_are_counted_as_pytorch_counts_them():
    model = small(num_classes=3).eval()
    parts = count_parts(model, (64, 90))
    heads = model.roi_heads
    pooled = torch.zeros(1, 16, 7, 7)

    class Boxes(nn.Module):
        in_chans = 16

        def __init__(self):
            super().__init__()
            self.head, self.predictor = heads.box_head, heads.box_predictor

        def forward(self, x):
            return self.predictor(self.head(x))

    class Masks(Boxes):
        def __init__(self):
            nn.Module.__init__(self)
            self.head, self.predictor = heads.mask_head, heads.mask_predictor

    assert parts["boxes"] == 1000 * counted_macs(Boxes(), pooled.shape[-2:])
    assert parts["masks"] == 100 * counted_macs(Masks(), (14, 14)) == 100 * count_macs(Masks(), (14, 14))
    assert parts == count_parts(model, (64, 96)), "images are padded to a multiple of 32"


def test_published_detectors_count_as_the_paper_says():
    """Facts of the paper's table 8: 48.4 M parameters, 271 G multiply-adds at 1280x800."""
    assert len(BACKBONES) == 6
    with torch.device("meta"):
        model = mask_rcnn("h_vit3_tiny", 80)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(48.4e6, rel=0.005)
    assert sum(count_parts(model, (800, 1280)).values()) == pytest.approx(271e9, rel=0.02)


def test_what_is_found_does_not_depend_on_the_first_image():
    """torchvision takes the scale of its maps from the first image, without its padding: wrong for 64x200 here."""
    low, other = torch.rand(3, 64, 200), torch.rand(3, 97, 131)
    model = small(box_score_thresh=0.0).eval()
    fresh = small(box_score_thresh=0.0).eval()
    fresh.load_state_dict(model.state_dict())
    with torch.no_grad():
        model([low])
        after, alone = model([other])[0], fresh([other])[0]
    assert len(alone["scores"]) and all(torch.equal(after[name], alone[name]) for name in alone)
    assert model.roi_heads.box_roi_pool.scales == model.roi_heads.mask_roi_pool.scales == [1 / 4, 1 / 8]


def test_the_loop_of_the_documentation_runs(tmp_path, monkeypatch):
    """As it stands there, with a small network on four images."""
    make_coco(tmp_path / "coco")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("vit3.detection.mask_rcnn", lambda name, classes, pretrained: small(classes))
    text = (ROOT / "docs" / "detection_and_segmentation.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(import torch\n.*?)```", text, re.DOTALL)
    names = {}
    exec(code, names)
    assert names["loss"].isfinite() and all(p.grad is not None for p in names["model"].parameters())
    assert [one.keys() for one in names["found"]] == [{"boxes", "labels", "scores", "masks"}] * 2
