"""What a generator makes of the sampler's output, and which network, weights and settings draw."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from tests.toy import CPU, configured, trainer_of
from vit3.build.sampling import _filled, build_sheets
from vit3.config.schema import SamplingConfig
from vit3.diffusion.codec import Pixels
from vit3.generation.generator import Generator

TINY = "++model.kwargs={patch_size: 2, embed_dim: 16, depth: 1, num_heads: 2}"


class Fixed:
    """Gives what it was made with, and notes how it was asked."""

    def __init__(self, values):
        self.values, self.asked = values, None

    def sample(self, model, labels, numbers, **how):
        self.asked = model.training, labels.tolist(), list(numbers), how
        return self.values


class Rough(Pixels):
    """Cuts nothing off, and gives images that are too large, as an autoencoder of patches may."""

    def decode(self, x0):
        return x0


def generator(values, **options):
    defaults = dict(codec=Rough(1), classes=("a", "b"), img_size=(1, 6), seed=7, device=CPU.device)
    return Generator(model=nn.Dropout(), sampler=Fixed(values), **{**defaults, **options})


def test_pixels():
    """-1 is 0, 1 is 255, what lies outside is cut off, halves go to the even level."""
    values = torch.tensor([-1.0, 1.0, 0.0, -1.5, 1.5, 0.5, 9.0]).view(1, 1, 1, 7)
    images = generator(values).generate(torch.tensor([1]), [4])
    assert images.shape == (1, 1, 6, 1) and images.dtype == torch.uint8
    assert images.flatten().tolist() == [0, 255, 128, 0, 255, 191]


def test_channels_come_last():
    values = torch.stack([torch.full((2, 3), value) for value in (-1.0, 0.2, 1.0)])[None]
    images = generator(values, codec=Rough(3), img_size=(2, 3)).generate(torch.tensor([0]), [0])
    assert images.shape == (1, 2, 3, 3) and images[0, 1, 2].tolist() == [0, 153, 255]


@pytest.mark.parametrize("training", [True, False])
def test_how_the_sampler_is_asked(training):
    made = generator(torch.zeros(2, 1, 1, 6))
    made.model.train(training)
    made.generate(torch.tensor([1, 0]), range(8, 10), progress=print)
    was_training, labels, numbers, how = made.sampler.asked
    assert not was_training and made.model.training is training
    assert (labels, numbers) == ([1, 0], [8, 9])
    assert how == dict(shape=(1, 1, 6), seed=7, device=CPU.device, progress=print)


def test_what_is_asked_for_goes_before_what_the_run_says():
    run = SamplingConfig("ddim", 50, 1.5, None, [0.0, 1.0])
    asked = SamplingConfig("ddpm", None, 1.0, 3, None)
    assert dataclasses.astuple(_filled(asked, run)) == ("ddpm", 50, 1.0, 3, [0.0, 1.0])


@pytest.mark.parametrize(("decay", "ema"), [(0.9, True), ("null", False)])
def test_sheets_show_the_average(tmp_path, decay, ema):
    cfg = configured("recipe=dit3_digits", TINY, f"engine.ema_decay={decay}", "engine.device=cpu")
    trainer = trainer_of(cfg)
    sheets = build_sheets(cfg, trainer, tuple("0123456789"), tmp_path)
    drawn = sheets.generate.__self__.model
    assert drawn is (trainer.task.trainable_module_ema.module if ema else trainer.task.trainable_module)
    assert (sheets.every, sheets.images) == (20, 40)
