"""COCO-format detection data: images with boxes, labels and masks, read by number; loaders of them."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timm.data.distributed_sampler import OrderedDistributedSampler
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision import tv_tensors
from torchvision.transforms import v2

from vit3.data.image_files import read_rgb
from vit3.data.loader import DeviceLoader, TrainLoader, outlive_signals
from vit3.data.plan import BatchPlan
from vit3.errors import UserError

_LEAST = 1.0  # pixels: boxes narrower or lower are not learnt from


class CocoImages(Dataset):
    """Images of a COCO annotation file with what is on them; images without anything belong to it too.

    Crowds are not among the instances; COCOeval, which needs them, reads ``coco`` itself.

    Args:
        annotations: the JSON file. images: folder of the files that it names.
        classes: names in the order of their labels; None takes those of the file, in the order of their ids.
        masks: read masks too.

    Attributes:
        classes: names; label 1 is the first one, as 0 is the background. category_ids: of the classes in this file,
            None for classes that the file lacks. coco: pycocotools' index of the file. transform: of (image, target).
        targets: read what is on the images; else ``image_id`` is all.

    Raises:
        UserError: a file cannot be read or is no COCO file, a name stands twice, or ``classes`` lack one of the file's.
    """

    def __init__(self, annotations: Path, images: Path, *, classes: Sequence[str] | None = None, masks: bool = True):
        self.coco = read_coco(annotations)
        self.annotations, self.images, self.masks = Path(annotations), Path(images), masks
        categories = sorted(self.coco.dataset["categories"], key=lambda category: category["id"])
        names = [category["name"] for category in categories]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise UserError(f"{annotations}: the category {twice} stands twice; names must differ")
        self.classes = tuple(names if classes is None else classes)
        if unknown := [name for name in names if name not in self.classes]:
            raise UserError(
                f"{annotations}: the category {unknown[0]} is none of the {len(self.classes)} classes of the training "
                f"({', '.join(self.classes[:5])}, …); train with annotations that have it, or take it out of this file"
            )
        ids = {category["name"]: category["id"] for category in categories}
        self.category_ids = tuple(ids.get(name) for name in self.classes)
        self._labels = {ids[name]: label for label, name in enumerate(self.classes, 1) if name in ids}
        self.image_ids = sorted(self.coco.imgs)
        self.transform: Callable | None = None
        self.targets = True

    def __len__(self) -> int:
        return len(self.image_ids)

    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, Tensor]]:
        pixels = torch.from_numpy(self.pixels(index)).permute(2, 0, 1)
        number = {"image_id": torch.tensor(self.image_ids[index])}
        image, target = tv_tensors.Image(pixels), self.target(index) if self.targets else number
        return (image, target) if self.transform is None else self.transform(image, target)

    def pixels(self, index: int) -> np.ndarray:
        """The image as it is, (H, W, 3) uint8, turned by no EXIF tag: annotations are of the stored pixels."""
        info = self.coco.imgs[self.image_ids[index]]
        path = self.images / info["file_name"]
        if not path.is_file():
            raise UserError(f"{path} is in {self.annotations} and not in the folder; check data_root=ROOT")
        pixels = read_rgb(path)
        if pixels.shape[:2] != (info["height"], info["width"]):
            raise UserError(
                f"{path} is {pixels.shape[0]}x{pixels.shape[1]} and in {self.annotations} {info['height']}x"
                f"{info['width']} (height x width); the annotations are of another image"
            )
        return pixels

    def target(self, index: int) -> dict[str, Tensor]:
        """``image_id``, ``boxes`` (n, 4) from corner to corner, ``labels`` (n,) and maybe ``masks`` (n, H, W)."""
        image_id = self.image_ids[index]
        info = self.coco.imgs[image_id]
        size = info["height"], info["width"]
        boxes, labels, masks = [], [], []
        for annotation in self.coco.imgToAnns[image_id]:
            x, y, w, h = annotation["bbox"]
            box = (max(x, 0), max(y, 0), min(x + w, size[1]), min(y + h, size[0]))
            if annotation.get("iscrowd") or box[2] - box[0] < _LEAST or box[3] - box[1] < _LEAST:
                continue
            boxes.append(box)
            labels.append(self._labels[annotation["category_id"]])
            if self.masks:
                masks.append(torch.from_numpy(self.coco.annToMask(annotation)))
        boxes = torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4)
        target: dict[str, Any] = {
            "image_id": torch.tensor(image_id),
            "boxes": tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=size),
            "labels": torch.tensor(labels, dtype=torch.int64),
        }
        if self.masks:
            target["masks"] = tv_tensors.Mask(torch.stack(masks) if masks else torch.zeros(0, *size, dtype=torch.uint8))
        return target

    def absent(self) -> list[str]:
        """Classes without a single instance that is no crowd; no average precision counts them."""
        found = {a["category_id"] for a in self.coco.anns.values() if not a.get("iscrowd")}
        return [name for name, number in zip(self.classes, self.category_ids) if number not in found]


def read_coco(annotations: Path):
    """pycocotools' index of a COCO file; where annotations lack ``iscrowd`` or ``area``, 0 and that of the box.

    Raises:
        UserError: pycocotools is missing, the file cannot be read or lacks a part, or an id is no whole number.
    """
    try:
        from pycocotools.coco import COCO
    except ModuleNotFoundError as error:
        raise UserError("COCO data needs pycocotools: pip install -e '.[det]'") from error
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # it tells how long it took
            coco = COCO(str(annotations))
    except FileNotFoundError as error:
        raise UserError(f"{annotations}: no such annotation file; check data_root=ROOT and data.*") from error
    except (OSError, ValueError, AssertionError, KeyError, TypeError) as error:
        raise UserError(f"{annotations} is no COCO annotation file ({error})") from error
    if missing := {"images", "annotations", "categories"} - coco.dataset.keys():
        raise UserError(f"{annotations} is no COCO file of instances: it has no '{sorted(missing)[0]}'")
    if any("name" not in category for category in coco.dataset["categories"]):
        raise UserError(f"{annotations} is no COCO file of instances: a category has no 'name'")
    if strange := [number for number in (*coco.imgs, *coco.cats) if not isinstance(number, int)]:
        raise UserError(f"{annotations} has the id {strange[0]!r}; ids of images and categories must be whole numbers")
    for annotation in coco.anns.values():  # own data often lacks what COCOeval asks for
        annotation.setdefault("iscrowd", 0)
        if "area" not in annotation and len(annotation.get("bbox") or ()) == 4:
            annotation["area"] = annotation["bbox"][2] * annotation["bbox"][3]
    return coco


class RandomCrop(v2.Transform):
    """Resize the shorter side to one of ``sides`` and cut out a window with sides drawn from ``window``.

    With probability ``p``; DETR's augmentation, which the paper's detectors use beside several scales.
    """

    def __init__(self, p: float, sides: Sequence[int] = (400, 500, 600), window: tuple[int, int] = (384, 600)):
        super().__init__()
        self.p, self.resize, self.window = p, v2.RandomShortestSize(sides), window

    def forward(self, image: tv_tensors.Image, target: dict[str, Any]) -> tuple[tv_tensors.Image, dict[str, Any]]:
        if torch.rand(()) >= self.p:
            return image, target
        image, target = self.resize(image, target)
        low, high = self.window
        height, width = (min(side, int(torch.randint(low, high + 1, ()))) for side in image.shape[-2:])
        top = int(torch.randint(0, image.shape[-2] - height + 1, ()))
        left = int(torch.randint(0, image.shape[-1] - width + 1, ()))
        cut = partial(v2.functional.crop, top=top, left=left, height=height, width=width)
        return cut(image), {k: cut(v) if isinstance(v, tv_tensors.TVTensor) else v for k, v in target.items()}


def make_transform(*, hflip: float = 0.0, crop: float = 0.0) -> v2.Transform:
    """(image, target) to plain tensors, values 0 to 1; what is cut away is dropped from the target.

    Args:
        hflip, crop: probabilities of a flip and of :class:`RandomCrop`.
    """
    return v2.Compose(
        [RandomCrop(crop), v2.RandomHorizontalFlip(hflip), v2.SanitizeBoundingBoxes(min_size=_LEAST), *_plain()]
    )


def _plain() -> list[v2.Transform]:
    return [v2.ToDtype({tv_tensors.Image: torch.float32, "others": None}, scale=True), v2.ToPureTensor()]


def collate(batch: list[tuple[Tensor, dict]]) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Images and targets as lists: sizes differ."""
    images, targets = zip(*batch)
    return list(images), list(targets)


