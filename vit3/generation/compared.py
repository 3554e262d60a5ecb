"""What is scored and what it is compared with: samples with how they were drawn, references with their statistics."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vit3.errors import UserError, first_line
from vit3.generation.folder import SampleFolder
from vit3.generation.image_sets import ImageSet, folder_images, npz_images, open_images
from vit3.generation.scores import Statistics

# Kind of output: its mean and covariance in an .npz, as ADM names them
_STORED = {"features": ("mu", "sigma"), "spatial": ("mu_s", "sigma_s")}


@dataclass(frozen=True)
class Samples:
    """Generated images.

    Attributes:
        images: the images. settings: how they were drawn, as samples.json says it; None for images of others.
        asked: class that each image was asked to be of, by name, in the images' order; None where it is not known.
    """

    images: ImageSet
    settings: dict[str, Any] | None = None
    asked: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Reference:
    """What samples are compared with.

    Attributes:
        title: what it is. images: None where there are statistics alone.
        statistics: by kind of output of the Inception network, exactly as a file gives them.
    """

    title: str
    images: ImageSet | None
    statistics: dict[str, Statistics] = field(default_factory=dict)


def open_samples(place: str) -> Samples:
    """The images that ``samples=`` means: a folder of tools/sample.py or the ``.npz`` in it, or any images.

    Raises:
        UserError: as :func:`vit3.generation.image_sets.open_images`; a folder of ours that is not complete.
    """
    path = Path(place)
    folder = path.parent if path.suffix == ".npz" else path
    if not (folder / "samples.json").is_file():
        return Samples(open_images(place, "samples"))
    ours = SampleFolder(folder)
    if path.suffix == ".npz":
        images, numbers = npz_images(path, "samples"), tuple(range(ours.n))
        there = images.n
    else:
        files = ours.files()
        there, numbers = len(files), tuple(files)
        odd = next((file for file in files.values() if file.suffix == ".npy"), None)
        if odd:
            raise UserError(f"samples={place}: {odd} is no picture; only images of 1 or 3 channels can be scored")
    if there != ours.n:
        raise UserError(f"samples={place}: {there:,} of {ours.n:,} images are there; finish them by tools/sample.py")
    if path.suffix != ".npz":
        images = folder_images(list(files.values()), place)
    return Samples(images, ours.settings, tuple(ours.classes[ours.label(number)] for number in numbers))


def open_reference(place: str) -> Reference:
    """What ``reference=`` means: images, or an ``.npz`` with ``mu`` and ``sigma``, perhaps ``mu_s`` and ``sigma_s``.

    Raises:
        UserError: as :func:`vit3.generation.image_sets.open_images`; statistics that are none.
    """
    path = Path(place)
    if path.suffix != ".npz" or not path.is_file():
        images = open_images(place, "reference")
        return Reference(images.title, images)
    try:
        with np.load(path, allow_pickle=False) as file:
            names = set(file.files)
            statistics = {
                kind: Statistics(*(np.asarray(file[name], np.float64) for name in pair))
                for kind, pair in _STORED.items()
                if names & set(pair)
            }
    except KeyError as error:
        raise UserError(f"reference={place}: {error.args[0]}; statistics are mu and sigma, mu_s and sigma_s") from error
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"reference={place} cannot be used ({first_line(error)}); write it again") from error
    if "arr_0" in names or not statistics:
        return Reference(place, npz_images(path, "reference"), statistics)
    return Reference(place, None, statistics)
