"""Small networks and files for the tests of scoring."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import torch
import torch_fidelity.feature_extractor_inceptionv3 as ported
from torch import Tensor, nn


class MeanFeatures:
    """Stands for a network: features are mean and spread of each channel; logits prefer dark or bright images."""

    name, classes, published = "means", ("dark", "bright"), False
    dims = {"features": 6, "logits": 2}
    metric_names = {"fid": "frechet_distance", "is": "class_score", "precision": "precision", "recall": "recall"}

    def __init__(self):
        self.seen: list[int] = []

    def __call__(self, images: Tensor) -> dict[str, Tensor]:
        self.seen.append(len(images))
        x = images.float().flatten(1, 2) / 255
        bright = x.mean(dim=(1, 2)) - 0.5
        return {
            "features": torch.cat([x.mean(1), x.std(1)], dim=1),
            "logits": torch.stack([-bright, bright], dim=1) * 10,
        }

    def describe(self):
        return {"name": self.name}


class PublishedMeans(MeanFeatures):
    """The same, taken for the network of published statistics; it has spatial features too."""

    classes, published = None, True
    dims = {"features": 6, "logits": 2, "spatial": 3}
    metric_names = {**{n: n for n in ("fid", "sfid", "precision", "recall")}, "is": "inception_score"}

    def __call__(self, images: Tensor) -> dict[str, Tensor]:
        return super().__call__(images) | {"spatial": images[:, 0, 0].float()}


def write_inception(path: Path) -> Path:
    """A file of random weights for torch-fidelity's Inception, scaled so that its signal does not fade."""
    extractor = ported.FeatureExtractorInceptionV3
    with (
        mock.patch.object(ported, "load_state_dict_from_url", lambda *args, **kwargs: {}),
        mock.patch.object(extractor, "load_state_dict", lambda *args, **kwargs: None),
    ):
        network = extractor("random", ["2048"])
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.normal_(module.weight, std=(2 / module.weight[0].numel()) ** 0.5)
    nn.init.normal_(network.fc.bias)  # or logits with and without it would hardly differ
    torch.save(network.state_dict(), path)
    return path
