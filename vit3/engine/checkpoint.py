"""Checkpoints: tensors and plain values only, whole or absent, verified when read; which to keep and which to take."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import zipfile
from pathlib import Path
from typing import Any

import torch

from vit3.engine.run_place import Score
from vit3.errors import UserError
from vit3.files import replacing

logger = logging.getLogger(__name__)

FORMAT = 2
FOLDER = "checkpoints"  # below the run folder: one file per save, named by the number of updates


def save_checkpoint(state: dict[str, Any], path: Path) -> None:
    """Write ``state`` so that ``path`` is at any moment either the old file or the whole new one.

    The file carries a checksum (CRC-32) of each of its tensors, which :func:`load_checkpoint` verifies. A write error
    that may pass (a network file system) is tried once more.

    Raises:
        UserError: the disk is full or the folder not writable; the old file is intact.
    """
    for attempt in (1, 2):
        try:
            with replacing(path) as file:
                torch.save({"format": FORMAT, **state}, file)
            return
        except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError
            full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
            if attempt == 2 or full:
                raise UserError(
                    f"{path} cannot be written ({error}); free space or choose another output=FOLDER"
                ) from error
            logger.warning("%s could not be written (%s); trying once more", path, error)


def load_checkpoint(path: str | Path) -> dict[str, Any]:
    """Read a checkpoint of ours with ``weights_only``, after its checksums.

    Args:
        path: the file, or a run folder: its newest whole checkpoint (damaged ones are named in a warning).

    Raises:
        UserError: no such file, damaged, or not ours.
    """
    path = Path(path)
    if path.is_dir():
        return newest_checkpoint(path)[1]
    if not path.is_file():
        raise UserError(f"{path}: no such checkpoint; give a run folder of tools/train.py, or a checkpoint in one")
    try:
        damaged = zipfile.ZipFile(path).testzip()
        state = None if damaged else torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # damaged bytes make zipfile and pickle raise almost anything: UnicodeDecodeError, zlib.error, …
        state = None
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise UserError(
            f"{path} is damaged or no checkpoint of this program; convert the authors' files with tools/convert.py "
            "and start from other weights by model.checkpoint=FILE (classifiers) or model.pretrained=FILE (detectors)"
        )
    return state


def update_checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run folder that can be resumed, newest first."""
    return sorted((run / FOLDER).glob("update-*.pt"), reverse=True)


def save_update(state: dict[str, Any], run: Path, keep: int) -> Path:
    """Save ``state`` (with ``updates`` and ``position`` in it) below a run folder and drop the oldest beyond ``keep``.

    Where the disk is full, older ones make room, but never the newest.
    """
    folder = run / FOLDER
    folder.mkdir(exist_ok=True)
    path = folder / f"update-{state['updates']:08d}-{state['epoch']:05d}-{state['position']:09d}.pt"
    try:
        save_checkpoint(state, path)
    except UserError:
        older = [other for other in update_checkpoints(run) if other != path][1:]
        if not older:
            raise
        logger.warning("the disk is full: %d older checkpoints are dropped", len(older))
        for old in older:
            old.unlink()
        save_checkpoint(state, path)
    for old in update_checkpoints(run)[keep:]:
        old.unlink()
    return path


def set_aside_later(run: Path, path: Path) -> None:
    """After resuming an older file: later ones no longer belong to the run; they are kept under another name."""
    for later in update_checkpoints(run):
        if later.name > path.name:
            later.rename(later.with_suffix(".pt.superseded"))
            logger.warning("%s is later than what is resumed; it is kept as %s.superseded", later, later.name)


def best_checkpoint(run: Path) -> Path:
    """The file with the best weights of a run folder: ``best_raw.pt`` or ``best_ema.pt``.

    Raises:
        UserError: there is none yet.
    """
    files = {weights: run / f"best_{weights}.pt" for weights in ("raw", "ema")}
    files = {weights: path for weights, path in files.items() if path.exists()}
    if not files:
        raise UserError(f"{run} holds no best_raw.pt or best_ema.pt; give a checkpoint file")
    try:
        weights = json.loads((run / "summary.json").read_text())["best"]["weights"]
    except (OSError, KeyError, TypeError, ValueError):
        weights = next(iter(files))
    return files.get(weights, next(iter(files.values())))


def kept_best(run: Path, best: dict[str, Any], score: Score) -> dict[str, Any]:
    """Of the best scores in a checkpoint those whose weights are still in the run folder.

    Files of other weights, left by updates after the checkpoint, are kept under another name: the next epoch is then
    the best so far.

    Args:
        best: epoch and score by kind of weights, as in the checkpoint.
    """
    kept = {}
    for weights, reached in best.items():
        path = run / f"best_{weights}.pt"
        try:
            if load_checkpoint(path)["epoch"] == reached["epoch"]:
                kept[weights] = reached
                continue
        except UserError:
            pass
        logger.warning(
            "the best %s weights (epoch %d, %s %s) are not in %s; the next epoch counts as the best so far",
            weights, reached["epoch"] + 1, score.title, score.text(reached[score.name]).strip(), path,
        )  # fmt: skip
        if path.exists():
            path.rename(path.with_suffix(".pt.superseded"))
    return kept


