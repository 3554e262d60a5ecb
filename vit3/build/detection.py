"""The commands of ``tools/det.py`` for torchvision's detectors: train, test, predict, flops."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import time
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from timm.utils import unwrap_model
from torch import nn

from vit3.analysis.dense_plots import plot_detections, plot_scores
from vit3.build.data import derive
from vit3.build.detector import (
    SCORE,
    build_batches,
    build_detection_trainer,
    build_detector,
    build_images,
    build_val_loader,
)
from vit3.build.trained import chosen_weights, saved_when
from vit3.build.training import build_tracker
from vit3.data.coco import CocoImages
from vit3.data.image_files import image_files, readable
from vit3.detection.config import SAME_MODEL, SAME_RUN, DetectionConfig, checked, compose
from vit3.detection.evaluate import coco_results, evaluate_detections
from vit3.detection.flops import BOXES, MASKS, count_parts
from vit3.detection.predict import detect, instances
from vit3.doctor.check import heed
from vit3.doctor.coco import check_coco
from vit3.engine.checkpoint import (
    best_checkpoint,
    check_resumable,
    checkpoint_to_resume,
    load_checkpoint,
    run_of,
)
from vit3.engine.distributed import Processes, start_processes
from vit3.engine.resuming import announce_resume, open_run
from vit3.engine.run_folder import RunFolder
from vit3.errors import UserError
from vit3.seeding import Purpose, seed_everything

logger = logging.getLogger("vit3.det")

_SHEET = 12  # images of one picture
_COCO_CLASSES = 80  # of flops, where there is no data
_DRAW_S = 30
_CURVES = {
    "val/bbox_AP": "box AP", "val/bbox_AP50": "box AP50", "val/segm_AP": "mask AP", "val/segm_AP50": "mask AP50",
    "val_ema/bbox_AP": "box AP, EMA", "val_ema/segm_AP": "mask AP, EMA",
}  # fmt: skip


def train(config: Path, arguments: list[str]) -> None:
    """Train a detector and leave everything in a run folder; ``resume=auto name=NAME`` goes on."""
    composed = compose(config, arguments)
    cfg = checked(composed)
    processes = _start(cfg)
    place = processes.on_main(lambda: checkpoint_to_resume(cfg.resume, cfg.output, cfg.name))
    state = load_checkpoint(place) if place else None
    train_set = build_images(cfg, "train")
    val_set = build_images(cfg, "val", train_set.classes)
    if state is not None:
        run_path = run_of(Path(place))
        check_resumable(state, dataclasses.asdict(cfg), train_set.classes, run_path, same=SAME_RUN, root="data_root")
    seed_everything(cfg.seed, Purpose.START)  # the same start in every process
    model = build_detector(cfg, len(train_set.classes), pretrained=state is None)
    plan = build_batches(cfg, len(train_set), processes.world_size)
    facts = dataclasses.asdict(derive(cfg, plan)) | {
        "parameters": sum(p.numel() for p in model.parameters()),
        "train_images": len(train_set),
        "val_images": len(val_set),
        "classes": len(train_set.classes),
    }
    trainer = build_detection_trainer(cfg, train_set, val_set, model, plan, facts, processes)
    processes.on_main(lambda: _check_data([train_set, val_set]))
    default = f"{cfg.model.name}-{cfg.model.backbone}"
    command = ["train", str(config), *arguments]
    run = processes.on_main(lambda: open_run(cfg, default, OmegaConf.to_yaml(composed), command, place))
    _announce(cfg, run, facts, processes)
    if state is not None:
        trainer.resume(state)
        announce_resume(place, state, trainer.metadata["config"], len(train_set), processes)
        del state  # as large as model and optimiser together
    summary = trainer.fit(run, build_tracker(cfg, run, processes), after_epoch=_Curves(run))
    if processes.main:
        _finish(cfg, run, trainer, val_set, summary, processes)


def test(config: Path, arguments: list[str]) -> None:
    """Print the average precision of ``checkpoint=FILE_OR_RUN_FOLDER`` on the validation images."""
    cfg = checked(compose(config, arguments))
    processes = _start(cfg)
    model, state, title = _trained(cfg, processes)
    val = build_images(cfg, "val", state["classes"])
    processes.on_main(lambda: _check_data([val]))
    loader = build_val_loader(cfg, val, processes)
    scores = evaluate_detections(model, loader, processes, amp=cfg.engine.amp, title="test")
    shown = ", ".join(f"{name} {value:.6f}" for name, value in scores.items())
    logger.info(f"{title}, {len(val):,} images: {shown}")


def predict(config: Path, arguments: list[str]) -> None:
    """Detect on ``images=FILE_OR_FOLDER``: sheets of pictures, and ``detections.json`` in COCO's result format."""
    cfg = checked(compose(config, arguments))
    files = image_files(cfg.images)
    processes = _start(cfg)
    if not processes.main:
        return
    model, state, title = _trained(cfg, processes)
    given = any(argument.startswith("name=") for argument in arguments)  # a run's own config has the run's name
    folder = RunFolder.create(cfg.output, cfg.name if given else None, f"predictions-{cfg.name or config.stem}").path
    try:
        count = _write_predictions(cfg, model, state, files, folder, title, processes)
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error}); choose another output=FOLDER") from error
    logger.info(f"{title}: {count:,} images, detections.json and sheets in {folder}")


