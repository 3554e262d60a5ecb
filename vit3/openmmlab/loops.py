"""MMEngine's epoch loop, which can also go on inside an epoch: :class:`EpochLoop`."""

from __future__ import annotations

import logging

from mmengine.registry import LOOPS
from mmengine.runner import EpochBasedTrainLoop
from torch.utils.data import DataLoader

logger = logging.getLogger(__name__)


@LOOPS.register_module()
class EpochLoop(EpochBasedTrainLoop):
    """Epochs as MMEngine's, but a run that stopped inside one goes on with the batches that are left of it.

    The order of an epoch follows from seed and epoch, so the batches that are done can be passed over unread.
    """

    def run_epoch(self) -> None:
        """The rest of the epoch at work, or a whole one."""
        done = self._iter - self._epoch * len(self.dataloader)
        if done == 0:
            return super().run_epoch()
        self.runner.call_hook("before_train_epoch")  # gives the sampler its epoch
        self.runner.model.train()
        batches = list(self.dataloader.batch_sampler)
        if not 0 < done <= len(batches):  # all of them: it stopped in the last one
            logger.warning("epoch %d starts anew: its length is not what it was when the run stopped", self._epoch + 1)
            done = 0
        loader = self.dataloader
        rest = DataLoader(
            loader.dataset,
            batch_sampler=batches[done:],
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            worker_init_fn=loader.worker_init_fn,
        )
        for index, batch in enumerate(rest, start=done):
            self.run_iter(index, batch)
        self.runner.call_hook("after_train_epoch")
        self._epoch += 1
