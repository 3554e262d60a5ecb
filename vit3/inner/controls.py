"""Controls: each breaks one part of the inner problem on purpose, in training or on a trained network.

What stays the same without its part did not need it. Sources: arXiv 2602.21204 (ascent and queries replaced by keys,
the first of which is ``inner.direction=ascent``, while no update at all is ``inner.epochs=0``); interventions on fast
weights as proposed for fast-weight programmers.

| control | what it does |
|---|---|
| ``query_is_key`` | the inner model is applied to the keys |
| ``shuffle_{q,k,v}_tokens`` | queries, keys or values change places among the tokens of an image, by a fixed shuffle |
| ``shuffle_{q,k,v}_images`` | they come from the next image of the batch |
| ``zero_start`` | W0 is zero; where each gradient is a product with another weight (mlp, glu, swiglu) it stays zero |
| ``random_start`` | W0 is fresh noise of W0's own spread, the same in every call |
| ``zero_fast`` | the trained weights are replaced by zero |
| ``swap_fast`` | each image gets the fast weights of the next image of the batch |
| ``mean_fast`` | every image gets the mean fast weights of the batch |
| ``mean_rate``, ``shuffle_rate`` | the gate is its mean over tokens, or changes places among them |
"""

from __future__ import annotations

import torch
from torch import Tensor

from vit3.inner.constants import constant_result

UNUSED_START = ("zero_start", "random_start", "zero_fast")  # with these the learned start gets no outer gradient
_SEED = 0  # of shuffles and noise: the same in every call, so that a mixer stays a function


def controlled_inputs(control: str, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values (B, G, N, D) as the control wants them."""
    if control == "query_is_key":
        return k, k, v
    if not control.startswith("shuffle_") or control == "shuffle_rate":
        return q, k, v
    _, which, across = control.split("_")
    change = _over_tokens if across == "tokens" else _over_images
    return tuple(change(x) if which == name else x for name, x in (("q", q), ("k", k), ("v", v)))


def controlled_start(control: str, weights: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The learned start as the control wants it."""
    if control == "zero_start":
        return tuple(torch.zeros_like(w) for w in weights)
    if control == "random_start":
        noise = (n.to(w) for n, w in zip(_noise(tuple(tuple(w.shape) for w in weights)), weights))
        return tuple(n * w.detach().square().mean().sqrt() for n, w in zip(noise, weights))
    return weights


def controlled_fast(control: str, weights: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Fast weights (B, ...) as the control wants them."""
    if control == "zero_fast":
        return tuple(torch.zeros_like(w) for w in weights)
    if control == "swap_fast":
        return tuple(_over_images(w) for w in weights)
    if control == "mean_fast":
        return tuple(w.mean(dim=0, keepdim=True).expand_as(w) for w in weights)
    return weights


def controlled_rate(control: str, rate: Tensor | None) -> Tensor | None:
    """Weights of the tokens' losses (B, G, N, 1) as the control wants them."""
    if control == "mean_rate":
        return rate.mean(dim=-2, keepdim=True).expand_as(rate)
    return _over_tokens(rate) if control == "shuffle_rate" else rate


def _over_tokens(x: Tensor) -> Tensor:
    return x.index_select(-2, _shuffle(x.shape[-2]).to(x.device))


def _over_images(x: Tensor) -> Tensor:
    """Of the next image; with one image there is no other."""
    return x.roll(-1, dims=0)


# A compiled mixer can have no generator


@constant_result
def _shuffle(count: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(_SEED), device="cpu")


@constant_result
def _noise(shapes: tuple[tuple[int, ...], ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(_SEED)
    return [torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu") for shape in shapes]
