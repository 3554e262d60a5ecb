"""Average precision is COCOeval's, with the file's own ids, crowds included, every image once."""

from __future__ import annotations

import contextlib
import io
import json

import numpy as np
import pytest
import torch
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from torch import nn

from tests.detection.toy import edit, make_coco
from vit3.data.coco import CocoImages, make_coco_eval_loader
from vit3.detection.evaluate import coco_results, coco_scores, evaluate_detections
from vit3.engine.distributed import Processes

CPU = Processes(torch.device("cpu"))
NAMES = [f"{kind}_{name}" for kind in ("bbox", "segm") for name in ("AP", "AP50", "AP75")]


class Oracle(nn.Module):
    """Finds what is on the images, which it is shown in the order of the data; ``change`` spoils it."""

    def __init__(self, data, change=lambda index, target: target):
        super().__init__()
        self.data, self.change, self.seen = data, change, 0

    def forward(self, images):
        outputs = []
        for _ in images:
            target = self.data.target(self.seen)
            boxes, labels, masks = (target[k].as_subclass(torch.Tensor) for k in ("boxes", "labels", "masks"))
            output = dict(boxes=boxes, labels=labels, masks=masks[:, None].float(), scores=torch.ones(len(labels)))
            outputs.append(self.change(self.seen, output))
            self.seen += 1
        return outputs


@pytest.fixture
def root(tmp_path):
    return make_coco(tmp_path / "coco")


def opened(root, **options):
    return CocoImages(root / "annotations" / "instances_val2017.json", root / "val2017", **options)


def scores(data, change=lambda index, output: output, batch=3):
    loader = make_coco_eval_loader(data, batch, rank=0, world_size=1, workers=0, device=CPU.device)
    return evaluate_detections(Oracle(data, change), loader, CPU)


def spoiled(index, output):
    """Boxes moved, masks cut, scores of all kinds, a false positive."""
    rng = np.random.default_rng(index)
    n = len(output["labels"])
    output["boxes"] = output["boxes"] + torch.from_numpy(rng.uniform(-4, 4, (n, 4))).float()
    output["masks"][..., ::5] *= 0.3
    output["scores"] = torch.from_numpy(rng.uniform(0.1, 1, n)).float()
    if index == 1:
        output["labels"] = output["labels"].flip(0)
    return output


@pytest.mark.parametrize("batch", [1, 3])
def test_the_truth_scores_one(root, batch):
    assert scores(opened(root), batch=batch) == dict.fromkeys(NAMES, 1.0)


def test_nothing_found_scores_nought(root):
    def none(index, output):
        return {name: value[:0] for name, value in output.items()}

    assert scores(opened(root), none) == dict.fromkeys(NAMES, 0.0)


def test_scores_are_those_of_cocoeval_on_the_dumped_detections(root, tmp_path):
    """By hand: a file of results, pycocotools alone."""
    data = opened(root)
    ours = scores(data, spoiled)
    results = []
    oracle = Oracle(data, spoiled)
    for image_id in data.image_ids:
        results += coco_results(image_id, oracle([None])[0], data.category_ids)
    assert {r["category_id"] for r in results} == {3, 7} and {r["image_id"] for r in results} == {10, 11, 13}
    (tmp_path / "results.json").write_text(json.dumps(results))
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO(str(data.annotations))
        for kind in ("bbox", "segm"):
            evaluation = COCOeval(truth, truth.loadRes(str(tmp_path / "results.json")), kind)
            evaluation.evaluate()
            evaluation.accumulate()
            evaluation.summarize()
            for place, name in enumerate(("AP", "AP50", "AP75")):
                assert ours[f"{kind}_{name}"] == evaluation.stats[place]
    assert 0 < ours["bbox_AP"] < 1 and 0 < ours["segm_AP"] < 1 and ours["bbox_AP"] != ours["segm_AP"]


def test_what_lies_in_a_crowd_is_no_mistake(root):
    """The first image's crowd of discs: a disc found in it counts neither way; elsewhere it is wrong."""

    def extra(x):
        def change(index, output):
            if index == 0:
                output = {name: torch.cat([value, value[:1]]) for name, value in output.items()}
                output["boxes"][-1] = torch.tensor([x, 60.0, x + 4, 90])
                output["masks"][-1] = 0
                output["masks"][-1, :, 60:90, int(x) : int(x) + 4] = 1
                output["scores"] = torch.tensor([0.5] * (len(output["labels"]) - 1) + [0.9])
            return output

        return change

    assert scores(opened(root), extra(1)) == dict.fromkeys(NAMES, 1.0)
    assert scores(opened(root), extra(100))["bbox_AP"] < 1


def test_an_absent_class_is_in_no_mean(root):
    edit(root, "val", lambda c: c.update(annotations=[a for a in c["annotations"] if a["category_id"] == 7]))
    data = opened(root)
    assert data.absent() == ["square"]
    assert scores(data) == dict.fromkeys(NAMES, 1.0)


def test_classes_that_the_file_lacks_are_left_out():
    output = dict(
        boxes=torch.tensor([[1.0, 2, 5, 8]] * 2), labels=torch.tensor([1, 2]), scores=torch.tensor([0.5, 0.25])
    )
    expected = [{"image_id": 4, "category_id": 9, "bbox": [1.0, 2.0, 4.0, 6.0], "score": 0.25}]
    assert coco_results(4, output, (None, 9)) == expected


def test_boxes_alone(root):
    data = opened(root, masks=False)
    found = [{"image_id": 10, "category_id": 3, "bbox": [40, 28, 22, 22], "score": 0.5}]
    assert list(coco_scores(data.coco, found, masks=False)) == ["bbox_AP", "bbox_AP50", "bbox_AP75"]


@pytest.mark.parametrize("training", [True, False])
def test_mode_is_restored_and_stopping_gives_nothing(root, training):
    data = opened(root)
    model = Oracle(data).train(training)
    loader = make_coco_eval_loader(data, 2, rank=0, world_size=1, workers=0, device=CPU.device)
    assert evaluate_detections(model, loader, CPU, stop=lambda: True) is None and model.seen == 0
    evaluate_detections(model, loader, CPU)
    assert model.training is training
