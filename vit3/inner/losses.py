"""Inner losses: how far predictions are from values, with their first and mixed second derivatives.

Every loss is a sum over the channels of a head and a mean over tokens, times ``scale``. With e = prediction - value,
r a weight per token (1 unless there is a gate) and a = scale / tokens:

    dot        -a sum r p v              mae         a sum r |e|
    mse        a/2 sum r e^2             huber       a sum r rho(e): e^2/2 where |e| < t, else t (|e| - t/2)
    rmse       sqrt(a sum r e^2)         smooth_l1   huber with t = 1
    cosine     -a sum r cos(p_i, v_i)

The mixed derivative d2L / dv dp is what the outer gradient of the values passes through: where it is zero, the values
get none (paper equation 6 and appendix 8). Source of the first five: paper table 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vit3.inner.spec import InnerSpec

_TINY = 1e-12  # under roots, whose slope at 0 is infinite


@dataclass(frozen=True)
class Loss:
    """One inner loss at one head width.

    Attributes:
        name: of :data:`vit3.inner.spec.LOSSES`. scale: factor of the loss. threshold: of ``huber``.
    """

    name: str
    scale: float
    threshold: float

    @classmethod
    def of(cls, spec: InnerSpec, head_dim: int) -> Loss:
        """The loss of ``spec`` for heads of ``head_dim`` channels."""
        scale = head_dim**-0.5 if spec.scale is None else spec.scale
        return cls(spec.loss, scale, 1.0 if spec.loss == "smooth_l1" else spec.threshold)

    @property
    def needs_prediction(self) -> bool:
        """Whether the derivative by the prediction depends on the prediction."""
        return self.name != "dot"

    def value(self, p: Tensor, v: Tensor, rate: Tensor | None = None, tokens: int | None = None) -> Tensor:
        """Loss of every sample and head, (B, G).

        Args:
            p: predictions, v: values, (B, G, N, D).
            rate: weight of each token, (B, G, N, 1) or what broadcasts to it; None for 1.
            tokens: what the mean is taken over, where the others of N have no weight; None for N.
        """
        a = self.scale / (tokens or p.shape[-2])
        if self.name == "dot":
            terms = -p * v
        elif self.name == "cosine":
            terms = -(_unit(p) * _unit(v))
        elif self.name == "mae":
            terms = (p - v).abs()
        elif self.name in ("mse", "rmse"):
            terms = (p - v).square() * (0.5 if self.name == "mse" else 1.0)
        else:
            size = (p - v).abs()
            t = self.threshold
            terms = torch.where(size < t, size.square() / 2, t * (size - t / 2))
        terms = terms if rate is None else terms * rate
        total = a * terms.sum(dim=(-2, -1))
        return (total + _TINY).sqrt() if self.name == "rmse" else total

    def error(self, p: Tensor | None, v: Tensor, rate: Tensor | None = None, tokens: int | None = None) -> Tensor:
        """Derivative of :meth:`value` by the predictions, (B, G, N, D); ``p`` may be None where none is needed."""
        a = self.scale / (tokens or v.shape[-2])
        if self.name == "dot":
            e = -a * v
        elif self.name == "cosine":
            p_unit, v_unit = _unit(p), _unit(v)
            cosine = (p_unit * v_unit).sum(dim=-1, keepdim=True)
            e = -a * (v_unit - cosine * p_unit) / _length(p)
        elif self.name == "mae":
            e = a * (p - v).sign()
        elif self.name == "mse":
            e = a * (p - v)
        elif self.name == "rmse":
            e = a * (p - v) / self.value(p, v, rate, tokens)[..., None, None]
        else:
            e = a * (p - v).clamp(-self.threshold, self.threshold)
        return e if rate is None else e * rate

    def mixed(self, p: Tensor, v: Tensor, rate: Tensor | None = None, tokens: int | None = None) -> Tensor:
        """Second derivative d2L / dv dp of each prediction by its own value, (B, G, N, D)."""
        a = (self.scale / (tokens or v.shape[-2])) * (1.0 if rate is None else rate)
        a = torch.as_tensor(a, dtype=v.dtype, device=v.device)
        if self.name in ("dot", "mse"):
            return -a.expand_as(v)
        if self.name == "mae":
            return torch.zeros_like(v)
        if self.name == "rmse":
            root = self.value(p, v, rate, tokens)[..., None, None]
            return -a / root + (a * (p - v)).square() / root**3
        if self.name == "cosine":
            p_unit, v_unit = _unit(p), _unit(v)
            cosine = (p_unit * v_unit).sum(dim=-1, keepdim=True)
            inner = 1 - v_unit.square() - p_unit.square() + cosine * p_unit * v_unit
            return -a * inner / (_length(p) * _length(v))
        return -a * ((p - v).abs() < self.threshold)


def _length(x: Tensor) -> Tensor:
    """Length of each token's vector, (..., 1)."""
    return (x.square().sum(dim=-1, keepdim=True) + _TINY).sqrt()


def _unit(x: Tensor) -> Tensor:
    return x / _length(x)
