"""The test loss of a generator: that of training, at times and with noise which each test image keeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from timm.task import evaluation_sample_limit
from torch import Tensor, nn

from vit3.engine.distributed import Processes
from vit3.engine.precision import autocast
from vit3.engine.progress import progress
from vit3.engine.run_place import Score
from vit3.seeding import Purpose, seed_everything

SCORE = Score("loss", "test loss", "{:.5f}", smaller=True)


@dataclass(frozen=True)
class TestLoss:
    """Evaluates networks by the signature of :func:`vit3.engine.evaluate.evaluate`.

    Every test image has one time and one noise of its own, drawn from ``seed`` and its number: differences between
    epochs, weights and numbers of processes are not differences of luck.

    Attributes:
        process, codec: as of :class:`vit3.tasks.diffusion.DiffusionTask`. seed: of times and noise.
    """

    __test__ = False  # for pytest

    process: Any
    codec: Any
    seed: int

    @torch.no_grad()
    def __call__(
        self, model: nn.Module, loader, processes: Processes, *, amp: str | None = None, channels_last: bool = False,
        title: str = "evaluate", stop: Callable[[], bool] | None = None,
    ) -> dict[str, float] | None:  # fmt: skip
        """``loss`` and its parts, means over the images; None if it was stopped.

        Args:
            model: (x, t, y) to predictions; its training mode is restored afterwards. channels_last: not used.
            amp, title, stop: as of :func:`vit3.engine.evaluate.evaluate`.
        """
        left = evaluation_sample_limit(loader)  # None: all
        sums: dict[str, float] = {}
        count, was_training = 0, model.training
        model.eval()
        try:
            with progress(title, len(loader), processes.main) as advance, torch.random.fork_rng():
                for images, target in loader:
                    if stop is not None and processes.total(float(stop())):
                        return None
                    own = target[:left] >= 0  # others could not be decoded
                    numbers = [processes.rank + processes.world_size * (count + i) for i in range(len(target))]
                    count += len(target)
                    left = None if left is None else max(0, left - len(target))
                    # also where nothing counts: a sharded network needs all processes
                    losses = self._losses(model, images, target.clamp(min=0), numbers, processes, amp)
                    sums["images"] = sums.get("images", 0) + int(own.sum())
                    for name, value in losses.items():
                        sums[name] = sums.get(name, 0.0) + float(value[: len(own)][own].double().sum())
                    advance(len(images) * processes.world_size)
        finally:
            model.train(was_training)
        return self._means(sums, processes)

    def _losses(self, model, images: Tensor, target: Tensor, numbers: list[int], processes: Processes, amp):
        """Losses (b,) of one batch by name."""
        seed_everything(self.seed, Purpose.SCORE, numbers[0])  # for what an autoencoder draws
        with autocast(processes.device, amp):
            x0 = self.codec.encode(images).float()
            times, noise = [], []
            for number in numbers:
                seed_everything(self.seed, Purpose.SCORE, number)
                times.append(self.process.draw_times(1))
                noise.append(torch.randn(x0.shape[1:]))
            times, noise = (torch.cat(times), torch.stack(noise))
            return self.process.losses(model, x0, times.to(x0.device), target, noise.to(x0.device))

    @staticmethod
    def _means(sums: dict[str, float], processes: Processes) -> dict[str, float]:
        if processes.distributed:
            shares: list = [None] * processes.world_size
            dist.all_gather_object(shares, sums)
            sums = {name: sum(share[name] for share in shares) for name in sums}
        images = sums.pop("images")
        return {name: total / images for name, total in sorted(sums.items())}
