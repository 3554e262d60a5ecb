"""A configuration on this machine: what neither building its objects nor the first step would say, or not in time."""

from __future__ import annotations

import netrc
import os
import shutil
from pathlib import Path
from urllib.parse import urlparse

import torch
from torch import nn

from vit3.config import TrainConfig
from vit3.doctor.check import FAIL, OK, WARNING, Check
from vit3.doctor.machine import OPTIONAL, cores, installed
from vit3.doctor.sizes import checkpoint_bytes
from vit3.engine.checkpoint import run_of, update_checkpoints
from vit3.mixers import TTT
from vit3.ops.backend import implementation

_SHM = Path("/dev/shm")
_PREFETCH = 2  # batches that each loader process works ahead (PyTorch's default)


def precision(cfg: TrainConfig, device: torch.device) -> Check:
    """Whether the device computes in ``engine.amp`` at its speed."""
    amp = cfg.engine.amp
    if device.type == "cpu" and amp == "float16":
        return Check("precision", WARNING, "engine.amp=float16 is many times slower than float32 on a CPU",
                     "set engine.amp=null there")  # fmt: skip
    if device.type == "cuda" and amp == "bfloat16" and torch.cuda.get_device_capability(device)[0] < 8:
        name = torch.cuda.get_device_name(device)
        return Check("precision", WARNING, f"engine.amp=bfloat16 is slow on {name}", "set engine.amp=float16")
    return Check("precision", OK, f"{amp or 'float32'} on {device}")


def backend(cfg: TrainConfig, model: nn.Module, device: torch.device) -> Check:
    """Whether ``mixer.backend`` runs on the device in the precision of the run."""
    mixer = next((module for module in model.modules() if isinstance(module, TTT)), None)
    if mixer is None or mixer.backend != "triton":
        return Check("backend", OK, f"mixer.backend={cfg.mixer.backend}")
    dtype = getattr(torch, cfg.engine.amp) if cfg.engine.amp else torch.float32
    try:
        for op in ("glu_ttt", "dwconv_ttt"):
            implementation(op, mixer.backend, torch.empty(0, device=device, dtype=dtype), mixer.head_dim)
    except ValueError as error:
        reason = str(error).split("; ")[0].removeprefix("backend='triton' ")
        return Check("backend", FAIL, f"mixer.backend=triton {reason}", "set mixer.backend=auto or fused")
    return Check("backend", OK, f"mixer.backend=triton on {device}")


def packages(cfg: TrainConfig) -> Check:
    """Packages that the configuration asks for."""
    wanted = {
        "wandb": cfg.logger.wandb is not None,
        "tensorboard": cfg.logger.tensorboard,
        "datasets": cfg.data.name == "hfds",
        "webdataset": cfg.data.name == "wds" and cfg.data.stream,
        "triton": cfg.mixer.backend == "triton",
        "diffusers": cfg.diffusion is not None
        and (cfg.diffusion.autoencoder is not None or cfg.diffusion.sheet.sampler == "dpmsolver"),
    }
    asked = [name for name, needed in wanted.items() if needed]
    missing = [name for name in asked if installed(name) is None]
    if missing:
        cure = " && ".join(OPTIONAL[name][1] for name in missing)
        return Check("asked for", FAIL, f"the configuration needs packages not installed: {', '.join(missing)}", cure)
    return Check("asked for", OK, ", ".join(asked) or "no optional package")


def workers(cfg: TrainConfig, world_size: int) -> Check:
    """Loader processes of this machine against its cores."""
    here = _on_this_machine(world_size)
    wanted, available = cfg.data.workers * here, cores()
    detail = f"data.workers={cfg.data.workers} x {here} processes = {wanted} loader processes on {available} cores"
    if wanted > available:
        return Check("workers", WARNING, detail, f"set data.workers={max(1, available // here)}")
    return Check("workers", OK, detail)


