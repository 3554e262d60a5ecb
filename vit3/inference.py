"""Classes of images by a trained classifier, from its checkpoint alone: ``vit3.predict(images, checkpoint)``.

Stands at the top, as the tools do: it knows checkpoints, configurations and images. Images are read, resized, cropped
and normalised by the code that ``tools/eval.py`` runs on test images.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from hydra.core.global_hydra import GlobalHydra
from PIL import Image
from timm.data import resolve_model_data_config
from torch import Tensor, nn
from torch.utils.data import Dataset

from vit3.build import build_model
from vit3.build.trained import read_stored
from vit3.cli import stored_config
from vit3.data import make_eval_loader
from vit3.data.folder import converted, image_mode
from vit3.data.image_files import read_image
from vit3.engine.distributed import usable_device
from vit3.engine.precision import autocast
from vit3.engine.predict import shown_pixels
from vit3.errors import UserError, first_line
from vit3.models import GENERATOR_NAMES
from vit3.models.places import FOLDER, described

OneImage = str | os.PathLike | Image.Image | np.ndarray
_BATCH = 32


@dataclass(frozen=True)
class Prediction:
    """The best classes of one image, the best first, and their probabilities (0 to 1)."""

    classes: tuple[str, ...]
    probabilities: tuple[float, ...]


@dataclass(frozen=True)
class Predictor:
    """A trained classifier with what it takes to show it images.

    Attributes:
        model: in evaluation mode, on ``device``. classes: names in the order of the labels.
        reading: ``img_size``, ``in_chans``, ``mean``, ``std``, ``interpolation``, ``crop_pct`` of its test images.
        title: what was loaded, in words. amp, channels_last: as it was evaluated in training.
    """

    model: nn.Module
    classes: tuple[str, ...]
    reading: dict[str, Any]
    device: torch.device
    title: str
    amp: str | None = None
    channels_last: bool = False

    @property
    def mode(self) -> str:
        """Pillow's mode of the images that the network takes."""
        return image_mode(self.reading["in_chans"])

    def predict(
        self, images: OneImage | Sequence[OneImage], topk: int = 5, batch_size: int = _BATCH
    ) -> list[Prediction]:
        """Predictions of one image or many, in their order.

        Args:
            images: paths, Pillow's images or uint8 arrays (H, W), (H, W, 1), (H, W, 3) or (H, W, 4). They may differ
                in size and kind; files are read batch by batch.
            topk: how many classes of each; all where there are fewer.

        Raises:
            UserError: no image, or one that cannot be decoded.
        """
        if topk < 1:
            raise UserError(f"topk={topk} is not allowed; it must be at least 1")
        batches = (self.ranked(self.logits(inputs), topk) for inputs in self.inputs(images, batch_size))
        return [prediction for batch in batches for prediction in batch]

    def inputs(self, images: OneImage | Sequence[OneImage], batch_size: int = _BATCH) -> Iterator[Tensor]:
        """What the network is shown: batches (b, C, H, W) on its device, normalised."""
        many = images if isinstance(images, (list, tuple)) else [images]
        given = _Given(many, self.mode)
        place = dict(rank=0, world_size=1, workers=0, device=self.device)
        for inputs, _ in make_eval_loader(given, batch_size, **self.reading, **place):
            yield inputs

    @torch.inference_mode()
    def logits(self, inputs: Tensor) -> Tensor:
        """Outputs (b, K) for a batch of :meth:`inputs`, in float32 on the CPU."""
        if self.channels_last:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        with autocast(self.device, self.amp):
            return self.model(inputs).float().cpu()

    def ranked(self, logits: Tensor, topk: int) -> list[Prediction]:
        """The ``topk`` best classes for each row of logits (b, K)."""
        best = logits.softmax(dim=-1).topk(min(topk, len(self.classes)), dim=-1)
        return [
            Prediction(tuple(self.classes[i] for i in labels), tuple(values))
            for labels, values in zip(best.indices.tolist(), best.values.tolist())
        ]

    def pixels(self, inputs: Tensor) -> np.ndarray:
        """A batch of :meth:`inputs` as it looks, (b, H, W, C) uint8."""
        return shown_pixels(inputs, self.reading["mean"], self.reading["std"])


def predict(
    images: OneImage | Sequence[OneImage], checkpoint: str | os.PathLike, topk: int = 5, *, weights: str = "auto",
    device: str = "cpu",
) -> list[Prediction]:  # fmt: skip
    """Predictions of one image or many, also as ``vit3.predict``; for many calls keep a :func:`load_predictor`.

    Args:
        images, topk: see :meth:`Predictor.predict`. checkpoint, weights, device: see :func:`load_predictor`.
    """
    return load_predictor(checkpoint, weights, device).predict(images, topk)


