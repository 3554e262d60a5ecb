"""Inner models f(W, x), each with its gradient in closed form and what both cost.

All of them map tokens (B, G, N, D) of G heads to the same shape. Shapes: B samples, G heads, N = h*w tokens, D channels
of a head, I and O the inputs and outputs of a layer. Weights have one set per sample: matrices (B, G, I, O), kernels
(B, G*D, I, k, k). A gradient is taken by an *error*, the derivative of the loss by the prediction; where the loss needs
no prediction (dot product), its last layer is never applied to the keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vit3.inner.spec import MODELS, ModelSpec

Weights = tuple[Tensor, ...]
Error = Tensor | Callable[[Tensor], Tensor]  # (B, G, N, D), or a function that makes it of the prediction

_STD = 0.02  # of the learned start, as in the released block


@dataclass(frozen=True)
class Cost:
    """Multiply-adds a token and head.

    Attributes:
        predict: the whole model. output: its last layer, which a loss without a prediction leaves out in training.
        backward: gradients of all weights, given the forward pass.
    """

    predict: int
    output: int
    backward: int


class InnerModel:
    """Base of the inner models.

    Args:
        spec: which model. heads: G. head_dim: D.

    Attributes:
        shapes: of the learned start of each weight, as parameters are stored.
        norm_dims: for each weight, the dimensions over which its gradient's norm is taken (an output column, a kernel).
        pointwise: whether a token's prediction depends on that token alone.
    """

    pointwise = True

    def __init__(self, spec: ModelSpec, heads: int, head_dim: int):
        self.spec, self.heads, self.head_dim = spec, heads, head_dim
        self.hidden = max(1, round(spec.ratio * head_dim))
        self.shapes: tuple[tuple[int, ...], ...] = ()
        self.norm_dims: tuple[tuple[int, ...], ...] = ()

    @property
    def has_gradients(self) -> bool:
        """Whether gradients are known in closed form; otherwise autograd takes them."""
        return type(self)._backward is not InnerModel._backward

    def start(self, weights: Weights) -> Weights:
        """Stored weights as one set for all samples, leading dimension 1."""
        return weights

    def apply(self, weights: Weights, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """Prediction for tokens x (B, G, N, D) of a grid (h, w)."""
        y = self._forward(self._effective(weights), x, grid)
        return y + x if self.spec.residual == "input" else y

    def gradients(self, weights: Weights, x: Tensor, grid: tuple[int, int], error: Error) -> Weights:
        """Gradients of the loss by the weights, summed over tokens, given the derivative of the loss by f(W, x)."""
        residual = x if self.spec.residual == "input" else None
        at = (lambda y: error(y if residual is None else y + residual)) if callable(error) else error
        return self._backward(self._effective(weights), x, grid, at)

    def cost(self) -> Cost:
        """Multiply-adds a token and head."""
        raise NotImplementedError(f"{type(self).__name__} has no cost; an inner model must define it")

    def matrices(self) -> list[tuple[int, int]]:
        """Rows and columns of the weights of one head, kernels as (outputs, inputs)."""
        return [shape[-2:] for shape in self.shapes]

    def _effective(self, weights: Weights) -> Weights:
        """The weights as they are applied: with ``output_weight``, the last one plus the identity."""
        if self.spec.residual != "output_weight":
            return weights
        *first, last = weights
        return (*first, last + torch.eye(last.shape[-1], dtype=last.dtype, device=last.device))

    def _forward(self, weights: Weights, x: Tensor, grid: tuple[int, int]) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} has no _forward; an inner model must define it")

    def _backward(self, weights: Weights, x: Tensor, grid: tuple[int, int], error: Error) -> Weights:
        raise NotImplementedError(f"{type(self).__name__} has no _backward; an inner model must define it")

    @torch.no_grad()
    def init(self, weights: Weights) -> None:
        """Fill stored weights with their learned start."""
        for i, weight in enumerate(weights):
            last = i == len(weights) - 1
            how = self.spec.output_init if last and self.spec.output_init != "same" else self.spec.init
            if how == "random":
                nn.init.trunc_normal_(weight, std=_STD)
            else:
                weight.zero_()
                if how == "identity":
                    self._add_identity(weight)

    def _add_identity(self, weight: Tensor) -> None:
        weight.add_(torch.eye(weight.shape[-1], dtype=weight.dtype, device=weight.device))


class Layers(InnerModel):
    """Linear layers with silu between them: ``fc`` (one), ``silu_fc`` (one, silu after it), ``mlp``."""

    def __init__(self, spec: ModelSpec, heads: int, head_dim: int):
        super().__init__(spec, heads, head_dim)
        depth = spec.depth if spec.model == "mlp" else 1
        self.ends_in_silu = spec.model == "silu_fc"
        widths = [head_dim, *[self.hidden] * (depth - 1), head_dim]
        self.shapes = tuple((1, heads, i, o) for i, o in zip(widths, widths[1:]))
        self.norm_dims = ((-2,),) * depth

    def _forward(self, weights, x, grid):
        for w in weights[:-1]:
            x = F.silu(x @ w)  # [N, I] @ [I, O] -> [N, O]
        x = x @ weights[-1]
        return F.silu(x) if self.ends_in_silu else x

    def _backward(self, weights, x, grid, error):
        inputs, sums = [x], []  # of each layer: what goes in, and the product before silu
        for w in weights[:-1]:
            sums.append(inputs[-1] @ w)
            inputs.append(F.silu(sums[-1]))
        if self.ends_in_silu or callable(error):
            sums.append(inputs[-1] @ weights[-1])
        delta = _resolved(error, lambda: F.silu(sums[-1]) if self.ends_in_silu else sums[-1])
        if self.ends_in_silu:
            delta = delta * silu_slope(sums[-1])
        gradients = []
        for i in reversed(range(len(weights))):
            gradients.append(inputs[i].mT @ delta)  # [I, N] @ [N, O] -> [I, O]
            if i:
                delta = (delta @ weights[i].mT) * silu_slope(sums[i - 1])
        return tuple(reversed(gradients))

    def cost(self) -> Cost:
        sizes = [i * o for _, _, i, o in self.shapes]
        output = 0 if self.ends_in_silu else sizes[-1]  # the slope of silu needs the product in any case
        return Cost(sum(sizes), output, 2 * sum(sizes) - sizes[0])


class Gated(InnerModel):
    """``glu`` xW1 * silu(xW2), and ``swiglu``, the same with an output layer W3."""

    def __init__(self, spec: ModelSpec, heads: int, head_dim: int):
        super().__init__(spec, heads, head_dim)
        self.has_output = spec.model == "swiglu"
        width = self.hidden if self.has_output else head_dim
        self.shapes = ((1, heads, head_dim, width),) * 2
        if self.has_output:
            self.shapes += ((1, heads, width, head_dim),)
        self.norm_dims = ((-2,),) * len(self.shapes)

    def _forward(self, weights, x, grid):
        gated = (x @ weights[0]) * F.silu(x @ weights[1])
        return gated @ weights[2] if self.has_output else gated

    def _backward(self, weights, x, grid, error):
        z1, z2 = x @ weights[0], x @ weights[1]
        gate = F.silu(z2)
        gated = z1 * gate
        delta = _resolved(error, lambda: gated @ weights[2] if self.has_output else gated)
        last = ()
        if self.has_output:
            last = (gated.mT @ delta,)
            delta = delta @ weights[2].mT
        return (x.mT @ (delta * gate), x.mT @ (delta * z1 * silu_slope(z2)), *last)

    def cost(self) -> Cost:
        first = 2 * self.head_dim * self.shapes[0][-1]
        output = self.shapes[0][-1] * self.head_dim if self.has_output else 0
        return Cost(first + output, output, first + 2 * output)


class Conv(InnerModel):
    """``conv``, a dense convolution in each head, and ``dwconv``, one kernel a channel; zeros outside the grid."""

    pointwise = False

    def __init__(self, spec: ModelSpec, heads: int, head_dim: int):
        super().__init__(spec, heads, head_dim)
        self.inputs = head_dim if spec.model == "conv" else 1  # channels that a kernel sees
        self.shapes = ((heads * head_dim, self.inputs, spec.kernel, spec.kernel),)
        self.norm_dims = ((-3, -2, -1),)

    def start(self, weights: Weights) -> Weights:
        return tuple(w[None] for w in weights)

    def _forward(self, weights, x, grid):
        b, g, n, d = x.shape
        kernel = weights[0].expand(b, *self.shapes[0])
        maps = x.mT.reshape(1, b * g * d, *grid)
        y = F.conv2d(
            maps,
            kernel.reshape(b * g * d, *kernel.shape[2:]),
            padding=self._padding,
            dilation=self.spec.dilation,
            groups=b * g * d // self.inputs,
        )
        return y.view(b, g, d, n).mT

    def _backward(self, weights, x, grid, error):
        error = error(self._forward(weights, x, grid)) if callable(error) else error
        b, g, n, d = x.shape
        neighbours = self._neighbours(x.mT.reshape(b, g, d, *grid))  # (B, G, D, k*k, N)
        e = error.mT  # (B, G, D, N)
        if self.inputs == 1:
            taps = neighbours @ e[..., None]  # [k*k, N] @ [N, 1] -> [k*k, 1]
        else:
            taps = e @ neighbours.flatten(2, 3).mT  # [D, N] @ [N, D*k*k] -> [D, D*k*k]
        return (taps.reshape(b, *self.shapes[0]),)

    def cost(self) -> Cost:
        size = self.head_dim * self.inputs * self.spec.kernel**2
        return Cost(size, size, size)

    def matrices(self) -> list[tuple[int, int]]:
        return [(self.head_dim, self.inputs * self.spec.kernel**2)]

    @property
    def _padding(self) -> int:
        return self.spec.dilation * (self.spec.kernel // 2)

    def _neighbours(self, maps: Tensor) -> Tensor:
        """What each tap sees: (B, G, D, h, w) to (B, G, D, k*k, h*w)."""
        k, step, p = self.spec.kernel, self.spec.dilation, self._padding
        h, w = maps.shape[-2:]
        padded = F.pad(maps, (p, p, p, p))
        shifts = [padded[..., y * step : y * step + h, x * step : x * step + w] for y in range(k) for x in range(k)]
        return torch.stack(shifts, dim=-3).flatten(-2)

    def _add_identity(self, weight: Tensor) -> None:
        centre = self.spec.kernel // 2
        inputs = torch.arange(weight.shape[0], device=weight.device) % self.inputs  # of its head
        weight[torch.arange(weight.shape[0], device=weight.device), inputs, centre, centre] += 1


_CLASSES: dict[str, type[InnerModel]] = {
    "fc": Layers,
    "silu_fc": Layers,
    "mlp": Layers,
    "glu": Gated,
    "swiglu": Gated,
    "conv": Conv,
    "dwconv": Conv,
}


def register_inner_model(name: str, cls: type[InnerModel]) -> None:
    """Make an inner model of your own available as ``inner.model=name``.

    Args:
        name: not taken yet. cls: gives ``shapes``, ``norm_dims``, ``_forward``, ``cost``; without ``_backward`` it is
            trained by autograd.

    Raises:
        ValueError: the name is taken, or ``cls`` is no inner model.
    """
    if not (isinstance(cls, type) and issubclass(cls, InnerModel)):
        raise ValueError(f"{cls!r} is no subclass of vit3.inner.InnerModel")
    if _CLASSES.get(name, cls) is not cls:
        raise ValueError(f"inner model '{name}' is taken by {_CLASSES[name].__name__}; choose another name")
    if name not in _CLASSES:
        MODELS.append(name)
    _CLASSES[name] = cls


def inner_model(spec: ModelSpec, heads: int, head_dim: int) -> InnerModel:
    """The inner model of ``spec`` for so many heads of so many channels."""
    return _CLASSES[spec.model](spec, heads, head_dim)


def silu_slope(z: Tensor) -> Tensor:
    """Derivative of silu."""
    s = torch.sigmoid(z)
    return s * (1 + z * (1 - s))


def _resolved(error: Error, prediction: Callable[[], Tensor]) -> Tensor:
    return error(prediction()) if callable(error) else error