def shared_memory(cfg: TrainConfig, batch_per_process: int, world_size: int) -> Check:
    """Batches on their way from loader processes against /dev/shm, whose end is a bus error in an epoch's midst."""
    if cfg.data.workers == 0 or not _SHM.is_dir():
        return Check("shared memory", OK, "not used")
    here = _on_this_machine(world_size)
    image = cfg.data.in_chans * cfg.data.img_size[0] * cfg.data.img_size[1]  # one byte a value
    needed, free = here * cfg.data.workers * _PREFETCH * batch_per_process * image, shutil.disk_usage(_SHM).free
    detail = f"{_SHM} has {_gb(free)} free, batches on their way need up to {_gb(needed)}"
    if needed > free:
        return Check("shared memory", WARNING, detail,
                     "set fewer data.workers, or start the container with --shm-size=16g")  # fmt: skip
    return Check("shared memory", OK, detail)


def disk(cfg: TrainConfig, model: nn.Module, resumed: str | None = None) -> Check:
    """Free space below ``output`` against what checkpoints need; those of a resumed run are there already.

    Args:
        resumed: its checkpoint.
    """
    folder = Path(cfg.output) if resumed is None else run_of(Path(resumed))
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not os.access(there, os.W_OK):
        return Check("disk", FAIL, f"output={cfg.output} is not writable ({there})", "choose another output=FOLDER")
    sizes = checkpoint_bytes(model, cfg.optim.opt, cfg.engine.ema_decay is not None)
    held = [] if resumed is None else [*update_checkpoints(folder), *folder.glob("best_*.pt")]
    free = shutil.disk_usage(there).free + sum(path.stat().st_size for path in held)
    needed = sizes.needed(cfg.engine.keep_last)
    detail = f"output={cfg.output}: {_gb(free)} free, checkpoints of {_gb(sizes.whole)} need up to {_gb(needed)}"
    if free < sizes.least:
        return Check("disk", FAIL, detail, "free space or choose another output=FOLDER")
    if free < needed:
        return Check("disk", WARNING, detail, "free space, lower engine.keep_last, or choose another output=FOLDER")
    return Check("disk", OK, detail)


def average(cfg: TrainConfig, decay: float | None, updates: int) -> Check:
    """How much of its start is left in the moving average at the end of the run."""
    if decay is None:
        return Check("average", OK, "off")
    detail = f"engine.ema_decay={cfg.engine.ema_decay:g} is {decay:.6f} per update"
    start = decay**updates
    if start > 0.01 and not cfg.engine.ema_warmup:
        return Check("average", WARNING, f"{detail}: after the run's {updates:,} updates the moving average is still "
                     f"{100 * start:.0f} % the untrained network",
                     "set engine.ema_warmup=true, or a lower engine.ema_decay")  # fmt: skip
    return Check("average", OK, detail)


def tracker(cfg: TrainConfig) -> Check:
    """Whether an online tracker finds a login; it goes offline by itself where it does not."""
    if cfg.logger.wandb != "online":
        return Check("tracker", OK, "none" if cfg.logger.wandb is None else "wandb, offline")
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    if not (os.environ.get("WANDB_API_KEY") or _in_netrc(host)):
        return Check("tracker", WARNING, f"logger.wandb=online finds no login for {host} and will go offline",
                     "run `wandb login`, or set logger.wandb=offline")  # fmt: skip
    return Check("tracker", OK, f"wandb, logged in at {host}")


def _in_netrc(host: str | None) -> bool:
    try:
        return bool(host and netrc.netrc().authenticators(host))
    except (OSError, netrc.NetrcParseError):
        return False


def _on_this_machine(world_size: int) -> int:
    """Processes of this run on this machine, as torchrun or Slurm says; all of them where neither does."""
    said = (os.environ.get(name) for name in ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE"))
    return next((min(world_size, int(text)) for text in said if text and text.isdigit()), world_size)


def _gb(size: float) -> str:
    return f"{size / 1e9:.3g} GB" if size >= 1e8 else f"{size / 1e6:.3g} MB"
