"""What a run derives from its config for the device, processes and batch at hand; never written back."""

from __future__ import annotations

import copy
import logging
import os
from typing import Any

import mmengine.device.utils as mm_device
from mmengine.config import Config
from mmengine.registry import OPTIMIZERS

from vit3.config import nearest
from vit3.engine.distributed import Processes
from vit3.errors import UserError
from vit3.openmmlab.datasets import EVALUATORS, LOADERS, dicts_of
from vit3.openmmlab.settings import Settings

logger = logging.getLogger(__name__)


def adapt(settings: Settings, work_dir: str, processes: Processes) -> Config:
    """A copy of the config that runs here; one line of the log for each thing that is not as it says.

    Args:
        work_dir: of the Runner, the run folder. processes: the ones that were started.
    """
    config = copy.deepcopy(settings.config)
    config.work_dir = work_dir
    cpu = processes.device.type == "cpu"
    mm_device.DEVICE = processes.device.type  # what MMEngine chose at import: a GPU if there is one
    if cpu or not processes.distributed:
        _plain_batch_norm(config, "on a CPU" if cpu else "in one process")
    if cpu:
        _plain_precision(config)
    _join_processes(config, processes)
    _limit_workers(config, settings.options.workers, processes)
    for key in EVALUATORS:
        for node in dicts_of(config.get(key)):
            if node.get("type") in ("IoUMetric", "mmseg.IoUMetric"):
                node.type = "PresentIoUMetric"
    if config.get("train_cfg") and config.train_cfg.get("type") == "EpochBasedTrainLoop":
        config.train_cfg.type = "EpochLoop"
    if config.get("visualizer"):  # their pictures and numbers lie beside their log; ours are in the run folder itself
        config.visualizer.setdefault("vis_backends", [dict(type="LocalVisBackend")])
    return config


def _plain_batch_norm(config: Config, where: str) -> None:
    found = [node for node in dicts_of(config.model) if node.get("type") in ("SyncBN", "MMSyncBN")]
    for node in found:
        node.type = "BN"
    if found:
        logger.info("batch norm   SyncBN is BN %s", where)


def _plain_precision(config: Config) -> None:
    wrapper = config.get("optim_wrapper")
    if wrapper and wrapper.get("type") == "AmpOptimWrapper":
        wrapper.type = "OptimWrapper"
        for key in ("loss_scale", "dtype", "use_fsdp"):
            wrapper.pop(key, None)
        logger.info("precision    float32 on a CPU, in the place of mixed precision")


def _join_processes(config: Config, processes: Processes) -> None:
    """Let MMEngine take the process group that exists: its own start calls CUDA even where there is none."""
    config.launcher = "pytorch" if processes.distributed else "none"
    if not processes.distributed:
        return
    gpu = processes.device.index if processes.device.type == "cuda" else None
    os.environ.setdefault("LOCAL_RANK", str(gpu or 0))  # MMEngine reads it, even where device_ids are given
    wrapper = config.get("model_wrapper_cfg") or dict(
        type="MMDistributedDataParallel",
        broadcast_buffers=False,
        find_unused_parameters=config.get("find_unused_parameters", False),
    )
    config.model_wrapper_cfg = dict(wrapper, device_ids=None if gpu is None else [gpu])


def _limit_workers(config: Config, wanted: int | None, processes: Processes) -> None:
    """Loader processes: as wanted, or as the config says but no more than there are CPUs."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for name in LOADERS:
        loader = config.get(name)
        if not loader:
            continue
        loader.num_workers = min(loader.get("num_workers", 0), cpus) if wanted is None else wanted
        if loader.num_workers == 0:
            loader.persistent_workers = False
            loader.pop("prefetch_factor", None)


def scale_learning_rate(config: Config, world_size: int, wanted: bool) -> dict[str, Any]:
    """Scale the learning rate with the batch, as far as the config says for which batch it is meant.

    Args:
        world_size: number of processes. wanted: False leaves it as it is.

    Returns:
        ``global_batch``, ``batch_per_process``, ``lr`` (effective) and ``lr_config``.

    Raises:
        UserError: the config has no single learning rate, or an unknown optimiser.
    """
    optimizer = config.optim_wrapper.get("optimizer") or {}
    if "lr" not in optimizer:
        raise UserError("optim_wrapper.optimizer.lr is missing; the commands need one optimiser with a learning rate")
    if isinstance(optimizer.get("type"), str) and OPTIMIZERS.get(optimizer.type) is None:
        cure = nearest(optimizer.type, OPTIMIZERS.module_dict)
        raise UserError(f"optim_wrapper.optimizer.type={optimizer.type} is no optimiser that MMEngine knows; {cure}")
    loader = config.train_dataloader
    batch = loader.get("batch_size") or (loader.get("batch_sampler") or {}).get("batch_size") or 1
    accumulated = config.optim_wrapper.get("accumulative_counts", 1)
    facts = dict(batch_per_process=batch, global_batch=world_size * batch * accumulated, lr_config=optimizer.lr)
    rule = config.get("auto_scale_lr") or {}
    base = rule.get("base_batch_size")
    said = f"{batch} images x {world_size} process{'es' if world_size > 1 else ''}"
    said += f" x {accumulated} passes" if accumulated > 1 else ""
    if base is None:
        logger.info("batch        %d = %s; the config does not say for which batch its learning rate %g is meant",
                    facts["global_batch"], said, optimizer.lr)  # fmt: skip
    elif facts["global_batch"] == base:
        logger.info("batch        %d = %s, as the config wants it; learning rate %g", base, said, optimizer.lr)
    elif not wanted:
        logger.warning("batch        %d = %s, the learning rate %g is meant for %d and stays as it is (scale_lr=false)",
                       facts["global_batch"], said, optimizer.lr, base)  # fmt: skip
    else:
        optimizer.lr = optimizer.lr * facts["global_batch"] / base
        logger.warning("batch        %d = %s, not %d as in the config: learning rate %g x %d/%d = %g "
                       "(scale_lr=false keeps it)",
                       facts["global_batch"], said, base, facts["lr_config"], facts["global_batch"], base,
                       optimizer.lr)  # fmt: skip
    if rule:
        rule.enable = False  # done here, where accumulated passes count too
    return facts | {"lr": optimizer.lr}


def forget_pretrained(config: Config) -> None:
    """Take files of start weights out of the model's config, for a run that loads all weights from a checkpoint."""
    for node in dicts_of(config.model):
        start = node.get("init_cfg")
        if hasattr(start, "get") and start.get("type") == "Pretrained":
            node.init_cfg = None
        if node.get("pretrained"):
            node.pretrained = False if node.pretrained is True else None  # timm's switch, or the name of a file
