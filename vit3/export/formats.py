"""The formats: how each is written, and how what was written is run again, for comparison."""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch.export import ExportedProgram

from vit3.errors import UserError
from vit3.export.aoti import open_package, write_package
from vit3.export.hub import open_hub_folder, write_hub_folder
from vit3.export.official import open_official, write_official
from vit3.export.onnx import HALF_BOUND, open_onnx, write_onnx
from vit3.export.program import export_program, open_program, save_program
from vit3.export.report import Result
from vit3.export.runner import Run
from vit3.export.signature import Signature
from vit3.export.subject import Subject
from vit3.export.verify import BOUND, verify

logger = logging.getLogger(__name__)

FORMATS = ("safetensors", "onnx", "pt2", "aoti", "official")
_TRACED = ("onnx", "pt2", "aoti")  # made of a graph; the others are weights alone


def export(
    subject: Subject,
    formats: Sequence[str],
    signature: Signature,
    folder: Path,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    multiple: int = 1,
    license: str = "mit",
    push: str | None = None,
) -> Iterator[Result]:
    """Write a network in several formats, and compare each with the network itself.

    One format that fails leaves the others alone.

    Args:
        formats: some of ``FORMATS``. signature: of the graphs, see :class:`vit3.export.signature.Signature`.
        folder: of all files. dtype: of ``onnx``. device, multiple: of ``aoti`` (:meth:`Signature.in_steps`).
        license: on the model card. push: OWNER/NAME on the hub, for ``safetensors``.

    Yields:
        A result for each format, as soon as it is there.
    """
    steps = {name: signature.in_steps(multiple if name == "aoti" else 1) for name in formats}
    programs: dict[int, ExportedProgram] = {}  # by the step of their sides
    for name in formats:
        started, path, files = time.monotonic(), folder / file_names(subject, dtype)[name], ()
        slow = " (takes minutes where the network is large)" if name in ("onnx", "aoti") else ""
        logger.info("%-12s writing, then comparing%s", name, slow)
        try:
            if name in _TRACED and steps[name].multiple not in programs:
                programs[steps[name].multiple] = export_program(subject, steps[name])
            program = programs.get(steps[name].multiple)
            if name == "safetensors":
                write_hub_folder(subject, path, license=license, push=push)
            elif name == "official":
                write_official(subject, path)
            else:
                with _whole(path) as arriving:
                    if name == "onnx":
                        write_onnx(program, steps[name], arriving, dtype=dtype)
                    elif name == "pt2":
                        save_program(program, steps[name], arriving)
                    else:
                        write_package(program, steps[name], arriving, device=device)
            files = written(path)
            run = _opened(name, path, subject)
        except (ValueError, RuntimeError, OSError, ModuleNotFoundError, UserError) as error:
            yield Result(name, files, (), seconds=time.monotonic() - started, error=str(error))
            continue
        seconds = time.monotonic() - started
        how = dict(bound=HALF_BOUND, relative=True) if name == "onnx" and dtype == "float16" else dict(bound=BOUND)
        how |= dict(dynamic=steps[name].dynamic, lowest=steps[name].lowest, multiple=steps[name].multiple)
        try:
            checks = verify(subject.model, run, steps[name], how["bound"], how.get("relative", False))
        except Exception as error:  # out of memory, for instance; the files are there
            yield Result(name, files, (), seconds=seconds, error=f"the comparison failed: {error}", **how)
            continue
        yield Result(name, files, tuple(checks), seconds=seconds, **how)


def _opened(name: str, path: Path, subject: Subject) -> Run:
    """What was written, to be run."""
    if name == "official":
        return open_official(path, subject)
    return {"safetensors": open_hub_folder, "onnx": open_onnx, "pt2": open_program, "aoti": open_package}[name](path)


def written(path: Path) -> tuple[Path, ...]:
    """The files of one format, the one to open first: of a folder those in it, else the file and its weights' file."""
    if path.is_dir():
        return tuple(sorted(path.iterdir(), key=lambda file: file.suffix != ".safetensors"))
    beside = path.with_name(f"{path.name}.data")
    return (path, beside) if beside.exists() else (path,)


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


@contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """Context for a file (and those beside it) to be written, that is then at ``path`` whole, or not at all."""
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        yield Path(folder) / path.name
        for file in sorted(Path(folder).iterdir(), key=lambda file: file.name == path.name):
            file.replace(path.parent / file.name)
