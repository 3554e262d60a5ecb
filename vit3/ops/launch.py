"""Launch configurations of Triton kernels: which of a table's fit a device, and, on request, which is fastest.

A table lists a few configurations per kernel, padded head width and element size, best guess first, each with a bound
on its shared memory that a test holds against the compiled kernels. No Triton is imported here before a kernel runs.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

MAX_HEAD_DIM = 128
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Launch:
    """One configuration: tokens a tile, columns a program, warps, pipeline stages, bytes of shared memory at most."""

    block: int
    columns: int
    warps: int
    stages: int
    shared: int


class Limits(NamedTuple):
    """What a device allows: bytes of shared memory a block, compute capability."""

    shared: int
    capability: tuple[int, int]


def product_precision(x: Tensor) -> str:
    """How float32 products of kernels on ``x`` are computed, by PyTorch's setting for matrix products: ieee or tf32.

    Triton 3.8 fails to compile tf32 products of these shapes for compute capability 10, so there they stay ieee.
    """
    if x.dtype != torch.float32:
        return "ieee"
    matmul = torch.backends.cuda.matmul
    # Once the newer setting has been used, reading the older one raises an error.
    wanted = matmul.fp32_precision == "tf32" if hasattr(matmul, "fp32_precision") else matmul.allow_tf32
    compiles = x.device.type != "cuda" or limits(x.device).capability < (10, 0)
    return "tf32" if wanted and compiles else "ieee"


# kernel name -> (padded head width, bytes an element) -> configurations, best first
Table = Mapping[str, Mapping[tuple[int, int], Sequence[Launch]]]


def padded(d: int) -> int:
    """Head width as the kernels see it: a power of two, at least the 16 that a matrix instruction takes."""
    return max(16, 1 << (d - 1).bit_length())


@functools.cache
def limits(device: torch.device) -> Limits:
    """Limits of a CUDA device, from its driver."""
    properties = torch.cuda.get_device_properties(device)
    return Limits(properties.shared_memory_per_block_optin, (properties.major, properties.minor))


def refusal(table: Table, d: int, dtype: torch.dtype, device: Limits | None) -> str | None:
    """Why the kernels of ``table`` cannot run, in words; None if they can.

    Args:
        d: head width.
        dtype: of q, k and v.
        device: limits of the device; None where there are none (Triton's interpreter).
    """
    if dtype not in DTYPES:
        return f"its kernels take float32, float16 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    if not 1 <= d <= MAX_HEAD_DIM:
        return f"its kernels take head widths up to {MAX_HEAD_DIM}, not {d}"
    if device is None:
        return None
    if device.capability < (8, 0):
        return "its kernels need compute capability 8.0, this device has {}.{}".format(*device.capability)
    for kernel, rows in table.items():
        candidates = rows.get((padded(d), dtype.itemsize), ())  # none where other launches do this one's work
        if candidates and not any(c.shared <= device.shared for c in candidates):
            least = min(c.shared for c in candidates)
            return f"{kernel} needs {least} bytes of shared memory at head width {d}, this device has {device.shared}"
    return None


def fitting(table: Table, kernel: str, d: int, dtype: torch.dtype, device: Limits | None) -> list[Launch]:
    """Configurations of a kernel that fit the device, best first."""
    candidates = table[kernel][padded(d), dtype.itemsize]
    return [c for c in candidates if device is None or c.shared <= device.shared]


def bucket(tokens: int, heads: int) -> str:
    """Size class of a call: powers of two of its tokens and of its samples times heads, so that all sizes share few."""
    return f"{(tokens - 1).bit_length()}-{(heads - 1).bit_length()}"


def choose(
    table: Table,
    kernel: str,
    d: int,
    like: Tensor,
    *,
    tokens: int,
    heads: int,
    run: Callable[[Launch], None],
    autotune: bool,
) -> Launch:
    """The configuration to launch ``kernel`` with.

    Args:
        table: where the kernel's configurations stand.
        kernel: its name in the table.
        d: head width.
        like: a tensor of the call, for device and dtype.
        tokens: tokens of a sample.
        heads: samples times heads.
        run: launches the kernel with a configuration; may be called several times.
        autotune: time the fitting ones once per size class and remember the fastest.
    """
    interpreted = like.device.type != "cuda"
    device = None if interpreted else limits(like.device)
    candidates = fitting(table, kernel, d, like.dtype, device)
    if not autotune or interpreted or len(candidates) == 1 or torch.cuda.is_current_stream_capturing():
        return candidates[0]
    tuned = _tuned(torch.cuda.get_device_name(like.device), _signature(table))
    return tuned.best((kernel, padded(d), str(like.dtype), bucket(tokens, heads)), candidates, run)


def _signature(table: Table) -> str:
    rows = sorted((kernel, sorted(rows.items())) for kernel, rows in table.items())
    return hashlib.sha256(repr(rows).encode()).hexdigest()[:12]


class Tuned:
    """Fastest configurations found on one device, kept in a JSON file between runs.

    Args:
        path: the file; unreadable or of another table, it is ignored, and if it cannot be written, tuning is
            repeated by the next process.
        timer: ``timer(run, launch) -> milliseconds``.
    """

    def __init__(self, path: Path, timer: Callable[[Callable[[Launch], None], Launch], float]):
        self.path, self.timer = path, timer
        self.found: dict[str, int] = {}
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            self.found = {str(key): int(place) for key, place in stored.items()}
        except (OSError, ValueError, AttributeError, TypeError):
            pass  # nothing there yet, or not ours

    def best(self, key: tuple, candidates: Sequence[Launch], run: Callable[[Launch], None]) -> Launch:
        """The fastest of ``candidates`` for a size class; timed once, then remembered."""
        name = "/".join(map(str, key))
        place = self.found.get(name)
        if place is None or not 0 <= place < len(candidates):
            times = [self.timer(run, c) for c in candidates]
            place = self.found[name] = times.index(min(times))
            logger.info("tuned %s: %s", name, candidates[place])
            self._write()
        return candidates[place]

    def _write(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.path.parent, delete=False, encoding="utf-8") as file:
                json.dump(self.found, file, indent=1, sort_keys=True)
            os.replace(file.name, self.path)
        except OSError as error:
            logger.warning("launch configurations are not kept: %s", error)


@functools.cache
def _tuned(device: str, table: str) -> Tuned:
    import triton

    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = "".join(c if c.isalnum() else "-" for c in device)
    return Tuned(root / "vit3" / f"launches-{name}-triton-{triton.__version__}-{table}.json", _milliseconds)


def _milliseconds(run: Callable[[Launch], None], launch: Launch) -> float:
    """Median of seven timed launches after two that compile and warm up."""
    for _ in range(2):
        run(launch)
    times = []
    for _ in range(7):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run(launch)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[3]
