"""Interventions on a trained network: what its inner training is worth, part by part, without training anew."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from vit3.inner.spec import CONTROLS, InnerSpec
from vit3.mixers import TTT

_LR_FACTORS = (0.0, 0.25, 0.5, 2.0, 4.0)
_EPOCHS = (0, 1, 2, 3, 4)


@dataclass(frozen=True)
class Intervention:
    """One way to run a trained network.

    Attributes:
        group: ``trained``, ``control``, ``lr`` or ``epochs``. label: for the table.
        changes: knobs of the inner problem that differ from training.
    """

    group: str
    label: str
    changes: dict[str, Any] = field(default_factory=dict)


def interventions(inner: InnerSpec) -> list[Intervention]:
    """All that make sense for networks trained with ``inner``, the trained state first."""
    flipped = "descent" if inner.direction == "ascent" else "ascent"
    found = [
        Intervention("trained", "as trained"),
        Intervention("control", "no update", dict(epochs=0)),
        Intervention("control", flipped, dict(direction=flipped)),
    ]
    for control in CONTROLS:
        if control != inner.control and (not control.endswith("_rate") or inner.rate.startswith("token")):
            found.append(Intervention("control", control.replace("_", " "), dict(control=control)))
    for factor in _LR_FACTORS:
        found.append(Intervention("lr", f"rate x {factor:g}", dict(lr=inner.lr * factor)))
    for epochs in _EPOCHS:
        if epochs != inner.epochs:
            found.append(Intervention("epochs", f"{epochs} epochs", dict(epochs=epochs)))
    return found


def inner_of(model: nn.Module) -> InnerSpec:
    """The inner problem that all TTT mixers of a network share.

    Raises:
        ValueError: there are none, or they differ.
    """
    specs = {module.inner for module in model.modules() if isinstance(module, TTT)}
    if len(specs) != 1:
        raise ValueError(f"the network has {len(specs)} kinds of inner training; interventions need exactly one")
    return specs.pop()


@contextmanager
def intervened(model: nn.Module, changes: dict[str, Any]) -> Iterator[None]:
    """Context in which all TTT mixers of ``model`` train with ``changes`` of their knobs.

    Raises:
        ValueError: a knob that needs other parameters, or a value that is not allowed.
    """
    mixers = [module for module in model.modules() if isinstance(module, TTT)]
    kept = [(mixer.inner, mixer.backend) for mixer in mixers]
    try:
        for mixer in mixers:
            mixer.backend = "auto"  # a forced operator need not have the change
            mixer.set_inner(mixer.inner.derive(**changes))
        yield
    finally:
        for mixer, (inner, backend) in zip(mixers, kept):
            mixer.set_inner(inner)
            mixer.backend = backend


@dataclass(frozen=True)
class Score:
    """What a network scores under an intervention: ``top1`` in per cent, mean cross-entropy ``loss``."""

    intervention: Intervention
    top1: float
    loss: float
