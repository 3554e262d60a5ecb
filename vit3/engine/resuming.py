"""The start of a run: a new folder, or that of the checkpoint to go on from, and what is different from before."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from vit3.engine.checkpoint import changed_keys, run_of, set_aside_later
from vit3.engine.distributed import Processes
from vit3.engine.run_folder import RunFolder

logger = logging.getLogger(__name__)


def open_run(cfg, default_name: str, composed: str, command: list[str], place: str | None) -> RunFolder:
    """The run folder, with the configuration saved as composed.

    Args:
        cfg: has ``output``, ``name`` and ``resume``. default_name: of a new folder, where ``name`` is None.
        composed: the configuration as YAML. command: what the command line said.
        place: the checkpoint to resume, whose folder is taken, or None.

    Raises:
        UserError: the folder cannot be written, or holds a run already.
    """
    if place is None:
        run = RunFolder.create(cfg.output, cfg.name, default_name, again=cfg.resume == "auto")
    else:
        run = RunFolder(run_of(Path(place)))
        with run.writing():
            set_aside_later(run.path, Path(place))
    with run.writing():
        run.write_start(composed, command)
    return run


def announce_resume(
    place: str, state: dict[str, Any], config: dict[str, Any], train_images: int, processes: Processes
) -> None:
    """Say where the run goes on and what is different from before.

    Args:
        place: of the checkpoint. state: what it holds. config: the whole configuration now.
        train_images: how many there are now.
    """
    logger.info(
        f"resumed      {place}: {state['updates']:,} updates done, epoch {state['epoch'] + 1} "
        f"at image {state['position']:,}"
    )
    if not processes.main:
        return
    if state["world_size"] != processes.world_size:
        logger.warning(
            "the run had %d processes and now has %d: the epoch goes on with the images that are left of it",
            state["world_size"], processes.world_size,
        )  # fmt: skip
    if state["position"] and state["train_images"] != train_images:
        logger.warning(
            "the run had %d training images and now has %d: this epoch goes on in another order, in which some of the "
            "images come again",
            state["train_images"], train_images,
        )  # fmt: skip
    for change in changed_keys(state, config):
        logger.warning("changed since the checkpoint: %s", change)
