"""The generic inner loop, by autograd: slow, obvious, and the oracle for every closed form and kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from vit3.inner.losses import dot_product
from vit3.inner.models import InnerModel
from vit3.inner.optim import gradient_descent
from vit3.inner.spec import InnerSpec


def inner_train(
    model: InnerModel, weights: tuple[Tensor, ...], k: Tensor, v: Tensor, spec: InnerSpec
) -> tuple[Tensor, ...]:
    """Train ``model`` from ``weights`` on (k, v) as ``spec`` says and return its weights per sample.

    The weights are expanded to one set per sample, the losses of all samples are summed, and autograd
    differentiates the sum: samples do not see each other. The result is differentiable (to any order) in
    weights, k and v. Works under ``torch.no_grad`` and ``torch.inference_mode`` too.

    Args:
        model: what to train, see :mod:`vit3.inner.models`.
        weights: learned start, shared by the samples, each (1, ...).
        k: inputs of the inner model, batch first.
        v: targets, shape of k.
        spec: loss scale and learning rate.

    Returns:
        Fast weights, each (B, ...).

    Raises:
        ValueError: a weight without the leading dimension of size 1.
    """
    for w in weights:
        if w.shape[:1] != (1,):
            raise ValueError(f"weights must be the learned start, each (1, ...); got {tuple(w.shape)}")
    record = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    with torch.inference_mode(False), torch.enable_grad():
        k, v, *weights = (_recordable(x, record) for x in (k, v, *weights))
        fast = tuple(_per_sample(w, k.shape[0]) for w in weights)
        loss = dot_product(model.apply(fast, k), v, scale=spec.scale, token_dims=model.token_dims)
        gradients = torch.autograd.grad(loss.sum(), fast, create_graph=record)
        fast = tuple(
            gradient_descent(w, g, lr=spec.lr, norm_dim=dim) for w, g, dim in zip(fast, gradients, model.norm_dims)
        )
    return fast if record else tuple(w.detach() for w in fast)


def _recordable(x: Tensor, record: bool) -> Tensor:
    """``x`` as autograd may save it; outside of recording it is cut from the caller's graph."""
    if record:
        return x
    return x.clone() if x.is_inference() else x.detach()


def _per_sample(weight: Tensor, batch: int) -> Tensor:
    """``weight`` (1, ...) copied to (B, ...) as a node that autograd can differentiate by."""
    copies = weight.expand(batch, *weight.shape[1:]).clone()
    return copies if copies.requires_grad else copies.requires_grad_()
