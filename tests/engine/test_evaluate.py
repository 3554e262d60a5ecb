"""Evaluation: every image counts once, whatever the batch."""

from __future__ import annotations

import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import Dataset

from tests.processes import run_processes
from vit3.data import make_eval_loader
from vit3.engine.distributed import Processes, start_processes
from vit3.engine.evaluate import evaluate

CPU = Processes(torch.device("cpu"))


@pytest.fixture
def problem():
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 7), nn.Dropout(0.5))
    return model, torch.randn(29, 3, 2, 2), torch.randint(0, 7, (29,))


@pytest.mark.parametrize("batch", [1, 7, 29, 64])
def test_scores_do_not_depend_on_the_batch(problem, batch):
    model, images, labels = problem
    scores = evaluate(model, list(zip(images.split(batch), labels.split(batch))), CPU)
    logits = model[1](images.flatten(1))  # without dropout
    rank = (logits > logits.gather(1, labels[:, None])).sum(1)
    assert scores["top1"] == pytest.approx(100 * (rank == 0).double().mean().item(), abs=1e-9)
    assert scores["top5"] == pytest.approx(100 * (rank < 5).double().mean().item(), abs=1e-9)
    assert scores["loss"] == pytest.approx(nn.functional.cross_entropy(logits, labels).item(), abs=1e-6)


def test_undecodable_images_are_left_out(problem):
    model, images, labels = problem
    whole = evaluate(model, [(images[3:], labels[3:])], CPU)
    labels = labels.clone()
    labels[:3] = -1
    assert evaluate(model, list(zip(images.split(7), labels.split(7))), CPU) == pytest.approx(whole, abs=1e-6)


@pytest.mark.parametrize("training", [True, False])
def test_training_mode_is_restored(problem, training):
    model, images, labels = problem
    model.train(training)
    evaluate(model, [(images, labels)], CPU)
    assert model.training is training


class Shades(Dataset):
    """``count`` small images of one grey each, a label for every seventh shade."""

    def __init__(self, count: int):
        self.count, self.transform = count, None

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        return self.transform(Image.new("L", (4, 4), i * 7 % 256)), i % 7


def score_shades(count: int, batch: int, stopping: int | None = None):
    """Scores, unless process ``stopping`` is asked to stop at its second batch."""
    processes, asked = start_processes("cpu"), []

    def stop():
        asked.append(1)
        return processes.rank == stopping and len(asked) == 2

    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 7))
    loader = make_eval_loader(
        Shades(count), batch, rank=processes.rank, world_size=processes.world_size, img_size=(4, 4), in_chans=1,
        mean=(0.5,), std=(0.5,), interpolation="bilinear", crop_pct=1.0, workers=0, device=processes.device,
    )  # fmt: skip
    return evaluate(model, loader, processes, stop=stop)


@pytest.mark.parametrize(("count", "world_size", "batch"), [(7, 2, 2), (1001, 3, 64), (1, 2, 4), (2, 3, 1)])
def test_every_image_counts_once_on_any_number_of_processes(count, world_size, batch):
    alone = score_shades(count, 1000)
    for scores in run_processes(score_shades, world_size, count, batch, timeout=60):
        assert scores == pytest.approx(alone, abs=1e-6)


def test_evaluation_can_be_stopped(problem):
    model, images, labels = problem
    asked = iter([False, False, True])
    assert evaluate(model, list(zip(images.split(7), labels.split(7))), CPU, stop=lambda: next(asked)) is None


def test_one_process_that_is_stopped_stops_all():
    assert run_processes(score_shades, 2, 20, 4, 1, timeout=60) == [None, None]
