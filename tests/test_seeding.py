"""Random numbers depend on what they are for and where, and on nothing else."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import torch

from vit3.seeding import Purpose, seed_everything, seed_image


def draw():
    return random.random(), float(np.random.rand()), torch.rand(1).item()


def test_every_purpose_and_place_has_its_own_numbers_and_repeats_them():
    def drawn(*key):
        seed_everything(*key)
        return draw()

    keys = list(product((0, 1), (Purpose.STEP, Purpose.ERASE), (0, 1), (0, 1)))
    draws = [drawn(*key) for key in keys]
    assert len({value for triple in draws for value in triple}) == 3 * len(keys)
    assert [drawn(*key) for key in reversed(keys)] == draws[::-1]


def test_an_image_draws_the_same_whatever_was_drawn_before():
    draws = []
    for before in (0, 5):
        seed_image(3, 2, 1)
        [draw() for _ in range(before)]
        seed_image(3, 2, 7)
        draws.append(draw())
    seed_image(3, 3, 7)
    assert draws[0] == draws[1] != draw()
