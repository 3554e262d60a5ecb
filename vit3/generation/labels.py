"""Which class each generated image is of; it depends on the number of the image alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vit3.config import nearest
from vit3.errors import UserError


def labels_in_turn(wanted: Any, classes: Sequence[str]) -> tuple[int, ...]:
    """The labels that images 0, 1, 2, … get, again and again from the first one.

    Args:
        wanted: None for all classes, or one or a list of names and labels; a whole number is a label, even where
            classes have numbers for names. classes: names, in the order of the labels.

    Raises:
        UserError: no class of that name or label, or one twice.
    """
    if wanted is None:
        return tuple(range(len(classes)))
    several = isinstance(wanted, Sequence) and not isinstance(wanted, str)
    labels = [_label(one, classes) for one in (wanted if several else [wanted])]
    if not labels:
        raise UserError("classes=[] asks for no class; use classes=null for all")
    for place, label in enumerate(labels):
        if label in labels[:place]:
            raise UserError(f"classes asks twice for label {label} ({classes[label]}); name each class once")
    return tuple(labels)


def label_of(number: int, in_turn: Sequence[int]) -> int:
    """Label of the image of that number. Args: in_turn: as :func:`labels_in_turn` gives them."""
    return in_turn[number % len(in_turn)]


def _label(one: Any, classes: Sequence[str]) -> int:
    if isinstance(one, str) and one in classes:
        return classes.index(one)
    if isinstance(one, int) and not isinstance(one, bool):
        if 0 <= one < len(classes):
            return one
        raise UserError(f"classes has the label {one}, but labels go from 0 to {len(classes) - 1}")
    raise UserError(f"classes has '{one}', which is no class of this network; {nearest(str(one), classes)}")
