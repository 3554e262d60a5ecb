"""A network as one graph of PyTorch's own operators, for every declared shape; and its file, ``.pt2``."""

from __future__ import annotations

import inspect
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from timm.utils import unwrap_model
from torch import Tensor, nn
from torch.export import ExportedProgram

from vit3.errors import first_line
from vit3.export.runner import Run, as_tuple
from vit3.export.signature import Probe, Signature
from vit3.export.subject import Subject
from vit3.mixers import TTT

_DEFER = "prefer_deferred_runtime_asserts_over_guards"
_SIGNATURE = "signature.json"  # in the file, beside the graph


@contextmanager
def plain_mixers(model: nn.Module) -> Iterator[None]:
    """Context in which all mixers of ``model`` are made of PyTorch's own operators, and in evaluation mode."""
    mixers = [module for module in model.modules() if isinstance(module, TTT)]
    backends = [mixer.backend for mixer in mixers]
    modes = [(module, module.training) for module in model.modules()]
    try:
        for mixer in mixers:
            mixer.backend = "reference" if all(mixer.operators) else "closed"
        model.eval()
        yield
    finally:
        for mixer, backend in zip(mixers, backends):
            mixer.backend = backend
        for module, training in modes:
            module.training = training


def export_program(subject: Subject, signature: Signature) -> ExportedProgram:
    """Trace the network of ``subject`` once, so that the graph holds for all shapes that ``signature`` declares.

    The network itself is left as it was.

    Raises:
        ValueError: PyTorch cannot trace it, or the graph depends on a shape that was declared free.
    """
    if _DEFER not in inspect.signature(torch.export.export).parameters:
        raise ValueError(f"PyTorch {torch.__version__} is too old for graphs of free sizes (torch.export.export has no "
                         f"{_DEFER}); install a newer one, 2.14 is tested")  # fmt: skip
    model = unwrap_model(subject.model)
    try:
        with plain_mixers(model), torch.no_grad():
            program = torch.export.export(
                model,
                signature.example(),
                dynamic_shapes=signature.dynamic_shapes(),
                strict=False,
                # "this size is not that size", which the exporter asks and no result depends on, becomes a check
                **{_DEFER: True},
            )
    except Exception as error:  # the exporter raises whatever the traced code does
        raise ValueError(_sentence(subject, signature, error)) from error
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # paths of this machine, which would be in every file
    run = program_runner(program)
    for probe in signature.probes():
        try:
            with torch.no_grad():
                run(*(x[:1] if signature.batch else x for x in probe.inputs))
        except ValueError as error:
            raise ValueError(_sentence(subject, signature, error, probe)) from error
    return program


def program_runner(program: ExportedProgram) -> Run:
    """The graph as a function of its inputs, which gives a tuple of outputs.

    The function raises a ValueError on shapes that the graph was not made for.
    """
    module = program.module()

    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        try:
            outputs = module(*inputs)
        except (AssertionError, RuntimeError) as error:
            shapes = ", ".join(str(tuple(x.shape)) for x in inputs)
            raise ValueError(
                f"inputs of shape {shapes} are refused by the exported graph: {first_line(error)}"
            ) from error
        return as_tuple(outputs)

    return run


def save_program(program: ExportedProgram, signature: Signature, path: Path) -> None:
    """Write a ``.pt2`` file, which :func:`torch.export.load` reads without this package."""
    content = io.BytesIO()  # on a full disk PyTorch's own writer of files ends the process
    torch.export.save(program, content, extra_files={_SIGNATURE: signature.to_json()})
    Path(path).write_bytes(content.getbuffer())


def load_program(path: Path) -> ExportedProgram:
    """Read what :func:`save_program` wrote."""
    return torch.export.load(Path(path))


def open_program(path: Path) -> Run:
    """The network in a ``.pt2`` file, as a function of its inputs that refuses shapes which were not declared."""
    extra = {_SIGNATURE: ""}
    run = program_runner(torch.export.load(Path(path), extra_files=extra))
    signature = Signature.from_json(extra[_SIGNATURE])

    @torch.no_grad()
    def checked(*inputs: Tensor) -> tuple[Tensor, ...]:
        signature.check(*inputs)
        return run(*inputs)

    return checked


def _sentence(subject: Subject, signature: Signature, error: Exception, probe: Probe | None = None) -> str:
    """Why there is no graph, and what can be done."""
    reason = f"at shape {probe.shape} it is another one" if probe else f"{type(error).__name__}: {first_line(error)}"
    free = list(signature.dynamic)
    if "size" in free:
        cure = ("mixers that work in chunks or mini-batches count tokens; use dynamic=[batch], and export it once for "
                "each size")  # fmt: skip
    elif free:
        cure = "use dynamic=[], which fixes the batch too"
    else:
        cure = "use format=[safetensors], which needs no graph"
    return f"{subject.name} with dynamic={free} cannot be one graph ({reason}); {cure}"
