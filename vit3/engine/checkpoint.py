"""Checkpoints: tensors and plain values only, written to a temporary file and renamed."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import torch

from vit3.errors import UserError

FORMAT = 1


def save_checkpoint(state: dict[str, Any], path: Path) -> None:
    """Write ``state`` so that ``path`` is at any moment either the old file or the whole new one.

    Raises:
        UserError: the disk is full or the folder not writable; the old file is intact.
    """
    part = path.with_name(path.name + ".part")
    try:
        with open(part, "wb") as file:
            torch.save({"format": FORMAT, **state}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError
        part.unlink(missing_ok=True)
        raise UserError(f"{path} cannot be written ({error}); free space or choose another output=FOLDER") from error


def load_checkpoint(path: str | Path) -> dict[str, Any]:
    """Read a checkpoint of ours with ``weights_only``.

    Args:
        path: the file, or a run folder: its ``last.pt``.

    Raises:
        UserError: no such file, unreadable, or not ours.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "last.pt"
    if not path.is_file():
        raise UserError(f"{path}: no such checkpoint")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, OSError, pickle.UnpicklingError):
        state = None
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise UserError(
            f"{path} is damaged or no checkpoint of this program; convert the authors' files with tools/convert.py "
            "and pass other weights as model.checkpoint=FILE"
        )
    return state
