"""TTT-Linear and TTT-MLP, the test-time training layers of language models: small steps along a sequence.

    f(x) = x + LN(f_res(x)),  ℓ_j(W) = ½‖f(W; k_j) - v_j‖²,  o_i = f(W_i; q_i)
    W_i = W - r_i Σ_(j <= i in i's mini-batch) η_j ∇ℓ_j(W),  W: the weights where that mini-batch starts

f_res is linear, or an MLP of two layers with GELU. The dual form below never builds W_i. Source: arXiv 2407.04620.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vit3.layers.rope import RoPE2d
from vit3.mixers.heads import HeadMixer, HeadNorm
from vit3.mixers.scan import check_chunk, check_direction, chunk_lengths, chunks, passes, run_scan
from vit3.ops.precision import widened, without_autocast

Layer = tuple[Tensor, Tensor | None]  # weight (..., M, in, out) and bias (..., M, 1, out)


def _apply(x: Tensor, layer: Layer) -> Tensor:
    weight, bias = layer
    return x @ weight if bias is None else x @ weight + bias


def _gelu_slope(x: Tensor) -> Tensor:
    """Derivative of GELU: Φ(x) + x Φ'(x)."""
    return (1 + torch.erf(x / math.sqrt(2))) / 2 + x * torch.exp(-x.square() / 2) / math.sqrt(2 * math.pi)


def _error(z: Tensor, k: Tensor, v: Tensor, norm: Layer | None) -> Tensor:
    """Gradient of ℓ by z = f_res(k), through LayerNorm and residual if there is a ``norm`` (its factor and shift)."""
    if norm is None:
        return z - v
    factor, shift = norm
    centred = z - z.mean(dim=-1, keepdim=True)
    spread = torch.rsqrt(centred.square().mean(dim=-1, keepdim=True) + HeadNorm.eps)
    unit = centred * spread
    g = factor * (k + factor * unit + shift - v)
    return spread * (g - g.mean(dim=-1, keepdim=True) - unit * (g * unit).mean(dim=-1, keepdim=True))


def ttt_mini_batch(
    q: Tensor, k: Tensor, v: Tensor, rate: Tensor, share: Tensor, layers: list[Layer], norm: Layer | None
) -> tuple[Tensor, list[Layer]]:
    """One mini-batch in dual form: outputs of its tokens, and the layers after it.

    With X the inputs of a layer and G the gradients by its outputs, W_i gives x W_i + b_i =
    x W + b - r_i Σ_(j <= i) η_j (<x, X_j> + 1) G_j: a masked product (without bias: no 1).

    Args:
        q, k, v: (..., M, n, D).
        rate: η, (..., M, n, 1).
        share: r, (n, 1).
        layers: what the mini-batch starts from.
        norm: factor and shift of the LayerNorm, each (M, 1, D); None leaves out LayerNorm and residual.
    """
    inputs, hidden = [k], []
    for layer in layers:
        hidden.append(_apply(inputs[-1], layer))
        inputs.append(F.gelu(hidden[-1]))
    gradients = [_error(hidden[-1], k, v, norm)]
    for (weight, _), z in zip(layers[:0:-1], hidden[-2::-1]):
        gradients.insert(0, (gradients[0] @ weight.mT) * _gelu_slope(z))

    y, after = q, []
    for i, (layer, x, g) in enumerate(zip(layers, inputs, gradients)):
        weight, bias = layer
        y = F.gelu(y) if i else y
        g = rate * g
        reach = y @ x.mT if bias is None else y @ x.mT + 1  # [n, in] @ [in, n] -> [n, n]
        y = _apply(y, layer) - (share * reach).tril() @ g
        weight = weight - share[-1] * (x.mT @ g)
        after.append((weight, bias if bias is None else bias - share[-1] * g.sum(dim=-2, keepdim=True)))
    if norm is not None:
        factor, shift = norm
        y = q + F.layer_norm(y, y.shape[-1:], eps=HeadNorm.eps) * factor + shift
    return y, after


