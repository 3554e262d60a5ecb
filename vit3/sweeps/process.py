"""A process of its own for each cell, so that no crash, kill or exit of one touches another."""

from __future__ import annotations

import faulthandler
import logging
import multiprocessing
import os
import signal
import sys
import threading
from multiprocessing import connection, forkserver
from pathlib import Path

from filelock import Timeout
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from vit3.errors import Interrupted, UserError
from vit3.sweeps.cell import KILLED, MISSING, RUNNING, Cell, CellFolder
from vit3.sweeps.work import ELSEWHERE, Train, compute

logger = logging.getLogger("vit3.sweep")

# Cells are forked from a server that has imported what takes seconds; it computes nothing: no threads, no GPU.
_PRELOAD = ("matplotlib.backends.backend_agg", "matplotlib.figure", "sklearn.datasets", "sklearn.model_selection")
_METHOD = "forkserver"
_ELSEWHERE_CODE = 3
_DRAIN_S = 10.0  # loader processes of a killed cell end within seconds, and hold its lock until then


def start_server() -> None:
    """Let the imports begin while the caller goes on."""
    ours = [name for name in sys.modules if name.split(".")[0] == "vit3" and not name.startswith("vit3.tools")]
    if _METHOD != "forkserver":
        return
    multiprocessing.get_context(_METHOD).set_forkserver_preload([*sorted(ours), "torchvision", *_PRELOAD])
    forkserver.ensure_running()


def compute_apart(
    train: Train, cfg: DictConfig, cell: Cell, folder: CellFolder, launch: str | None, stop: Path | None = None
) -> str:
    """:func:`~vit3.sweeps.work.compute` in a process of its own, which prints to ``log.txt``; returns the cell's state.

    Args:
        train: picklable by name. The others: as there.

    Raises:
        UserError: the folder of the cell cannot be made.
    """
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder.path} cannot be written ({error}); free space, and give the command again") from error
    start_server()
    running = HydraConfig.instance().cfg
    # plain, for classes of a launcher's plugin cannot be pickled in its worker
    hydra = OmegaConf.to_container(running.hydra, resolve=False) if running is not None else None
    work = (train, cfg, cell, folder, launch, stop, hydra, dict(os.environ))
    process = multiprocessing.get_context(_METHOD).Process(target=_child, args=work, name=f"cell {cell.id}")
    process.start()
    process.join()
    if process.exitcode == _ELSEWHERE_CODE:
        return ELSEWHERE
    if folder.record()["status"] in (RUNNING, MISSING):
        _note_death(folder, process.exitcode, process.pid)
    return folder.record()["status"]


def _note_death(folder: CellFolder, code: int, pid: int) -> None:
    """Record the end of a process that could not do so itself."""
    try:
        with folder.lock().acquire(timeout=_DRAIN_S):
            record = folder.record()
            if record["status"] in (RUNNING, MISSING) and record.get("pid", pid) == pid:
                what = f"by {signal.Signals(-code).name}" if code < 0 else f"with status {code}"
                hint = " (is memory short?)" if code == -signal.SIGKILL else ""
                folder.note(status=KILLED, reason=f"its process was ended {what}{hint}")
    except Timeout:
        pass  # another command has taken it over
    except OSError as error:  # what it had saved before is kept, and the other cells may still find room
        logger.warning(f"{folder / 'cell.json'} cannot be written ({error}); free space, and give the command again")


def _child(
    train: Train,
    cfg: DictConfig,
    cell: Cell,
    folder: CellFolder,
    launch: str | None,
    stop: Path | None,
    hydra: dict | None,
    env: dict[str, str],
) -> None:
    os.environ.clear()
    os.environ.update(env)
    os.setsid()  # Ctrl-C reaches the command, which hands it on: once
    log = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for number in (1, 2):
        os.dup2(log, number)
    os.close(log)
    for number in (signal.SIGTERM, signal.SIGUSR1):  # not what the command does with them, where this is its fork
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.enable()
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    logging.basicConfig(level=logging.INFO, format="%(message)s", force=True)
    if hydra is not None:
        HydraConfig.instance().cfg = OmegaConf.create({"hydra": hydra})
    try:
        state = compute(train, cfg, cell, folder, launch, stop)
    except Interrupted as error:
        print(error, file=sys.stderr, flush=True)
        sys.exit(error.code)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    if state == ELSEWHERE:
        sys.exit(_ELSEWHERE_CODE)


def _stop_with_parent() -> None:
    """Save and stop where the command that started this is gone."""
    connection.wait([multiprocessing.parent_process().sentinel])
    # to the main thread, where Python acts on signals: one that this thread gets does not wake a sleep there
    signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)
