"""Train a network: ``python tools/train.py [group=choice ...] [key=value ...]``; keys stand in configs/train.yaml."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf

from vit3.analysis.flops import count_macs
from vit3.analysis.plots import plot_curves, plot_predictions
from vit3.build import build_data, build_model, build_tracker, build_trainer, derive
from vit3.cli import overrides, run_tool
from vit3.config import TrainConfig, typed
from vit3.engine.checkpoint import check_resumable, load_checkpoint
from vit3.engine.distributed import Processes, seed_everything, start_processes
from vit3.engine.predict import predict_sample
from vit3.engine.run_folder import RunFolder
from vit3.engine.train import Trainer

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
logger = logging.getLogger("vit3.train")


def train(cfg: DictConfig) -> None:
    """One run from a composed configuration."""
    composed = OmegaConf.to_yaml(cfg)
    run_cfg: TrainConfig = typed(cfg, TrainConfig)
    processes = start_processes(run_cfg.engine.device)
    if not processes.main:
        logging.getLogger().setLevel(logging.WARNING)
    if run_cfg.engine.threads:
        torch.set_num_threads(run_cfg.engine.threads)
    state = load_checkpoint(run_cfg.resume) if run_cfg.resume else None

    data = build_data(run_cfg, processes)
    if state is not None:
        check_resumable(state, dataclasses.asdict(run_cfg), data.classes)
    seed_everything(run_cfg.engine.seed, rank=0)  # the same start in every process
    model = build_model(run_cfg, len(data.classes))
    derived = derive(run_cfg, data, processes)
    facts = dataclasses.asdict(derived) | {
        "parameters": sum(p.numel() for p in model.parameters()),
        "multiply_adds": count_macs(model, run_cfg.data.img_size),
        "train_images": len(data.train),
        "val_images": len(data.val),
    }
    trainer = build_trainer(run_cfg, data, model, derived, facts, processes)
    if state is not None:
        trainer.resume(state)
    run = processes.on_main(lambda: open_run(run_cfg, composed))
    announce(run_cfg, run, facts, processes)
    summary = trainer.fit(
        run,
        build_tracker(run_cfg, run, processes),
        after_epoch=lambda: plot_curves(run / "metrics.jsonl", run / "curves.png", run.path.name),
    )
    if processes.main:
        finish(run_cfg, run, trainer, data, summary, processes)


def open_run(cfg: TrainConfig, composed: str) -> RunFolder:
    """The run folder: that of the run to resume, or a new one; the configuration is saved as composed."""
    if cfg.resume:
        path = Path(cfg.resume)
        run = RunFolder(path if path.is_dir() else path.parent)
    else:
        run = RunFolder.create(cfg.output, cfg.name, f"{cfg.model.name}-{cfg.mixer.name}-{cfg.data.name}")
    run.write_start(composed, overrides())
    return run


def announce(cfg: TrainConfig, run: RunFolder, facts: dict, processes: Processes) -> None:
    """Say what is going to happen, with every derived number."""
    ema = "off" if facts["ema_decay"] is None else f"{facts['ema_decay']:.6f} per update"
    for line in (
        f"run folder   {run.path}",
        f"model        {cfg.model.name}, mixer {cfg.mixer.name}: {facts['parameters']:,} parameters, "
        f"{facts['multiply_adds'] / 1e9:.4g} G multiply-adds at {cfg.data.img_size[0]}x{cfg.data.img_size[1]}",
        f"data         {cfg.data.name}: {facts['train_images']:,} training and {facts['val_images']:,} test images",
        f"batch        {facts['global_batch']} = {facts['world_size']} x {facts['batch_per_process']}; "
        f"{facts['updates_per_epoch']} updates an epoch, {facts['updates']:,} in all",
        f"learning     peak {facts['lr']:.4g}, warm-up from {facts['warmup_lr']:.4g}, down to {facts['min_lr']:.4g}; "
        f"EMA {ema}",
        f"device       {processes.device}, precision {cfg.engine.amp or 'float32'}, "
        f"{torch.get_num_threads()} CPU threads",
    ):
        logger.info(line)


def finish(cfg: TrainConfig, run: RunFolder, trainer: Trainer, data, summary: dict, processes: Processes) -> None:
    """Draw the sheet of test images and say where everything is."""
    best = summary["best"]
    sheet = predict_sample(
        trainer.task.get_eval_model(ema=best["weights"] == "ema"),
        trainer.val_loader,
        processes,
        count=64,
        mean=cfg.data.mean,
        std=cfg.data.std,
        amp=cfg.engine.amp,
    )
    title = f"{run.path.name}: {best['weights']} weights of the last epoch, errors first"
    plot_predictions(*sheet, data.classes, run / "predictions.png", title)
    logger.info(
        f"best top-1 {best['top1']:.2f} % ({best['weights']} weights, epoch {best['epoch'] + 1}), "
        f"{summary['seconds']:.0f} s\n"
        f"weights      {run / 'best.pt'}\n"
        f"pictures     {run / 'curves.png'}, {run / 'predictions.png'}\n"
        f"evaluate     python tools/eval.py checkpoint={run / 'best.pt'}"
    )


def main() -> None:
    run_tool(train, config_name="train", schema=TrainConfig, configs=CONFIGS)


if __name__ == "__main__":
    main()
