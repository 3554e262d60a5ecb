"""The depthwise-convolution inner step and its gradient as Triton kernels.

Two kernels over tokens do all the work, forward and backward:

    _correlate   T[d] = sum over p of y(p) x(p + d)      G from K and V; dW' from Q and dO
    _convolve    z(p) = factor * sum over d of W[d] x(p + d), or x(p - d)      O; dQ; dV; dK

and two work on nine taps a channel: ``_step`` and ``_step_backward``. A tile is [p, D], channels side by side in
memory; what lies outside the grid is zero. Arithmetic is in float32. A program takes 16 D positions of one sample,
whatever the batch, so sums have a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vit3.ops.launch import Launch, choose, padded


@triton.jit
def _shifted(x, row, column, dy, dx, h, w, channel, left, x_h, x_w, x_d, D: tl.constexpr):
    """x at positions (row + dy, column + dx), zero outside the grid, from position ``left`` and channel D on."""
    y, z = row + dy, column + dx
    inside = (y >= 0) & (y < h) & (z >= 0) & (z < w) & (tl.arange(0, row.shape[0]) < left)
    place = y.to(tl.int64) * x_h + z.to(tl.int64) * x_w
    mask = inside[:, None] & (channel[None, :] < D)
    return tl.load(x + place[:, None] + channel[None, :] * x_d, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _correlate(
    x, y, sums, n, splits, h, w,
    x_b, x_d, x_h, x_w, y_b, y_d, y_h, y_w,
    D: tl.constexpr, J: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Sums over a range of positions of y(p) x(p + offset), nine offsets: (B, splits, 9, D)."""
    blocks: tl.constexpr = (D + J - 1) // J
    pid = tl.program_id(0)
    block, split, b = pid % blocks, pid // blocks % splits, (pid // blocks // splits).to(tl.int64)
    channel = block * J + tl.arange(0, J)
    first = split * TOKENS
    x += b * x_b
    y += b * y_b
    sums += (b * splits + split) * (9 * D)
    count = tl.minimum(n - first, TOKENS)
    for tap in range(9):  # a range of x and y stays in the cache for all nine
        total = tl.zeros([BLOCK, J], tl.float32)
        for start in range(0, count, BLOCK):
            p = first + start + tl.arange(0, BLOCK)
            row, column = p // w, p % w
            here = _shifted(y, row, column, 0, 0, h, w, channel, count - start, y_h, y_w, y_d, D)
            there = _shifted(x, row, column, tap // 3 - 1, tap % 3 - 1, h, w, channel, count - start, x_h, x_w, x_d, D)
            total += here * there
        tl.store(sums + tap * D + channel, tl.sum(total, 0), mask=channel < D)


@triton.jit
def _convolve(
    x, taps, out, n, splits, h, w, factor,
    x_b, x_d, x_h, x_w, o_b, o_d, o_h, o_w,
    D: tl.constexpr, J: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, SIGN: tl.constexpr,
):  # fmt: skip
    """factor * the sum of taps (B, 9, D) times x at p + SIGN * offset."""
    blocks: tl.constexpr = (D + J - 1) // J
    pid = tl.program_id(0)
    block, split, b = pid % blocks, pid // blocks % splits, (pid // blocks // splits).to(tl.int64)
    channel = block * J + tl.arange(0, J)
    first = split * TOKENS
    x += b * x_b
    out += b * o_b
    taps += b * (9 * D)
    count = tl.minimum(n - first, TOKENS)
    for start in range(0, count, BLOCK):
        p = first + start + tl.arange(0, BLOCK)
        row, column = p // w, p % w
        left = count - start
        total = tl.zeros([BLOCK, J], tl.float32)
        for tap in range(9):
            weight = tl.load(taps + tap * D + channel, mask=channel < D, other=0.0)
            dy, dx = SIGN * (tap // 3 - 1), SIGN * (tap % 3 - 1)
            total += weight[None, :] * _shifted(x, row, column, dy, dx, h, w, channel, left, x_h, x_w, x_d, D)
        place = row.to(tl.int64) * o_h + column.to(tl.int64) * o_w
        mask = (tl.arange(0, BLOCK) < left)[:, None] & (channel[None, :] < D)
        value = (total * factor).to(out.dtype.element_ty)
        tl.store(out + place[:, None] + channel[None, :] * o_d, value, mask=mask)


@triton.jit
def _taps(base, channel, D: tl.constexpr):
    """Nine taps of some channels, (9, D) in memory, as [16, D] with zeros below."""
    tap = tl.arange(0, 16)
    mask = (tap[:, None] < 9) & (channel[None, :] < D)
    return tl.load(base + tap[:, None] * D + channel[None, :], mask=mask, other=0.0)


@triton.jit
def _store_taps(base, channel, x, D: tl.constexpr):
    tap = tl.arange(0, 16)
    mask = (tap[:, None] < 9) & (channel[None, :] < D)
    tl.store(base + tap[:, None] * D + channel[None, :], x, mask=mask)


@triton.jit
def _step(sums, start, g, fast, splits, factor, lr, D: tl.constexpr, J: tl.constexpr, STORE_G: tl.constexpr):
    """G = factor times the sum over splits; W' = W0 - lr G / (||G|| + 1), norm over the taps of a channel."""
    blocks: tl.constexpr = (D + J - 1) // J
    pid = tl.program_id(0)
    b, channel = (pid // blocks).to(tl.int64), pid % blocks * J + tl.arange(0, J)
    total = tl.zeros([16, J], tl.float32)
    for split in range(splits):
        total += _taps(sums + (b * splits + split) * (9 * D), channel, D)
    total *= factor
    if STORE_G:
        _store_taps(g + b * (9 * D), channel, total, D)
    norm = tl.sqrt(tl.sum(total * total, 0))[None, :]
    _store_taps(fast + b * (9 * D), channel, _taps(start, channel, D) - lr * (total / (norm + 1)), D)


@triton.jit
def _step_backward(sums, g, dfast, dg, splits, lr, D: tl.constexpr, J: tl.constexpr):
    """dW' = the sum over splits; dG from dW' = -dG^/lr."""
    blocks: tl.constexpr = (D + J - 1) // J
    pid = tl.program_id(0)
    b, channel = (pid // blocks).to(tl.int64), pid % blocks * J + tl.arange(0, J)
    total = tl.zeros([16, J], tl.float32)
    for split in range(splits):
        total += _taps(sums + (b * splits + split) * (9 * D), channel, D)
    _store_taps(dfast + b * (9 * D), channel, total, D)
    raw = _taps(g + b * (9 * D), channel, D)
    norm = tl.sqrt(tl.sum(raw * raw, 0))[None, :]
    direction = raw / tl.where(norm > 0, norm, 1.0)
    up = -lr * total
    along = tl.sum(up * direction, 0)[None, :]
    change = up / (norm + 1) - direction * (norm * along / ((norm + 1) * (norm + 1)))
    _store_taps(dg + b * (9 * D), channel, change, D)


# name of a launch -> (kernel, its flags)
KERNELS = {
    "correlate": (_correlate, {}),
    "convolve": (_convolve, dict(SIGN=1)),
    "convolve_back": (_convolve, dict(SIGN=-1)),
    "step": (_step, dict(STORE_G=True)),
    "step_again": (_step, dict(STORE_G=False)),
    "step_backward": (_step_backward, {}),
}
# Pointers of the kernels: the dtype of q, k and v (None), or always float32.
POINTERS: dict[str, str | None] = dict.fromkeys(("x", "y", "out")) | dict.fromkeys(
    ("taps", "sums", "start", "g", "fast", "dfast", "dg"), "fp32"
)
LARGEST: dict = {}  # no option makes these kernels larger
_TOKENS = {(dp, size): (Launch(64, min(dp, 32), 4, 1, 2048),) for dp in (16, 32, 64, 128) for size in (2, 4)}
_STEP = {key: (Launch(1, min(key[0], 32), 1, 1, 2048),) for key in _TOKENS}
LAUNCHES = {name: _TOKENS if kernel in (_correlate, _convolve) else _STEP for name, (kernel, _) in KERNELS.items()}


def constants(name: str, d: int, dtype: torch.dtype, launch: Launch) -> dict:
    """Compile-time arguments of a launch."""
    kernel, flags = KERNELS[name]
    every = dict(D=d, J=launch.columns, BLOCK=launch.block, TOKENS=16 * padded(d), **flags)
    return {key: value for key, value in every.items() if key in kernel.arg_names}


class _Call:
    """What all launches of one call share."""

    def __init__(self, q: Tensor, autotune: bool):
        self.b, self.d, self.h, self.w = q.shape
        self.like, self.autotune = q, autotune
        self.n = self.h * self.w
        self.splits = triton.cdiv(self.n, 16 * padded(self.d))
        self.size = (self.n, self.splits, self.h, self.w)

    def taps(self, splits: int = 1) -> Tensor:
        """Room for nine taps a channel per sample and split."""
        return torch.empty(self.b * splits, 9, self.d, dtype=torch.float32, device=self.like.device)

    def run(self, name: str, *args) -> None:
        """Launch a kernel on everything of this call."""
        kernel, _ = KERNELS[name]

        def run(launch: Launch) -> None:
            per_sample = triton.cdiv(self.d, launch.columns) * (self.splits if "BLOCK" in kernel.arg_names else 1)
            kernel[(self.b * per_sample,)](
                *args,
                **constants(name, self.d, self.like.dtype, launch),
                num_warps=launch.warps,
                num_stages=launch.stages,
            )

        if self.b:
            size = dict(tokens=self.n, heads=self.b)
            with torch.cuda.device_of(self.like):  # Triton launches on the current device, whatever its arguments
                run(choose(LAUNCHES, name, self.d, self.like, **size, run=run, autotune=self.autotune))

    def correlate(self, x: Tensor, y: Tensor) -> Tensor:
        sums = self.taps(self.splits)
        self.run("correlate", x, y, sums, *self.size, *x.stride(), *y.stride())
        return sums

    def convolve(self, x: Tensor, taps: Tensor, out: Tensor, *, back: bool, factor: float = 1.0) -> None:
        self.run("convolve_back" if back else "convolve", x, taps, out, *self.size, factor, *x.stride(), *out.stride())


def _start(w: Tensor) -> Tensor:
    """The kernel (D, 1, 3, 3) as taps (9, D) in float32."""
    return w.float().flatten(1).t().contiguous()


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    out: Tensor,
    *,
    lr: float,
    scale: float,
    autotune: bool = False,
) -> Tensor:
    """Write conv(W', q) into ``out`` and return the raw inner gradient.

    Args:
        q: queries (B, D, H, W), any strides; k and v alike, of the same dtype.
        w: learned start of the kernel, (D, 1, 3, 3).
        out: where the output goes, (B, D, H, W), any strides.
        autotune: time launch configurations once per size class.

    Returns:
        (B, D, 9) in float32.
    """
    call = _Call(q, autotune)
    g, fast = call.taps(), call.taps()
    call.run("step", call.correlate(k, v), _start(w), g, fast, call.splits, -scale / call.n, lr)
    call.convolve(q, fast, out, back=False)
    return g.transpose(1, 2).contiguous()


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    g: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    *,
    lr: float,
    scale: float,
    autotune: bool = False,
) -> Tensor:
    """Write the gradients of q, k and v into ``dq``, ``dk`` and ``dv``; return that of w, (D, 1, 3, 3) in float32."""
    call = _Call(q, autotune)
    raw = g.transpose(1, 2).contiguous()
    fast, dfast, dg = call.taps(), call.taps(), call.taps()
    call.run("step_again", raw, _start(w), raw, fast, 1, 1.0, lr)
    call.run("step_backward", call.correlate(q, grad), raw, dfast, dg, call.splits, lr)
    call.convolve(grad, fast, dq, back=True)
    call.convolve(k, dg, dv, back=False, factor=-scale / call.n)
    call.convolve(v, dg, dk, back=True, factor=-scale / call.n)
    return dfast.sum(dim=0).t().reshape(call.d, 1, 3, 3).contiguous()