def flops(config: Path, arguments: list[str]) -> None:
    """Print parameters and multiply-adds at ``size=[height,width]``, for COCO's 80 classes."""
    cfg = checked(compose(config, arguments))
    model = build_detector(cfg, _COCO_CLASSES, pretrained=False)
    parts = count_parts(model, tuple(cfg.size))
    print(f"{cfg.model.name} on {cfg.model.backbone}, {_COCO_CLASSES} classes")
    print(f"parameters {sum(p.numel() for p in model.parameters()):,}")
    for name, count in {**parts, "all": sum(parts.values())}.items():
        print(f"{name:30s} {count / 1e9:10.3f} G multiply-adds")
    print(f"at {cfg.size[0]}x{cfg.size[1]} (height x width), {BOXES} boxes and {MASKS} masks")


class _Curves:
    """Draws the curves of a run after an epoch, at most every half minute: small epochs are shorter than drawing."""

    def __init__(self, run: RunFolder):
        self.run, self.drawn = run, -math.inf

    def __call__(self) -> None:
        if time.monotonic() - self.drawn > _DRAW_S:
            _draw_curves(self.run)
            self.drawn = time.monotonic()


def _draw_curves(run: RunFolder) -> None:
    plot_scores(run / "metrics.jsonl", run / "curves.png", run.path.name, _CURVES)


def _start(cfg: DetectionConfig) -> Processes:
    processes = start_processes(cfg.device)
    if not processes.main:
        logging.getLogger().setLevel(logging.WARNING)
    if cfg.engine.threads:
        torch.set_num_threads(cfg.engine.threads)
    return processes


def _check_data(sets: list[CocoImages]) -> None:
    """Stop what would fail later, and warn of what would go badly."""
    heed([c for data in sets for c in check_coco(data.annotations, data.images, None, masks=data.masks)])


def _announce(cfg: DetectionConfig, run: RunFolder, facts: dict[str, Any], processes: Processes) -> None:
    """Say what is going to happen, with every derived number."""
    ema = "off" if facts["ema_decay"] is None else f"{facts['ema_decay']:.6f} per update"
    for line in (
        f"run folder   {run.path}",
        f"model        {cfg.model.name} on {cfg.model.backbone}: {facts['parameters']:,} parameters",
        f"data         {cfg.data_root}: {facts['train_images']:,} training and {facts['val_images']:,} validation "
        f"images, {facts['classes']} classes",
        f"batch        {facts['global_batch']} = {facts['world_size']} processes x {facts['accumulation']} forward "
        f"passes x {facts['batch_per_process']}; {facts['updates_per_epoch']} updates an epoch, "
        f"{facts['updates']:,} in all",
        f"learning     peak {facts['lr']:.4g}, warm-up from {facts['warmup_lr']:.4g}; EMA {ema}",
        f"device       {processes.device}, precision {cfg.engine.amp or 'float32'}, "
        f"{torch.get_num_threads()} CPU threads",
    ):
        logger.info(line)


