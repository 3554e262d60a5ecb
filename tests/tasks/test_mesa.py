"""MESA: its loss by hand, its teacher, its start."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.toy import configured, one_update, trainer_of
from vit3.errors import UserError
from vit3.tasks import MESATask
from vit3.tasks.mesa import mesa_loss


def test_loss_by_hand():
    """Two images, three classes: minus the teacher's probabilities times the logarithm of the student's, averaged."""
    output, teacher = [[1.0, 0.0, -1.0], [0.5, 2.0, 0.0]], [[0.0, 1.0, 0.0], [3.0, 0.0, 0.0]]

    def softmax(row):
        return [math.exp(x) / sum(map(math.exp, row)) for x in row]

    hand = -sum(q * math.log(p) for o, t in zip(output, teacher) for p, q in zip(softmax(o), softmax(t))) / 2
    assert mesa_loss(torch.tensor(output), torch.tensor(teacher)).item() == pytest.approx(hand, abs=1e-6)
    half = mesa_loss(torch.tensor(output).half(), torch.tensor(teacher).half())
    assert half.dtype == torch.float32 and half.item() == pytest.approx(hand, abs=1e-3)


@pytest.fixture
def task():
    """A student with batch norm and dropout, and a teacher that differs from it."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    task = MESATask(model, weight=1.5, start=0.25, criterion_kwargs=dict(soft_targets=True), verbose=False)
    task.setup_ema(decay=0.9)
    with torch.no_grad():
        for p in task.trainable_module_ema.parameters():
            p.add_(torch.randn_like(p))
    return task


def test_the_teacher_is_the_average_in_evaluation_mode_without_gradient(task):
    x, target = torch.randn(6, 4), torch.rand(6, 3).softmax(-1)
    teacher = task.trainable_module_ema.module
    statistics = [b.clone() for b in teacher.buffers()]
    wanted = teacher(x)  # as built: evaluation mode
    task.train()  # reaches the average, too
    task.active = True
    result = task(x, target)
    output = result["output"]
    mesa = -(wanted.softmax(-1) * output.log_softmax(-1)).sum(-1).mean()
    plain = -(target * output.log_softmax(-1)).sum(-1).mean()
    torch.testing.assert_close(result["mesa"], mesa)
    torch.testing.assert_close(result["loss"], plain + 1.5 * mesa)
    result["loss"].backward()
    assert all(p.grad is None for p in teacher.parameters())
    assert all(p.grad is not None for p in task.trainable_module.parameters())
    assert all(torch.equal(b, before) for b, before in zip(teacher.buffers(), statistics))


def test_it_starts_after_a_quarter_of_the_epochs(task):
    for epochs, first in ((300, 75), (10, 3), (1, 1)):
        active = []
        for epoch in range(epochs):
            task.start_epoch(epoch, epochs)
            active.append(task.active)
        assert active == [epoch >= first for epoch in range(epochs)]
    task.active = False
    x, target = torch.randn(6, 4), torch.rand(6, 3).softmax(-1)
    result = task(x, target)
    assert "mesa" not in result
    torch.testing.assert_close(result["loss"], F.cross_entropy(result["output"], target))


def test_both_parts_are_told_apart_in_an_update():
    trainer = trainer_of(configured("task=mesa", "task.weight=2.0", "++model.kwargs.depth=1"))
    trainer.task.active = True
    losses = one_update(trainer).losses
    teacher = one_update(trainer_of(configured("++model.kwargs.depth=1"))).losses  # without the second part
    assert losses["loss"] == pytest.approx(teacher["loss"] + 2.0 * losses["mesa"], rel=1e-6)


def test_it_needs_an_average():
    with pytest.raises(UserError, match="task=mesa learns from the moving average; set engine.ema_decay"):
        trainer_of(configured("task=mesa", "engine.ema_decay=null"))
