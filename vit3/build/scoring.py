"""A trained classifier of ours as the network that generated images are compared by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from omegaconf import DictConfig
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset

from vit3.build.data import build_eval_loader
from vit3.build.model import build_model
from vit3.build.trained import read_stored
from vit3.config import TrainConfig
from vit3.data.folder import image_mode
from vit3.engine.distributed import Processes
from vit3.errors import UserError
from vit3.files import sha256_of


class ClassifierFeatures:
    """Pooled features and logits of a classifier, which sees images as it saw its test images.

    Args:
        model: the network, on the device. cfg: of its training. classes: names of its logits. about: for reports.
        processes: whose device it is on.
    """

    published = False
    metric_names = {
        **{"fid": "frechet_distance", "is": "class_score"},  # no FID and no Inception Score: other features
        **{"precision": "precision", "recall": "recall"},
    }

    def __init__(
        self, model: nn.Module, cfg: TrainConfig, classes: tuple[str, ...], about: dict[str, Any], processes: Processes
    ):
        self._model, self._about, self._processes = model.eval(), about, processes
        self._cfg = replace(cfg, data=replace(cfg.data, workers=0))  # the images are in memory
        self.name, self.classes = cfg.model.name, classes
        self.dims = {"features": model.head_hidden_size, "logits": len(classes)}

    def __call__(self, images: Tensor) -> dict[str, Tensor]:
        """Outputs of images, see :class:`vit3.generation.features.Features`."""
        mode = image_mode(self._cfg.data.in_chans)
        pictures = [Image.fromarray(image).convert(mode) for image in images.numpy()]
        loader = build_eval_loader(self._cfg, _Pictures(pictures), self._processes, len(pictures))
        ((batch, _),) = loader
        tokens = self._model.forward_features(batch.float())
        features = self._model.forward_head(tokens, pre_logits=True)
        logits = self._model.forward_head(tokens)
        return {"features": features.float().cpu(), "logits": logits.float().cpu()}

    def describe(self) -> dict[str, Any]:
        """Name, file, its SHA-256 and which of its weights."""
        return {"name": self.name, **self._about}


def build_classifier_features(
    checkpoint: str, complete: Callable[[dict], DictConfig], processes: Processes
) -> ClassifierFeatures:
    """Load a classifier to compare images by; its data need not be there.

    Args:
        checkpoint: a file, or a run folder: its best one. complete: makes the configuration in a checkpoint one that
            has every key.

    Raises:
        UserError: no such checkpoint, or it is no classifier's.
    """
    stored = read_stored(checkpoint, complete)
    if stored.cfg.diffusion is not None:
        raise UserError(f"classifier={checkpoint} is a generator; give a run that was trained to classify images")
    model = build_model(stored.cfg, stored.classes)
    kind = stored.load_into(model, "auto")
    about = {"weights": str(stored.path), "sha256": sha256_of(stored.path), "kind": kind, "saved": stored.saved}
    return ClassifierFeatures(model.to(processes.device), stored.cfg, stored.classes, about, processes)


class _Pictures(Dataset):
    """Pictures without labels, as an evaluation loader reads them."""

    def __init__(self, pictures: list[Image.Image]):
        self._pictures, self.transform = pictures, None

    def __len__(self) -> int:
        return len(self._pictures)

    def __getitem__(self, index: int):
        return self.transform(self._pictures[index]), -1