def make_coco_train_loader(
    dataset: CocoImages, plan: BatchPlan, rank: int, *, workers: int, device: torch.device, hflip: float, crop: float
) -> TrainLoader:
    """The loader of training batches; ``hflip`` and ``crop`` as in :func:`make_transform`."""
    return TrainLoader(
        dataset, plan, rank, prefetch=partial(DeviceLoader, device=device), collate=collate, workers=workers,
        transform=make_transform(hflip=hflip, crop=crop), pin_memory=device.type == "cuda",
    )  # fmt: skip


def make_coco_eval_loader(
    dataset: CocoImages, batch_size: int, *, rank: int, world_size: int, workers: int, device: torch.device
) -> DeviceLoader:
    """The loader of evaluation batches: every image in order, dealt out to the processes.

    Some images are read twice, so that all processes have as many batches; timm's ``evaluation_sample_limit`` of the
    loader says how many count. ``batch_size`` is per process.
    """
    dataset.transform, dataset.targets = v2.Compose(_plain()), False  # COCOeval reads them itself
    sampler = OrderedDistributedSampler(dataset, num_replicas=world_size, rank=rank)
    loader = DataLoader(
        dataset, batch_size, sampler=sampler, num_workers=workers, collate_fn=collate,
        worker_init_fn=outlive_signals, pin_memory=device.type == "cuda",
    )  # fmt: skip
    return DeviceLoader(loader, device)
