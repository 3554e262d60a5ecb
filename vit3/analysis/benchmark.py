"""Timings of the operators, mixers and models against their controls, all contenders of a case in one loop.

A figure on its own depends on the machine and on what else it does; the ratios of one loop much less. Results are
plain rows, for a table, a CSV file and a plot of time and memory against tokens.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vit3.analysis.memory import kept_bytes
from vit3.mixers import TTT, SoftmaxAttention
from vit3.ops import packed_ttt
from vit3.ops.backend import implementation

CPU_SHAPES = ((16, 384, 6, 14, 14), (4, 64, 2, 56, 56), (2, 192, 6, 32, 32), (1, 192, 6, 64, 64), (1, 64, 2, 128, 128))
GPU_SHAPES = (
    (64, 192, 6, 14, 14),
    (64, 192, 6, 28, 28),
    (64, 192, 6, 32, 32),
    (64, 192, 6, 64, 64),
    (64, 384, 6, 14, 14),
    (64, 384, 6, 32, 32),
)
GROWTH = (32, 64, 128, 256)  # side of the grid: 1,024 to 65,536 tokens
MODEL_SIZES = {"cpu": (224, 512, 1248), "cuda": (224, 512, 1248, 2048)}
TOO_LONG = 20.0  # seconds of one call: a contender that takes longer leaves the larger sizes out


class LinearAttention(nn.Module):
    """Linear attention with feature map elu + 1, not causal: the cheapest linear mixer, as a control.

    Source: Katharopoulos et al., "Transformers are RNNs", 2020, equations 5 and 7.
    """

    def __init__(self, dim: int, num_heads: int):
        super().__init__()
        self.heads, self.qkv, self.proj = num_heads, nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor, h: int, w: int) -> Tensor:
        """Tokens (B, h*w, C) to tokens of the same shape."""
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        q, k = F.elu(q) + 1, F.elu(k) + 1
        y = q @ (k.mT @ v) / (q @ k.sum(dim=-2).unsqueeze(-1))
        return self.proj(y.transpose(1, 2).flatten(2))


@dataclass(frozen=True)
class Row:
    """One contender of one case in one direction."""

    level: str  # op, mixer, growth, model or runtime
    case: str
    tokens: int
    contender: str
    direction: str  # forward, or forward+backward
    threads: int  # of the CPU; 0 on a GPU
    dtype: str
    p20_ms: float
    p50_ms: float
    p80_ms: float
    to_reference: float  # time of the case's first contender / time of this one, both from the same loop
    saved_elements: float | None = None  # kept for the backward pass, per token and channel, without x and weights
    peak_mb: float | None = None  # allocated at most, on a GPU; of a runtime: resident set of a process of its own
    copy_fraction: float | None = None  # floor bytes a second, in units of a copy's
    images_s: float | None = None  # images a second
    ready_s: float | None = None  # from the start of a process to its first answer


def timed(calls: dict[str, Callable[[], object]], device: torch.device, seconds: float = 2.0) -> dict[str, list[float]]:
    """Milliseconds of each call, sorted; the calls take turns for about ``seconds`` each, at least three times."""
    for call in calls.values():
        call()
    _wait(device)
    times: dict[str, list[float]] = {name: [] for name in calls}
    started = time.perf_counter()
    while len(next(iter(times.values()))) < 3 or (
        time.perf_counter() - started < seconds * len(calls) and len(next(iter(times.values()))) < 50
    ):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            _wait(device)
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: sorted(values) for name, values in times.items()}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _quantile(values: list[float], q: float) -> float:
    return values[min(len(values) - 1, round(q * (len(values) - 1)))]


def saved_elements(call: Callable[[], Tensor], ignore: tuple[Tensor, ...], dtype: torch.dtype = torch.float32) -> int:
    """What autograd keeps during ``call``, in elements of ``dtype``: distinct storages, without those of ``ignore``."""
    return round(kept_bytes(call, ignore) / dtype.itemsize)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second that a copy reads and writes."""
    x = torch.empty(2**28 if device.type == "cuda" else 2**24, device=device).normal_()
    y = torch.empty_like(x)
    times = timed({"copy": lambda: y.copy_(x)}, device, 1.0)["copy"]
    return 2 * x.nbytes / (1e-3 * _quantile(times, 0.5))


def backends(device: torch.device, dtype: torch.dtype) -> tuple[str, ...]:
    """The reference first, then what runs on this device."""
    like = torch.empty(0, device=device, dtype=dtype)
    try:
        implementation("glu_ttt", "triton", like, 32)
    except ValueError:
        return ("reference", "fused")
    return ("reference", "fused", "triton")


def rows_of(level, case, tokens, calls, direction, device, dtype, seconds=1.5, **extra) -> list[Row]:
    """One row of each call, all timed in one loop; ``extra`` has by contender what else is known of it."""
    times = timed(calls, device, seconds)
    reference = _quantile(next(iter(times.values())), 0.5)
    rows = []
    for name, values in times.items():
        peak = None
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            calls[name]()
            peak = (torch.cuda.max_memory_allocated(device) - before) / 2**20
        p20, p50, p80 = (_quantile(values, q) for q in (0.2, 0.5, 0.8))
        rows.append(
            Row(
                level, case, tokens, name, direction, 0 if device.type == "cuda" else torch.get_num_threads(),
                str(dtype).removeprefix("torch."), p20, p50, p80, reference / p50,
                **{"peak_mb": peak} | {key: values[name] for key, values in extra.items() if name in values},
            )
        )  # fmt: skip
    return rows


