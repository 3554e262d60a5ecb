"""What the naive loops of the mixers share: heads by slices, both ways by two loops, and the comparison itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

GRIDS = [(1, 1), (3, 5), (7, 6)]


def randomised(mixer: nn.Module, std: float = 0.4) -> nn.Module:
    """The mixer in float64 with all parameters drawn at random, so that none is 0 or 1 by luck."""
    mixer = mixer.double()
    for p in mixer.parameters():
        nn.init.normal_(p, std=std)
    return mixer


def of_head(mixer: nn.Module, t: Tensor, head: int) -> Tensor:
    """Channels of one head of t (..., C)."""
    d = mixer.dim // mixer.num_heads
    return t[..., head * d : (head + 1) * d]


def projected(mixer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v, (B, N, C) each."""
    c = mixer.dim
    y = x @ mixer.qkv.weight.T + (0 if mixer.qkv.bias is None else mixer.qkv.bias)
    return y[..., :c], y[..., c : 2 * c], y[..., 2 * c :]


def there_and_back(one: Callable[[Sequence[int]], dict[int, Tensor]], tokens: int, direction: str) -> list[Tensor]:
    """Outputs by token of ``one``, which takes an order of tokens; with ``bidirectional`` averaged over two orders."""
    there = one(range(tokens))
    if direction == "causal":
        return [there[n] for n in range(tokens)]
    back = one(range(tokens - 1, -1, -1))
    return [0.5 * there[n] + 0.5 * back[n] for n in range(tokens)]


def per_head(mixer: nn.Module, x: Tensor, head_of_sample: Callable[[int, int], list[Tensor]]) -> Tensor:
    """(B, N, C) from the tokens that ``head_of_sample(b, head)`` gives."""
    return torch.stack(
        [
            torch.cat([torch.stack(head_of_sample(b, head)) for head in range(mixer.num_heads)], dim=-1)
            for b in range(x.shape[0])
        ]
    )


def assert_same(mixer: nn.Module, naive: Callable, h: int, w: int, rope: nn.Module | None = None, bound=1e-10) -> None:
    """Values and the gradients of x and of every parameter agree to ``bound`` of their largest entry."""
    x = torch.randn(2, h * w, mixer.dim, dtype=torch.float64, requires_grad=True)
    inputs = dict(mixer.named_parameters()) | {"x": x}
    ours, wanted = mixer(x, h, w, rope=rope), naive(mixer, x, h, w, rope)
    direction = torch.randn_like(x)
    results = {"y": (ours, wanted)}
    gradients = (torch.autograd.grad((y * direction).sum(), list(inputs.values()), allow_unused=True)
                 for y in (ours, wanted))  # fmt: skip
    for name, a, b in zip(inputs, *gradients):
        results[name] = tuple(torch.zeros(1).double() if g is None else g for g in (a, b))
    for name, (a, b) in results.items():
        error = (a - b).abs().max() / max(1.0, b.abs().max())
        assert error <= bound, f"{name}: {error:.1e}"
