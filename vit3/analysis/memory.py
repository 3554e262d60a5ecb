"""Memory of training, counted without computing anything: every tensor of an update has a shape and no data.

Counted are the bytes of PyTorch's own tensors, exactly. Not counted: what an operator allocates and frees inside itself
(workspaces of cuDNN and of our kernels), fragmentation, CUDA's context and the buffers of NCCL.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only


@dataclass(frozen=True)
class Memory:
    """Bytes of an update as functions of the images in one forward pass of one process.

    Attributes:
        parameters: weights and buffers of the network. gradients: of all that learns. optimizer: its state.
        average: the moving average of the weights, if there is one.
        kept, kept_per_image: for the backward pass, with no image and with each.
        transient, transient_per_image: at most at any moment beside all of the above.
        step: temporaries of the optimiser's step, after what was kept is gone.
    """

    parameters: int
    gradients: int
    optimizer: int
    average: int
    kept: float
    kept_per_image: float
    transient: float
    transient_per_image: float
    step: int

    def standing(self, shards: int = 1) -> float:
        """Bytes that are there all the time, in each of ``shards`` processes that they are spread over."""
        return (self.parameters + self.gradients + self.optimizer + self.average) / shards

    def at(self, images: int, shards: int = 1) -> float:
        """Largest number of bytes at any moment of an update with so many images in a forward pass."""
        passing = self.kept + self.transient + images * (self.kept_per_image + self.transient_per_image)
        return self.standing(shards) + max(passing, self.step / shards)

    def largest_batch(self, limit: float, unit: int = 1, shards: int = 1) -> int:
        """Images of a forward pass that fit into ``limit`` bytes, a multiple of ``unit``; 0 where none does."""
        if self.at(0, shards) > limit:
            return 0
        left = limit - self.standing(shards) - self.kept - self.transient
        return int(left / (self.kept_per_image + self.transient_per_image)) // unit * unit


def kept_bytes(call: Callable[[], object], ignore: Iterable[Tensor] = ()) -> int:
    """What autograd keeps for the backward pass of ``call``, each storage once and whole, but none of ``ignore``."""
    ignored = {x.untyped_storage()._cdata for x in ignore}
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in ignored:
            kept[storage._cdata] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        result = call()  # holds the graph, so that no storage is used again
    del result
    return sum(kept.values())


class LiveBytes(TorchDispatchMode):
    """Context that follows every tensor made in it: bytes alive now and at most.

    Attributes:
        now, peak: bytes of tensors made inside, each storage once; ``peak`` may be set back.
    """

    def __init__(self, known: Iterable[Tensor] = ()):
        """``known`` tensors were there before: views of them count nothing."""
        super().__init__()
        self.now = self.peak = 0
        self._known = {x.untyped_storage()._cdata for x in known}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tree_map_only(Tensor, self._note, result)
        return result

    def _note(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def hollow(module: nn.Module, device: torch.device | str) -> None:
    """Give all parameters and buffers new tensors on ``device``; inside of FakeTensorMode these hold no data."""
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, x in tensors.items():
                if x is not None:
                    new = torch.empty(x.shape, dtype=x.dtype, device=device)
                    tensors[name] = nn.Parameter(new, x.requires_grad) if isinstance(x, nn.Parameter) else new


def update_memory(
    task: nn.Module,
    model: nn.Module,
    average: nn.Module | None,
    make_optimizer: Callable[[], torch.optim.Optimizer],
    make_batch: Callable[[int], tuple[Tensor, Tensor]],
    *,
    amp: str | None,
    device_type: str,
    sizes: tuple[int, int] = (128, 256),
) -> Memory:
    """Memory of an update of ``task``, from two batch sizes.

    What is kept is linear in the size. The peak is the largest of several linear functions, so ``sizes`` should be near
    those of use; large ones cost no more than small ones.

    Args:
        task: ``task(images, target)["loss"]``; it contains ``model`` and ``average``. All lose their data.
        make_optimizer: of the model's parameters as they then are. make_batch: images and target for a size.
        amp: None, ``float16`` or ``bfloat16``. device_type: ``cuda`` or ``cpu``, whose rules of mixed precision decide
            what is kept; a GPU is not needed. Transients are followed by the CPU's rules.
    """
    task.train()
    with FakeTensorMode(allow_non_fake_inputs=True):
        kept = []
        with torch.device(device_type):
            hollow(task, device_type)
            for size in sizes:
                batch = make_batch(size)
                with _autocast(device_type, amp):
                    kept.append(kept_bytes(lambda batch=batch: task(*batch), [*task.parameters(), *task.buffers()]))
        with torch.device("cpu"):
            hollow(task, "cpu")
            optimizer_bytes, step, transient = _transients(task, model, make_optimizer, make_batch, amp, sizes)
    size_of = lambda tensors: sum(x.nbytes for x in tensors)  # noqa: E731
    slopes = [(two - one) / (sizes[1] - sizes[0]) for one, two in (kept, transient)]
    return Memory(
        parameters=size_of([*model.parameters(), *model.buffers()]),
        gradients=size_of(p for p in model.parameters() if p.requires_grad),
        optimizer=optimizer_bytes,
        average=0 if average is None else size_of([*average.parameters(), *average.buffers()]),
        kept=max(0.0, kept[0] - slopes[0] * sizes[0]),
        kept_per_image=slopes[0],
        transient=max(0.0, transient[0] - slopes[1] * sizes[0]),
        transient_per_image=slopes[1],
        step=step,
    )


def _transients(task, model, make_optimizer, make_batch, amp, sizes) -> tuple[int, int, list[int]]:
    """Bytes of the optimiser's state, of its step's temporaries, and of the passes beside what they keep."""
    standing = [*task.parameters(), *task.buffers()]
    optimizer = make_optimizer()
    with LiveBytes(standing) as live:
        learning = [p for p in model.parameters() if p.requires_grad]
        for p in learning:
            p.grad = torch.empty_like(p)
        gradients = live.now
        optimizer.step()
        state = live.now - gradients
        step = live.peak - live.now
        peaks = []
        for size in sizes:
            batch = make_batch(size)
            before, live.peak = live.now, live.now
            with _autocast("cpu", amp):
                result = task(*batch)
            kept_for_backward = live.now - before
            result["loss"].backward()
            peaks.append(live.peak - before - kept_for_backward)
            del result, batch
    return state, step, peaks


@contextmanager
def _autocast(device_type: str, amp: str | None) -> Iterator[None]:
    """Autocast by a device's rules although it is absent, which ``torch.autocast`` refuses."""
    if amp is None:
        yield
        return
    before = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    torch.set_autocast_enabled(device_type, True)
    torch.set_autocast_dtype(device_type, getattr(torch, amp))
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled(device_type, before[0])
        torch.set_autocast_dtype(device_type, before[1])
