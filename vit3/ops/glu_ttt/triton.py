"""Launching the Triton kernels of the GLU inner step: configurations, grids, forward and backward."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from vit3.ops.glu_ttt import kernels_triton as kernels
from vit3.ops.launch import Launch, choose, padded, product_precision
from vit3.ops.rotary import Rotary

# name of a launch -> (kernel, its flags). Where both parts of a backward pass fit one launch, it has rows of its own.
KERNELS = {
    "gradient": (kernels.gradient, {}),
    "step": (kernels.step, dict(STORE_G=True)),
    "step_again": (kernels.step, dict(STORE_G=False)),
    "apply": (kernels.apply, {}),
    "apply_backward": (kernels.apply_backward, dict(WRITE=True, SUM=True)),
    "apply_backward_write": (kernels.apply_backward, dict(WRITE=True, SUM=False)),
    "apply_backward_sum": (kernels.apply_backward, dict(WRITE=False, SUM=True)),
    "step_backward": (kernels.step_backward, {}),
    "gradient_backward": (kernels.gradient_backward, dict(WRITE=True, SUM=True)),
    "gradient_backward_write": (kernels.gradient_backward, dict(WRITE=True, SUM=False)),
    "gradient_backward_sum": (kernels.gradient_backward, dict(WRITE=False, SUM=True)),
}
# Pointers of the kernels: the dtype of q, k and v (None), or always float32.
POINTERS: dict[str, str | None] = dict.fromkeys(("q", "k", "v", "out", "grad", "dq", "dk", "dv")) | dict.fromkeys(
    ("w", "cos", "sin", "sums", "fast", "g", "dfast", "dg", "unit"), "fp32"
)
LARGEST = dict(rotary=True, precision="ieee")  # the options that need most registers
# bytes an element -> launch -> padded head width -> (tokens a tile, columns, warps, KB of shared memory), best
# first; the memory is the most found over aligned and unaligned strides, with tf32 where it is allowed
_TABLE = {
    2: {
        "gradient": {
            16: [(64, 16, 4, 5)],
            32: [(64, 32, 4, 12)],
            64: [(64, 32, 4, 24), (64, 64, 8, 33)],
            128: [(32, 32, 8, 27)],
        },
        "apply": {16: [(64, 16, 4, 3)], 32: [(64, 32, 4, 8)], 64: [(64, 64, 4, 24)], 128: [(64, 32, 8, 32)]},
        "apply_backward": {16: [(32, 16, 4, 3)], 32: [(64, 32, 4, 14), (32, 32, 8, 10)]},
        "apply_backward_write": {64: [(32, 32, 4, 20), (32, 16, 4, 12)], 128: [(16, 16, 8, 20)]},
        "apply_backward_sum": {64: [(32, 32, 4, 24)], 128: [(64, 16, 8, 36)]},
        "gradient_backward": {16: [(32, 16, 4, 4)]},
        "gradient_backward_write": {
            32: [(32, 16, 8, 4)],
            64: [(32, 32, 8, 16), (32, 16, 4, 10)],
            128: [(16, 16, 8, 13)],
        },
        "gradient_backward_sum": {
            32: [(32, 16, 4, 12)],
            64: [(64, 16, 4, 28), (32, 16, 4, 22)],
            128: [(32, 16, 8, 42)],
        },
    },
    4: {
        "gradient": {
            16: [(32, 16, 4, 8)],
            32: [(32, 32, 4, 20)],
            64: [(32, 16, 4, 26), (16, 32, 4, 26)],
            128: [(32, 16, 4, 50)],
        },
        "apply": {16: [(32, 16, 4, 4)], 32: [(32, 32, 4, 12)], 64: [(32, 16, 4, 16)], 128: [(32, 16, 8, 32)]},
        "apply_backward": {16: [(32, 16, 4, 8)], 32: [(16, 32, 4, 16)]},
        "apply_backward_write": {64: [(32, 16, 4, 20)], 128: [(32, 16, 4, 40)]},
        "apply_backward_sum": {64: [(32, 16, 4, 24)], 128: [(32, 16, 4, 48)]},
        "gradient_backward": {16: [(16, 16, 4, 8)], 32: [(16, 32, 8, 28)]},
        "gradient_backward_write": {64: [(32, 16, 4, 32)], 128: [(16, 16, 8, 56)]},
        "gradient_backward_sum": {64: [(32, 16, 4, 32)], 128: [(16, 16, 4, 48)]},
    },
}
_SMALL = {(width, size): (Launch(1, 16, 4, 1, 1024),) for width in (16, 32, 64, 128) for size in (2, 4)}
LAUNCHES = {name: _SMALL for name in ("step", "step_again", "step_backward")} | {
    name: {
        (width, size): tuple(Launch(*place, 1, 1024 * kb) for *place, kb in choices)
        for size, rows in _TABLE.items()
        for width, choices in rows.get(name, {}).items()
    }
    for name in _TABLE[2]
}


def constants(name: str, d: int, dtype: torch.dtype, launch: Launch, *, rotary: bool, precision: str) -> dict:
    """Compile-time arguments of a launch."""
    kernel, flags = KERNELS[name]
    dp = padded(d)
    every = dict(
        D=d,
        DP=dp,
        J=launch.columns,
        BLOCK=launch.block,
        TOKENS=16 * dp,  # sums then cost an eighth of the bytes of k and v
        ROTARY=rotary,
        PRECISION=precision,
        EXACT=dtype != torch.float32,
        **flags,
    )
    return {key: value for key, value in every.items() if key in kernel.arg_names}


class _Call:
    """What all launches of one call share."""

    def __init__(self, q: Tensor, rotary: Rotary | None, autotune: bool):
        self.b, self.m, self.n, self.d = q.shape
        self.like, self.rotary, self.autotune = q, rotary, autotune
        self.bm = self.b * self.m
        self.splits = triton.cdiv(self.n, 16 * padded(self.d))
        self.precision = product_precision(q)

    def matrices(self, splits: int = 1) -> Tensor:
        """Room for (D, 2D) per sample, head and split."""
        shape = (self.bm * splits, self.d, 2 * self.d)
        return torch.empty(shape, dtype=torch.float32, device=self.like.device)

    def tables(self) -> tuple:
        """Rotation tables, and the grid that they are for."""
        if self.rotary is None:
            return self.like, self.like, 1, 1, 1  # never read
        cos, sin, h, w = self.rotary
        return cos.contiguous(), sin.contiguous(), h, w, cos.shape[-1]

    def has(self, name: str) -> bool:
        return (padded(self.d), self.like.dtype.itemsize) in LAUNCHES[name]

    def run(self, name: str, *args) -> None:
        """Launch a kernel on everything of this call."""
        kernel, flags = KERNELS[name]
        fixed = dict(rotary=self.rotary is not None, precision=self.precision)

        def run(launch: Launch) -> None:
            blocks = 1 if flags.get("WRITE") else triton.cdiv(self.d, launch.columns)
            per_head = {kernels.step: 2 * blocks, kernels.step_backward: 1}.get(kernel, self.splits * blocks)
            kernel[(self.bm * per_head,)](
                *args,
                **constants(name, self.d, self.like.dtype, launch, **fixed),
                num_warps=launch.warps,
                num_stages=launch.stages,
            )

        if self.bm:
            size = dict(tokens=self.n, heads=self.bm)
            with torch.cuda.device_of(self.like):  # Triton launches on the current device, whatever its arguments
                run(choose(LAUNCHES, name, self.d, self.like, **size, run=run, autotune=self.autotune))


def _start(w1: Tensor, w2: Tensor) -> Tensor:
    """W1 and W2 side by side, (M, D, 2D) in float32."""
    return torch.cat((w1[0].float(), w2[0].float()), dim=-1)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w1: Tensor,
    w2: Tensor,
    out: Tensor,
    *,
    lr: float,
    scale: float,
    rotary: Rotary | None = None,
    autotune: bool = False,
) -> Tensor:
    """Write f(W', q) into ``out`` and return the raw inner gradient.

    Args:
        q: queries (B, M, N, D), any strides; k and v alike, of the same dtype.
        w1: learned start of W1 (1, M, D, D); w2 alike.
        out: where the output goes, (B, M, N, D), any strides.
        rotary: rotation of q and k at load.
        autotune: time launch configurations once per size class.

    Returns:
        (B, M, D, 2D) in float32: gradients of W1 and W2 side by side.
    """
    call = _Call(q, rotary, autotune)
    w, sums, fast, g = _start(w1, w2), call.matrices(call.splits), call.matrices(), call.matrices()
    cos, sin, *grid = call.tables()
    size = (call.n, call.m, call.splits, *grid)
    call.run("gradient", k, v, w, cos, sin, sums, *size, *k.stride(), *v.stride())
    call.run("step", sums, w, g, fast, call.splits, call.m, -scale / call.n, lr)
    call.run("apply", q, fast, cos, sin, out, *size, *q.stride(), *out.stride())
    return g.view(call.b, call.m, call.d, 2 * call.d)


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w1: Tensor,
    w2: Tensor,
    g: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    *,
    lr: float,
    scale: float,
    rotary: Rotary | None = None,
    autotune: bool = False,
) -> tuple[Tensor, Tensor]:
    """Write the gradients of q, k and v into ``dq``, ``dk`` and ``dv``; return those of w1 and w2, in float32.

    Args:
        grad: gradient of the output, (B, M, N, D), any strides, stride 0 included.
        g: what :func:`forward` returned.
    """
    call = _Call(q, rotary, autotune)
    w, sums, fast = _start(w1, w2), call.matrices(call.splits), call.matrices()
    dfast, dg = call.matrices(), call.matrices()
    unit = torch.empty(call.bm, dtype=torch.float32, device=q.device)
    cos, sin, *grid = call.tables()
    size = (call.n, call.m, call.splits)

    def both(name: str, *args) -> None:
        for part in (name,) if call.has(name) else (f"{name}_write", f"{name}_sum"):
            call.run(part, *args)

    call.run("step_again", g, w, g, fast, 1, call.m, 1.0, lr)
    strides = (*grad.stride(), *q.stride(), *dq.stride())
    both("apply_backward", grad, q, fast, cos, sin, dq, sums, *size, *grid, *strides)
    call.run("step_backward", sums, g, dfast, dg, unit, call.splits, lr)
    strides = (*k.stride(), *v.stride(), *dk.stride(), *dv.stride())
    pointers = (k, v, w, dg, unit, cos, sin, dk, dv, sums)
    both("gradient_backward", *pointers, *size, -scale / call.n, *grid, *strides)
    per_sample = dfast + sums.view(call.bm, call.splits, call.d, 2 * call.d).sum(dim=1)
    dw = per_sample.view(call.b, call.m, call.d, 2 * call.d).sum(dim=0)[None]
    return dw[..., : call.d].clone(), dw[..., call.d :].clone()
