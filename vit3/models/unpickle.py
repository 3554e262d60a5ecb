"""Read a PyTorch file that may be anybody's, without running any of its code."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path

import torch


class WeightsError(ValueError):
    """A file that holds no usable weights, or weights that do not fit the model."""


def read_checkpoint(path: str | Path):
    """Unpickle a PyTorch file whose objects may be anybody's; all but tensors and containers become inert.

    Raises:
        WeightsError: the file is truncated, no checkpoint, or a TorchScript archive.
    """
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                if any(name.endswith("/constants.pkl") for name in archive.namelist()):
                    raise WeightsError(f"{path} is a TorchScript archive; save its state_dict instead")
        return torch.load(path, map_location="cpu", weights_only=False, pickle_module=_InertPickle)
    except (RuntimeError, EOFError, pickle.UnpicklingError, zipfile.BadZipFile, AttributeError, KeyError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise WeightsError(f"{path} is not a readable PyTorch checkpoint ({reason})") from error


class _Inert(dict):
    """Stands for any class or function that a pickle names: takes everything, does nothing."""

    def __new__(cls, *args, **kwargs):
        return super().__new__(cls)

    def __init__(self, *args, **kwargs):
        super().__init__()

    def __setstate__(self, state):
        pass

    def __hash__(self):  # may stand in a set or as a key
        return id(self)

    def append(self, item):
        pass

    def extend(self, items):
        pass

    add = append


class _InertUnpickler(pickle.Unpickler):
    """Resolves what a state dict needs, and nothing that could act."""

    _ALLOWED = {
        ("collections", "OrderedDict"),
        ("torch._utils", "_rebuild_tensor_v2"),
        ("torch._utils", "_rebuild_tensor"),
        ("torch._utils", "_rebuild_parameter"),
        ("torch", "Size"),
        ("torch", "device"),
        ("torch.serialization", "_get_layout"),
    }

    def find_class(self, module: str, name: str):
        dtype_or_storage = module == "torch" and (
            name.endswith("Storage") or isinstance(getattr(torch, name, None), torch.dtype)
        )
        if dtype_or_storage or (module, name) in self._ALLOWED:
            return super().find_class(module, name)
        return _Inert


class _InertPickle:
    """The part of the ``pickle`` module that ``torch.load`` uses, with the unpickler above."""

    __name__ = "inert pickle"
    Unpickler = _InertUnpickler
    UnpicklingError = pickle.UnpicklingError

    @staticmethod
    def load(file, **kwargs):
        return _InertUnpickler(file, **kwargs).load()
