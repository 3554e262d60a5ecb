"""Train a network: ``python tools/train.py [group=choice ...] [key=value ...]``; keys stand in configs/train.yaml."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import shutil
import sys
import time
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table
from timm.utils import unwrap_model

from vit3.analysis.flops import count_macs
from vit3.analysis.generation_plots import plot_losses
from vit3.analysis.plots import plot_curves, plot_predictions
from vit3.build import (
    build_data,
    build_model,
    build_network,
    build_plan,
    build_sheets,
    build_tracker,
    build_trainer,
    derive,
)
from vit3.build.generator import CACHED
from vit3.cli import overrides, run_tool
from vit3.config import TrainConfig, typed
from vit3.doctor import before_first_step
from vit3.engine.checkpoint import (
    FOLDER,
    best_checkpoint,
    check_resumable,
    checkpoint_to_resume,
    load_checkpoint,
    run_of,
)
from vit3.engine.distributed import Processes, start_processes
from vit3.engine.groups import parameter_rows
from vit3.engine.predict import predict_sample
from vit3.engine.resuming import announce_resume, open_run
from vit3.engine.run_folder import RunFolder
from vit3.engine.sharding import is_sharded, whole
from vit3.engine.train import Trainer
from vit3.generation.during import SampleSheets
from vit3.seeding import Purpose, seed_everything

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
logger = logging.getLogger("vit3.train")
_DRAW_S = 30


def train(cfg: DictConfig) -> None:
    """One run from a composed configuration."""
    composed = OmegaConf.to_yaml(cfg)
    run_cfg: TrainConfig = typed(cfg, TrainConfig)
    processes = start_processes(run_cfg.engine.device)
    if not processes.main:
        logging.getLogger().setLevel(logging.WARNING)
    if run_cfg.engine.threads:
        torch.set_num_threads(run_cfg.engine.threads)
    place = processes.on_main(lambda: checkpoint_to_resume(run_cfg.resume, run_cfg.output, run_cfg.name))
    state = load_checkpoint(place) if place else None

    data = build_data(run_cfg)
    if state is not None:
        check_resumable(state, dataclasses.asdict(run_cfg), data.classes, run_of(Path(place)))
    seed_everything(run_cfg.engine.seed, Purpose.START)  # the same start in every process
    model, codec = build_network(run_cfg, data.classes, processes.device)
    plan = build_plan(run_cfg, len(data.train), processes.world_size, model)
    facts = dataclasses.asdict(derive(run_cfg, plan)) | {
        "parameters": sum(p.numel() for p in model.parameters()),
        "multiply_adds": count_macs(model, run_cfg.data.img_size if codec is None else model.img_size),
        "train_images": len(data.train),
        "val_images": len(data.val),
    }
    trainer = build_trainer(run_cfg, data, model, plan, facts, processes, codec)
    if run_cfg.print_groups:
        if processes.main:
            print_groups(model, trainer.updater.optimizer)
        return
    before_first_step(run_cfg, model, facts, processes, place)
    default = f"{run_cfg.model.name}-{run_cfg.mixer.name}-{run_cfg.data.name}"
    run = processes.on_main(lambda: open_run(run_cfg, default, composed, overrides(), place))
    announce(run_cfg, run, facts, processes)
    if state is not None:
        trainer.resume(state)
        announce_resume(place, state, trainer.metadata["config"], len(data.train), processes)
        del state  # as large as model and optimiser together
    generator = codec is not None
    pictures = Pictures(run, trainer, build_sheets(run_cfg, trainer, data.classes, run.path) if generator else None)
    summary = trainer.fit(
        run,
        build_tracker(run_cfg, run, processes),
        after_epoch=pictures,
    )
    if not generator:
        finish(run_cfg, run, trainer, data, summary, processes)
    elif processes.main:
        finish_generator(run, pictures, trainer, summary)


class Pictures:
    """Draws the sheet of a generator's samples after an epoch, and the curves of a run at most every half minute:

    small epochs are shorter than drawing.
    """

    def __init__(self, run: RunFolder, trainer: Trainer, sheets: SampleSheets | None):
        self.run, self.trainer, self.sheets, self.drawn = run, trainer, sheets, -math.inf

    def __call__(self) -> None:
        if self.sheets is not None:
            self.sheets(self.trainer.place.epoch)
        if time.monotonic() - self.drawn > _DRAW_S:
            draw_curves(self.run)
            self.drawn = time.monotonic()


def draw_curves(run: RunFolder) -> None:
    """Curves over all epochs so far: of a generator its losses, of a classifier also its accuracy."""
    with open(run / "metrics.jsonl") as lines:
        classifies = "val/top1" in json.loads(lines.readline())
    draw = plot_curves if classifies else plot_losses
    draw(run / "metrics.jsonl", run / "curves.png", run.path.name)


def announce(cfg: TrainConfig, run: RunFolder, facts: dict, processes: Processes) -> None:
    """Say what is going to happen, with every derived number."""
    ema = "off" if facts["ema_decay"] is None else f"{facts['ema_decay']:.6f} per update"
    task = "" if cfg.task.name != "mesa" else (
        f"; {cfg.task.name}, weight {cfg.task.weight:g}, from epoch {math.ceil(cfg.task.start * cfg.engine.epochs) + 1}"
    )  # fmt: skip
    for line in (
        f"run folder   {run.path}",
        f"model        {cfg.model.name}, mixer {cfg.mixer.name}: {facts['parameters']:,} parameters, "
        f"{facts['multiply_adds'] / 1e9:.4g} G multiply-adds at {cfg.data.img_size[0]}x{cfg.data.img_size[1]}",
        f"data         {cfg.data.name}: {facts['train_images']:,} training and {facts['val_images']:,} test images",
        f"batch        {facts['global_batch']} = {facts['world_size']} processes x {facts['accumulation']} forward "
        f"passes x {facts['batch_per_process']}; {facts['updates_per_epoch']} updates an epoch, "
        f"{facts['updates']:,} in all",
        *([] if cfg.diffusion is None else [describe_diffusion(cfg)]),
        f"learning     peak {facts['lr']:.4g}, warm-up from {facts['warmup_lr']:.4g}, down to {facts['min_lr']:.4g}; "
        f"EMA {ema}{task}",
        f"device       {processes.device}, precision {cfg.engine.amp or 'float32'}, "
        f"{torch.get_num_threads()} CPU threads",
    ):
        logger.info(line)
    if processes.main and cfg.engine.recipe_batch not in (None, facts["global_batch"]):
        logger.warning(
            "engine.batch_size=%d is not the recipe's %d: learning rates and EMA decay are scaled with it, but the "
            "recipe's score was reached with %d; engine.max_per_process=N keeps it on fewer or smaller devices",
            facts["global_batch"], cfg.engine.recipe_batch, cfg.engine.recipe_batch,
        )  # fmt: skip


def describe_diffusion(cfg: TrainConfig) -> str:
    """The line on what a generator learns."""
    d = cfg.diffusion
    of = f"{d.steps} steps, {d.betas} schedule" if d.process == "ddpm" else f"{d.time_sampling} times"
    cached = cfg.data.name == CACHED
    place = f"latents of {d.autoencoder}" if d.autoencoder else "cached latents" if cached else "pixels"
    return (
        f"diffusion    {d.process}, {of}, {'learned' if d.learn_sigma else 'fixed'} variance, in {place}; "
        f"{d.label_drop:.0%} of the labels dropped"
    )


def print_groups(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """List every parameter once."""
    table = Table("parameter", "shape", "weight decay", "learning rate x", box=None)
    for row in parameter_rows(model, optimizer):
        decay, factor = ("frozen", "") if row.frozen else (f"{row.weight_decay:g}", f"{row.lr_factor:.6g}")
        table.add_row(row.name, "x".join(map(str, row.shape)), decay, factor)
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def finish(cfg: TrainConfig, run: RunFolder, trainer: Trainer, data, summary: dict, processes: Processes) -> None:
    """Draw the sheet of test images and say where everything is."""
    best = summary["best"]
    ema = best is not None and best["weights"] == "ema" and trainer.task.has_ema()
    model = plain_model(trainer.task.get_eval_model(ema=ema), cfg, data.classes, processes)
    if not processes.main:
        return
    sheet = predict_sample(
        model,
        trainer.val_loader,
        processes,
        count=64,
        mean=cfg.data.mean,
        std=cfg.data.std,
        amp=cfg.engine.amp,
    )
    title = f"{run.path.name}: {'ema' if ema else 'raw'} weights of the last epoch, errors first"
    try:
        draw_curves(run)
        plot_predictions(*sheet, data.classes, run / "predictions.png", title)
    except OSError as error:  # the run is whole without them
        logger.warning("pictures are lost (%s)", error)
    if best is None:  # the files were taken away after the last epoch
        return
    logger.info(
        f"best top-1 {best['top1']:.2f} % ({best['weights']} weights, epoch {best['epoch'] + 1}), "
        f"{summary['seconds']:.0f} s\n"
        f"weights      {best_checkpoint(run.path)}\n"
        f"pictures     {run / 'curves.png'}, {run / 'predictions.png'}\n"
        f"evaluate     python tools/eval.py checkpoint={run.path}"
    )


def finish_generator(run: RunFolder, pictures: Pictures, trainer: Trainer, summary: dict) -> None:
    """Draw the last sheet of samples and say where everything is."""
    try:
        draw_curves(run)
        if pictures.sheets is not None:
            shutil.copy(pictures.sheets(trainer.place.epoch, last=True), run / "samples.png")
    except OSError as error:  # the run is whole without them
        logger.warning("pictures are lost (%s)", error)
    last = {name: value for name, value in summary["last"].items() if name.startswith("val")}
    logger.info(
        f"{', '.join(f'{name} {value:.5f}' for name, value in last.items())}, {summary['seconds']:.0f} s\n"
        f"weights      {run / FOLDER}\n"
        f"pictures     {run / 'curves.png'}{', samples.png' if pictures.sheets else ''}\n"
        f"sample       python tools/sample.py checkpoint={run.path} n=500"
        f"{'' if pictures.sheets else ' autoencoder=FOLDER_OR_NAME'}"
    )


def plain_model(model, cfg: TrainConfig, classes: tuple[str, ...], processes: Processes):
    """``model``, or where it is sharded a plain one with its weights, which one process alone can run."""
    if not is_sharded(model):
        return model
    tensors = whole(unwrap_model(model).state_dict())
    cfg.model.pretrained, cfg.model.checkpoint = False, None
    plain = build_model(cfg, classes).to(processes.device)
    plain.load_state_dict(tensors)
    return plain


def main() -> None:
    run_tool(train, config_name="train", schema=TrainConfig, configs=CONFIGS, cells=True)


if __name__ == "__main__":
    main()
