"""Two processes: they train without find_unused_parameters, and find together what one finds."""

from __future__ import annotations

import json

import pytest
import torch

from tests.detection.toy import CONFIG, SIZES, arguments, make_coco, no_pictures, small
from tests.processes import run_processes
from vit3.build import detection
from vit3.data.coco import CocoImages, make_coco_eval_loader
from vit3.detection.evaluate import collect_results, evaluate_detections
from vit3.engine.distributed import start_processes


def share(root):
    """What the processes find together, and the scores that each of them gets."""
    processes = start_processes("cpu")
    torch.manual_seed(0)
    model = small(box_score_thresh=0.0)
    data = CocoImages(root / "annotations" / "instances_val2017.json", root / "val2017")
    where = dict(rank=processes.rank, world_size=processes.world_size)
    loader = make_coco_eval_loader(data, 1, **where, workers=0, device=processes.device)
    return collect_results(model, loader, processes), evaluate_detections(model, loader, processes)


def trained(root, output):
    """Train; returns the weights of this process."""
    no_pictures(setattr)
    kept, build = [], detection.build_detection_trainer

    def building(*args):
        kept.append(build(*args))
        return kept[-1]

    detection.build_detection_trainer = building
    more = ("name=c", "engine.epochs=1", "optim.warmup_epochs=0", "model.frozen_stages=1", "model.with_cp=true")
    detection.train(CONFIG, arguments(root, output, *more))
    model = kept[0].task.trainable_module.module
    return {name: value.numpy() for name, value in model.state_dict().items()}


def both(evaluated, learnt, output):
    return share(evaluated), trained(learnt, output)


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    """Five images to find things on; two to learn from, of which one has no boxes."""
    folder = tmp_path_factory.mktemp("data")
    five = make_coco(folder / "five", sizes=[*SIZES, (64, 64)])
    return five, make_coco(folder / "two", sizes=[(97, 131), (64, 200)], empty=1), folder


@pytest.fixture(scope="module")
def results(roots):
    return run_processes(both, 2, *roots)


def test_processes_give_what_one_gives(roots, results):
    """Five images on two processes: one is read twice and counted once."""
    alone, scores = share(roots[0])
    ((together, first), _), ((_, second), _) = results

    def ordered(found):
        return sorted((r["image_id"], r["category_id"], -r["score"], r["segmentation"]["counts"]) for r in found)

    assert len(alone) >= 5 and ordered(alone) == ordered(together)
    assert first == second == scores


def test_training_with_an_image_without_boxes_in_one_process(roots, results):
    """A batch of one image each, of another size in every process, the first stage frozen, blocks recomputed."""
    (_, first), (_, second) = results
    assert first.keys() == second.keys() and all((first[name] == second[name]).all() for name in first)
    (record,) = map(json.loads, (roots[2] / "c" / "metrics.jsonl").read_text().splitlines())
    assert record["updates"] == 1 and 0 < record["train/loss"] < 100
