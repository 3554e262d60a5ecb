"""The folder of a set of generated images: one file per image, and samples.json, which says how they were drawn.

::

    samples.json            settings, labels, n, starts; written before the first image
    images/000000.png …     one file per image (000000.npy where a picture cannot hold its channels)
    samples.npz             all of them: arr_0 (n, H, W, 3) uint8, arr_1 labels, as ADM's evaluation reads it
    sheet.png               the first ones, by class

``labels`` in samples.json holds ``classes`` (names by label) and ``in_turn``: image i has label
``in_turn[i % len(in_turn)]``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vit3.errors import UserError
from vit3.files import replacing
from vit3.generation.labels import label_of

_NAME = re.compile(r"(\d{6,})\.(?:png|npy)")
_LEFT = re.compile(r"\.(?:\d{6,}\.(?:png|npy)|samples\.npz|sheet\.png)\..+")  # as vit3.files names what it writes


class SampleFolder:
    """A set of images that exists, whole or in part.

    Attributes:
        path: its folder. images: the folder of the images in it. n: how many images belong to it.
        settings: what decides what they look like. in_turn: labels of images 0, 1, …, again and again.
        classes: names, in the order of the labels.

    Raises:
        UserError: ``path`` holds no such set.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.images = self.path / "images"
        try:
            about = json.loads((self.path / "samples.json").read_text(encoding="utf-8"))
            self.n: int = about["n"]
            self.settings: dict[str, Any] = about["settings"]
            self.in_turn, self.classes = tuple(about["labels"]["in_turn"]), tuple(about["labels"]["classes"])
            self._starts: list[dict[str, Any]] = about["starts"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{self.path} is no folder of tools/sample.py (samples.json: {error})") from error

    @classmethod
    def start(
        cls,
        path: str | Path,
        n: int,
        settings: Mapping[str, Any],
        in_turn: Sequence[int],
        classes: Sequence[str],
        about: Mapping[str, Any],
        resume: bool = True,
    ) -> SampleFolder:
        """Begin a set, or go on with the one that is there.

        Args:
            n: images. settings: plain values that decide what the images look like; ``checkpoint`` holds ``path``,
                which may change, and ``sha256``. in_turn, classes: as :class:`SampleFolder` has them.
            about: this start (machine, versions), kept beside those of earlier starts. resume: False allows new ones
                only.

        Raises:
            UserError: the images that are there were drawn with other settings or are more than ``n``, ``resume`` is
                False and there are some, or the folder cannot be written.
        """
        path = Path(path)
        labels = {"in_turn": list(in_turn), "classes": list(classes)}
        settings = json.loads(json.dumps(dict(settings)))  # as it comes back from the file
        try:
            (path / "images").mkdir(parents=True, exist_ok=True)
            old = cls(path) if (path / "samples.json").exists() else None
            there = {} if old is None else old.files()
            if old is not None and there:
                if not resume:
                    raise UserError(f"{path} holds {len(there):,} images; choose another name=NAME, or resume=true")
                _check_same(path, old.settings | {"classes": old.labels}, settings | {"classes": labels})
                if max(there) >= n:
                    raise UserError(f"n={n}, but {path} holds image {max(there):,}; use a larger n, or another name")
            elif old is None and next((path / "images").iterdir(), None) is not None:
                raise UserError(f"{path / 'images'} is not empty, but {path} has no samples.json; use another name")
            starts = [*(old._starts if there else ()), {"n": n, **about}]
            with replacing(path / "samples.json") as file:
                content = {"n": n, "settings": settings, "labels": labels, "starts": starts}
                file.write((json.dumps(content, indent=2) + "\n").encode())
        except OSError as error:
            raise UserError(f"{path} cannot be written ({error}); choose another output=FOLDER") from error
        return cls(path)

    @property
    def labels(self) -> dict[str, list]:
        """The rule of the labels, as it is stored."""
        return {"in_turn": list(self.in_turn), "classes": list(self.classes)}

    def label(self, number: int) -> int:
        """Label of the image of that number."""
        return label_of(number, self.in_turn)

    def files(self) -> dict[int, Path]:
        """The images that are there, by number, in their order; all are whole."""
        found = {int(m[1]): path for path in self.images.iterdir() if (m := _NAME.fullmatch(path.name))}
        return dict(sorted(found.items()))

    def tidy(self) -> None:
        """Delete what processes that were killed have left half written; only while nobody writes."""
        for folder in (self.path, self.images):
            for path in folder.iterdir():
                if _LEFT.fullmatch(path.name):
                    path.unlink(missing_ok=True)

    def write(self, number: int, image: np.ndarray) -> None:
        """Write one image, whole or not at all. Args: image: (H, W, C) uint8."""
        picture = image.shape[2] in (1, 3)
        with replacing(self.images / f"{number:06d}.{'png' if picture else 'npy'}") as file:
            if picture:
                Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image).save(file, format="png")
            else:
                np.save(file, image)


def read_image(path: Path) -> np.ndarray:
    """One image of a set, (H, W, C) uint8.

    Raises:
        UserError: the file cannot be read.
    """
    try:
        if path.suffix == ".npy":
            return np.load(path, allow_pickle=False)
        with Image.open(path) as picture:
            image = np.asarray(picture)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); delete it, and the same command draws it again") from error
    return image[:, :, None] if image.ndim == 2 else image


def _check_same(path: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    """Refuse the first setting that differs from that of the images in ``path``."""
    before, now = old.pop("checkpoint", {}), new.pop("checkpoint", {})
    if before.get("sha256") != now.get("sha256"):
        raise UserError(
            f"checkpoint={now.get('path')} is not the file that the images in {path} are drawn from "
            f"({before.get('path')}, SHA-256 {str(before.get('sha256'))[:12]}…); give that one, or another name=NAME"
        )
    for key in sorted((old.keys() | new.keys()) - {"autoencoder"}):  # its place may change, its weights are a key too
        if old.get(key) != new.get(key):
            if key == "classes":
                raise UserError(f"classes are not those of the images in {path}; give those, or another name=NAME")
            raise UserError(
                f"{key}={new.get(key)}, but the images in {path} are drawn with {key}={old.get(key)}; "
                "use that, or another name=NAME"
            )
