"""Look at this machine and at a training run before it starts: ``python tools/doctor.py [what tools/train.py takes]``.

One line a check: ok, warning or FAIL, what was found, and the cure. Exit status 1 if anything failed. Nothing is
written. Under ``torchrun`` the batch is dealt out to its processes.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import torch
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from vit3.build import build_data, build_network, build_plan, build_trainer, derive
from vit3.cli import run_tool
from vit3.config import TrainConfig, typed
from vit3.doctor import FAIL, OK, WARNING, Check, attempt
from vit3.doctor.before import run_checks
from vit3.doctor.machine import machine_checks
from vit3.engine.checkpoint import check_resumable, checkpoint_to_resume, load_checkpoint
from vit3.engine.distributed import start_processes

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
_COLOURS = {OK: "green", WARNING: "yellow", FAIL: "bold red"}


def examine(cfg: DictConfig) -> list[Check]:
    """All checks of the machine and of a composed configuration, in order; what failed hides only what needs it."""
    checks = list(machine_checks())

    def check(name: str, action, describe):
        found, result = attempt(name, action, describe)
        checks.append(found)
        return result

    run_cfg = check("configuration", lambda: typed(cfg, TrainConfig), lambda c: f"{c.model.name} on {c.data.name}")
    if run_cfg is None:
        return checks
    processes = check("device", lambda: start_processes(run_cfg.engine.device), lambda p: f"{p.device}")
    if run_cfg.engine.threads:
        torch.set_num_threads(run_cfg.engine.threads)
    data = check("data", lambda: build_data(run_cfg), describe_data)
    places = check("resume", lambda: find_checkpoint(run_cfg), lambda p: "a new run" if p[0] is None else f"{p[0]}")
    built = None
    if data is not None and processes is not None:
        built = check(
            "model", lambda: build_network(run_cfg, data.classes, processes.device),
            lambda b: f"{run_cfg.model.name}: {sum(p.numel() for p in b[0].parameters()):,} parameters",
        )  # fmt: skip
    if built is None:
        return checks
    model, codec = built
    plan = check(
        "batch", lambda: build_plan(run_cfg, len(data.train), processes.world_size, model),
        lambda plan: describe_batch(run_cfg, derive(run_cfg, plan)),
    )  # fmt: skip
    if plan is None:
        return checks
    if run_cfg.engine.recipe_batch not in (None, plan.batch):
        checks[-1] = dataclasses.replace(
            checks[-1], status=WARNING, detail=f"{checks[-1].detail}; the recipe's is {run_cfg.engine.recipe_batch}",
            cure=f"set engine.batch_size={run_cfg.engine.recipe_batch}, and engine.max_per_process for small devices",
        )  # fmt: skip
    facts = dataclasses.asdict(derive(run_cfg, plan))
    resumed = None
    if places is not None and places[0] is not None:
        resumed = places[0]
        describe = lambda _: f"goes on in epoch {places[1]['epoch'] + 1}"  # noqa: E731
        check("go on", lambda: check_resumable(places[1], dataclasses.asdict(run_cfg), data.classes), describe)
    # before the trainer, which wraps and moves the model
    where = dict(device=processes.device, world_size=processes.world_size, resumed=resumed)
    about_run = run_checks(run_cfg, model, facts, **where)
    check("learning", lambda: build_trainer(run_cfg, data, model, plan, facts, processes, codec), lambda _: (
        f"task {run_cfg.task.name}, optimiser {run_cfg.optim.opt}, schedule {run_cfg.optim.sched}, transforms"
    ))  # fmt: skip
    return checks + about_run


def find_checkpoint(cfg: TrainConfig) -> tuple[str | None, dict | None]:
    """The checkpoint to go on from and its content."""
    place = checkpoint_to_resume(cfg.resume, cfg.output, cfg.name)
    return place, load_checkpoint(place) if place else None


def describe_data(data) -> str:
    """Counts of both splits; a test split with classes of its own could not have been opened."""
    counts = [f"{len(split):,}" if hasattr(split, "__len__") else "streamed" for split in (data.train, data.val)]
    return f"{counts[0]} training and {counts[1]} test images, {len(data.classes)} classes, labels by their names"


def describe_batch(cfg: TrainConfig, d) -> str:
    """The arithmetic of an update."""
    ema = "" if d.ema_decay is None else f", EMA decay {d.ema_decay:.6f}"
    return (
        f"{d.global_batch} = {d.world_size} processes x {d.accumulation} forward passes x {d.batch_per_process}, "
        f"{d.updates_per_epoch} updates an epoch, {d.updates:,} in all; peak learning rate {d.lr:.4g}{ema}"
    )


def show(checks: list[Check]) -> None:
    """A table in a terminal, a line a check elsewhere."""
    if sys.stdout.isatty():
        table = Table("check", "", "found", "cure", box=None)
        for c in checks:
            table.add_row(c.name, f"[{_COLOURS[c.status]}]{c.status}[/]", c.detail, c.cure)
        Console().print(table)
    else:
        for c in checks:
            print(f"{c.status:8s}{c.name:15s}{c.detail}" + (f" -> {c.cure}" if c.cure else ""))
    counts = {status: sum(c.status == status for c in checks) for status in (OK, WARNING, FAIL)}
    print(", ".join(f"{count} {status}" for status, count in counts.items()))


def doctor(cfg: DictConfig) -> None:
    """Examine, show, and leave with 1 if anything failed."""
    checks = examine(cfg)
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        show(checks)
    if any(c.status == FAIL for c in checks):
        sys.exit(1)


def main() -> None:
    run_tool(doctor, config_name="train", schema=TrainConfig, configs=CONFIGS)


if __name__ == "__main__":
    main()
