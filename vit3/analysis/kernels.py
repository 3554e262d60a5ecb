"""What Triton's compiler makes of every kernel: registers, spills and shared memory, without a GPU."""

from __future__ import annotations

import importlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from vit3.ops.launch import Launch

ARCHITECTURES = (80, 90, 100)
OPS = ("glu_ttt", "dwconv_ttt")
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Resources:
    """One compiled kernel."""

    op: str
    kernel: str
    width: int  # padded head width
    dtype: str
    launch: Launch
    architecture: int
    registers: int  # per thread
    spills: int  # bytes of local memory per thread
    shared: int  # bytes per block


def configurations(dtypes: tuple[str, ...] = ("fp32", "fp16")) -> Iterator[tuple]:
    """Every (op, kernel, padded width, dtype, launch) of the launch tables."""
    for op in OPS:
        module = importlib.import_module(f"vit3.ops.{op}.triton")
        for kernel, rows in module.LAUNCHES.items():
            names = module.KERNELS[kernel][0].arg_names
            small = all(module.POINTERS.get(name, "") is not None for name in names)  # knows nothing of q's dtype
            for (width, size), launches in rows.items():
                for dtype in ("fp32",) if small else dtypes:
                    if size == (4 if dtype == "fp32" else 2):
                        for launch in launches:
                            yield op, kernel, width, dtype, launch


def resources(configuration: tuple, architecture: int) -> Resources:
    """Compile one configuration for ``sm_<architecture>`` and read what it needs from the machine code."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    op, kernel, width, dtype, launch = configuration
    module = importlib.import_module(f"vit3.ops.{op}.triton")
    fn, _ = module.KERNELS[kernel]
    constants = module.constants(kernel, width, DTYPES[dtype], launch, **module.LARGEST)
    signature, attributes = {}, {}
    for i, name in enumerate(fn.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in module.POINTERS:
            signature[name] = f"*{dtype}" if module.POINTERS[name] is None else f"*{module.POINTERS[name]}"
        elif name in ("factor", "lr"):
            signature[name] = "fp32"
        elif name.endswith("_d"):  # channels lie side by side
            signature[name], constants[name] = "constexpr", 1
        else:
            signature[name] = "i32"
        if name in module.POINTERS or re.fullmatch(r"\w+_[bmnhw]", name):
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=fn, signature=signature, constexprs=constants, attrs=attributes)
    target = GPUTarget("cuda", architecture, 32)
    compiled = triton.compile(source, target=target, options=dict(num_warps=launch.warps, num_stages=launch.stages))
    registers, spills = _usage(compiled.asm["cubin"])
    return Resources(*configuration, architecture, registers, spills, compiled.metadata.shared)


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of local memory a thread, by the disassembler that comes with Triton."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    usage = dict(re.findall(r"(\w+):(\d+)", text[text.index("Function") :]))
    return int(usage["REG"]), int(usage["STACK"]) + int(usage["LOCAL"])


def _job(job: tuple) -> Resources:
    return resources(*job)


def all_resources(architectures: tuple[int, ...] = ARCHITECTURES, workers: int = 2) -> list[Resources]:
    """Compile everything; one row per configuration and architecture."""
    jobs = [(c, a) for c in configurations() for a in architectures]
    with ProcessPoolExecutor(workers) as pool:
        return list(pool.map(_job, jobs, chunksize=4))
