"""What can be known to fail before the first step, said before the first step."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

from torch.utils.data import Dataset

from vit3.data.sets import Data
from vit3.errors import UserError

_SAMPLE = 256  # images per split that are decoded for a check, evenly spread

logger = logging.getLogger(__name__)


def preflight(data: Data, *, batch_size: int, world_size: int, mixing: bool) -> None:
    """Check batch arithmetic and decode a sample of the files.

    Args:
        data: both splits. batch_size: global. world_size: processes. mixing: mixup or cutmix is on.

    Raises:
        UserError: the batch does not divide, leaves no step, or is odd where pairs are mixed; a file cannot be decoded
            (with ``on_bad_image: skip`` a warning that counts them).
    """
    if batch_size % world_size:
        raise UserError(
            f"engine.batch_size={batch_size} is global and must be a multiple of the {world_size} processes"
        )
    per_process = batch_size // world_size
    if mixing and per_process % 2:
        raise UserError(
            f"engine.batch_size={batch_size} gives {per_process} images per process; "
            "mixup and cutmix need an even number"
        )
    images = -(-len(data.train) // world_size)  # the sampler pads to equal shares
    if images < per_process:
        raise UserError(
            f"engine.batch_size={batch_size} is more than the {len(data.train)} training images: an epoch would have "
            f"no step; use at most {len(data.train) // world_size * world_size}"
        )
    for split in (data.train, data.val):
        _check_decoding(split)


def _check_decoding(split: Dataset) -> None:
    if not hasattr(split, "decode"):
        return
    indices = sorted({i * len(split) // _SAMPLE for i in range(_SAMPLE)})

    def error_of(index: int) -> str | None:
        try:
            split.decode(index)
        except UserError as error:
            return str(error)

    with ThreadPoolExecutor(8) as pool:
        errors = [error for error in pool.map(error_of, indices) if error]
    if errors and not split.skip:
        raise UserError(
            f"{errors[0]} (and {len(errors) - 1} more of {len(indices)} tried)" if errors[1:] else errors[0]
        )
    if errors:
        logger.warning(
            "%d of %d tried images cannot be decoded and will be skipped: %s", len(errors), len(indices), errors[0]
        )
