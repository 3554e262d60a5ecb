"""timm's WebDataset reader with our decoding; importing this file imports webdataset."""

from __future__ import annotations

from collections.abc import Callable

import webdataset
from timm.data.readers.reader_wds import ReaderWds


class StreamReader(ReaderWds):
    """timm's reader, in which ``decode`` takes the place of the decoding that drops bad images without a count.

    Args:
        decode: sample (bytes by ending of the member's name) to dict of ``image`` and ``target``, or None to go on with
            the next; what it raises ends the stream. options: timm's.
    """

    def __init__(self, decode: Callable[[dict], dict | None], **options):
        super().__init__(**options)
        self.decode = decode

    def workers(self) -> int:
        """Loader processes that share the shards, over all training processes; known once a loader process runs."""
        if self.ds is None:
            self._lazy_init()
        return self.global_num_workers

    def _lazy_init(self) -> None:
        super()._lazy_init()
        self.ds.pipeline[-2:] = [webdataset.map(self.decode)]  # the last two stages decode and rename