def _finish(cfg: DetectionConfig, run: RunFolder, trainer, val: CocoImages, summary: dict, processes) -> None:
    """Draw the last curves and a sheet of validation images, and say where everything is."""
    best = summary["best"]
    ema = best is not None and best["weights"] == "ema" and trainer.task.has_ema()
    model = unwrap_model(trainer.task.get_eval_model(ema=ema))
    shown = range(min(_SHEET, len(val)))
    images = [val.pixels(index) for index in shown]
    found = [instances(output) for output in detect(model, images, processes.device, cfg.engine.amp)]
    truth = [instances(val.target(index)) for index in shown]
    title = f"{run.path.name}: {'ema' if ema else 'raw'} weights of the last epoch"
    try:
        _draw_curves(run)
        plot_detections(images, found, val.classes, run / "predictions.png", title, truth, cfg.threshold)
    except OSError as error:  # the run is whole without them
        logger.warning("pictures are lost (%s)", error)
    if best is None:  # the files were taken away after the last epoch
        return
    logger.info(
        f"best {SCORE.title} {SCORE.text(best[SCORE.name]).strip()} ({best['weights']} weights, epoch "
        f"{best['epoch'] + 1}), {summary['seconds']:.0f} s\n"
        f"weights      {best_checkpoint(run.path)}\n"
        f"pictures     {run / 'curves.png'}, {run / 'predictions.png'}\n"
        f"evaluate     python tools/det.py test {run / 'config.yaml'} checkpoint={run.path}"
    )


def _trained(cfg: DetectionConfig, processes: Processes) -> tuple[nn.Module, dict[str, Any], str]:
    """A trained detector on the device, its checkpoint, and what was loaded, in words.

    Raises:
        UserError: no checkpoint, or one of another model.
    """
    if cfg.checkpoint is None:
        raise UserError("checkpoint has no value yet; give checkpoint=RUN_FOLDER or a checkpoint file")
    path = Path(cfg.checkpoint)
    path = best_checkpoint(path) if path.is_dir() else path
    state = load_checkpoint(path)
    stored = state["config"].get("model", {})
    for key in SAME_MODEL:
        name = key.removeprefix("model.")
        here, there = getattr(cfg.model, name), stored.get(name)
        if here != there:
            raise UserError(f"checkpoint={cfg.checkpoint}: {key} is {here} here and {there} in it; give its own value")
    kind = chosen_weights(state, "auto", path, SCORE.name)
    model = build_detector(cfg, len(state["classes"]), pretrained=False)
    model.load_state_dict(state["state_dict_ema" if kind == "ema" else "state_dict"])
    title = f"{path}: {kind} weights of {saved_when(state)}"
    return model.to(processes.device), state, title


def _write_predictions(cfg, model, state, files, folder: Path, title: str, processes: Processes) -> int:
    """Sheets and ``detections.json``; returns how many of the files could be decoded."""
    classes, ids = state["classes"], state["category_ids"]
    results, count = [], 0
    for first in range(0, len(files), _SHEET):
        part = list(readable(files[first : first + _SHEET]))
        if not part:
            continue
        count += len(part)
        images = [pixels for _, pixels in part]
        outputs = list(detect(model, images, processes.device, cfg.engine.amp))
        for number, ((file, _), output) in enumerate(zip(part, outputs), first):
            for result in coco_results(number, output, ids):
                names = {"file_name": str(file), "category": classes[ids.index(result["category_id"])]}
                results.append({**result, **names})
        sheet = folder / f"sheet-{first // _SHEET:03d}.png"
        plot_detections(images, list(map(instances, outputs)), classes, sheet, title, None, cfg.threshold)
    if not count:
        raise UserError(f"images={cfg.images}: none of the {len(files):,} files can be decoded; give others")
    (folder / "detections.json").write_text(json.dumps(results))
    return count
