"""The ViT³ mixer: train small inner models on the keys and values of one image, then apply them to the queries.

    x --qkv--> q, k, v   --inner training on (k, v)-->   f(W', .)   --apply to q-->   --proj--> y

As released, all M heads run a gated linear unit, and one extra branch of a head's width runs a 3x3 depthwise
convolution; both take one step. Any other point of the design space is an :class:`vit3.inner.InnerSpec`. The cost is
linear in the number of tokens. Source: paper sections 3 to 5 and the authors' released block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from vit3.inner import InnerModel, InnerSpec, ModelSpec, inner_model, inner_report, inner_train
from vit3.inner.controls import UNUSED_START, controlled_fast, controlled_inputs, controlled_rate, controlled_start
from vit3.inner.cost import training_cost
from vit3.layers.rope import RoPE2d
from vit3.mixers.check import check_tokens, head_dim
from vit3.ops import check_backend, dwconv_ttt, glu_ttt, packed_ttt
from vit3.ops.packed_ttt.layout import grid as as_map
from vit3.ops.precision import widened, without_autocast
from vit3.ops.rotary import Rotary, rotate

GENERIC = ("closed", "autograd")  # backends that run any inner problem


class TTT(nn.Module):
    """Test-time-training token mixer (B, N, C) -> (B, N, C) for tokens on an h x w grid.

    Parameters are named and shaped as in the authors' block: ``qkv`` (C -> 3C + 3D), ``w1`` and ``w2`` (1, M, D, D),
    ``w3`` (D, 1, 3, 3), ``proj`` (C + D -> C). Other inner models number their weights on in the same way, the first
    model's first; extra heads widen ``qkv`` and ``proj``. The fast weights live for one call and one sample.

    Args:
        dim: channels C of the tokens.
        num_heads: heads M; each has D = C / M channels.
        qkv_bias: whether ``qkv`` has a bias.
        inner: the inner problem; or its plain values, as files hold them (:meth:`vit3.inner.InnerSpec.of`).
        backend: ``auto`` takes an operator of :mod:`vit3.ops` where there is one, else closed gradients;
            ``reference``, ``fused`` or ``triton`` ask for that operator; ``closed`` and ``autograd`` run the generic
            loop of :mod:`vit3.inner.train`.
        autotune: let the Triton backend time its launch configurations once per size class (kept on disk).

    Raises:
        ValueError: dim is not a multiple of num_heads, the inner models need more heads than there are, a plain value
            is unknown or not allowed, or the backend is not available or has no operator for this inner problem.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        qkv_bias: bool = True,
        *,
        inner: InnerSpec | Mapping[str, Any] = InnerSpec(),
        backend: str = "auto",
        autotune: bool = False,
    ):
        super().__init__()
        inner = InnerSpec.of(inner) if isinstance(inner, Mapping) else inner
        self.dim, self.num_heads, self.head_dim = dim, num_heads, head_dim(dim, num_heads)
        self.backend, self.autotune = backend, autotune
        self.branches = _branches(inner, num_heads, self.head_dim)
        self.names = _weight_names(self.branches)
        self.extra = sum(branch.heads for branch in inner.beside if branch.extra) * self.head_dim  # channels beside C
        self._take(inner)
        self.qkv = nn.Linear(dim, 3 * dim + 3 * self.extra, bias=qkv_bias)
        for branch, names in zip(self.branches, self.names):
            for name, shape in zip(names, branch.shapes):
                self.register_parameter(name, nn.Parameter(torch.empty(shape)))
        self.proj = nn.Linear(dim + self.extra, dim)
        heads = sum(branch.heads for branch in self.branches)
        if inner.rate in ("learned", "per_head"):
            self.rate = nn.Parameter(torch.empty(heads if inner.rate == "per_head" else 1))
        elif inner.rate != "fixed":
            self.rate = nn.Linear(dim, heads if inner.rate == "token_head" else 1, bias=False)
        self.reset_parameters()
        self._freeze_unused()

    def set_inner(self, inner: InnerSpec) -> None:
        """Train the same inner models in another way from now on, also with weights that were learned.

        Args:
            inner: differs from the present one in how inner models are trained, not in what they are.

        Raises:
            ValueError: other inner models, or a rate that needs other parameters.
        """
        for name in (*(field.name for field in fields(ModelSpec)), "beside", "rate"):
            if getattr(inner, name) != getattr(self.inner, name):
                raise ValueError(
                    f"inner.{name}={getattr(inner, name)} needs other parameters than inner.{name}="
                    f"{getattr(self.inner, name)}, which this mixer has; build a new one"
                )
        self._take(inner)

    def _take(self, inner: InnerSpec) -> None:
        if self.backend not in GENERIC:
            check_backend(self.backend)
            if self.backend != "auto" and not all(_has_operator(branch, inner) for branch in self.branches):
                raise ValueError(f"backend='{self.backend}' has no operator for this inner problem ({inner}); "
                                 f"use backend='auto', or one of: {', '.join(GENERIC)}")  # fmt: skip
        self.inner, self.packed = inner, _is_packed(inner)
        self.operators = tuple(_has_operator(branch, inner) for branch in self.branches)

    def _freeze_unused(self) -> None:
        """No gradient for what the control leaves out of the outer graph.

        Several processes would wait for it without end, and weight decay would shrink the W0 whose spread
        ``random_start`` takes.
        """
        if self.inner.rate != "fixed" and self.inner.epochs == 0:
            raise ValueError(f"inner.rate={self.inner.rate} never learns with inner.epochs=0, which takes no step; "
                             "use inner.rate=fixed, or inner.epochs=1")  # fmt: skip
        if self.inner.control in UNUSED_START:
            for weight in self._weights(name for names in self.names for name in names):
                weight.requires_grad_(False)
        if self.inner.control == "zero_fast" and self.inner.rate != "fixed":
            raise ValueError(f"inner.rate={self.inner.rate} never learns with inner.control=zero_fast, which throws "
                             "each step away; use inner.rate=fixed")  # fmt: skip

    def reset_parameters(self) -> None:
        """Fresh learned starts W0 (as released: truncated normal, std 0.02), and learned rates of factor 1."""
        for branch, names in zip(self.branches, self.names):
            branch.init(self._weights(names))
        if self.inner.rate in ("learned", "per_head"):
            nn.init.zeros_(self.rate)  # the factor is exp(rate)

    def forward(
        self, x: Tensor, h: int, w: int, rope: RoPE2d | None = None, return_inner: bool = False
    ) -> Tensor | tuple[Tensor, dict]:
        """Mix the tokens of an h x w grid.

        Args:
            x: tokens (B, h*w, C), row by row.
            h: rows of the grid.
            w: columns of the grid.
            rope: rotation of q and k of the M heads.
            return_inner: also return what the inner training did.

        Returns:
            (B, h*w, C); with ``return_inner`` a pair of that (unchanged) and a dict with one
            :func:`vit3.inner.inner_report` for each inner model, under its name (``glu``, ``dwconv``, …; a second
            one of a name has ``_2`` added).

        Raises:
            ValueError: x does not fit the grid or dim.
        """
        check_tokens(x, self.dim, h, w)
        if rope is not None and self.head_dim % 2:
            raise ValueError(f"rope turns pairs of channels inside a head, but dim={self.dim} and num_heads="
                             f"{self.num_heads} make heads of {self.head_dim} channels; use an even one")  # fmt: skip
        qkv = self.qkv(x)  # (B, N, 3C + 3E): q, k, v of M heads, then those of each extra branch
        rotary = None if rope is None else rope.tables(h, w, like=qkv)
        if self.packed and self.backend not in GENERIC:
            weights = self._weights(name for names in self.names for name in names)
            y = packed_ttt(qkv, *weights, h, w, rotary=rotary, **self._options())
        else:
            y = self._run_branches(x, qkv, h, w, rotary)
        y = self.proj(y)  # (B, N, C + E) -> (B, N, C)
        return (y, self._describe(x, qkv, h, w, rotary)) if return_inner else y

    def _run_branches(self, x: Tensor, qkv: Tensor, h: int, w: int, rotary: Rotary | None) -> Tensor:
        """Each inner model on its heads; outputs side by side, (B, N, C + E)."""
        outputs, (factors, token_rates) = [], self._rates(x)
        for i, (q, k, v) in enumerate(self._heads(qkv, h, w, rotary)):
            branch, weights = self.branches[i], self._weights(self.names[i])
            if self.backend not in GENERIC and self.operators[i]:
                y = self._operator(branch, q, k, v, weights, h, w)
            else:
                with without_autocast(qkv.device):
                    q, k, v, *weights = map(widened, (q, k, v, *weights))
                    fast, q, *_ = self._train(branch, weights, q, k, v, (h, w), factors[i], token_rates[i])
                    y = branch.apply(fast, q, (h, w))
            outputs.append(y.transpose(1, 2).flatten(2).to(qkv.dtype))
        return torch.cat(outputs, dim=-1)

    def _train(self, branch: InnerModel, weights, q, k, v, grid, factor, token_rate) -> tuple:
        """Fast weights of one inner model, and what it was given, controls included."""
        control = self.inner.control
        q, k, v = controlled_inputs(control, q, k, v)
        start = controlled_start(control, branch.start(tuple(weights)))
        rate = controlled_rate(control, token_rate)
        method = "autograd" if self.backend == "autograd" else "closed"
        fast = inner_train(branch, start, k, v, self.inner, grid=grid, factor=factor, token_rate=rate, method=method)
        return controlled_fast(control, fast), q, k, v, start, rate

    def _operator(self, branch: InnerModel, q, k, v, weights, h: int, w: int) -> Tensor:
        """The branch by its operator."""
        if branch.spec.model == "glu":
            return glu_ttt(q, k, v, *weights, **self._options())
        maps = (as_map(t.transpose(1, 2).flatten(2), h, w) for t in (q, k, v))  # (B, G*D, h, w)
        return dwconv_ttt(*maps, *weights, **self._options()).flatten(2).unflatten(1, (branch.heads, -1)).mT

    def _options(self) -> dict:
        scale = self.head_dim**-0.5 if self.inner.scale is None else self.inner.scale
        return dict(lr=self.inner.lr, scale=scale, backend=self.backend, autotune=self.autotune)

    def _heads(self, qkv: Tensor, h: int, w: int, rotary: Rotary | None) -> list[tuple[Tensor, ...]]:
        """q, k, v (B, G, N, D) of each branch; those of the M heads are rotated."""
        extra = (False, *(spec.extra for spec in self.inner.beside))
        widths = [3 * b.heads * self.head_dim for b, is_extra in zip(self.branches, extra) if is_extra]
        own, *others = (self._split(part) for part in qkv.split([3 * self.dim, *widths], dim=-1))
        q, k, v = own
        if rotary is not None:
            cos, sin = (t.unflatten(-1, (self.num_heads, -1)).transpose(0, 1) for t in rotary.of_tokens())
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        heads = [branch.heads for branch, is_extra in zip(self.branches, extra) if not is_extra]
        shares, others = zip(*(t.split(heads, dim=1) for t in (q, k, v))), iter(others)
        return [next(others) if is_extra else next(shares) for is_extra in extra]

    def _split(self, part: Tensor) -> tuple[Tensor, ...]:
        """q, k and v beside each other (B, N, 3*G*D) as (B, G, N, D) each."""
        return tuple(t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for t in part.chunk(3, dim=-1))

    def _rates(self, x: Tensor) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """For each branch: the learned factor of its learning rate, and the weights of its tokens (B, 1 or G, N, 1)."""
        heads, none = [branch.heads for branch in self.branches], [None] * len(self.branches)
        if self.inner.rate == "fixed":
            return none, none
        if self.inner.rate in ("learned", "per_head"):
            factor = widened(self.rate).exp()
            return (list(factor.split(heads)) if self.inner.rate == "per_head" else [factor] * len(heads)), none
        gate = torch.sigmoid(widened(self.rate(x))).transpose(1, 2)[..., None]  # (B, 1 or G, N, 1)
        return none, (list(gate.split(heads, dim=1)) if self.inner.rate == "token_head" else [gate] * len(heads))

    def _weights(self, names) -> tuple[Tensor, ...]:
        return tuple(getattr(self, name) for name in names)

    @torch.no_grad()
    def _describe(self, x: Tensor, qkv: Tensor, h: int, w: int, rotary: Rotary | None) -> dict:
        """Reports of the inner training, recomputed beside the output so that asking changes nothing."""
        reports, (factors, token_rates) = {}, self._rates(x)
        with without_autocast(qkv.device):
            for i, parts in enumerate(self._heads(qkv, h, w, rotary)):
                branch, names = self.branches[i], self.names[i]
                q, k, v, *weights = map(widened, (*parts, *self._weights(names)))
                fast, _, k, v, start, rate = self._train(branch, weights, q, k, v, (h, w), factors[i], token_rates[i])
                report = inner_report(branch, names, start, fast, k, v, self.inner, grid=(h, w), token_rate=rate)
                name, model = branch.spec.model, branch.spec.model
                count = sum(other.spec.model == model for other in self.branches[: i + 1])
                reports[name if count == 1 else f"{name}_{count}"] = report
        return reports

    def macs(self, h: int, w: int) -> int:
        """Multiply-adds for one image of h*w tokens, inner training included."""
        c, e, n = self.dim, self.extra, h * w
        gate = self.rate.weight.numel() if isinstance(getattr(self, "rate", None), nn.Linear) else 0
        inner = sum(
            training_cost(branch, self.inner, n) + branch.heads * n * branch.cost().predict for branch in self.branches
        )
        return n * (c * (3 * c + 3 * e) + (c + e) * c + gate) + inner

    def extra_repr(self) -> str:
        return f"dim={self.dim}, num_heads={self.num_heads}, inner={self.inner}, backend={self.backend!r}"


