"""The rows of a classifier, moved to where another list of class names has them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def reorder_head(
    weights: dict[str, Tensor], head: str, source: Sequence[str], target: Sequence[str]
) -> tuple[dict[str, Tensor], str]:
    """Select and permute a classifier's rows by class name; drop them where a wanted class has none.

    Args:
        weights: named tensors; not changed. head: name of the classifier, as in ``default_cfg["classifier"]``.
        source: class names of the rows of ``HEAD.weight`` [K, C] and ``HEAD.bias`` [K]. target: those wanted.

    Returns:
        New dict of tensors, and a sentence for the log.

    Raises:
        ValueError: ``weights`` has no ``HEAD.weight``, its rows are not one per name, or a name stands twice.
    """
    names = [f"{head}.weight", f"{head}.bias"]
    if names[0] not in weights:
        raise ValueError(f"head={head} is not in these weights; expected a tensor {names[0]}")
    for what, classes in (("source", source), ("target", target)):
        if len(set(classes)) != len(classes):
            raise ValueError(f"{what} has a class name twice; names must differ")
    rows = len(weights[names[0]])
    if rows != len(source):
        raise ValueError(f"{names[0]} has {rows} rows, source has {len(source)} class names; they must be as many")
    place = {name: i for i, name in enumerate(source)}
    missing = [name for name in target if name not in place]
    if missing:
        kept = {name: value for name, value in weights.items() if name not in names}
        return kept, (
            f"the classifier starts anew: {len(missing)} of {len(target)} classes are not among the "
            f"{len(source)} of the weights, {missing[0]} for one"
        )
    order = torch.tensor([place[name] for name in target], dtype=torch.long)
    moved = {name: weights[name][order.to(weights[name].device)] for name in names if name in weights}
    if list(source) == list(target):
        sentence = f"the classifier is kept: its {len(target)} classes stand in the same order"
    else:
        sentence = f"the classifier is kept: {len(target)} of its {len(source)} classes, put in the order of the data"
    return weights | moved, sentence