class LanguageTTT(HeadMixer):
    """What TTT-Linear and TTT-MLP share: (B, N, C) -> (B, N, C), one inner model per head, tokens in raster order.

    Left out: output gate and short convolutions of the paper's second backbone, and the warm-up of TTT-MLP's rate.

    Args:
        dim: channels C of the tokens.
        num_heads: heads M; each has D = C / M channels.
        qkv_bias: whether ``qkv`` has a bias.
        base_rate: η_base; None: 1 for TTT-Linear, 0.1 for TTT-MLP.
        direction: ``causal``, or ``bidirectional``: mean of both ways, see :func:`vit3.mixers.scan.run_scan`; the way
            back starts its first mini-batch at the last token.
        mini_batch: tokens whose gradients are taken at the same weights. It changes the result.
        bias: inner biases.
        norm_residual: f(x) = x + LN(f_res(x)); otherwise f = f_res.
        gate: η of a token is η_base sigmoid(x θ) / D; otherwise η_base itself.
        position_rate: r_i = max(0, 1/(i + 1) + learned offset) for token i = 0, 1, ... of a mini-batch, as in the
            authors' code; otherwise 1, as in their text.
        post_norm: LayerNorm over C before the last projection.

    Raises:
        ValueError: a value that is not allowed.
    """

    widths: tuple[int, ...]  # of f_res, in units of D
    usual_rate: float

    def __init__(
        self,
        dim: int,
        num_heads: int,
        qkv_bias: bool = True,
        *,
        base_rate: float | None = None,
        direction: str = "bidirectional",
        mini_batch: int = 16,
        bias: bool = True,
        norm_residual: bool = True,
        gate: bool = True,
        position_rate: bool = False,
        post_norm: bool = True,
    ):
        super().__init__(dim, num_heads, qkv_bias)
        base_rate = self.usual_rate if base_rate is None else base_rate
        if not (math.isfinite(base_rate) and base_rate >= 0):
            raise ValueError(f"base_rate={base_rate} must be a finite number, 0 or more")
        self.direction, self.mini_batch = check_direction(direction), check_chunk("mini_batch", mini_batch)
        self.base_rate, d = base_rate, self.head_dim
        for i, (a, b) in enumerate(zip(self.widths, self.widths[1:]), start=1):
            self.register_parameter(f"w{i}", nn.Parameter(torch.empty(num_heads, a * d, b * d)))
            self.register_parameter(f"b{i}", nn.Parameter(torch.empty(num_heads * b * d)) if bias else None)
        self.norm = HeadNorm(num_heads, d) if norm_residual else None
        self.rate = nn.Linear(dim, num_heads) if gate else None
        self.offset = nn.Parameter(torch.zeros(mini_batch)) if position_rate else None
        self.post_norm = nn.LayerNorm(dim, eps=1e-6) if post_norm else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fresh learned start: weights normal with std 0.02, biases 0."""
        for name, parameter in self.named_parameters(recurse=False):
            if name[0] == "w":
                nn.init.normal_(parameter, std=0.02)
            else:
                nn.init.zeros_(parameter)

    def layers(self) -> list[Layer]:
        """Learned start of the inner model, in float32 or wider."""
        start = []
        for i in range(1, len(self.widths)):
            weight, bias = getattr(self, f"w{i}"), getattr(self, f"b{i}")
            start.append((widened(weight), None if bias is None else widened(bias).view(self.num_heads, 1, -1)))
        return start

    def rates(self, x: Tensor) -> Tensor:
        """η of the tokens x (B, N, C): (B, M, N, 1), in float32 or wider."""
        if self.rate is None:
            wide = torch.promote_types(x.dtype, torch.float32)
            return torch.full((x.shape[0], self.num_heads, x.shape[1], 1), self.base_rate, dtype=wide, device=x.device)
        (gate,) = self.widened_heads(self.rate(x))
        return self.base_rate / self.head_dim * torch.sigmoid(gate)

    def shares(self, n: int, like: Tensor) -> Tensor:
        """r of a mini-batch of n tokens, (n, 1)."""
        if self.offset is None:
            return like.new_ones(n, 1)
        mean = 1 / torch.arange(1, n + 1, device=like.device, dtype=like.dtype)
        return (mean + self.offset[:n]).clamp(min=0)[:, None]

    def forward(self, x: Tensor, h: int, w: int, rope: RoPE2d | None = None) -> Tensor:
        """Mix the tokens x (B, h*w, C) of an h x w grid; ``rope`` rotates q and k."""
        q, k, v = self.project(x, h, w)
        if rope is not None:
            q, k = rope(q, h, w), rope(k, h, w)
        tensors = (*self.widened_heads(q, k, v), self.rates(x))
        with without_autocast(x.device):
            y = self.join(run_scan(self._scan, *tensors, direction=self.direction)).to(x.dtype)
        return self.proj(y if self.post_norm is None else self.post_norm(y))

    def _scan(self, *tensors: Tensor) -> Tensor:
        layers, norm, out = self.layers(), None if self.norm is None else self.norm.affine(), []
        for q, k, v, rate in chunks(*tensors, size=self.mini_batch):
            y, layers = ttt_mini_batch(q, k, v, rate, self.shares(q.shape[-2], q), layers, norm)
            out.append(y)
        return torch.cat(out, dim=-2)

    def macs(self, h: int, w: int) -> int:
        """Multiply-adds for one image of h*w tokens: projections, gate, inner training once or twice.

        Per mini-batch of n tokens and layer (a, b): three products n·a·b (keys, queries, update), one more to carry
        the gradient through each later layer, and n²·(a + b) in the dual form, masked half included.
        """
        scan = 0
        for n in chunk_lengths(h * w, self.mini_batch):
            for i, (a, b) in enumerate(zip(self.widths, self.widths[1:])):
                a, b = a * self.head_dim, b * self.head_dim
                scan += (3 + (i > 0)) * n * a * b + n * n * (a + b)
        gate = (self.rate is not None) * h * w * self.dim * self.num_heads
        return self.projection_macs(h, w) + gate + passes(self.direction) * self.num_heads * scan

    def extra_repr(self) -> str:
        options = f"base_rate={self.base_rate:g}, mini_batch={self.mini_batch}, direction={self.direction!r}"
        return f"{super().extra_repr()}, {options}"


class TTTLinear(LanguageTTT):
    """TTT-Linear: f_res is one D x D matrix per head."""

    widths, usual_rate = (1, 1), 1.0


class TTTMLP(LanguageTTT):
    """TTT-MLP: f_res has a hidden layer of 4D channels with GELU."""

    widths, usual_rate = (1, 4, 1), 0.1
