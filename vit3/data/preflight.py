"""What can be known to fail before the first step, said before the first step."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

from torch.utils.data import Dataset

from vit3.data.sets import Data
from vit3.errors import UserError

_SAMPLE = 256  # images per split that are decoded for a check, evenly spread

logger = logging.getLogger(__name__)


def preflight(data: Data) -> None:
    """Decode a sample of the files of both splits.

    Raises:
        UserError: a file cannot be decoded (with ``on_bad_image: skip`` a warning that counts them).
    """
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
