"""The moving average is its formula, whatever is around the network (R13)."""

from __future__ import annotations

import pytest
import torch

from tests.engine.test_combinations import COMMON, MODELS, cheap_compile
from tests.processes import run_processes
from tests.toy import configured, trainer_of, updates_of
from vit3.engine.distributed import start_processes

DECAY = 0.5  # the warm-up's own is 0, 0.37, 0.52 at the first three updates
UPDATES = 4


def follow(*overrides: str):
    """Train with warm-up and average by hand beside; returns that, the network's average, and its last weights."""
    ema = (f"engine.ema_decay={DECAY}", "engine.ema_batch=8", "engine.ema_warmup=true")
    options = (*COMMON, *MODELS["h_vit3_tiny"], *ema, *overrides)
    trainer = trainer_of(configured(*options), start_processes("cpu"), images=8 * UPDATES)
    copy = "engine.ema_buffers=copy" in overrides
    statistics = {name for name, _ in trainer.updater.model.named_buffers()}
    hand = {}
    for step, _outcome in enumerate(updates_of(trainer)):
        decay = min(DECAY, 1 - (1 + step) ** (-2 / 3))
        for name, value in trainer.updater.model.state_dict().items():
            latest = not value.is_floating_point() or (copy and name in statistics)
            kept = 0.0 if latest or step == 0 else decay
            hand[name] = value.clone() if kept == 0 else kept * hand[name] + (1 - kept) * value
    assert trainer.updater.counts.updates == UPDATES
    now = {name: value.clone() for name, value in trainer.updater.model.state_dict().items()}
    return hand, dict(trainer.task.trainable_module_ema.module.state_dict()), now


def check(hand, average, now):
    assert hand.keys() == average.keys()
    for name, value in hand.items():
        torch.testing.assert_close(average[name], value, rtol=1e-6, atol=1e-6)
    moved = [name for name in hand if name.endswith("weight") and not torch.equal(average[name], now[name])]
    assert moved


@pytest.mark.parametrize("buffers", ["copy", "average"])
def test_plain(buffers):
    hand, average, now = follow(f"engine.ema_buffers={buffers}")
    check(hand, average, now)
    statistics = [name for name in hand if "running" in name]
    assert statistics and all(torch.equal(average[name], now[name]) == (buffers == "copy") for name in statistics)


def test_compiled(monkeypatch):
    monkeypatch.setattr(torch, "compile", cheap_compile)
    check(*follow("engine.compile=true"))


@pytest.mark.parametrize("buffers", [pytest.param("copy", marks=pytest.mark.slow), "average"])
def test_on_two_processes(buffers):
    one, other = run_processes(follow, 2, f"engine.ema_buffers={buffers}")
    check(*one)
    assert all(torch.equal(value, other[1][name]) for name, value in one[1].items())
