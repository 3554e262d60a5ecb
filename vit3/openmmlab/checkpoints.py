"""Where a run keeps its checkpoints, how it saves at any moment, and which file a command means."""

from __future__ import annotations

import logging
import zipfile
from pathlib import Path

from mmengine.config import Config
from mmengine.hooks import CheckpointHook, EMAHook
from mmengine.registry import HOOKS
from mmengine.runner import Runner

from vit3.errors import UserError
from vit3.openmmlab.datasets import dicts_of

logger = logging.getLogger(__name__)

FOLDER = "checkpoints"
_LAST = "last_checkpoint"  # MMEngine's note of the newest whole file


@HOOKS.register_module()
class RunCheckpoints(CheckpointHook):
    """MMEngine's checkpoints in the run folder's ``checkpoints/``, and one at any moment by :meth:`save_now`."""

    def before_train(self, runner: Runner) -> None:
        super().before_train(runner)
        self.out_dir = str(Path(runner.work_dir) / FOLDER)
        if self.save_best is not None and self.best_ckpt_path:  # the run folder may have been moved meanwhile
            self.best_ckpt_path = str(Path(self.out_dir) / Path(self.best_ckpt_path).name)

    def save_now(self, runner: Runner, *, within_update: bool) -> Path:
        """Save everything between two updates; every process calls it.

        Args:
            within_update: True from ``after_train_iter``, where the update is done but not counted yet.

        Returns:
            The file.
        """
        if not within_update:  # an evaluation is cut off, which has the average in the place of the weights
            for hook in runner.hooks:
                if isinstance(hook, EMAHook):
                    hook.after_val_epoch(runner)
        updates = runner.iter + within_update
        step = f"{runner.epoch}_update_{updates}" if self.by_epoch else updates
        path = Path(self.out_dir) / self.filename_tmpl.format(step)
        if self.last_ckpt != str(path):
            self._save_checkpoint_with_step(runner, step, meta=dict(epoch=runner.epoch, iter=updates))
        return path


def keep_checkpoints(config: Config) -> str | None:
    """Set up :class:`RunCheckpoints` in a config: the last two and the best.

    Returns:
        MMEngine's name of the score that decides, None where the evaluators have none that is known here.
    """
    hooks = config.setdefault("default_hooks", {})
    settings = dict(hooks.get("checkpoint") or {})
    score = score_of(config)
    settings.setdefault("by_epoch", config.train_cfg.get("type") != "IterBasedTrainLoop")
    settings.setdefault("max_keep_ckpts", 2)
    if settings["max_keep_ckpts"] == -1:
        settings["max_keep_ckpts"] = 2
    if score and config.get("val_cfg"):
        if settings.get("save_best") in (None, "auto"):
            settings |= dict(save_best=score, rule="greater")
        score = settings["save_best"]
    settings.pop("out_dir", None)
    hooks.checkpoint = settings | dict(type="RunCheckpoints", save_last=True)
    return score


def score_of(config: Config) -> str | None:
    """MMEngine's name of the score that decides which checkpoint is the best; higher is better."""
    for node in dicts_of(config.get("val_evaluator")):
        kind = str(node.get("type", "")).rpartition(".")[2]
        if kind == "CocoMetric":
            metric = node.get("metric", "bbox")
            return f"coco/{metric if isinstance(metric, str) else metric[0]}_mAP"
        if kind in ("IoUMetric", "PresentIoUMetric"):
            return "mIoU"
    return None


def last_checkpoint(run: Path) -> Path | None:
    """The newest whole checkpoint of a run folder, None where there never was one; damaged ones are named.

    Raises:
        UserError: there are only damaged ones.
    """
    note, folder = run / _LAST, run / FOLDER
    files = [file for file in folder.glob("*.pth") if not file.name.startswith("best_")]
    files.sort(key=lambda file: file.stat().st_mtime, reverse=True)
    if note.is_file():
        noted = folder / Path(note.read_text().strip()).name
        files.sort(key=lambda file: file != noted)  # first
    for file in files:
        if _whole(file):
            return file
        logger.warning("skipped: %s is damaged", file)
    if files and note.is_file():
        raise UserError(f"{run} holds no whole checkpoint in {FOLDER}/; take the folder away to start anew")
    return None


def _whole(file: Path) -> bool:
    try:
        with zipfile.ZipFile(file) as archive:
            return archive.testzip() is None
    except Exception:  # damaged bytes make zipfile raise almost anything
        return False


def checkpoint_to_resume(resume: str | None, output: str, name: str | None) -> Path | None:
    """The checkpoint file to go on from; None starts from the beginning.

    Args:
        resume: None, a run folder, a file, or ``auto``: what OUTPUT/NAME holds, nothing where that is new.

    Raises:
        UserError: nothing to go on from at an explicit path, a file outside of run folders, or ``auto`` without a name.
    """
    if resume is None:
        return None
    if resume == "auto":
        if name is None:
            raise UserError("resume=auto needs name=NAME, the run folder below output to continue or to start")
        return last_checkpoint(Path(output) / name)
    path = Path(resume)
    if path.is_file() and path.resolve().parent.name != FOLDER:
        raise UserError(
            f"resume={resume} lies in no {FOLDER}/ of a run folder, so there is none to go on in; "
            f"load_from={resume} starts a new run from its weights"
        )
    found = last_checkpoint(path) if path.is_dir() else path.resolve() if path.is_file() else None
    if found is None:
        raise UserError(f"resume={resume}: no such checkpoint, and no run folder that has one; name=NAME starts one")
    return found


def checkpoint_to_use(checkpoint: str | None) -> Path:
    """The file to test or predict with: itself, or of a run folder the best, or else the last.

    Raises:
        UserError: nothing is there.
    """
    if checkpoint is None:
        raise UserError("checkpoint has no value yet; set it on the command line: checkpoint=RUN_FOLDER or a file")
    path = Path(checkpoint)
    if path.is_dir():
        best = sorted((path / FOLDER).glob("best_*.pth"), key=lambda file: file.stat().st_mtime)
        found = best[-1] if best else last_checkpoint(path)
        if found is None:
            raise UserError(f"checkpoint={checkpoint} holds no checkpoint in {FOLDER}/; give another folder, or a file")
        return found
    if not path.is_file():
        raise UserError(f"checkpoint={checkpoint}: no such file or run folder")
    return path
