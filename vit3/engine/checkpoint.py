"""Checkpoints: tensors and plain values only, written to a temporary file and renamed."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

from vit3.errors import UserError
from vit3.files import replacing

FORMAT = 1


def save_checkpoint(state: dict[str, Any], path: Path) -> None:
    """Write ``state`` so that ``path`` is at any moment either the old file or the whole new one.

    Raises:
        UserError: the disk is full or the folder not writable; the old file is intact.
    """
    try:
        with replacing(path) as file:
            torch.save({"format": FORMAT, **state}, file)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError
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


# What must be equal for a checkpoint to go on; paths, schedules and precision of bfloat16 or float32 may change.
_SAME_RUN = {
    "data": ("name", "img_size", "in_chans"),
    "model": ("name", "kwargs"),
    "mixer": ("name",),
    "inner": ("lr", "scale"),
    "optim": ("opt", "decay_inner", "layer_decay"),
}


def check_resumable(state: dict[str, Any], config: dict[str, Any], classes: tuple[str, ...]) -> None:
    """Make sure that a checkpoint belongs to the run that ``config`` (the whole configuration) describes.

    Raises:
        UserError: another model, mixer, inner step, optimiser or data; or nothing is left to train.
    """
    what = f"resume={config['resume']}"
    for group, keys in _SAME_RUN.items():
        for key in keys:
            here, there = config[group][key], state["config"][group].get(key)
            if here != there:
                raise UserError(
                    f"{what}: {group}.{key} is {here} here and {there} in the run; give the run's own value"
                )
    scaled = [cfg["engine"]["amp"] == "float16" for cfg in (config, state["config"])]
    if scaled[0] != scaled[1]:
        raise UserError(f"{what}: engine.amp={config['engine']['amp']} here and {state['config']['engine']['amp']} "
                        "in the run; float16 has a loss scale, so it cannot begin or end within a run")  # fmt: skip
    if list(classes) != state["classes"]:
        raise UserError(f"{what}: data.root={config['data']['root']} has other classes than the run was trained on")
    done = state["epoch"] + 1
    if done >= config["engine"]["epochs"]:
        raise UserError(f"{what}: {done} epochs are done already; set engine.epochs higher to go on")
