"""How an operator with a hand-written gradient is registered with PyTorch.

Through ``torch.library`` an operator is opaque to compilers and exporters, yet whole:
``torch.compile(fullgraph=True)``, ``torch.export``, activation checkpointing, DDP, autocast and PyTorch's operation
counter see one node of known shapes and one for its gradient.
Second and higher derivatives go through the closed form.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from vit3.ops.precision import without_autocast


def register(
    name: str,
    arguments: str,
    *,
    differentiable: int,
    states: int,
    forward: Callable,
    backward: Callable,
    like: Callable,
    like_backward: Callable,
    reference: Callable,
    macs: Callable,
    macs_backward: Callable,
) -> Callable:
    """Make the operators ``vit3::name`` and ``vit3::name_backward``; returns the first.

    Args:
        name: name of the operator.
        arguments: its arguments in PyTorch's schema language.
        differentiable: how many of them, from the first on, get a gradient; these are all tensors.
        states: how many tensors ``forward`` returns beside the output, for ``backward``.
        forward: ``forward(*arguments) -> (output, *states)``.
        backward: ``backward(grad, *states, *arguments) -> gradients``.
        like: ``forward`` on shapes alone.
        like_backward: ``backward`` on shapes alone.
        reference: ``reference(*arguments) -> output`` under autograd, for second derivatives.
        macs: multiply-adds of ``forward``, from the same arguments with shapes in place of tensors.
        macs_backward: multiply-adds of ``backward``, likewise.
    """
    kept = "".join(f"Tensor state{i}, " for i in range(states))
    op = _define(name, f"({arguments}) -> {_tuple(1 + states)}", forward, like, macs)
    schema = f"(Tensor grad, {kept}{arguments}) -> {_tuple(differentiable)}"
    gradient = _define(f"{name}_backward", schema, backward, like_backward, macs_backward)

    def keep(ctx, inputs, output):
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        _save(ctx, (*output[1:], *inputs))

    def first(ctx, grad, *_):
        values = _saved(ctx)
        gradients = [None] * differentiable if grad is None else gradient(grad, *values)
        return (*gradients, *[None] * (len(values) - states - differentiable))

    def keep_again(ctx, inputs, output):
        _save(ctx, inputs)

    def second(ctx, *upstream):
        grad, *values = _saved(ctx)
        inputs, options = values[states : states + differentiable], values[states + differentiable :]
        further = torch.is_grad_enabled()
        with torch.enable_grad():
            # nodes of their own: what they depend on further up (grad on inputs, say) must not be counted here
            grad, *inputs = (x.view_as(x) if x.requires_grad else x.detach().requires_grad_() for x in (grad, *inputs))
            gradients = torch.autograd.grad(reference(*inputs, *options), inputs, grad, create_graph=True)
            dgrad, *dinputs = torch.autograd.grad(
                gradients, (grad, *inputs), upstream, create_graph=further, allow_unused=True
            )
        return (dgrad, *[None] * states, *dinputs, *[None] * len(options))

    op.register_autograd(first, setup_context=keep)
    gradient.register_autograd(second, setup_context=keep_again)
    return op


def _tuple(n: int) -> str:
    return f"({', '.join(['Tensor'] * n)})"


def _define(name: str, schema: str, fn: Callable, like: Callable, macs: Callable) -> Callable:
    def run(*args):
        # The precision rule is the operator's own: autocast stays outside, in the backward pass as in the forward.
        with without_autocast(args[0].device):
            return fn(*args)

    op = torch.library.custom_op(f"vit3::{name}", run, mutates_args=(), schema=schema)
    op.register_fake(like)
    count = register_flop_formula(getattr(torch.ops.vit3, name))
    count(lambda *shapes, out_shape=None, **_: 2 * macs(*shapes))
    return op


def _save(ctx, values: tuple) -> None:
    """Keep values for the backward pass: tensors where autograd watches over them, the rest as they are."""
    ctx.save_for_backward(*(x for x in values if isinstance(x, Tensor)))
    ctx.values = [None if isinstance(x, Tensor) else (x,) for x in values]


def _saved(ctx) -> list:
    tensors = iter(ctx.saved_tensors)
    return [next(tensors) if x is None else x[0] for x in ctx.values]
