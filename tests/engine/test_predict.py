"""The sample of predictions: images as they were, errors first, at most half of them."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from vit3.engine.distributed import Processes
from vit3.engine.predict import predict_sample


def test_errors_come_first_and_pixels_are_restored():
    pixels = torch.randint(0, 256, (12, 3, 4, 5))
    labels = torch.tensor([0, 1] * 6)
    mean, std = [0.4, 0.5, 0.6], [0.2, 0.3, 0.4]
    images = (pixels / 255 - torch.tensor(mean).view(-1, 1, 1)) / torch.tensor(std).view(-1, 1, 1)

    class Zero(nn.Module):
        def forward(self, x):
            return torch.tensor([[1.0, 0.0]]).expand(len(x), 2)

    loader = list(zip(images.split(5), labels.split(5)))
    shown, truth, predicted = predict_sample(
        Zero(), loader, Processes(torch.device("cpu")), count=8, mean=mean, std=std
    )
    assert truth.tolist() == [1] * 4 + [0] * 4 and predicted.tolist() == [0] * 8
    assert np.array_equal(shown[:4], pixels[labels == 1][:4].permute(0, 2, 3, 1).numpy())
