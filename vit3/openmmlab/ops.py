"""mmcv's compiled operators by torchvision: the module ``mmcv._ext`` where no compiled one is installed.

mmcv keeps its operators in one extension module, ``mmcv._ext``, which no wheel on PyPI holds for a current torch.
:func:`install` appends one finder to ``sys.meta_path`` that answers for this single name, with the functions of
``operators.py``. It is asked last, so a compiled ``mmcv._ext`` wins; no file of mmcv is changed.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import multiprocessing
import sys
from collections.abc import Callable
from types import ModuleType

import torch
import torchvision

from vit3.errors import UserError
from vit3.openmmlab.operators import PROVIDED

NAME = "mmcv._ext"

# What to take instead of an operator that is not here: start of its name -> half a sentence.
INSTEAD = {
    "roi_align_rotated": "boxes without rotation and RoIAlign",
    "roi_pool": "type='RoIAlign' for the RoI layer (torchvision's RoIPool rounds boxes where mmcv's does not)",
    "sync_bn": "norm_cfg=dict(type='SyncBN'), which is torch's own",
    "sigmoid_focal_loss": "a two-stage detector such as Mask R-CNN (or the CPU: mmdet has this loss in torch)",
    "softmax_focal_loss": "a two-stage detector such as Mask R-CNN",
    "deform_conv": "a backbone without dcn=",
    "modulated_deform_conv": "a backbone without dcn=",
    "ms_deform_attn": "the CPU, where mmcv computes it in torch, or a neck without deformable attention",
    "nms_rotated": "boxes without rotation and type='nms'",
}


def install() -> None:
    """Let ``import mmcv._ext`` find torchvision's operators when mmcv has no compiled ones; calling it twice is fine.

    It must run before the first ``import mmcv.ops``, which mmdet does; mmcv itself and mmengine may come before.

    Raises:
        UserError: ``mmcv.ops`` was imported earlier, without any operators.
    """
    if "mmcv.ops" in sys.modules and NAME not in sys.modules:
        raise UserError(
            "mmcv.ops was imported without its operators before vit3.openmmlab, and keeps none; import vit3.openmmlab "
            "first (in a config: the first entry of custom_imports)."
        )
    if TorchvisionOperators not in sys.meta_path:
        sys.meta_path.append(TorchvisionOperators)
    _tell_spawned_processes()


def provider() -> str:
    """Whose operators mmcv has: "compiled" (its own), "torchvision" (these), or "none" (neither, or no mmcv)."""
    if importlib.util.find_spec("mmcv") is None:
        return "none"
    spec = importlib.util.find_spec(NAME)
    if spec is None:
        return "none"
    return "torchvision" if spec.loader is TorchvisionOperators else "compiled"


class TorchvisionOperators:
    """Finder and loader of ``mmcv._ext``; used as a class, it has no state."""

    @staticmethod
    def find_spec(name: str, path=None, target=None) -> importlib.machinery.ModuleSpec | None:
        """Python's question to every entry of ``sys.meta_path``; only ``mmcv._ext`` is answered."""
        if name != NAME:
            return None
        origin = f"torchvision {torchvision.__version__} by {__name__}"
        return importlib.machinery.ModuleSpec(name, TorchvisionOperators, origin=origin)

    @staticmethod
    def create_module(spec: importlib.machinery.ModuleSpec) -> None:
        """Python makes the module itself."""

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        """Fill the module: the operators provided, and for every other name one that says what is missing."""
        module.__dict__.update({function.__name__: function for function in PROVIDED})
        module.__getattr__ = _absent


def _absent(name: str) -> Callable[..., None]:
    """An operator that is not here. mmcv asks for all by ``hasattr`` at import, so only the call may fail."""
    if name.startswith("_"):
        raise AttributeError(f"module {NAME!r} has no attribute {name!r}")

    def operator(*args, **kwargs):
        starts = [start for start in INSTEAD if name.startswith(start)]
        instead = INSTEAD[max(starts, key=len)] if starts else "a config that does not need it"
        raise NotImplementedError(
            f"mmcv's operator {name} needs an mmcv compiled for torch {torch.__version__}, and this mmcv has only the "
            f"operators of torchvision ({', '.join(function.__name__ for function in PROVIDED[:4])}); "
            f"compile mmcv, or use {instead}."
        )

    operator.__name__ = name
    return operator


class _Carried:
    """Runs :func:`install` wherever it is unpickled."""

    def __reduce__(self):
        return _carried, ()


def _carried() -> _Carried:
    install()
    return _Carried()


def _tell_spawned_processes() -> None:
    """Install in processes that start with a fresh interpreter too (spawn, forkserver), as loader workers may.

    Such a worker first unpickles its data set, which imports mmdet and with it mmcv.ops: too late for worker_init_fn or
    custom_imports. A process carries the configuration of its parent, pickled before its arguments; an entry there is
    the one place that is early enough and asks nothing of the caller.
    """
    multiprocessing.current_process()._config[__name__] = _Carried()
