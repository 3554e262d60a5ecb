"""The test loss: each image has its own time and noise, whatever processes and batches do."""

from __future__ import annotations

import pytest
import torch

from tests.processes import run_processes
from vit3.diffusion import GaussianDiffusion, RectifiedFlow
from vit3.diffusion.codec import Pixels
from vit3.engine.distributed import Processes, start_processes
from vit3.engine.run_place import RunPlace
from vit3.generation.evaluate import SCORE, TestLoss

CPU = Processes(torch.device("cpu"))
IMAGES = torch.randn(29, 1, 4, 4, generator=torch.Generator().manual_seed(5))
LABELS = torch.arange(29) % 3


class Half(torch.nn.Module):
    def forward(self, x, t, y):
        self.asked_in_training = self.training
        return torch.cat([0.5 * x + 0.01 * y[:, None, None, None], 0 * x], dim=1)


def loader_of(batch, images=IMAGES, labels=LABELS):
    return list(zip(images.split(batch), labels.split(batch)))


def loss_of(process=GaussianDiffusion(), **options):
    return TestLoss(process, Pixels(1), seed=1)(Half(), loader_of(7, **options), CPU)


@pytest.mark.parametrize("batch", [1, 7, 29, 64])
def test_not_by_the_batch(batch):
    score = TestLoss(GaussianDiffusion(), Pixels(1), seed=1)
    assert score(Half(), loader_of(batch), CPU) == pytest.approx(loss_of(), rel=1e-6)


def test_by_hand():
    """The mean over images of the process's loss."""
    found = loss_of()
    assert set(found) == {"loss", "mse", "vb"}
    assert found["loss"] == pytest.approx(found["mse"] + found["vb"], rel=1e-6)
    other = TestLoss(GaussianDiffusion(), Pixels(1), seed=2)(Half(), loader_of(7), CPU)
    assert other["loss"] != found["loss"] and other["loss"] == pytest.approx(found["loss"], rel=0.5)


def test_undecodable_images_are_left_out():
    labels = LABELS.clone()
    labels[-3:] = -1
    assert loss_of(labels=labels) == pytest.approx(loss_of(images=IMAGES[:-3], labels=LABELS[:-3]), rel=1e-6)


@pytest.mark.parametrize("training", [True, False])
def test_nothing_else_changes(training):
    """Neither the training mode nor the random numbers of training."""
    model = Half().train(training)
    state = torch.get_rng_state()
    TestLoss(RectifiedFlow(), Pixels(2), seed=1)
    TestLoss(GaussianDiffusion(), Pixels(1), seed=1)(model, loader_of(7), CPU)
    assert model.training is training and torch.equal(torch.get_rng_state(), state)
    assert model.asked_in_training is False  # scored as it is evaluated, whatever it was


def share():
    """The loss over the images that this process is dealt."""
    from tests.toy import configured
    from vit3.build.data import build_data, build_eval_loader

    processes = start_processes("cpu")
    cfg = configured("data.mean=[0.5]", "data.std=[0.5]", "augment=none")
    data = build_data(cfg)
    data.val.images = data.val.images[:29]
    loader = build_eval_loader(cfg, data.val, processes, 4)
    return TestLoss(GaussianDiffusion(), Pixels(1), seed=1)(Half(), loader, processes)


def test_not_by_the_processes():
    alone, *others = run_processes(share, 1), run_processes(share, 2), run_processes(share, 3)
    for found in others:
        assert all(scores == pytest.approx(alone[0], rel=1e-6) for scores in found)


def test_stopped():
    score = TestLoss(GaussianDiffusion(), Pixels(1), seed=1)
    assert score(Half(), loader_of(7), CPU, stop=lambda: True) is None


def test_the_smallest_loss_is_the_best():
    place = RunPlace()
    for epoch, (raw, ema) in enumerate([(0.5, 0.7), (0.3, 0.2), (0.4, 0.25)]):
        improved = place.note_best({"epoch": epoch, "val/loss": raw, "val_ema/loss": ema}, SCORE)
        assert improved == ([], ["raw", "ema"])[epoch < 2]
    assert place.better(SCORE) == {"epoch": 1, "weights": "ema", "loss": 0.2}