def load_predictor(checkpoint: str | os.PathLike, weights: str = "auto", device: str = "cpu") -> Predictor:
    """A predictor from a checkpoint; the data it was trained on need not be there.

    Args:
        checkpoint: run folder of ``tools/train.py`` (its best checkpoint), a checkpoint file in one, or a folder in
            timm's layout: ``config.json`` and the weights.
        weights: ``auto`` (the kind that scored best in training), ``raw`` or ``ema``; a folder of timm's has one kind.
        device: ``auto`` (a GPU if there is one), ``cpu`` or ``cuda``.

    Raises:
        UserError: no such checkpoint, a network that gives no classes, weights or a device that are not there.
    """
    place, path = usable_device(device), Path(str(checkpoint).removeprefix(FOLDER))
    if (path / "config.json").is_file():
        return _of_hub_folder(path, weights, place)
    if path.suffix == ".safetensors":
        raise UserError(f"checkpoint={path} holds bare weights; give the folder with its config.json")
    with _own_hydra():
        stored = read_stored(str(path), partial(stored_config, configs=_configs()), weights=weights)
    stored.check_classifier()
    cfg, d = stored.cfg, stored.cfg.data
    model = build_model(cfg, stored.classes)
    kind = stored.load_into(model, weights)
    names = ("img_size", "in_chans", "mean", "std", "interpolation", "crop_pct")
    title = f"{stored.path}: {kind} weights of {stored.saved}"
    model = model.to(place).eval()
    reading = {name: getattr(d, name) for name in names}
    return Predictor(model, stored.classes, reading, place, title, cfg.engine.amp, cfg.engine.channels_last)


def _of_hub_folder(folder: Path, weights: str, device: torch.device) -> Predictor:
    if weights != "auto":
        raise UserError(f"weights={weights}, but {folder} holds one kind of weights; leave weights=auto")
    try:
        name = described(folder)["architecture"]
    except ValueError as error:
        raise UserError(str(error)) from error
    if name in GENERATOR_NAMES:
        raise UserError(f"checkpoint={folder} holds the generator {name}, which gives images and no classes; "
                        "draw from its checkpoint with python tools/sample.py")  # fmt: skip
    try:
        model = timm.create_model(f"local-dir:{folder}", pretrained=True)
    except Exception as error:  # damaged weights and foreign arguments raise almost anything
        raise UserError(f"checkpoint={folder} cannot be loaded as {name}: {first_line(error)}") from error
    if getattr(model, "num_classes", 0) < 1:
        raise UserError(f"checkpoint={folder} holds {name} without a classifier; give one that was trained on classes")
    reading = resolve_model_data_config(model)
    in_chans, *img_size = reading.pop("input_size")
    reading |= dict(in_chans=in_chans, img_size=img_size)
    classes = _class_names(model.pretrained_cfg.get("label_names"), model.num_classes)
    return Predictor(model.to(device).eval(), classes, reading, device, f"{folder}: {name}")


def _class_names(names: Sequence[str] | dict | None, count: int) -> tuple[str, ...]:
    """Names in the order of their labels, from timm's list or table; numbers stand in for those that are missing."""
    known = names if isinstance(names, dict) else dict(enumerate(names or ()))
    known = {int(label): name for label, name in known.items()}
    return tuple(known.get(label, str(label)) for label in range(count))


class _Given(Dataset):
    """Images of any kind, as the loader of evaluation batches reads a data set."""

    def __init__(self, images: Sequence[OneImage], mode: str):
        self.images, self.mode, self.transform = images, mode, None

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int):
        return self.transform(_decoded(self.images[index], self.mode)), index


def _decoded(image: OneImage, mode: str) -> Image.Image:
    if isinstance(image, (str, os.PathLike)):
        return read_image(image, mode)
    if isinstance(image, np.ndarray):
        shape = image.shape
        if image.dtype != np.uint8 or not (image.ndim == 2 or image.ndim == 3 and shape[2] in (1, 3, 4)) or 0 in shape:
            raise UserError(f"an image is an array {shape} of {image.dtype}; give uint8 (H, W, 3), (H, W, 1) "
                            "or (H, W), several as a list")  # fmt: skip
        image = Image.fromarray(image[..., 0] if image.ndim == 3 and shape[2] == 1 else image)
    if not isinstance(image, Image.Image):
        raise UserError(f"an image is a {type(image).__name__}; give a path, a Pillow image or a uint8 array (H, W, 3)")
    return converted(image, mode)


def _configs() -> Path:
    """Folder of the configurations: in the package where it is installed, else beside it."""
    inside = Path(__file__).resolve().parent / "configs"
    return inside if inside.is_dir() else inside.parent.parent / "configs"


@contextmanager
def _own_hydra() -> Iterator[None]:
    """Context in which the Hydra of the caller's own program, if it has one, is put aside."""
    kept = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        yield
    finally:
        GlobalHydra.instance().hydra = kept  # another instance by now, when Hydra was started in between
