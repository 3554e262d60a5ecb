"""What several test files share: both operators as one kind of thing, small models, error measures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import timm
import torch
from torch import Tensor, nn

from vit3.inner import InnerSpec, ModelSpec, inner_model, inner_train
from vit3.ops import dwconv_ttt, glu_ttt
from vit3.ops.dwconv_ttt import reference as dwconv_reference
from vit3.ops.glu_ttt import reference as glu_reference

ROOT = Path(__file__).parent.parent
GOLDEN = ROOT / "tests" / "golden"
SPEC = InnerSpec()
STEP = dict(lr=SPEC.lr, scale=SPEC.scale)
ODD_SIZES = [(33, 31), (65, 97), (200, 336)]


@dataclass(frozen=True)
class Op:
    """One operator with its inner model: ``run(q, k, v, *weights, lr, scale)``."""

    name: str
    function: Callable[..., Tensor]
    fast: Callable[..., tuple[Tensor, ...]]
    weights: int
    backend: str = "auto"

    def __str__(self) -> str:
        return f"{self.name}-{self.backend}"

    def run(self, *tensors: Tensor, **options) -> Tensor:
        """The operator on q, k, v and weights."""
        return self.function(*tensors, **{"backend": self.backend, **options})

    def shapes(self, b: int, m: int, h: int, w: int, d: int) -> list[tuple[int, ...]]:
        """Shapes of q, k, v and the weights."""
        if self.name == "glu":
            return [(b, m, h * w, d)] * 3 + [(1, m, d, d)] * 2
        return [(b, d, h, w)] * 3 + [(d, 1, 3, 3)]

    def inputs(self, b=2, m=3, h=5, w=7, d=8, dtype=torch.float64, grad=True) -> list[Tensor]:
        """Random q, k, v and weights; weights are scaled by their fan, so that the step is not negligible."""
        tensors = [torch.randn(shape, dtype=dtype) for shape in self.shapes(b, m, h, w, d)]
        fan = d if self.name == "glu" else 9
        tensors[3:] = [x / fan**0.5 for x in tensors[3:]]
        return [x.requires_grad_(grad) for x in tensors]

    def oracle(self, q: Tensor, k: Tensor, v: Tensor, *weights: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Output and fast weights by autograd through the inner step."""
        shape = q.shape
        model, (q, k, v), grid = self.tokens(q, k, v)
        fast = inner_train(model, model.start(weights), k, v, SPEC, grid=grid, method="autograd")
        y = model.apply(fast, q, grid)
        return (y if self.name == "glu" else y.mT.reshape(shape)), fast

    def predict(self, weights: tuple[Tensor, ...], x: Tensor) -> Tensor:
        """The inner model on x, with one set of weights per sample."""
        model, (tokens,), grid = self.tokens(x)
        y = model.apply(weights, tokens, grid)
        return y if self.name == "glu" else y.mT.reshape(x.shape)

    def tokens(self, *tensors: Tensor):
        """The inner model, tensors as tokens (B, G, N, D), and the grid."""
        _, m, n, d = tensors[0].shape
        if self.name == "glu":
            return inner_model(ModelSpec("glu"), m, d), tensors, (1, n)
        model = inner_model(ModelSpec("dwconv"), 1, m)
        return model, tuple(x.flatten(2).mT[:, None] for x in tensors), (n, d)


def _dwconv_fast(*args, **options):
    return (dwconv_reference.fast_weights(*args, **options),)


OPS = [
    op
    for backend in ("reference", "fused")
    for op in (
        Op("glu", glu_ttt, glu_reference.fast_weights, 2, backend),
        Op("dwconv", dwconv_ttt, _dwconv_fast, 1, backend),
    )
]


def light(name: str, **kwargs) -> nn.Module:
    """A registered model with few blocks, its widths as published."""
    depth = dict(depths=(1, 1, 1, 1)) if name.startswith("h_") else dict(depth=2)
    return timm.create_model(name, **{**depth, **kwargs})


def narrow(name: str, **kwargs) -> nn.Module:
    """A registered model with few blocks and few channels, for what takes long."""
    if name.startswith("h_"):
        shape = dict(dims=(16, 32, 48, 64), depths=(1, 1, 1, 1), num_heads=(2, 2, 2, 4))
    else:
        shape = dict(embed_dim=48, depth=2, num_heads=3)
    return timm.create_model(name, **{**shape, **kwargs})


def shallow(name: str, **kwargs) -> nn.Module:
    """As small as still shows every layer: for compilers, which need a tenth of a second an operation."""
    if name.startswith("h_"):
        return timm.create_model(name, dims=(16, 32), depths=(1, 1), num_heads=(2, 2), **kwargs)
    return timm.create_model(name, embed_dim=32, depth=1, num_heads=2, **kwargs)


def max_error(a: Tensor, b: Tensor) -> float:
    """Largest absolute difference; infinite where the shapes differ."""
    if a.shape != b.shape:
        return float("inf")
    return (a - b).abs().max().item() if a.numel() else 0.0


def same_dict(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Whether two state dicts are bitwise equal."""
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)
