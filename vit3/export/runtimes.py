"""One network by four runtimes on the CPU: eager PyTorch, torch.compile, AOTInductor and onnxruntime.

Speed comes from one loop in which all take turns, memory from a fresh process for each. No figure of a runtime whose
output differs from eager's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

import vit3
from vit3.analysis import benchmark
from vit3.analysis.benchmark import Row
from vit3.errors import UserError
from vit3.export import resident
from vit3.export.aoti import write_package
from vit3.export.onnx import write_onnx
from vit3.export.program import export_program
from vit3.export.signature import Signature
from vit3.export.subject import Subject
from vit3.export.verify import BOUND

RUNTIMES = ("eager", "torch.compile", "AOTInductor", "onnxruntime")
CALLS = 3  # of one process whose memory is measured
CONDITIONS = (
    f"- Before anything is timed, each output is compared with eager's: at most {BOUND:g} apart.",
    "- Eager and torch.compile run the mixers' `auto` backend, as in training; AOTInductor and onnxruntime the closed "
    "form, exported for any batch at this one size.",
    "- The number of threads is the same for all. AOTInductor compiles it into its file.",
    f"- Peak resident set: of a fresh process that opens the file and runs {CALLS} batches. All is in it: Python, "
    "libraries, weights, activations, and with torch.compile the compiler, without the processes that it starts.",
    "- Seconds until ready: of that process, from its first line to its first answer, imports included. torch.compile "
    "finds there on disk what the timing process compiled before.",
)
_NEEDS = {"onnxruntime": ("onnx", "onnxscript", "onnxruntime")}


def missing() -> dict[str, str]:
    """Runtimes that cannot run here, each with one sentence that says why and names the cure."""
    found = {}
    for runtime, packages in _NEEDS.items():
        if absent := [name for name in packages if find_spec(name) is None]:
            found[runtime] = f"{runtime} is left out: no package {', '.join(absent)}; pip install 'vit3[export]'"
    if not _compiler():
        for runtime in ("torch.compile", "AOTInductor"):
            found[runtime] = f"{runtime} is left out: no C++ compiler was found; install g++, or set CXX to one"
    return found


def _compiler() -> bool:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        return bool(get_cpp_compiler())
    except InvalidCxxCompiler:
        return False


def write_artefacts(subject: Subject, folder: Path, runtimes: tuple[str, ...]) -> dict[str, Path]:
    """One file for each runtime; those that are exported take any batch, at the subject's size of images alone.

    PyTorch's number of threads at this moment is compiled into the package of AOTInductor.

    Raises:
        UserError: the network cannot be exported.
    """
    weights = folder / "model.safetensors"
    save_file({name: value.contiguous() for name, value in subject.model.state_dict().items()}, weights)
    files = {name: weights for name in runtimes if name in ("eager", "torch.compile")}
    if len(files) < len(runtimes):
        try:
            files |= _export(subject, folder, runtimes)
        except ValueError as error:
            raise UserError(f"{subject.name} cannot be exported, so no runtime is timed: {error}") from error
    return {name: files[name] for name in runtimes}


def _export(subject: Subject, folder: Path, runtimes: tuple[str, ...]) -> dict[str, Path]:
    signature = Signature.of(subject, dynamic=("batch",))
    program, files = export_program(subject, signature), {}
    if "onnxruntime" in runtimes:
        files["onnxruntime"] = folder / "model.onnx"
        write_onnx(program, signature, files["onnxruntime"])
    if "AOTInductor" in runtimes:
        files["AOTInductor"] = folder / "model.pt2"
        write_package(program, signature, files["AOTInductor"])
    return files


def runtime_rows(
    subject: Subject,
    batches: tuple[int, ...],
    runtimes: tuple[str, ...] = RUNTIMES,
    seconds: float = 4.0,
    say: Callable[[str], None] = print,
) -> Iterator[Row]:
    """Rows of each batch: times of a forward pass, peak memory, and seconds of a new process to its first answer.

    Args:
        subject: a network of images to one output. batches: images of one call. runtimes: some of ``RUNTIMES``.
        seconds: of the loop, for each runtime. say: takes a line on each runtime that is left out.

    Raises:
        UserError: the output of a runtime is not eager's within ``BOUND``.
    """
    left_out = {name: why for name, why in missing().items() if name in runtimes}
    for why in left_out.values():
        say(why)
    runtimes = tuple(name for name in runtimes if name not in left_out)
    threads = torch.get_num_threads()
    build = dict(name=subject.name, kwargs=subject.kwargs)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        files = write_artefacts(subject, folder, runtimes)
        for batch in batches:
            x = _images(subject, batch)
            with torch.inference_mode():
                expected = subject.model(torch.from_numpy(x)).numpy()
            calls = {name: resident.open_runner(name, str(files[name]), x, threads, build) for name in runtimes}
            for name, call in calls.items():
                check(name, np.asarray(call()), expected, batch)
            alone = {name: measure_alone(name, files[name], x, expected, threads, build, folder) for name in runtimes}
            yield from _rows(subject, batch, calls, alone, seconds)


def _images(subject: Subject, batch: int) -> np.ndarray:
    shape = (batch, subject.in_chans, *subject.img_size)
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


def check(runtime: str, output: np.ndarray, expected: np.ndarray, batch: int) -> None:
    """Make sure that a runtime gives eager's answer.

    Raises:
        UserError: another shape, a difference above ``BOUND``, or no number.
    """
    same = output.shape == expected.shape
    error = float(np.abs(output - expected).max()) if same else float("inf")
    if not error <= BOUND:
        what = f"differs by {error:.1e} from eager, above {BOUND:g}" if same else f"has the shape {output.shape}"
        raise UserError(f"{runtime} at batch {batch}: its output {what}, so no timing is reported; "
                        "python tools/export.py shows each difference")  # fmt: skip


def measure_alone(
    runtime: str, file: Path, x: np.ndarray, expected: np.ndarray, threads: int, build: dict, folder: Path
) -> dict[str, float]:
    """Peak resident bytes of a fresh process that loads the file and runs it, and its seconds to the first answer.

    All is in it: the interpreter, libraries (shared pages too), weights, activations; with torch.compile the compiler,
    though not the processes that it starts.

    Raises:
        UserError: it does not run, or its output is not eager's.
    """
    np.save(folder / "input.npy", x)
    options = dict(runtime=runtime, file=str(file), input=str(folder / "input.npy"), output=str(folder / "output.npy"),
                   threads=threads, calls=CALLS, build=build)  # fmt: skip
    code = Path(resident.__file__).read_text(encoding="utf-8")  # as text: importing it would import all of vit3
    paths = [str(Path(vit3.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    environment = dict(os.environ, OMP_NUM_THREADS=str(threads), PYTHONPATH=os.pathsep.join(filter(None, paths)))
    result = subprocess.run(
        [sys.executable, "-c", code, json.dumps(options)], capture_output=True, text=True, env=environment
    )
    if result.returncode:
        last = (result.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(f"{runtime} does not run in a process of its own: {last}")
    check(f"{runtime} in a process of its own", np.load(folder / "output.npy"), expected, len(x))
    return json.loads(result.stdout.splitlines()[-1])


def _rows(subject: Subject, batch: int, calls: dict, alone: dict, seconds: float) -> Iterator[Row]:
    height, width = subject.img_size
    case, tokens = f"{subject.name} B{batch} {height}x{width} pixels", height * width // 16**2
    peak = {name: values["peak_bytes"] / 2**20 for name, values in alone.items()}
    ready = {name: values["ready_s"] for name, values in alone.items()}
    for row in benchmark.rows_of("runtime", case, tokens, calls, "forward", torch.device("cpu"), torch.float32, seconds,
                                 peak_mb=peak, ready_s=ready):  # fmt: skip
        yield replace(row, images_s=1e3 * batch / row.p50_ms)
