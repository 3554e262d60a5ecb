"""Evaluation: every image counts once, whatever the batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vit3.engine.distributed import Processes
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
