"""The Inception network that published scores are measured by: the 2015 TensorFlow one, as torch-fidelity ports it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch
from torch import Tensor
from torch_fidelity.feature_extractor_inceptionv3 import URL_INCEPTION_V3, FeatureExtractorInceptionV3

from vit3.errors import UserError, first_line
from vit3.files import sha256_of

logger = logging.getLogger(__name__)

_NAME = "inception-v3-compat"
_OUTPUTS = {"features": "2048", "logits": "logits_unbiased"}  # ours: torch-fidelity's
_SPATIAL_CHANNELS = 7


class InceptionFeatures:
    """Pooled features (FID, precision, recall), logits without bias (Inception Score) and spatial features (sFID).

    Spatial features follow the evaluation of ADM (Dhariwal & Nichol, 2021): the first 7 channels of ``mixed_6/conv``,
    which here is the 1x1 branch of ``Mixed_6d`` after its ReLU, 17 x 17 places, flattened row, column, channel. That is
    ADM's definition; it is not verified against its TensorFlow code here.

    Args:
        weights: file of the weights. device: where it computes.

    Raises:
        UserError: no such file, or other weights in it.
    """

    name = _NAME
    dims = {"features": 2048, "logits": 1008, "spatial": 17 * 17 * _SPATIAL_CHANNELS}
    metric_names = {
        **{"fid": "fid", "sfid": "sfid", "is": "inception_score"},
        **{"precision": "precision", "recall": "recall"},
    }
    published = True
    classes = None

    def __init__(self, weights: Path, device: torch.device):
        try:
            torch.load(weights, map_location="cpu", weights_only=True)  # torch-fidelity would run what a file says
            network = FeatureExtractorInceptionV3(_NAME, list(_OUTPUTS.values()), str(weights))
        except FileNotFoundError as error:
            raise UserError(f"inception={weights}: no such file") from error
        except Exception as error:  # damaged or other files make torch and pickle raise almost anything
            raise UserError(
                f"inception={weights} holds no weights of torch-fidelity's Inception ({first_line(error)}); "
                f"they are at {URL_INCEPTION_V3}"
            ) from error
        self._network, self._device = network.to(device), device
        self._weights, self._sha256 = weights, sha256_of(weights)

    def __call__(self, images: Tensor) -> dict[str, Tensor]:
        """Outputs of images, see :class:`vit3.generation.features.Features`."""
        spatial: list[Tensor] = []
        hook = self._network.Mixed_6d.branch1x1.register_forward_hook(lambda _m, _x, y: spatial.append(y))
        try:
            outputs = self._network(images.permute(0, 3, 1, 2).to(self._device))
        finally:
            hook.remove()
        found = dict(zip(_OUTPUTS, outputs))
        found["spatial"] = spatial[0][:, :_SPATIAL_CHANNELS].permute(0, 2, 3, 1).flatten(1)
        return {kind: value.float().cpu() for kind, value in found.items()}

    def describe(self) -> dict[str, Any]:
        """Name, file and SHA-256."""
        return {"name": self.name, "weights": str(self._weights), "sha256": self._sha256}


def load_inception(weights: str | None, device: torch.device) -> InceptionFeatures:
    """The network with its weights from a file, or from torch-fidelity's download, which is kept for the next time.

    Raises:
        UserError: no such file, and where none is given no network.
    """
    if weights is not None:
        return InceptionFeatures(Path(weights), device)
    file = Path(torch.hub.get_dir()) / "checkpoints" / Path(urlparse(URL_INCEPTION_V3).path).name
    if not file.is_file():
        logger.info("downloading %s", URL_INCEPTION_V3)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            torch.hub.download_url_to_file(URL_INCEPTION_V3, str(file), progress=False)
        except OSError as error:  # also URLError and HTTPError
            raise UserError(
                f"the Inception weights are missing and cannot be downloaded ({first_line(error)}); put "
                f"{URL_INCEPTION_V3} at {file} or give inception=FILE, or compare in the features of a classifier "
                "of yours: classifier=RUN"
            ) from error
    return InceptionFeatures(file, device)
