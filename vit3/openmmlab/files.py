"""MMEngine's checkpoint files, read without running their code: :func:`use_safe_loader`, :func:`load_safely`."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mmengine.dist import barrier, is_main_process
from mmengine.logging.history_buffer import HistoryBuffer
from mmengine.runner.checkpoint import CheckpointLoader

from vit3.models.places import download
from vit3.models.unpickle import read_checkpoint
from vit3.models.weights import read_tensors


def use_safe_loader() -> None:
    """Make every reading of a checkpoint by MMEngine go through :func:`load_safely`, those of addresses too.

    MMEngine's own loader tries ``weights_only`` and then unpickles whatever is in the file, code included.
    """
    CheckpointLoader.register_scheme(prefixes="", loader=load_safely, force=True)
    CheckpointLoader.register_scheme(prefixes=("http://", "https://"), loader=download_safely, force=True)


def load_safely(filename: str, map_location: Any = None, **_) -> Any:
    """Read a checkpoint of MMEngine, or anybody's.

    Tensors, containers, numpy values and MMEngine's own buffers come as they are. A file that holds anything else is
    read again with all of that made inert, which is enough for its weights.

    Args:
        filename: ``.pth`` or ``.safetensors``. map_location: as for ``torch.load``.

    Raises:
        FileNotFoundError: no such file.
        WeightsError: it is unreadable.
    """
    path = Path(filename).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    if path.suffix == ".safetensors":
        return {"state_dict": read_tensors(path)}
    try:
        with torch.serialization.safe_globals(_allowed()):
            return torch.load(path, map_location=map_location, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError):
        return read_checkpoint(path)


def download_safely(filename: str, map_location: Any = None, **_) -> Any:
    """Read a checkpoint from an address by :func:`load_safely`; it is kept among torch's downloads."""
    if is_main_process():
        download(filename)
    barrier()
    return load_safely(str(download(filename)), map_location)  # there by now, or on another machine's disk


def _method(kind: type, name: str) -> Callable:
    """Stands for ``getattr`` in files: a buffer's table of statistics is all that it gives."""
    if kind is not HistoryBuffer or not name.isidentifier() or name.startswith("_"):
        raise pickle.UnpicklingError(f"a checkpoint asks for {kind!r}.{name}")
    return getattr(kind, name)


def _allowed() -> list[Any]:
    core = np._core if hasattr(np, "_core") else np.core
    dtypes = {type(np.dtype(name)) for name in ("float64", "float32", "int64", "int32", "uint32", "uint8", "bool")}
    return [
        HistoryBuffer,
        np.ndarray,
        np.dtype,
        core.multiarray.scalar,
        core.multiarray._reconstruct,
        slice,
        *dtypes,
        (_method, "builtins.getattr"),
    ]
