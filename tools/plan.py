"""Memory and hours of a recipe on hardware that need not be here: ``python tools/plan.py recipe=NAME memory_gb=80``.

Memory is counted from shapes, without computing (:mod:`vit3.analysis.memory`); hours come from ``images_per_s``, or
from timing a few updates on this machine, which is said. Keys stand in configs/plan.yaml. Nothing is written.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table
from torch import Tensor

from vit3.analysis.memory import Memory, update_memory
from vit3.build import (
    as_latents,
    build_network,
    build_optimizer,
    build_plan,
    build_task,
    build_updater,
    derive,
)
from vit3.cli import run_tool
from vit3.config import PlanConfig, typed
from vit3.data import open_split
from vit3.engine.distributed import Processes, start_processes
from vit3.engine.throughput import Throughput, measure_throughput
from vit3.errors import UserError

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
KNOWN = {"imagenet": (1_281_167, 1000), "digits": (1437, 10), "patterns": (4200, 12)}  # training images, classes
_UNIT = 2  # batches are even: pairs of images are mixed or normalised
_CPU_BATCH = 4


@dataclass(frozen=True)
class Row:
    """One number of processes.

    Attributes:
        largest: images that fit in one forward pass of a process. accumulation, per_pass: how an update is dealt out
            so that it fits. gb: memory of a process at its peak, 10^9 bytes. hours: of the whole run.
        problem: why it cannot be done; then the others are None.
    """

    processes: int
    largest: int
    accumulation: int | None = None
    per_pass: int | None = None
    gb: float | None = None
    hours: float | None = None
    problem: str = ""


def read(cfg: DictConfig) -> PlanConfig:
    """The typed configuration; data that is absent needs no place.

    Raises:
        UserError: a value out of range.
    """
    cfg = copy.deepcopy(cfg)
    if OmegaConf.is_missing(cfg.data, "root"):
        cfg.data.root = None
    plan: PlanConfig = typed(cfg, PlanConfig)
    counts = plan.processes if isinstance(plan.processes, list) else [plan.processes]
    if not counts or not all(isinstance(n, int) and n > 0 for n in counts):
        raise UserError(f"processes={plan.processes} is not allowed; give a number from 1 on, or a list [1,8]")
    plan.processes = counts
    for name in ("memory_gb", "images", "classes", "images_per_s"):
        value = getattr(plan, name)
        if value is not None and not value > 0:
            raise UserError(f"{name}={value} is not allowed; it must be more than 0")
    if not 0 <= plan.reserve < 1:
        raise UserError(f"reserve={plan.reserve} is not allowed; it must be from 0 to below 1")
    # weights do not matter here, and what is compiled cannot be followed
    plan.model.pretrained, plan.model.checkpoint, plan.engine.compile = False, None, False
    return plan


def data_facts(cfg: PlanConfig) -> tuple[int, int]:
    """Training images and classes: as given, as known, or as found in ``data.root``.

    Raises:
        UserError: none of these.
    """
    images, classes = cfg.images, cfg.classes
    if images is None or classes is None:
        d = cfg.data
        if d.name in KNOWN:
            known = KNOWN[d.name]
        elif d.root:
            keys = dict(wanted=d.train_split, input_key=d.input_key, target_key=d.target_key, stream=d.stream)
            split = open_split(d.name, d.root, "train", d.in_chans, d.on_bad_image, **keys)
            known = len(split), len(split.classes)
        else:
            raise UserError(f"data={d.name} says nothing of its size; give images=N and classes=K, or data.root=FOLDER")
        images, classes = images or known[0], classes or known[1]
    return images, classes


def count_memory(cfg: PlanConfig, images: int, classes: int) -> Memory:
    """Memory of an update, by the rules of a GPU unless ``engine.device=cpu``; the later, dearer part of a run."""
    parts = _Parts(cfg, images, classes, Processes(torch.device("cpu")))
    average = parts.task.trainable_module_ema if parts.task.has_ema() else None
    return update_memory(
        parts.task, parts.model, average, parts.optimizer, lambda size: parts.batch(size, parts.mixes),
        amp=cfg.engine.amp, device_type="cpu" if cfg.engine.device == "cpu" else "cuda",
    )  # fmt: skip


def time_updates(cfg: PlanConfig, images: int, classes: int, size: int) -> Throughput:
    """Time updates of ``size`` images on this machine; on a CPU few images, and float32 in place of 16 bit."""
    processes = start_processes(cfg.engine.device)
    cfg = copy.deepcopy(cfg)
    if processes.device.type == "cpu":
        size, cfg.engine.amp = min(size, _CPU_BATCH), None
    parts = _Parts(cfg, images, classes, processes)
    optimizer = parts.optimizer()
    updater = build_updater(cfg, parts.task, optimizer, parts.derived, None, processes, classes)
    return measure_throughput(updater, lambda n: parts.batch(n, False, processes.device), size)


class _Parts:
    """Model and task of a run in one process, in its last epochs."""

    def __init__(self, cfg: PlanConfig, images: int, classes: int, processes: Processes):
        self.cfg, self.classes = cfg, classes
        self.mixes = cfg.augment.mixup > 0 or cfg.augment.cutmix > 0
        self.model, codec = build_network(cfg, tuple(map(str, range(classes))), processes.device)
        self.derived = derive(cfg, build_plan(cfg, images, 1, self.model))
        self.task = build_task(cfg, self.model, self.derived, processes, codec)
        if hasattr(self.task, "start_epoch"):
            self.task.start_epoch(cfg.engine.epochs, cfg.engine.epochs)

    def optimizer(self) -> torch.optim.Optimizer:
        return build_optimizer(self.cfg, self.model, self.derived)

    def batch(self, size: int, mixed: bool, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
        images = torch.randn(size, self.cfg.data.in_chans, *self.cfg.data.img_size, device=device)
        if mixed:
            return images, torch.rand(size, self.classes, device=device).softmax(dim=-1)
        return images, torch.randint(self.classes, (size,), device=device)


def rows(cfg: PlanConfig, images: int, memory: Memory, images_per_s: float | None, model) -> list[Row]:
    """The table: for each number of processes what fits, how to deal the batch out, and the hours."""
    return [_row(cfg, images, memory, images_per_s, model, count) for count in cfg.processes]


def _row(cfg: PlanConfig, images: int, memory: Memory, images_per_s: float | None, model, count: int) -> Row:
    shards = count if cfg.engine.parallel == "fsdp" else 1
    largest = memory.largest_batch(cfg.memory_gb * 1e9 * (1 - cfg.reserve), _UNIT, shards)
    if largest < _UNIT:
        return Row(count, largest, problem=f"not even {_UNIT} images fit; set model.grad_checkpointing=true")
    limit = min(largest, cfg.engine.max_per_process or largest)
    limited = dataclasses.replace(cfg, engine=dataclasses.replace(cfg.engine, max_per_process=limit))
    try:
        d = derive(limited, build_plan(limited, images, count, model))
    except UserError as error:
        return Row(count, largest, problem=str(error))
    hours = None if images_per_s is None else d.updates * d.global_batch / (images_per_s * count) / 3600
    gb = memory.at(d.batch_per_process, shards) / 1e9
    return Row(count, largest, d.accumulation, d.batch_per_process, gb, hours)


def plan(cfg: DictConfig) -> None:
    """Count, time and print."""
    asked = read(cfg)
    images, classes = data_facts(asked)
    run, note = as_latents(asked)
    memory = count_memory(run, images, classes)
    model, _ = build_network(run, tuple(map(str, range(classes))), torch.device("cpu"))
    found = rows(run, images, memory, None, model)
    rate, measured = run.images_per_s, None
    fitting = [row for row in found if row.per_pass]
    if rate is None and fitting:
        measured = time_updates(run, images, classes, max(row.per_pass for row in fitting))
        rate = measured.images_per_s
    if note:
        print(note)
    show(asked, images, memory, rows(run, images, memory, rate, model), rate, measured)


def show(
    cfg: PlanConfig, images: int, memory: Memory, table: list[Row], rate: float | None, measured: Throughput | None
) -> None:
    """Print the estimate, and what it rests on."""
    m, mb = memory, 1e6
    rules = "CPU" if cfg.engine.device == "cpu" else "GPU"
    print(
        f"{cfg.model.name}, mixer {cfg.mixer.name}, {cfg.data.img_size[0]}x{cfg.data.img_size[1]}, "
        f"{cfg.engine.amp or 'float32'}{', gradient checkpointing' if cfg.model.grad_checkpointing else ''}; "
        f"{cfg.engine.epochs} epochs of {images:,} images, {cfg.engine.batch_size} per update\n"
        f"memory, counted from shapes by the rules of a {rules} (not measured on one):\n"
        f"  parameters {m.parameters / mb:,.1f} MB, gradients {m.gradients / mb:,.1f} MB, "
        f"optimiser {m.optimizer / mb:,.1f} MB, moving average {m.average / mb:,.1f} MB"
        f"{', spread over the processes' if cfg.engine.parallel == 'fsdp' else ''}\n"
        f"  kept for the backward pass {m.kept_per_image / mb:,.2f} MB an image + {m.kept / mb:,.1f} MB\n"
        f"  largest transient          {m.transient_per_image / mb:,.2f} MB an image + {m.transient / mb:,.1f} MB"
    )
    printed = Table(
        "processes", "largest batch\nof a process", "images in a\nforward pass", "forward passes\nan update",
        "set\nengine.max_per_process", "memory", "hours", box=None,
    )  # fmt: skip
    for r in table:
        if r.problem:
            printed.add_row(str(r.processes), str(r.largest), r.problem)
            continue
        setting = str(r.per_pass) if r.accumulation > 1 else "null"
        hours = "" if r.hours is None else f"{r.hours:,.1f}" if r.hours < 1000 else f"{r.hours:,.0f}"
        printed.add_row(
            str(r.processes), f"{r.largest:,}", f"{r.per_pass:,}", str(r.accumulation), setting, f"{r.gb:.1f} GB", hours
        )
    Console(width=None if sys.stdout.isatty() else 160).print(printed)
    print(f"{cfg.memory_gb:g} GB each, {100 * cfg.reserve:.0f} % of it left alone (reserve)")
    if rate is not None:
        print(f"hours: {_source(cfg, rate, measured)}; the same rate on every process, images always ready, "
              "evaluation not counted")  # fmt: skip
    if measured is not None and measured.peak is not None:
        print(f"check: {measured.peak / 1e9:.2f} GB were allocated here at {measured.size} images, "
              f"estimated {memory.at(measured.size) / 1e9:.2f} GB")  # fmt: skip


def _source(cfg: PlanConfig, rate: float, measured: Throughput | None) -> str:
    if measured is None:
        return f"from images_per_s={rate:g}, as given"
    text = f"{rate:,.1f} images/s measured here in {measured.updates} updates of {measured.size} random images"
    if torch.cuda.is_available() and cfg.engine.device != "cpu":
        return f"{text} on {torch.cuda.get_device_name()}"
    return (
        f"{text} on this CPU with {torch.get_num_threads()} threads in float32, which says nothing of a GPU: "
        "give images_per_s=N of one"
    )


def main() -> None:
    run_tool(plan, config_name="plan", schema=PlanConfig, configs=CONFIGS)


if __name__ == "__main__":
    main()
