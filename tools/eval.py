"""Evaluate a checkpoint on the data it was trained for: ``python tools/eval.py checkpoint=runs/NAME``."""

from __future__ import annotations

import logging
import os
from functools import partial
from pathlib import Path

from omegaconf import DictConfig

from vit3.analysis.plots import plot_predictions
from vit3.build import build_eval_loader, build_trained
from vit3.cli import run_tool, stored_config
from vit3.config import EvalConfig, typed
from vit3.engine.distributed import start_processes
from vit3.engine.evaluate import evaluate
from vit3.engine.predict import predict_sample
from vit3.errors import UserError

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
logger = logging.getLogger("vit3.eval")


def run_eval(cfg: DictConfig) -> None:
    """Score one checkpoint and print loss, top-1 and top-5."""
    options: EvalConfig = typed(cfg, EvalConfig)
    processes = start_processes(options.device)
    if not processes.main:
        logging.getLogger().setLevel(logging.WARNING)
    if options.predictions and not os.access(Path(options.predictions).parent, os.W_OK):
        raise UserError(
            f"predictions={options.predictions}: its folder is missing or not writable; choose another file"
        )
    trained = build_trained(options, partial(stored_config, configs=CONFIGS), processes)
    run_cfg, model, images = trained.cfg, trained.model, trained.images
    loader = build_eval_loader(run_cfg, images, processes, trained.batch)
    scores = evaluate(model, loader, processes, amp=run_cfg.engine.amp, channels_last=run_cfg.engine.channels_last)
    logger.info(
        f"{trained.title}: top-1 {scores['top1']:.2f} %, top-5 {scores['top5']:.2f} %, loss {scores['loss']:.6f}"
    )
    if bad := getattr(images, "bad_images", None):
        if bad.value:
            logger.warning("%d images could not be decoded and are not in these scores", bad.value)
    if options.predictions and processes.main:
        sheet = predict_sample(
            model, loader, processes, count=64, mean=run_cfg.data.mean, std=run_cfg.data.std, amp=run_cfg.engine.amp
        )
        plot_predictions(*sheet, images.classes, Path(options.predictions), f"{trained.path}: errors first")


def main() -> None:
    run_tool(run_eval, config_name="eval", schema=EvalConfig, configs=CONFIGS)


if __name__ == "__main__":
    main()