def _branches(inner: InnerSpec, num_heads: int, d: int) -> tuple[InnerModel, ...]:
    """The inner models; the first one has the heads that the others leave."""
    left = num_heads - sum(branch.heads for branch in inner.beside if not branch.extra)
    if left < 1:
        raise ValueError(f"inner.beside takes all of the num_heads={num_heads} heads; leave one to the first inner "
                         "model, or mark a branch extra=true")  # fmt: skip
    return (inner_model(inner, left, d), *(inner_model(branch, branch.heads, d) for branch in inner.beside))


def _weight_names(branches: tuple[InnerModel, ...]) -> tuple[tuple[str, ...], ...]:
    """w1, w2, … over all inner models."""
    names, count = [], 0
    for branch in branches:
        names.append(tuple(f"w{count + i + 1}" for i in range(len(branch.shapes))))
        count += len(branch.shapes)
    return tuple(names)


def _has_operator(branch: InnerModel, inner: InnerSpec) -> bool:
    """Whether :mod:`vit3.ops` has this inner model with this training: one full-batch step as released."""
    plain = InnerSpec(lr=inner.lr, scale=inner.scale)
    training = ("loss", "rate", "direction", "batch", "epochs", "optimizer", "gradient_norm", "renormalise", "control")
    if any(getattr(inner, name) != getattr(plain, name) for name in training) or branch.spec.residual != "none":
        return False
    spec = branch.spec
    return spec.model == "glu" or (spec.model == "dwconv" and (spec.kernel, spec.dilation) == (3, 1))


def _is_packed(inner: InnerSpec) -> bool:
    """Whether both branches are those of the released block, which have an operator on one tensor."""
    beside = inner.beside
    return (
        inner.model == "glu"
        and len(beside) == 1
        and (beside[0].model, beside[0].heads, beside[0].extra) == ("dwconv", 1, True)
        and all(_has_operator(inner_model(spec, 1, 1), inner) for spec in (inner, *beside))
    )
