"""What one inner step did: for looking into test-time training without changing its output."""

from __future__ import annotations

import torch
from torch import Tensor

from vit3.inner.losses import dot_product
from vit3.inner.models import InnerModel
from vit3.inner.spec import InnerSpec


def inner_report(
    model: InnerModel,
    names: tuple[str, ...],
    start: tuple[Tensor, ...],
    gradients: tuple[Tensor, ...],
    fast: tuple[Tensor, ...],
    k: Tensor,
    v: Tensor,
    spec: InnerSpec,
) -> dict[str, Tensor | dict[str, Tensor]]:
    """Describe one inner step.

    Args:
        model: the inner model.
        names: a name for each weight.
        start: learned start of each weight, (1, ...).
        gradients: raw gradients (B, ...), before the soft norm.
        fast: weights after the step, (B, ...).
        k: inputs, v: targets, batch first.
        spec: the loss scale that was used.

    Returns:
        ``loss_before`` and ``loss_after``: (B, channels...) inner loss, one value per channel; and for each
        weight name: ``grad_norm`` (norms as the soft norm takes them), ``clip_ratio`` (the factor
        1/(norm + 1) it multiplied by), ``update_norm`` and ``relative_update`` (B,), ``fast_weights`` (B, ...).
    """
    weights = tuple(w.expand_as(f) for w, f in zip(start, fast))
    loss = [dot_product(model.apply(w, k), v, scale=spec.scale, token_dims=model.token_dims) for w in (weights, fast)]
    report = {"loss_before": loss[0], "loss_after": loss[1]}
    for key in ("grad_norm", "clip_ratio", "update_norm", "relative_update", "fast_weights"):
        report[key] = {}
    for name, w, g, f, dim in zip(names, weights, gradients, fast, model.norm_dims):
        norm = torch.linalg.vector_norm(g, dim=dim)
        update = (f - w).flatten(1).norm(dim=1)
        report["grad_norm"][name] = norm
        report["clip_ratio"][name] = 1 / (norm + 1)
        report["update_norm"][name] = update
        report["relative_update"][name] = update / w.flatten(1).norm(dim=1)
        report["fast_weights"][name] = f
    return report
