"""A generator that costs nothing, for the tests of what becomes of its images."""

from __future__ import annotations

import torch

CLASSES = tuple("abc")


class Stub:
    """Images whose every pixel depends on label, number and channel; notes what it was asked for.

    Args:
        channels, size: of the images. trouble: called with the numbers of a batch between two steps.
    """

    def __init__(self, channels=3, size=(5, 7), trouble=lambda numbers: None):
        self.channels, self.size, self.trouble = channels, size, trouble
        self.batches: list[list[int]] = []

    def __call__(self, labels, numbers, progress=None):
        self.batches.append(list(numbers))
        progress(1)
        self.trouble(numbers)
        progress(1)
        assert labels.dtype == torch.int64 and len(labels) == len(numbers)
        return torch.stack([self.image(int(label), number) for label, number in zip(labels, numbers)])

    def image(self, label, number):
        """The image of that number, (H, W, C) uint8."""
        places = torch.arange(self.channels * self.size[0] * self.size[1])
        return ((places * 31 + label * 100 + number * 7) % 256).to(torch.uint8).reshape(*self.size, self.channels)
