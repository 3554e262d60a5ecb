"""The class map: labels are places in one stored list of names, and every split is read by name."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

import torch.distributed as dist

from vit3.errors import UserError

logger = logging.getLogger(__name__)


def check_known(names: Collection[str], classes: Sequence[str], where: str) -> None:
    """Stop where a split has a class that the map lacks.

    Args:
        names: classes of the split. classes: the map, in label order. where: the split, for the sentence.

    Raises:
        UserError: with the class that was probably meant, where only case, leading zeros or spaces differ.
    """
    unknown = sorted(set(names) - set(classes))
    if not unknown:
        return
    meant = {_plain(name): name for name in classes}
    hints = [
        f"'{name}' differs from '{meant[_plain(name)]}' only by case, leading zeros or spaces"
        for name in unknown
        if _plain(name) in meant
    ]
    raise UserError(
        f"{where} has classes that the network is not trained for: {some(unknown)}"
        f"{f' ({some(hints)})' if hints else ''}; known are {len(classes)}: {some(list(classes))}; "
        "rename or remove the others"
    )


def warn_missing(names: Collection[str], classes: Sequence[str], where: str) -> None:
    """Say, in the main process, which classes of the map have no image in a split; labels are not affected.

    Args:
        names: classes that have an image. classes: the map. where: the split, for the sentence.
    """
    missing = sorted(set(classes) - set(names))
    if missing and _main():
        logger.warning(
            "%s has no image of %d of %d classes (labels stay as they are): %s",
            where,
            len(missing),
            len(classes),
            some(missing),
        )


def note_order(classes: Sequence[str]) -> None:
    """Log the order of names that are numbers where it is not the order of the numbers."""
    if _main() and all(name.isdecimal() for name in classes) and list(classes) != sorted(classes, key=int):
        logger.info(
            "class names are numbers in the order of their spelling, as in ImageFolder: labels 0, 1, ... are %s",
            ", ".join(f"'{name}'" for name in classes[:3]),
        )


def some(names: Sequence[str]) -> str:
    """The first few of ``names``, for a sentence."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "") if names else "none"


def _plain(name: str) -> str:
    return name.strip().casefold().lstrip("0")


def _main() -> bool:
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
