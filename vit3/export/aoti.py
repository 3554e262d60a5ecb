"""A network compiled ahead of time (AOTInductor): a package of machine code, for programs in C++ and Python."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.export import ExportedProgram

from vit3.errors import first_line
from vit3.export.runner import Run, as_tuple
from vit3.export.signature import Signature

DEVICES = ("cpu", "cuda")
_SIGNATURE = "signature"  # key among the package's metadata


def write_package(program: ExportedProgram, signature: Signature, path: Path, device: str = "cpu") -> None:
    """Compile ``program`` into the package ``path`` (``.pt2``), for this processor's instructions.

    Takes minutes, most of them in Python on free sizes; ``dynamic=[batch]`` is much faster.

    Args:
        program: of :func:`vit3.export.program.export_program`. signature: of the same.
        device: ``cpu``, or ``cuda`` for this GPU's generation.

    Raises:
        ValueError: unknown device, no such device here, or no compiler.
    """
    if device not in DEVICES:
        raise ValueError(f"device='{device}' is unknown; use one of: {', '.join(DEVICES)}")
    if device == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"device='{device}' needs a CUDA device, and there is none; use device='cpu'")
        from torch.export.passes import move_to_device_pass

        program = move_to_device_pass(program, device)
    from torch._inductor.exc import CppCompileError, InductorError, InvalidCxxCompiler  # loads the compiler

    configs = {"aot_inductor.metadata": {_SIGNATURE: signature.to_json(), "device": device}}
    try:
        with torch.no_grad():
            torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=configs)
    except (InductorError, InvalidCxxCompiler, CppCompileError) as error:
        raise ValueError(f"AOTInductor cannot compile this network ({first_line(error)}); it needs a C++ compiler "
                         "(apt install g++); use format=[pt2], which needs none") from error  # fmt: skip


def open_package(path: Path) -> Run:
    """The network in a package, as a function of its inputs.

    Shapes that were not declared are a ValueError. That is checked here: the machine code itself does so only where
    the environment variable AOTI_RUNTIME_CHECK_INPUTS is 1, and without reads past the end of what it was given.
    """
    package = torch._inductor.aoti_load_package(str(path))
    notes = package.get_metadata()
    signature = Signature.from_json(notes[_SIGNATURE])

    @torch.no_grad()
    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        signature.check(*inputs)
        return as_tuple(package(*(x.to(notes["device"]) for x in inputs)))

    return run
