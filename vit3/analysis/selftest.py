"""Self-test of the operators on this machine: every backend, dtype and shape against the closed form in float64."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from vit3.ops import packed_ttt
from vit3.ops.glu_ttt.reference import gradients
from vit3.ops.packed_ttt.reference import branches
from vit3.ops.rotary import Rotary, rotary_tables

STEP = dict(lr=1.0, scale=1 / 3)
# Largest relative L2 error of an output or a gradient, worst head. In 16 bit, also at most twice the error of the
# closed form, which computes in float32 and rounds nothing but its inputs and results.
BOUNDS = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}
UPDATE_BOUND = 1e-2  # of W' - W0, under autocast
QUANTITIES = ("output", "d qkv", "d w1", "d w2", "d w3")
COLUMNS = (*QUANTITIES, "update", "twice")


@dataclass(frozen=True)
class Case:
    """A shape: samples, heads, grid, head width, whether q and k are rotated, layout of the upstream gradient."""

    b: int
    m: int
    h: int
    w: int
    d: int
    rotated: bool = False
    upstream: str = "plain"  # plain, expanded (stride 0) or transposed

    def __str__(self) -> str:
        rotated = ", rotated" if self.rotated else ""
        return f"{self.b} x {self.m} heads of {self.d}, {self.h} x {self.w}{rotated}, {self.upstream} gradient"


# Every token count, head width, number of heads and layout of interest at least once.
CASES = (
    Case(64, 3, 1, 1, 8),
    Case(8, 3, 5, 7, 24, True, "transposed"),
    Case(2, 3, 7, 7, 32, True),
    Case(2, 1, 7, 9, 48, False, "expanded"),
    Case(2, 3, 14, 14, 64, True),
    Case(1, 3, 14, 14, 80),
    Case(1, 1, 14, 14, 128, True, "transposed"),
    Case(1, 3, 25, 41, 32, True),
    Case(1, 2, 64, 64, 64),
)
QUICK = (Case(8, 3, 5, 7, 24, True, "transposed"), Case(2, 3, 14, 14, 32, True), Case(1, 1, 25, 41, 64))


@dataclass(frozen=True)
class Finding:
    """One backend and dtype on one shape: the worst quantity, its error and the bound it must keep."""

    backend: str
    dtype: str
    what: str
    where: str
    error: float
    bound: float

    @property
    def passed(self) -> bool:
        return self.error <= self.bound  # NaN does not pass


def inputs(case: Case, dtype: torch.dtype, device: torch.device, weight_dtype: torch.dtype | None = None):
    """qkv, w1, w2, w3 (scaled by their fan) and an upstream gradient, the same numbers on every device."""
    b, m, n, d = case.b, case.m, case.h * case.w, case.d
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    qkv, weights = randn(b, n, 3 * d * (m + 1)), [randn(1, m, d, d) / d**0.5, randn(1, m, d, d) / d**0.5]
    weights.append(randn(d, 1, 3, 3) / 3)
    grad = {
        "plain": lambda: randn(b, n, d * (m + 1)),
        "transposed": lambda: randn(b, d * (m + 1), n),
        "expanded": lambda: randn(1, 1, 1),
    }[case.upstream]()
    grad = grad.to(device, dtype)
    if case.upstream == "transposed":
        grad = grad.transpose(1, 2)
    grad = grad.expand(b, n, d * (m + 1))
    return [qkv.to(device, dtype), *(x.to(device, weight_dtype or dtype) for x in weights)], grad


def outcome(case: Case, tensors: list[Tensor], grad: Tensor, backend: str, dtype: torch.dtype | None = None):
    """Output of ``packed_ttt`` and its gradients, with the inputs converted to ``dtype``."""
    tensors = [x.detach().to(dtype or x.dtype).requires_grad_() for x in tensors]
    rotary = _rotary(case, tensors[0])
    y = packed_ttt(*tensors, case.h, case.w, **STEP, rotary=rotary, backend=backend)
    return [y.detach(), *torch.autograd.grad(y, tensors, grad.to(y.dtype))]


def _rotary(case: Case, like: Tensor) -> Rotary | None:
    wide = torch.promote_types(like.dtype, torch.float32)
    return rotary_tables(case.h, case.w, case.m * case.d, 10000.0, wide, like.device) if case.rotated else None


def head_error(ours: Tensor, exact: Tensor, d: int) -> float:
    """Relative L2 error of the worst head: (B, N, heads * D), (1, M, D, D) or (D, 1, 3, 3), the last as one head."""
    if exact.ndim == 3:
        ours, exact = (x.unflatten(-1, (-1, d)).movedim(-2, 0).flatten(1) for x in (ours, exact))
    else:
        ours, exact = (x[0].flatten(1) if x.shape[0] == 1 else x.flatten()[None] for x in (ours, exact))
    ours, exact = ours.double(), exact.double()
    return ((ours - exact).norm(dim=-1) / exact.norm(dim=-1).clamp_min(1e-30)).max().item()


def check_case(case: Case, backend: str, dtype: torch.dtype, device: torch.device) -> list[Finding]:
    """Output and gradients of one case; raises a ValueError where the backend cannot run it."""
    tensors, grad = inputs(case, dtype, device)
    with torch.backends.cudnn.flags(enabled=torch.backends.cudnn.enabled, allow_tf32=False):  # PyTorch's default is on
        return _check_case(case, backend, dtype, tensors, grad)


def _check_case(case: Case, backend: str, dtype: torch.dtype, tensors: list[Tensor], grad: Tensor) -> list[Finding]:
    ours = outcome(case, tensors, grad, backend)
    exact = outcome(case, tensors, grad, "reference", torch.float64)
    own = outcome(case, tensors, grad, "reference")
    findings = []
    for what, a, e, r in zip(QUANTITIES, ours, exact, own):
        bound = BOUNDS[dtype]
        if dtype in (torch.float16, torch.bfloat16):
            bound = min(bound, 2 * head_error(r, e, case.d))
        findings.append(Finding(backend, _name(dtype), what, str(case), head_error(a, e, case.d), bound))
    again = outcome(case, tensors, grad, backend)
    differs = sum(not torch.equal(a, b) for a, b in zip(ours, again))
    findings.append(Finding(backend, _name(dtype), "twice", str(case), float(differs), 0.0))
    return findings


def check_update(tokens: int, backend: str, dtype: torch.dtype, device: torch.device) -> Finding:
    """W' - W0 of the gated linear units at ``tokens`` tokens, weights in float32 as under autocast."""
    side = round(tokens**0.5)
    case = Case(1, 2, side, tokens // side, 32)
    (qkv, *weights), _ = inputs(case, dtype, device, torch.float32)
    k, v = branches(qkv, case.m, case.h, case.w, None)[0][1:]
    exact = torch.cat(gradients(k.double(), v.double(), *(w.double() for w in weights[:2]), scale=1 / 3), dim=-1)
    exact = exact / (torch.linalg.vector_norm(exact, dim=-2, keepdim=True) + 1)
    _, g, _ = torch.ops.vit3.packed_ttt(qkv, *weights, None, None, case.h, case.w, 1.0, 1 / 3, backend, False)
    ours = g / (torch.linalg.vector_norm(g, dim=-2, keepdim=True) + 1)
    error = ((ours.double() - exact).norm() / exact.norm()).item()
    return Finding(backend, _name(dtype), "update", f"{tokens:,} tokens", error, UPDATE_BOUND)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def run(
    device: torch.device,
    backends: Iterable[str] = ("reference", "fused", "triton"),
    dtypes: Iterable[torch.dtype] = tuple(BOUNDS),
    *,
    quick: bool = False,
    forced: bool = False,
) -> Iterator[Finding | str]:
    """Findings as they come; a sentence instead where a backend cannot run.

    Args:
        quick: few shapes.
        forced: a backend that cannot run raises its ValueError.
    """
    dtypes = tuple(dtypes)
    for backend in backends:
        for dtype in dtypes:
            try:
                for case in QUICK if quick else CASES:
                    yield from check_case(case, backend, dtype, device)
                if dtype in (torch.float16, torch.bfloat16) and backend != "reference":
                    for tokens in (196, 4096) if quick else (196, 4096, 16384, 65536):
                        yield check_update(tokens, backend, dtype, device)
            except ValueError as error:
                if forced or backend != "triton":  # the others run everywhere
                    raise
                yield f"{backend} in {_name(dtype)} not tested: {error}"


def table(findings: Iterable[Finding]) -> list[dict[str, str]]:
    """One row for each backend and dtype: of each quantity the worst error in units of its bound, with both."""
    worst: dict[tuple[str, str], dict[str, Finding]] = {}
    for f in findings:
        row = worst.setdefault((f.backend, f.dtype), {})
        if f.what not in row or not _share(f) <= _share(row[f.what]):
            row[f.what] = f
    return [
        {"backend": backend, "dtype": dtype} | {what: _cell(row.get(what)) for what in COLUMNS}
        for (backend, dtype), row in worst.items()
    ]


def _cell(f: Finding | None) -> str:
    if f is None:
        return ""
    if f.bound == 0:
        return "equal" if f.passed else "DIFFERS"
    return f"{f.error:.1e} / {f.bound:.0e}" + ("" if f.passed else " WRONG")


def _share(f: Finding) -> float:
    return f.error / f.bound if f.bound else f.error
