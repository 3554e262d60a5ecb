"""The task of a generator: what it draws, and what it makes of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vit3.diffusion import GaussianDiffusion, RectifiedFlow
from vit3.diffusion.codec import Pixels
from vit3.tasks import DiffusionTask


class Recorder(nn.Module):
    """Predicts noise badly, and remembers what it was asked."""

    null_label = 10

    def __init__(self, learn_sigma: bool):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(0.5))
        self.learn_sigma, self.asked = learn_sigma, None

    def forward(self, x, t, y):
        self.asked = x, t, y
        return torch.cat([self.factor * x, torch.zeros_like(x)], dim=1) if self.learn_sigma else self.factor * x


def made(label_drop=0.0, learn_sigma=True, process=None):
    model = Recorder(learn_sigma)
    process = process or GaussianDiffusion(learn_sigma=learn_sigma)
    return DiffusionTask(model, process, Pixels(1), label_drop, device=torch.device("cpu"), verbose=False), model


@pytest.mark.parametrize(("drop", "share"), [(0.0, 0.0), (1.0, 1.0), (0.1, 0.1)])
def test_labels_are_dropped(drop, share):
    task, model = made(drop)
    torch.manual_seed(0)
    task(torch.zeros(4000, 1, 2, 2), torch.arange(4000) % 10)
    y = model.asked[2]
    kept = y != 10
    assert torch.equal(y[kept], (torch.arange(4000) % 10)[kept])
    assert (~kept).double().mean().item() == pytest.approx(share, abs=0.015)


@pytest.mark.parametrize("learn_sigma", [True, False])
def test_loss_is_the_mean_of_the_process(learn_sigma):
    """The same draws, by hand."""
    task, model = made(0.1, learn_sigma)
    images, labels = torch.randn(6, 1, 4, 4), torch.arange(6)
    torch.manual_seed(3)
    result = task(images, labels)
    torch.manual_seed(3)
    y = torch.where(torch.rand(6) < 0.1, 10, labels)
    t = torch.randint(1000, (6,))
    wanted = task.process.losses(model, images, t, y, torch.randn(6, 1, 4, 4))
    assert result.keys() == wanted.keys() == ({"loss", "mse", "vb"} if learn_sigma else {"loss"})
    assert all(torch.equal(result[name], wanted[name].mean()) for name in wanted)
    result["loss"].backward()
    assert model.factor.grad.abs() > 0


def test_noise_is_added_to_what_the_codec_makes():
    class Twice(Pixels):
        def encode(self, images):
            return 2 * images + 3

    task, _ = made(0.1)
    images, labels = torch.randn(6, 1, 4, 4), torch.arange(6)
    torch.manual_seed(3)
    wanted = task(2 * images + 3, labels)
    task.codec = Twice(1)
    torch.manual_seed(3)
    assert torch.equal(task(images, labels)["loss"], wanted["loss"])


def test_times_are_spread():
    task, model = made()
    task(torch.zeros(4000, 1, 1, 1), torch.zeros(4000, dtype=torch.long))
    t = model.asked[1]
    assert t.min() < 5 and t.max() > 994 and t.double().mean().item() == pytest.approx(500, abs=20)
    flow, model = made(learn_sigma=False, process=RectifiedFlow("logit_normal"))
    flow(torch.zeros(4000, 1, 1, 1), torch.zeros(4000, dtype=torch.long))
    s = model.asked[1] / 1000
    assert 0 < s.min() and s.max() < 1
    assert s.logit().std().item() == pytest.approx(1, abs=0.05)


def test_everything_follows_from_the_seed():
    task, _ = made(0.1)
    images, labels = torch.randn(6, 1, 4, 4), torch.arange(6)
    losses = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        losses.append(task(images, labels)["loss"].item())
    assert losses[0] == losses[1] != losses[2]
