"""Rectified flow: straight lines, their velocity, and the times of training."""

import math

import pytest
import torch

from vit3.diffusion import RectifiedFlow


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def normal(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def test_ends_and_middle():
    x0, noise = normal(3, 2, 4, 4), normal(3, 2, 4, 4)
    xs = RectifiedFlow().add_noise(x0, torch.tensor([0.0, 1000.0, 250.0]), noise)
    assert torch.equal(xs[0], x0[0]) and torch.equal(xs[1], noise[1])
    torch.testing.assert_close(xs[2], 0.75 * x0[2] + 0.25 * noise[2])


def test_what_is_learnt_is_the_velocity():
    """The derivative of x_s by s, from a difference; a network that knows it loses nothing."""
    flow, t = RectifiedFlow(), torch.tensor([125.0, 500.0], dtype=torch.float64)
    x0, noise = normal(2, 1, 3, 3), normal(2, 1, 3, 3)
    velocity = (flow.add_noise(x0, t + 50, noise) - flow.add_noise(x0, t - 50, noise)) / 0.1
    seen = {}

    def network(x, t, y):
        seen.update(x=x, t=t, y=y)
        return velocity

    y = torch.tensor([1, 0])
    loss = flow.losses(network, x0, t, y, noise)["loss"]
    assert loss.dtype == torch.float32 and loss.max() < 1e-10
    assert torch.equal(seen["x"], flow.add_noise(x0, t, noise)) and seen["y"] is y
    assert seen["t"].tolist() == [125, 500]
    still = flow.losses(lambda x, t, y: torch.zeros_like(x), x0, t, y, noise)["loss"]
    torch.testing.assert_close(still.double(), ((noise - x0) ** 2).mean((1, 2, 3)), rtol=1e-6, atol=1e-6)


def test_moving_along_the_line():
    flow, t, after = RectifiedFlow(), torch.tensor([900.0, 300.0]), torch.tensor([200.0, 0.0])
    x0, noise = normal(2, 1, 3, 3), normal(2, 1, 3, 3)
    moved = flow.moved(flow.add_noise(x0, t, noise), noise - x0, t, after)
    torch.testing.assert_close(moved, flow.add_noise(x0, after, noise), rtol=1e-6, atol=1e-6)


def test_training_times():
    n = 20000
    even = RectifiedFlow("uniform").draw_times(n) / 1000
    assert abs(even.mean() - 1 / 2) < 5 / math.sqrt(12 * n) and even.min() < 0.01 and even.max() > 0.99
    logits = (RectifiedFlow("logit_normal").draw_times(n).double() / 1000).logit()
    assert abs(logits.mean()) < 5 / math.sqrt(n) and abs(logits.std() - 1) < 5 / math.sqrt(2 * n)


def test_no_variance():
    flow, t = RectifiedFlow(), torch.tensor([1.5, 1000.0])
    assert not flow.learn_sigma and flow.out_chans(4) == 4 and flow.model_times(t) is t


def test_refused():
    with pytest.raises(ValueError, match="time_sampling='cosmap' is unknown; use one of: uniform, logit_normal"):
        RectifiedFlow("cosmap")
