"""Where the inner step matters in an image: by how much each token's output changes, block by block."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vit3.analysis.interventions import intervened
from vit3.mixers import TTT


@dataclass(frozen=True)
class InnerMap:
    """What the inner step changed in one block.

    Attributes:
        block: number of the block among those with a TTT mixer, from 1. name: of its mixer in the network.
        values: ``|f(W', q) - f(W0, q)| / |f(W', q)|`` of each token, (B, h, w), in float32; see :func:`inner_maps`.
    """

    block: int
    name: str
    values: Tensor


def inner_maps(model: nn.Module, images: Tensor, blocks: Sequence[int] | None = None) -> list[InnerMap]:
    """Maps of what the inner step changed in the mixers' outputs; an empty list for networks without TTT mixers.

    For each token: q of the inner models is applied with the fast weights W' that the image gave, and again with the
    learned start W0, as if no step had been taken. Shown is the norm of the difference relative to the norm of
    ``f(W', q)``, over the channels of all inner models of the mixer side by side, before ``proj`` mixes them. 0: the
    step changed nothing for this token; 1: the change is as large as the output. It may be above 1, where the step
    made an output smaller or turned it round; where ``f(W', q)`` is zero it is 0.

    Both outputs of a block come from the same tokens: what the trained network feeds it, all blocks before it with
    their inner steps. The network runs once, and nothing of it is changed.

    Args:
        model: any network with :class:`vit3.mixers.TTT` mixers. images: its input (B, C, H, W).
        blocks: which mixers, counted from 0 in the order of the network; None for all.

    Raises:
        ValueError: a block that is not there.
    """
    mixers = [(name, module) for name, module in model.named_modules() if isinstance(module, TTT)]
    blocks = range(len(mixers)) if blocks is None else blocks
    if not all(0 <= block < len(mixers) for block in blocks):
        raise ValueError(f"blocks={list(blocks)}, but the network has {len(mixers)} TTT mixers, counted from 0")
    found: dict[int, Tensor] = {}
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), ExitStack() as hooks:
            for block in blocks:
                _watch(mixers[block][1], block, found, hooks)
            model(images)
    finally:
        model.train(was_training)
    return [InnerMap(block + 1, mixers[block][0], found[block]) for block in blocks]


def evenly_spaced(total: int, count: int) -> list[int]:
    """Up to ``count`` of the numbers 0 to total - 1, evenly spaced, the last one always among them."""
    count = min(total, count)
    return [round((i + 1) * total / count) - 1 for i in range(count)]


def _watch(mixer: TTT, block: int, found: dict[int, Tensor], hooks: ExitStack) -> None:
    """Let ``mixer`` leave its map in ``found`` when it runs; the hooks go with ``hooks``."""
    outputs: list[Tensor] = []  # before proj

    def keep(proj, args) -> None:
        outputs.append(args[0].float())

    def compare(mixer: TTT, args, kwargs, output) -> None:
        with intervened(mixer, dict(epochs=0)):
            mixer.forward(*args, **kwargs)  # not called, which would come here again
        trained, start = outputs
        outputs.clear()  # or the outputs of all blocks would stay until the last
        grid = inspect.signature(mixer.forward).bind(*args, **kwargs).arguments
        size = torch.linalg.vector_norm(trained, dim=-1)
        change = torch.linalg.vector_norm(trained - start, dim=-1)
        relative = torch.where(size > 0, change / size, 0.0)
        found[block] = relative.unflatten(1, (grid["h"], grid["w"])).cpu()

    for handle in (
        mixer.proj.register_forward_pre_hook(keep),
        mixer.register_forward_hook(compare, with_kwargs=True),
    ):
        hooks.callback(handle.remove)
