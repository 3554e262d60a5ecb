"""Parameters and multiply-adds: ``python tools/flops.py model=NAME|recipe=NAME [sizes=[224,[512,2048]]]``.

Inner training is counted by formula, block by block; one image under PyTorch's own counter checks the sum. Of a
generator one step is counted, without its autoencoder; ``sizes`` are then those of the latents. Keys stand in
configs/flops.yaml. Nothing is written.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table
from torch import nn

from vit3.analysis.flops import count_macs, counted_macs, macs_by_part
from vit3.build import as_latents, build_network
from vit3.cli import run_tool
from vit3.config import FlopsConfig, typed
from vit3.errors import UserError

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
_BLOCK = re.compile(r"(?:.*?\.)?blocks\.\d+|[^.]+")  # what one line of the table stands for


def flops(cfg: DictConfig) -> None:
    """Print both tables of one network."""
    cfg.data.root = None
    run: FlopsConfig = typed(cfg, FlopsConfig)
    run.model.pretrained, run.model.checkpoint = False, None
    run, note = as_latents(run)
    model, _ = build_network(run, [str(i) for i in range(run.classes)], torch.device("cpu"))
    model.eval()
    sizes = [run.data.img_size] if run.sizes is None else [_size(size) for size in run.sizes]
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(f"{run.model.name}, mixer {run.mixer.name}, {run.classes} classes")
    if note:
        console.print(note)
    console.print(block_table(model, sizes[0]))
    console.print(size_table(model, sizes, run.count))


def block_table(model: nn.Module, size: tuple[int, int]) -> Table:
    """Parameters and multiply-adds of each block and of what stands outside of them."""
    params: dict[str, int] = {}
    for name, p in model.named_parameters():
        line = _BLOCK.match(name)[0]
        params[line] = params.get(line, 0) + p.numel()
    macs: dict[str, int] = {}
    mixers: dict[str, int] = {}
    for name, count in macs_by_part(model, size).items():
        line = _BLOCK.match(name)[0]
        macs[line] = macs.get(line, 0) + count
        if hasattr(model.get_submodule(name), "macs"):
            mixers[line] = mixers.get(line, 0) + count
    table = Table("part", "parameters", f"multiply-adds at {size[0]}x{size[1]}", "of these in the mixer", box=None)
    for line in [*params, *(line for line in macs if line not in params)]:
        mixer = f"{mixers[line] / 1e6:,.3f} M" if line in mixers else ""
        table.add_row(line, f"{params.get(line, 0):,}", f"{macs.get(line, 0) / 1e6:,.3f} M", mixer)
    table.add_row("all", f"{sum(params.values()):,}", f"{sum(macs.values()) / 1e6:,.3f} M",
                  f"{sum(mixers.values()) / 1e6:,.3f} M")  # fmt: skip
    return table


def size_table(model: nn.Module, sizes: list[tuple[int, int]], count: bool) -> Table:
    """Multiply-adds at each size: by formula, as PyTorch counts them, and with norms."""
    table = Table("image", "multiply-adds", *(["counted"] if count else []), "with LayerNorms", box=None)
    for size in sizes:
        counted = [f"{counted_macs(model, size) / 1e9:.4f} G"] if count else []
        table.add_row(f"{size[0]}x{size[1]}", f"{count_macs(model, size) / 1e9:.4f} G", *counted,
                      f"{count_macs(model, size, layer_norms=True) / 1e9:.4f} G")  # fmt: skip
    return table


def _size(size) -> tuple[int, int]:
    pair = tuple(size) if isinstance(size, list) else (size, size)
    if len(pair) != 2 or not all(isinstance(side, int) and side > 0 for side in pair):
        raise UserError(f"sizes: {size} is no size; give sides in pixels or [height,width]: sizes=[224,[512,2048]]")
    return pair


def main() -> None:
    run_tool(flops, config_name="flops", schema=FlopsConfig, configs=CONFIGS)


if __name__ == "__main__":
    main()
