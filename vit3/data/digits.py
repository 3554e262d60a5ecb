"""The embedded data: handwritten digits of the UCI repository, as scikit-learn ships them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from PIL import Image
from torch.utils.data import Dataset

TEST_FRACTION = 0.2
SPLIT_SEED = 0


class Digits(Dataset):
    """1,797 real scans of 8x8 pixels in ten classes; a stratified fifth of them is the test split.

    Args:
        split: ``train`` (1,437 images) or ``val`` (360 images); the same images every time.
    """

    classes = tuple("0123456789")

    def __init__(self, split: str):
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        digits = load_digits()
        images = np.rint(digits.images * (255 / 16)).astype(np.uint8)  # they have 17 grey levels
        train_x, val_x, train_y, val_y = train_test_split(
            images, digits.target, test_size=TEST_FRACTION, stratify=digits.target, random_state=SPLIT_SEED
        )
        self.images, self.labels = {"train": (train_x, train_y), "val": (val_x, val_y)}[split]
        self.transform: Callable | None = None

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int):
        image = Image.fromarray(self.images[index])
        return (self.transform(image) if self.transform else image), int(self.labels[index])
