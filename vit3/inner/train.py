"""The inner loop: train an inner model on the keys and values of each sample, by closed gradients or by autograd.

Autograd is the oracle: it works for any model and loss and knows nothing of their algebra. The closed gradients are
what the mixers run; both are differentiable to any order in weights, keys, values and rates.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vit3.inner.batches import token_batches
from vit3.inner.losses import Loss
from vit3.inner.models import InnerModel
from vit3.inner.optim import InnerOptimizer
from vit3.inner.spec import InnerSpec

METHODS = ("closed", "autograd")


def inner_train(
    model: InnerModel,
    weights: tuple[Tensor, ...],
    k: Tensor,
    v: Tensor,
    spec: InnerSpec,
    *,
    grid: tuple[int, int],
    factor: Tensor | None = None,
    token_rate: Tensor | None = None,
    method: str = "closed",
) -> tuple[Tensor, ...]:
    """Train ``model`` from ``weights`` on (k, v) as ``spec`` says and return its weights per sample.

    Samples do not see each other. Works under training, ``torch.no_grad`` and ``torch.inference_mode``.

    Args:
        model: what to train.
        weights: learned start, one set for all samples or one per sample, leading dimension 1 or B.
        k: inputs of the inner model (B, G, N, D).
        v: targets, shape of k.
        spec: loss, learning rate, batches, epochs, optimiser.
        grid: (h, w) with h*w = N.
        factor: learned factor of the learning rate, one number (1,) or one per head (G,).
        token_rate: weight of each token's loss, (B, 1 or G, N, 1).
        method: ``closed`` or ``autograd`` gradients.

    Returns:
        Fast weights, each (B, ...).

    Raises:
        ValueError: weights of another batch, tokens that are not the grid's, unknown method.
    """
    b, g, n, _ = k.shape
    for w in weights:
        if w.shape[0] not in (1, b):
            raise ValueError(f"weights must be the learned start, each (1, ...), or {b} of them; got {tuple(w.shape)}")
    if grid[0] * grid[1] != n:
        raise ValueError(f"grid={grid} has {grid[0] * grid[1]} tokens, k has {n}")
    if method not in METHODS:
        raise ValueError(f"method='{method}' is unknown; use one of: {', '.join(METHODS)}")
    if method == "closed" and model.has_gradients:
        return _train(model, weights, k, v, spec, grid, factor, token_rate, _closed)
    record = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()  # which compilation cannot ask
    with torch.inference_mode(False), torch.enable_grad():
        k, v, factor, token_rate, *weights = (_recordable(x, record) for x in (k, v, factor, token_rate, *weights))
        fast = _train(model, tuple(weights), k, v, spec, grid, factor, token_rate, _by_autograd(record))
    return fast if record else tuple(w.detach() for w in fast)


def _train(model, weights, k, v, spec, grid, factor, token_rate, gradients: Callable) -> tuple[Tensor, ...]:
    loss = Loss.of(spec, k.shape[-1])
    rates = tuple(spec.lr if factor is None else spec.lr * _as_rate(factor, w, k.shape[1]) for w in weights)
    batches = None if spec.batch == "N" else token_batches(spec.batch, spec.order, *grid)
    optimizer = InnerOptimizer(spec, weights, model.norm_dims, rates)
    fast = tuple(w.expand(k.shape[0], *w.shape[1:]) for w in weights)
    for _ in range(spec.epochs):
        if batches is None:
            fast = optimizer.step(fast, gradients(model, loss, fast, k, v, grid, token_rate, None))
            continue
        for tokens in batches:
            tokens = tokens.to(k.device)
            if model.pointwise:  # tokens that see only themselves can be cut out before the model runs
                part = (x if x is None else x.index_select(-2, tokens) for x in (k, v, token_rate))
                k_part, v_part, rate = part
                g = gradients(model, loss, fast, k_part, v_part, grid, rate, None)
            else:
                mask = torch.zeros(k.shape[-2], 1, dtype=k.dtype, device=k.device).index_fill(0, tokens, 1.0)
                rate = mask if token_rate is None else mask * token_rate
                g = gradients(model, loss, fast, k, v, grid, rate, len(tokens))
            fast = optimizer.step(fast, g)
    return fast


def gradients_of(model, loss: Loss, weights, k, v, grid, token_rate=None) -> tuple[Tensor, ...]:
    """Gradients of the loss over all tokens, (B, ...) each, for looking at; arguments as of :func:`inner_train`."""
    if model.has_gradients:
        return _closed(model, loss, weights, k, v, grid, token_rate, None)
    with torch.inference_mode(False), torch.enable_grad():
        k, v, token_rate, *weights = (_recordable(x, False) for x in (k, v, token_rate, *weights))
        return _by_autograd(False)(model, loss, tuple(weights), k, v, grid, token_rate, None)


def _closed(model, loss: Loss, fast, k, v, grid, rate, count) -> tuple[Tensor, ...]:
    """Gradients by the formulas of model and loss."""
    if loss.needs_prediction:
        return model.gradients(fast, k, grid, lambda prediction: loss.error(prediction, v, rate, count))
    return model.gradients(fast, k, grid, loss.error(None, v, rate, count))


def _by_autograd(record: bool) -> Callable:
    """Gradients by autograd through loss and model; recorded for the outer gradient or not."""

    def gradients(model, loss: Loss, fast, k, v, grid, rate, count) -> tuple[Tensor, ...]:
        fast = tuple(w.clone() if record else w.detach() for w in fast)
        fast = tuple(w if w.requires_grad else w.requires_grad_() for w in fast)
        total = loss.value(model.apply(fast, k, grid), v, rate, count).sum()
        return torch.autograd.grad(total, fast, create_graph=record)

    return gradients


def _as_rate(factor: Tensor, weight: Tensor, heads: int) -> Tensor:
    """A factor for all or per head as it broadcasts to a weight (1, G, I, O) or (1, G*D, I, k, k)."""
    if factor.numel() > 1:
        factor = factor.repeat_interleave(weight.shape[1] // heads)
    return factor.view(1, -1, *[1] * (weight.ndim - 2))


def _recordable(x: Tensor | None, record: bool) -> Tensor | None:
    """``x`` as autograd may save it; outside of recording it is cut from the caller's graph."""
    if record or x is None:
        return x
    return x.clone() if x.is_inference() else x.detach()
