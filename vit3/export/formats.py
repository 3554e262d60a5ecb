"""The formats: how each is written, and how what was written is run again, for comparison."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import timm
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from vit3.export.aoti import open_package, write_package
from vit3.export.hub import write_hub_folder
from vit3.export.official import write_official
from vit3.export.onnx import open_onnx, write_onnx
from vit3.export.program import export_program, open_program, save_program
from vit3.export.signature import Signature
from vit3.export.subject import Subject
from vit3.export.verify import Check, verify
from vit3.models.official import from_official
from vit3.models.weights import read_tensors

FORMATS = ("safetensors", "onnx", "pt2", "aoti", "official")
_TRACED = ("onnx", "pt2", "aoti")  # made of a graph; the others are weights alone

Run = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True)
class Result:
    """One format of one network.

    Attributes:
        format: one of ``FORMATS``. path: the file, or the folder of ``safetensors``. checks: every comparison.
        seconds: it took to write. error: why it could not be written, in a sentence; None where it was.
    """

    format: str
    path: Path
    checks: tuple[Check, ...] = ()
    seconds: float = 0.0
    error: str | None = None

    @property
    def passed(self) -> bool:
        """Whether it was written and every comparison holds."""
        return self.error is None and all(check.passed for check in self.checks)


def export(
    subject: Subject,
    formats: Sequence[str],
    signature: Signature,
    folder: Path,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    license: str = "mit",
    push: str | None = None,
) -> Iterator[Result]:
    """Write a network in several formats, and compare each with the network itself.

    One format that fails leaves the others alone.

    Args:
        formats: some of ``FORMATS``. signature: of the graphs, see :class:`vit3.export.signature.Signature`.
        folder: of all files. dtype: of ``onnx``. device: of ``aoti``. license: on the model card. push: OWNER/NAME on
            the hub, for ``safetensors``.

    Yields:
        A result for each format, as soon as it is there.
    """
    program: ExportedProgram | None = None
    for name in formats:
        started, path = time.monotonic(), folder / file_names(subject, dtype)[name]
        try:
            if name in _TRACED and program is None:
                program = export_program(subject, signature)
            if name == "safetensors":
                run = _hub_folder(subject, path, license, push)
            elif name == "official":
                run = _official(subject, path)
            elif name == "onnx":
                write_onnx(program, signature, path, dtype=dtype, subject=subject)
                run = open_onnx(path)
            elif name == "pt2":
                save_program(program, signature, path)
                run = open_program(path)
            else:
                write_package(program, signature, path, device=device)
                run = open_package(path, device=device)
        except (ValueError, RuntimeError, ModuleNotFoundError) as error:
            yield Result(name, path, seconds=time.monotonic() - started, error=str(error))
            continue
        seconds = time.monotonic() - started
        yield Result(name, path, tuple(verify(subject.model, run, signature)), seconds)


def file_names(subject: Subject, dtype: str = "float32") -> dict[str, str]:
    """What the file (of ``safetensors`` the folder) of each format is called."""
    half = "_float16" if dtype == "float16" else ""
    return {
        "safetensors": f"{subject.name}_hub",
        "onnx": f"{subject.name}{half}.onnx",
        "pt2": f"{subject.name}.pt2",
        "aoti": f"{subject.name}_aoti.pt2",
        "official": f"{subject.name}_official.pth",
    }


def _hub_folder(subject: Subject, path: Path, license: str, push: str | None) -> Run:
    write_hub_folder(subject, path, license=license, push=push)
    return _as_tuple(timm.create_model(f"local-dir:{path}", pretrained=True))


def _official(subject: Subject, path: Path) -> Run:
    write_official(subject, path)
    model = timm.create_model(subject.name, **subject.kwargs)
    model.load_state_dict(from_official(read_tensors(path), subject.name))
    return _as_tuple(model)


def _as_tuple(model: nn.Module) -> Run:
    """The network read back, as the other formats are run."""
    model.eval()

    @torch.inference_mode()
    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        found = model(*inputs)
        return tuple(found) if isinstance(found, (tuple, list)) else (found,)

    return run
