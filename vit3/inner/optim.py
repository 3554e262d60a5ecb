"""Inner optimisers: from gradients to new weights, with what they remember between the steps of one image."""

from __future__ import annotations

import torch
from torch import Tensor

from vit3.inner.spec import InnerSpec
from vit3.ops.soft_norm import soft_normalise

_BETAS = (0.9, 0.95)  # of adam
_EPS = 1e-8  # of adam: under the root, so that its own gradient stays finite where a gradient is zero
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # Muon's quintic: singular values go to about 1 in five steps
_ITERATIONS = 5


class InnerOptimizer:
    """One image's optimiser; every quantity has one value per sample.

    Args:
        spec: optimizer, gradient norm, direction, momentum, renormalisation.
        start: weights before the first step, to which ``renormalise`` returns their norms.
        norm_dims: for each weight, the dimensions over which norms are taken.
        rates: for each weight, the learning rate: a number, or a tensor that broadcasts to the weight.
    """

    def __init__(
        self,
        spec: InnerSpec,
        start: tuple[Tensor, ...],
        norm_dims: tuple[tuple[int, ...], ...],
        rates: tuple[float | Tensor, ...],
    ):
        self.spec, self.norm_dims = spec, norm_dims
        self.rates = rates if spec.direction == "descent" else tuple(-rate for rate in rates)
        self.norms = [_norm(w, d) for w, d in zip(start, norm_dims)] if spec.renormalise else []
        self.first: list[Tensor | None] = [None] * len(start)  # moments
        self.second: list[Tensor | None] = [None] * len(start)
        self.steps = 0

    def step(self, weights: tuple[Tensor, ...], gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Weights after one step."""
        self.steps += 1
        new = []
        for i, (w, g) in enumerate(zip(weights, gradients)):
            w = w - self.rates[i] * self._direction(i, normalised(g, self.spec, self.norm_dims[i]))
            if self.spec.renormalise:
                w = w * (self.norms[i] / _norm(w, self.norm_dims[i]))
            new.append(w)
        return tuple(new)

    def _direction(self, i: int, g: Tensor) -> Tensor:
        """What is subtracted, before the learning rate."""
        name, momentum = self.spec.optimizer, self.spec.momentum
        if name == "sgd":
            return g
        if name == "adam":
            m = self.first[i] = _average(self.first[i], g, _BETAS[0])
            s = self.second[i] = _average(self.second[i], g.square(), _BETAS[1])
            m, s = m / (1 - _BETAS[0] ** self.steps), s / (1 - _BETAS[1] ** self.steps)
            return m / (s + _EPS**2).sqrt()
        m = self.first[i] = g if self.first[i] is None else momentum * self.first[i] + g
        return m if name == "momentum" else orthogonalised(m)


def normalised(g: Tensor, spec: InnerSpec, dim: tuple[int, ...]) -> Tensor:
    """The gradient as ``gradient_norm`` wants it: soft g / (norm + 1), clipped to max_norm, or as it is."""
    if spec.gradient_norm == "soft":
        return soft_normalise(g, dim=dim)
    if spec.gradient_norm == "clip":
        norm = torch.linalg.vector_norm(g, dim=dim, keepdim=True)
        return g * (spec.max_norm / norm.clamp(min=spec.max_norm))
    return g


def orthogonalised(m: Tensor) -> Tensor:
    """The nearest (semi-)orthogonal matrices to m by five Newton-Schulz steps (Muon); kernels as (out, in*k*k).

    Singular values end between about 0.7 and 1.2, as in Muon itself.
    """
    a, b, c = _NEWTON_SCHULZ
    x = m if m.ndim == 4 else m.flatten(2).unflatten(1, (-1, m.shape[2]))  # (B, G, I, O), or (B, G, D, D*k*k)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.square().sum(dim=(-2, -1), keepdim=True) + _EPS**2).sqrt()
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).reshape(m.shape)


def orthogonalise_cost(rows: int, columns: int) -> int:
    """Multiply-adds of :func:`orthogonalised` for one matrix."""
    short, long = sorted((rows, columns))
    return _ITERATIONS * (2 * short * short * long + short**3)


def _average(old: Tensor | None, new: Tensor, beta: float) -> Tensor:
    return (1 - beta) * new if old is None else beta * old + (1 - beta) * new


def _norm(w: Tensor, dim: tuple[int, ...]) -> Tensor:
    """Norm that can be divided by, and differentiated at 0."""
    return (w.square().sum(dim=dim, keepdim=True) + _EPS**2).sqrt()
