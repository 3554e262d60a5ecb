"""Evaluate a checkpoint on the data it was trained for: ``python tools/eval.py checkpoint=runs/NAME``."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from omegaconf import DictConfig

from vit3.analysis.plots import plot_predictions
from vit3.build import build_eval_loader, build_model
from vit3.cli import run_tool, stored_config
from vit3.config import EvalConfig, TrainConfig, typed
from vit3.data import open_split
from vit3.engine.checkpoint import best_checkpoint, load_checkpoint
from vit3.engine.distributed import start_processes
from vit3.engine.evaluate import evaluate
from vit3.engine.predict import predict_sample
from vit3.errors import UserError

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
logger = logging.getLogger("vit3.eval")

_MAX_BATCH = 256  # per process, unless batch_size is given


def run_eval(cfg: DictConfig) -> None:
    """Score one checkpoint and print loss, top-1 and top-5."""
    options: EvalConfig = typed(cfg, EvalConfig)
    processes = start_processes(options.device)
    if not processes.main:
        logging.getLogger().setLevel(logging.WARNING)
    path = Path(options.checkpoint)
    path = best_checkpoint(path) if path.is_dir() else path
    state = load_checkpoint(path)
    run_cfg = training_config(state, options)
    d = run_cfg.data
    images = open_split(
        d.name,
        d.root,
        "val",
        d.in_chans,
        d.on_bad_image,
        key="data_root",
        classes=state["classes"],
        wanted=d.val_split,
        input_key=d.input_key,
        target_key=d.target_key,
        img_size=d.img_size,
    )
    if options.predictions and not os.access(Path(options.predictions).parent, os.W_OK):
        raise UserError(
            f"predictions={options.predictions}: its folder is missing or not writable; choose another file"
        )
    model = build_model(run_cfg, images.classes)
    weights = chosen_weights(state, options.weights, path)
    model.load_state_dict(state["state_dict_ema" if weights == "ema" else "state_dict"])
    model.to(processes.device)
    batch = options.batch_size or max(1, min(_MAX_BATCH, run_cfg.engine.batch_size // processes.world_size))
    loader = build_eval_loader(run_cfg, images, processes, batch)
    scores = evaluate(model, loader, processes, amp=run_cfg.engine.amp, channels_last=run_cfg.engine.channels_last)
    logger.info(
        f"{path}: {weights} weights of {describe(state)}, {len(images):,} images: "
        f"top-1 {scores['top1']:.2f} %, top-5 {scores['top5']:.2f} %, loss {scores['loss']:.6f}"
    )
    if bad := getattr(images, "bad_images", None):
        if bad.value:
            logger.warning("%d images could not be decoded and are not in these scores", bad.value)
    if options.predictions and processes.main:
        sheet = predict_sample(
            model, loader, processes, count=64, mean=run_cfg.data.mean, std=run_cfg.data.std, amp=run_cfg.engine.amp
        )
        plot_predictions(*sheet, images.classes, Path(options.predictions), f"{path}: test images, errors first")


def training_config(state: dict, options: EvalConfig) -> TrainConfig:
    """The configuration inside the checkpoint, with what this command changes of it."""
    cfg: TrainConfig = typed(stored_config(state["config"], CONFIGS), TrainConfig)
    cfg.model.pretrained, cfg.model.checkpoint = False, None  # the weights are in this checkpoint
    if options.data_root is not None:
        cfg.data.root = options.data_root
    if options.workers is not None:
        cfg.data.workers = options.workers
    return cfg


def describe(state: dict) -> str:
    """When the weights were saved: best ones at the end of an epoch, others anywhere."""
    if "optimizer" not in state or state["position"]:
        part = "" if "optimizer" not in state else f" after {state['position']:,} images"
        return f"epoch {state['epoch'] + 1}{part}"
    return f"epoch {state['epoch']}"


def chosen_weights(state: dict, wanted: str, path: Path) -> str:
    """``raw`` or ``ema``; ``auto`` is the kind that is there, or of both the one that gave the best score."""
    kinds = [kind for kind, key in (("raw", "state_dict"), ("ema", "state_dict_ema")) if key in state]
    if wanted != "auto":
        if wanted not in kinds:
            raise UserError(f"weights={wanted}, but {path} holds {' and '.join(kinds)} weights; use weights={kinds[0]}")
        return wanted
    known = [kind for kind in kinds if kind in state.get("best", {})]
    return max(known or kinds[:1], key=lambda kind: state["best"][kind]["top1"] if known else 0)


def main() -> None:
    run_tool(run_eval, config_name="eval", schema=EvalConfig, configs=CONFIGS)


if __name__ == "__main__":
    main()