def checkpoint_to_resume(resume: str | None, output: str, name: str | None) -> str | None:
    """The checkpoint file to continue; None starts from the beginning.

    Args:
        resume: None, a run folder, a file, or ``auto``: what OUTPUT/NAME holds, nothing where that is new.

    Raises:
        UserError: nothing to continue at an explicit path, or ``auto`` without a name.
    """
    if resume is None:
        return None
    if resume == "auto":
        if name is None:
            raise UserError("resume=auto needs name=NAME, the run folder below output to continue or to start")
        folder = Path(output) / name
        return str(newest_checkpoint(folder)[0]) if update_checkpoints(folder) else None
    path = Path(resume)
    if not path.exists():
        raise UserError(f"resume={resume}: no such run folder or checkpoint; resume=auto name=NAME starts one")
    return str(newest_checkpoint(path)[0] if path.is_dir() else path)


def run_of(checkpoint: Path) -> Path:
    """The run folder that a checkpoint to resume belongs to."""
    return checkpoint.parent.parent if checkpoint.parent.name == FOLDER else checkpoint.parent


def newest_checkpoint(run: Path) -> tuple[Path, dict[str, Any]]:
    """The newest whole checkpoint of a run folder and its content; damaged ones are named in a warning.

    Raises:
        UserError: none is whole.
    """
    for path in update_checkpoints(run):
        try:
            return path, load_checkpoint(path)
        except UserError as error:
            logger.warning("skipped: %s", str(error).split(";")[0])
    raise UserError(f"{run} holds no whole checkpoint in {FOLDER}/; give a run folder, or a checkpoint file")


def config_hash(config: dict[str, Any]) -> str:
    """SHA-256 of a configuration, for telling at a glance whether two are equal."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


# What must be equal for a checkpoint to go on; paths, schedules and precision of bfloat16 or float32 may change.
_SAME_RUN = (
    "data.name", "data.img_size", "data.in_chans", "model.name", "model.kwargs", "model.freeze", "mixer.name",
    "inner.lr", "inner.scale", "task.name", "diffusion.process", "diffusion.steps", "diffusion.betas",
    "diffusion.learn_sigma", "diffusion.latent_scale", "optim.opt", "optim.decay_inner", "optim.layer_decay",
    "engine.seed",
)  # fmt: skip
_ANY_TIME = ("resume", "name", "output", "print_groups")  # say nothing about how a run goes on


def check_resumable(
    state: dict[str, Any],
    config: dict[str, Any],
    classes: tuple[str, ...],
    run: Path | None = None,
    *,
    same: tuple[str, ...] = _SAME_RUN,
    root: str = "data.root",
) -> None:
    """Make sure that a checkpoint belongs to the run that ``config`` (the whole configuration) describes.

    Args:
        run: its folder. A run that was stopped after its last checkpoint goes on, to write what is not there.
        same: keys whose values must be equal. root: the key that says where the data is.

    Raises:
        UserError: another model, mixer, inner step, task, optimiser, seed or data; or nothing is left to train.
    """
    what = f"resume={config['resume']}"
    if "optimizer" not in state:
        raise UserError(
            f"{what} holds weights alone; resume the run folder, or start from it by model.checkpoint=FILE "
            "(classifiers) or model.pretrained=FILE (detectors)"
        )
    for key in same:
        here, there = (_value(c, key) for c in (config, state["config"]))
        if here != there:
            raise UserError(f"{what}: {key} is {here} here and {there} in the run; give the run's own value")
    scaled = [cfg["engine"]["amp"] == "float16" for cfg in (config, state["config"])]
    if scaled[0] != scaled[1]:
        raise UserError(f"{what}: engine.amp={config['engine']['amp']} here and {state['config']['engine']['amp']} "
                        "in the run; float16 has a loss scale, so it cannot begin or end within a run")  # fmt: skip
    if list(classes) != state["classes"]:
        raise UserError(f"{what}: {root}={_value(config, root)} has other classes than the run was trained on")
    left = state["epoch"] < config["engine"]["epochs"]
    if not left and (run is None or state["epoch"] > config["engine"]["epochs"] or _complete(run, state["epoch"])):
        raise UserError(f"{what}: {state['epoch']} epochs are done already; set engine.epochs higher to go on")


def _complete(run: Path, epochs: int) -> bool:
    """Whether a run folder holds all that is written at the end."""
    try:
        last = json.loads((run / "summary.json").read_text())["last"]["epoch"]
    except (OSError, KeyError, TypeError, ValueError):
        return False
    drawn = ("predictions.png", "samples.png")  # at the end, of a classifier or of a generator
    return last == epochs - 1 and any((run / name).exists() for name in drawn)


def changed_keys(state: dict[str, Any], config: dict[str, Any]) -> list[str]:
    """``key: there -> here`` for everything that differs from the configuration in a checkpoint."""
    here, there = (_flat(c) for c in (config, state["config"]))
    keys = [key for key in sorted(here.keys() | there.keys()) if here.get(key) != there.get(key)]
    return [f"{key}: {there.get(key)} -> {here.get(key)}" for key in keys if key.split(".")[0] not in _ANY_TIME]


def _value(config: dict[str, Any], key: str) -> Any:
    """The value of a dotted key; None where there is none."""
    for name in key.split("."):
        config = (config or {}).get(name)
    return config


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat
