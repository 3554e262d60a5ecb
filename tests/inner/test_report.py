"""The report of the inner training, each entry by hand for a linear inner model."""

import pytest
import torch

from tests.helpers import max_error
from vit3 import TTT
from vit3.inner import InnerSpec

B, G, D, H, W = 2, 2, 3, 2, 3
N = H * W


def some(*shape):
    return torch.randn(shape, dtype=torch.float64)


def mixer_and_parts(**knobs):
    """A mixer of one fc model with random weights; its x, and its k, v (B, G, N, D) cut by hand."""
    mixer = TTT(
        G * D, G, inner=InnerSpec(**{"model": "fc", "beside": (), "loss": "mse", "scale": 0.5, **knobs})
    ).double()
    with torch.no_grad():
        for p in mixer.parameters():
            p.copy_(some(*p.shape) / 2)
    x = some(B, N, G * D)
    _, k, v = (t.view(B, N, G, D).transpose(1, 2) for t in mixer.qkv(x).detach().chunk(3, dim=-1))
    return mixer, x, k, v


@pytest.mark.parametrize("rate", ["fixed", "token_head"])
@pytest.mark.parametrize("norm", ["soft", "clip", "none"])
def test_by_hand(rate, norm):
    clip = dict(max_norm=0.1) if norm == "clip" else {}
    mixer, x, k, v = mixer_and_parts(rate=rate, gradient_norm=norm, lr=0.3, **clip)
    gate = torch.ones(B, G, N, 1, dtype=torch.float64)
    if rate == "token_head":
        gate = torch.sigmoid(x @ mixer.rate.weight.T).detach().transpose(1, 2)[..., None]
    w0 = mixer.w1.detach()
    e = k @ w0 - v
    g = 0.5 / N * k.mT @ (gate * e)
    length = g.square().sum(dim=-2).sqrt()  # of each output column
    factor = {"soft": 1 / (length + 1), "clip": (0.1 / length).clamp(max=1), "none": torch.ones_like(length)}[norm]
    w = w0 - 0.3 * g * factor[..., None, :]
    report = mixer(x, H, W, return_inner=True)[1]["fc"]
    after = k @ w - v
    wanted = {
        "loss_before": 0.25 / N * (gate * e.square()).sum(dim=(-2, -1)),
        "loss_after": 0.25 / N * (gate * after.square()).sum(dim=(-2, -1)),
        "mixed_derivative": (0.5 / N * gate).mean(dim=(-2, -1)),
        "signal_share": torch.ones(B, G, dtype=torch.float64),
        "grad_norm": length,
        "clip_ratio": factor,
        "update_norm": (w - w0).square().sum(dim=(1, 2, 3)).sqrt(),
        "relative_update": (w - w0).square().sum(dim=(1, 2, 3)).sqrt() / w0.square().sum().sqrt(),
        "fast_weights": w,
    }
    assert list(report) == list(wanted)
    for name, value in wanted.items():
        got = report[name]["w1"] if isinstance(report[name], dict) else report[name]
        assert got.shape == value.shape and max_error(got, value) <= 1e-12, name


def test_what_the_control_gave_is_reported():
    """Loss and gradient are of the keys and values that were trained on, from the start that was used."""
    mixer, x, k, v = mixer_and_parts(control="shuffle_v_images", gradient_norm="none")
    report = mixer(x, H, W, return_inner=True)[1]["fc"]
    error = k @ mixer.w1.detach() - v[[1, 0]]
    assert max_error(report["loss_before"], 0.25 / N * error.square().sum(dim=(-2, -1))) <= 1e-12
    mixer, x, k, v = mixer_and_parts(control="zero_start", gradient_norm="none")
    report = mixer(x, H, W, return_inner=True)[1]["fc"]
    assert max_error(report["loss_before"], 0.25 / N * v.square().sum(dim=(-2, -1))) <= 1e-12
    assert max_error(report["fast_weights"]["w1"], 0.5 / N * k.mT @ v) <= 1e-12


def test_without_gradient():
    """Zero gradients are left as they are, and a start of zero has no relative update."""
    mixer, x, *_ = mixer_and_parts(loss="dot")
    with torch.no_grad():
        mixer.qkv.weight.zero_(), mixer.qkv.bias.zero_()
    report = mixer(x, H, W, return_inner=True)[1]["fc"]
    assert (report["clip_ratio"]["w1"] == 1).all() and not report["relative_update"]["w1"].any()
    mixer, x, *_ = mixer_and_parts(control="zero_start")
    assert mixer(x, H, W, return_inner=True)[1]["fc"]["relative_update"]["w1"].isinf().all()