def op_rows(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype, copy: float) -> Iterator[Row]:
    """``packed_ttt`` by backend, with the share of a copy's bandwidth that its floor bytes reach.

    The floor: q, k and v read and the output written, 4(C + D) elements a token; backward another 7(C + D).
    """
    b, c, m, h, w = shape
    d = c // m
    case = f"B{b} C{c} M{m} {h}x{w}"
    for direction in ("forward", "forward+backward"):
        backward = direction == "forward+backward"
        calls = {}
        qkv = torch.randn(b, h * w, 3 * (c + d), device=device, dtype=dtype)
        weights = [torch.randn(1, m, d, d, device=device) / d**0.5 for _ in range(2)]
        weights.append(torch.randn(d, 1, 3, 3, device=device) / 3)
        grad = torch.randn(b, h * w, c + d, device=device, dtype=dtype)
        tensors = [x.requires_grad_(backward) for x in (qkv, *weights)]
        for backend in backends(device, dtype):

            def call(backend=backend, backward=backward, tensors=tensors, grad=grad):
                with nullcontext() if backward else torch.inference_mode():
                    y = packed_ttt(*tensors, h, w, lr=1.0, scale=1 / 3, backend=backend)
                return torch.autograd.grad(y, tensors, grad) if backward else y

            calls[backend] = call
        for row in rows_of("op", case, h * w, calls, direction, device, dtype):
            floor = (11 if backward else 4) * b * h * w * (c + d) * dtype.itemsize
            yield Row(**{**asdict(row), "copy_fraction": floor / (1e-3 * row.p50_ms) / copy})


def _mixers(c: int, m: int, device: torch.device, dtype: torch.dtype) -> dict[str, nn.Module]:
    ours = {backend: TTT(c, m, backend=backend) for backend in backends(device, dtype)}
    for mixer in ours.values():
        mixer.load_state_dict(ours["reference"].state_dict())
    others = {"softmax (SDPA)": SoftmaxAttention(c, m), "linear attention": LinearAttention(c, m)}
    return {name: mixer.to(device) for name, mixer in (ours | others).items()}


def mixer_rows(
    shape: tuple[int, ...],
    device: torch.device,
    dtype: torch.dtype,
    *,
    level: str = "mixer",
    leave_out: tuple[str, ...] = (),
    seconds: float = 2.0,
) -> Iterator[Row]:
    """Whole mixers, projections included; weights in float32, under autocast where ``dtype`` is narrower."""
    b, c, m, h, w = shape
    case = f"B{b} C{c} M{m} {h}x{w}"
    mixers = {name: mixer for name, mixer in _mixers(c, m, device, dtype).items() if name not in leave_out}
    x = torch.randn(b, h * w, c, device=device, requires_grad=True)
    grad = torch.randn(b, h * w, c, device=device)

    def autocast():
        return torch.autocast(device.type, dtype) if dtype != torch.float32 else nullcontext()

    for direction in ("forward", "forward+backward"):
        backward, calls, saved = direction == "forward+backward", {}, {}
        for name, mixer in mixers.items():

            def call(mixer=mixer, backward=backward):
                with autocast(), nullcontext() if backward else torch.inference_mode():
                    y = mixer(x, h, w)
                if backward:
                    y.backward(grad.to(y.dtype))
                return y

            calls[name] = call
            if backward:
                with autocast():
                    count = saved_elements(lambda mixer=mixer: mixer(x, h, w), (x, *mixer.parameters()), dtype)
                saved[name] = count / (b * h * w * c)
        yield from rows_of(level, case, h * w, calls, direction, device, dtype, seconds, saved_elements=saved)


def growth_rows(device: torch.device, dtype: torch.dtype, sides: tuple[int, ...] = GROWTH) -> Iterator[Row]:
    """Mixers of 64 channels and two heads on ever more tokens."""
    left_out: list[str] = []
    for side in sides:
        for row in mixer_rows(
            (1, 64, 2, side, side), device, dtype, level="growth", leave_out=(*left_out,), seconds=1.5
        ):
            if row.p50_ms > 1e3 * TOO_LONG / 16:  # four times as many tokens: sixteen times as long, if quadratic
                left_out.append(row.contender)
            yield row


def exponent(rows: list[Row]) -> float:
    """Slope of log time over log tokens, least squares."""
    x, y = [math.log(r.tokens) for r in rows], [math.log(r.p50_ms) for r in rows]
    mx, my = statistics.fmean(x), statistics.fmean(y)
    return sum((a - mx) * (b - my) for a, b in zip(x, y)) / sum((a - mx) ** 2 for a in x)


def model_rows(size: int, device: torch.device, dtype: torch.dtype) -> Iterator[Row]:
    """ViT³-T against timm's DeiT-T in inference at size x size pixels; the first contender is DeiT-T."""
    options = dict(num_classes=1000)
    models = {
        "deit_tiny (SDPA)": timm.create_model("deit_tiny_patch16_224", dynamic_img_size=True, **options),
        "vit3_tiny": timm.create_model("vit3_tiny", **options),
    }
    batch = {224: 4, 512: 2}.get(size, 1) if device.type == "cpu" else max(1, 64 * 224**2 // size**2)
    x = torch.randn(batch, 3, size, size, device=device)
    calls = {}
    for name, model in models.items():
        model = model.to(device).eval()

        def call(model=model):
            with torch.inference_mode(), torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                return model(x)

        calls[name] = call
    tokens = math.ceil(size / 16) ** 2
    yield from rows_of("model", f"B{batch} {size}x{size} pixels", tokens, calls, "forward", device, dtype, 4.0)
