"""Whether an exported network gives what the network itself gives, at shapes other than the one it was traced with."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from timm.utils import unwrap_model
from torch import Tensor, nn

from vit3.errors import first_line
from vit3.export.runner import Run, as_tuple
from vit3.export.signature import Probe, Signature

BOUND = 1e-4


@dataclass(frozen=True)
class Check:
    """One comparison.

    Attributes:
        shape: of the images or latents.
        what: what is shown, in words; for undeclared shapes also what happened.
        difference: largest absolute one over all outputs; relative to the largest output where that was asked for;
            None where the input was refused or the network itself does not take it; NaN where outputs are not finite.
        passed: whether it is as it should be.
        declared: False for shapes that were not declared.
        outputs: largest absolute value of the network's outputs.
    """

    shape: tuple[int, ...]
    what: str
    difference: float | None
    passed: bool
    declared: bool = True
    outputs: float | None = None


@torch.no_grad()
def verify(
    model: nn.Module, run: Run, signature: Signature, bound: float = BOUND, relative: bool = False
) -> list[Check]:
    """Compare ``run`` with ``model``, in evaluation mode, in eager execution and with its own mixers.

    Args:
        model: the network. run: the exported one, from inputs to a tuple of outputs; to refuse is to raise an error.
        signature: says with which inputs. bound: the largest difference that passes.
        relative: take differences relative to the largest output of the network for the same input.

    Returns:
        Every declared probe, then the undeclared ones: they pass if they are refused or right.
    """
    model = unwrap_model(model)
    with _evaluating(model):
        declared = [_declared(model, run, probe, bound, relative) for probe in signature.probes()]
        return declared + [_undeclared(model, run, probe, bound, relative) for probe in signature.refused()]


def _declared(model: nn.Module, run: Run, probe: Probe, bound: float, relative: bool) -> Check:
    wanted = _eager(model, probe.inputs)
    try:
        given = as_tuple(run(*probe.inputs))
    except Exception as error:  # runtimes raise errors of their own kinds, and a refusal is a result
        return Check(probe.shape, f"{probe.what}: refused, {first_line(error)}", None, False)
    difference, largest = _difference(wanted, given, relative)
    return Check(probe.shape, probe.what, difference, difference <= bound, outputs=largest)


def _undeclared(model: nn.Module, run: Run, probe: Probe, bound: float, relative: bool) -> Check:
    try:
        given = as_tuple(run(*probe.inputs))
    except Exception:  # see above
        return Check(probe.shape, f"{probe.what}: refused", None, True, declared=False)
    try:
        wanted = _eager(model, probe.inputs)
    except (ValueError, RuntimeError):
        return Check(probe.shape, f"{probe.what}: runs, the network refuses it", None, False, declared=False)
    difference, largest = _difference(wanted, given, relative)
    passed = difference <= bound
    what = f"{probe.what}: runs, {'equal' if passed else 'wrong'}"
    return Check(probe.shape, what, difference, passed, declared=False, outputs=largest)


def _eager(model: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    device = next(model.parameters()).device
    return tuple(y.cpu() for y in as_tuple(model(*(x.to(device) for x in inputs))))


def _difference(wanted: tuple[Tensor, ...], given: tuple[Tensor, ...], relative: bool) -> tuple[float, float]:
    """Largest difference, infinite where shapes differ, NaN where a value is not finite; and the largest output."""
    largest = max(float(y.abs().max()) for y in wanted)
    if [y.shape for y in wanted] != [y.shape for y in given]:
        return math.inf, largest
    if not all(y.isfinite().all() for y in (*wanted, *given)):
        return math.nan, largest  # which is below no bound
    difference = max(float((a - b.cpu()).abs().max()) for a, b in zip(wanted, given))
    return (difference / largest if relative and largest else difference), largest


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training
