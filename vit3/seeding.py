"""Random numbers as a function of what they are for, so that nothing has to be remembered to repeat them.

Every random number of training depends on (seed, purpose, epoch, number of the image or of its place in it) alone:
not on which process or loader worker draws it, nor on what was drawn before. A run that is stopped anywhere and started
again therefore continues with the same augmentation, mixing and dropping, and has no random state to save.
"""

from __future__ import annotations

import random
from enum import IntEnum

import numpy as np
import torch


class Purpose(IntEnum):
    """What random numbers are drawn for; each has streams of its own."""

    START = 0  # initial weights
    ORDER = 1  # order of the images in an epoch
    IMAGE = 2  # augmentation of one image
    ERASE = 3  # erasing in a batch
    STEP = 4  # mixing, dropout and dropped paths of one forward pass
    STREAM = 5  # workers of a streamed data set
    SAMPLE = 6  # one generated image
    SCORE = 7  # times and noise at which one test image is scored


def seed_everything(seed: int, purpose: Purpose, *place: int) -> None:
    """Seed Python, NumPy and torch (all devices) for ``purpose`` at ``place``, integers of at least 0."""
    value = seed_of(seed, purpose, *place)
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)


def seed_image(seed: int, epoch: int, index: int) -> None:
    """Seed Python, NumPy and torch's CPU generator for one image; for loader workers, which use no device."""
    value = seed_of(seed, Purpose.IMAGE, epoch, index)
    random.seed(value)
    np.random.seed(value)
    torch.random.default_generator.manual_seed(value)


def seed_of(seed: int, purpose: Purpose, *place: int) -> int:
    """One 32-bit number for a purpose and a place."""
    return int(np.random.SeedSequence([seed, int(purpose), *place]).generate_state(1)[0])
