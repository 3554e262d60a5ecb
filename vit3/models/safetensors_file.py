"""safetensors files: the same bytes for the same content, and one sentence where a file is none."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
from torch import Tensor

from vit3.models.unpickle import WeightsError

_TEXTS = "__metadata__"


def encode(tensors: Mapping[str, Tensor], header: Mapping[str, str]) -> bytes:
    """The content of a file.

    The library orders the header's texts anew at every call, and changes the file's SHA-256; here they are sorted.
    """
    data = safetensors.torch.save(dict(tensors), dict(header) or None)
    size = int.from_bytes(data[:8], "little")
    described = json.loads(data[8 : 8 + size])
    if _TEXTS in described:
        described[_TEXTS] = dict(sorted(described[_TEXTS].items()))
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of eight
    return b"".join((len(text).to_bytes(8, "little"), text, memoryview(data)[8 + size :]))


def decode(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and the header's texts.

    Raises:
        WeightsError: the file is not readable.
    """
    try:
        with safetensors.safe_open(path, "pt") as file:
            header = file.metadata() or {}
        return safetensors.torch.load_file(path), header
    except safetensors.SafetensorError as error:
        raise WeightsError(f"{path} is not a readable safetensors file ({error})") from error
