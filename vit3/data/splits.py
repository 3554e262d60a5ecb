"""Which of the splits that a data set has is the training and which the validation split."""

from __future__ import annotations

from collections.abc import Collection

from vit3.errors import UserError

USUAL_NAMES = {"train": ("train", "training"), "val": ("val", "valid", "validation", "test")}


def choose_split(split: str, available: Collection[str], wanted: str | None, where: str) -> str:
    """Name of a split in a data set's own words.

    Args:
        split: ``train`` or ``val``. available: what the data set has. wanted: ``data.{split}_split``, None for the
            first of the usual names. where: the data set, for the sentence.

    Raises:
        UserError: no such split.
    """
    for name in USUAL_NAMES[split] if wanted is None else (wanted,):
        if name in available:
            return name
    asked = f"no split {' or '.join(USUAL_NAMES[split])}" if wanted is None else f"no split {wanted}"
    raise UserError(
        f"{where} has {asked}; it has: {', '.join(sorted(available)) or 'none'}; set data.{split}_split to one of them"
    )
