"""What the inner training did: for looking into it without changing its output."""

from __future__ import annotations

import torch
from torch import Tensor

from vit3.inner.losses import Loss
from vit3.inner.models import InnerModel
from vit3.inner.optim import normalised
from vit3.inner.spec import InnerSpec
from vit3.inner.train import gradients_of


def inner_report(
    model: InnerModel,
    names: tuple[str, ...],
    start: tuple[Tensor, ...],
    fast: tuple[Tensor, ...],
    k: Tensor,
    v: Tensor,
    spec: InnerSpec,
    *,
    grid: tuple[int, int],
    token_rate: Tensor | None = None,
) -> dict[str, Tensor | dict[str, Tensor]]:
    """Describe the inner training of one inner model.

    Args:
        model: the inner model. names: a name for each weight.
        start: weights before training, (1, ...). fast: after it, (B, ...).
        k: inputs, v: targets, (B, G, N, D). spec: how it was trained. grid: (h, w).
        token_rate: weight of each token's loss, (B, 1 or G, N, 1).

    Returns:
        ``loss_before`` and ``loss_after``: loss of every sample and head, (B, G), over all tokens.
        ``mixed_derivative``: mean size over tokens and channels of d2L / dv dp at the start, (B, G): the signal that
        the values' outer gradient is made of, 0 where they get none. ``signal_share``: share of entries not zero.
        For each weight name: ``grad_norm`` (of the gradient over all tokens at the start, norms as the gradient norm
        takes them), ``clip_ratio`` (the factor that the gradient norm multiplied by), ``update_norm`` and
        ``relative_update`` (B,), ``fast_weights`` (B, ...).
    """
    loss = Loss.of(spec, k.shape[-1])
    weights = tuple(w.expand_as(f) for w, f in zip(start, fast))
    before, after = (model.apply(w, k, grid) for w in (weights, fast))
    gradients = gradients_of(model, loss, weights, k, v, grid, token_rate)
    mixed = loss.mixed(before, v, token_rate)
    report = {
        "loss_before": loss.value(before, v, token_rate),
        "loss_after": loss.value(after, v, token_rate),
        "mixed_derivative": mixed.abs().mean(dim=(-2, -1)),
        "signal_share": (mixed != 0).to(mixed.dtype).mean(dim=(-2, -1)),
    }
    for key in ("grad_norm", "clip_ratio", "update_norm", "relative_update", "fast_weights"):
        report[key] = {}
    for name, w, g, f, dim in zip(names, weights, gradients, fast, model.norm_dims):
        norm = torch.linalg.vector_norm(g, dim=dim)
        taken = torch.linalg.vector_norm(normalised(g, spec, dim), dim=dim)
        update = (f - w).flatten(1).norm(dim=1)
        report["grad_norm"][name] = norm
        report["clip_ratio"][name] = torch.where(norm > 0, taken / norm.clamp(min=torch.finfo(norm.dtype).tiny), 1.0)
        report["update_norm"][name] = update
        report["relative_update"][name] = update / w.flatten(1).norm(dim=1)
        report["fast_weights"][name] = f
    return report
