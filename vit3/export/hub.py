"""A folder in timm's hub layout: weights, configuration and model card, to be loaded by path or from the hub."""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor

from vit3 import __version__
from vit3.errors import UserError, first_line
from vit3.export.card import CARD, model_card
from vit3.export.runner import runner
from vit3.export.subject import Subject
from vit3.files import sha256_of
from vit3.models.places import CONFIG, WEIGHTS
from vit3.models.weights import bare, write_tensors

_PREPROCESSING = ("mean", "std", "interpolation", "crop_pct", "crop_mode")  # that timm's configuration knows


def write_hub_folder(subject: Subject, folder: Path, license: str = "mit", push: str | None = None) -> Path:
    """Write a folder that ``timm.create_model("local-dir:FOLDER", pretrained=True)`` loads, whole or not at all.

    Args:
        subject: its model may be compiled, wrapped by DDP or an average, and in any memory format.
        folder: a new or an empty one, or one that this function wrote before, which is replaced.
        license: of the weights, as the hub abbreviates it.
        push: ``OWNER/NAME`` of a repository on the Hugging Face hub, to which the folder is uploaded too.

    Returns:
        The folder.

    Raises:
        UserError: the folder holds something else, arguments that JSON cannot hold, or the upload failed.
    """
    folder, subject = Path(folder), dataclasses.replace(subject, model=bare(subject.model))
    _check_target(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    arriving = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    leaving = arriving.with_name(f"{arriving.name}.old")
    try:
        facts = {"model": subject.name, "weights": subject.weights}
        write_tensors(arriving / WEIGHTS, subject.model.state_dict(), facts, subject.classes)
        config = hub_config(subject, license) | {"sha256": sha256_of(arriving / WEIGHTS)}
        (arriving / CARD).write_text(model_card(subject, config, folder.name, push), encoding="utf-8")
        (arriving / CONFIG).write_text(_as_json(config), encoding="utf-8")
        arriving.chmod(0o755)
        if folder.exists():
            folder.replace(leaving)
        arriving.replace(folder)
    except BaseException:
        if leaving.exists() and not folder.exists():
            leaving.replace(folder)
        raise
    finally:
        for rest in (arriving, leaving):
            shutil.rmtree(rest, ignore_errors=True)
    if push is not None:
        _upload(folder, push)
    return folder


def hub_config(subject: Subject, license: str) -> dict[str, Any]:
    """What ``config.json`` says of a bare model: timm's keys, then those of ours that timm leaves alone."""
    model = subject.model
    known, pool = getattr(model, "pretrained_cfg", None) or {}, getattr(model, "global_pool", None)
    about = {
        "input_size": (subject.in_chans, *subject.img_size),
        "fixed_input_size": known.get("fixed_input_size", False),
        **{name: value for name, value in subject.preprocessing.items() if name in _PREPROCESSING},
        "num_classes": getattr(model, "num_classes", 0),
        "first_conv": known.get("first_conv"),
        "classifier": known.get("classifier"),
        "pool_size": None,
        "license": license,
    }
    config = {
        "architecture": subject.name,
        "num_classes": about["num_classes"],
        "num_features": getattr(model, "num_features", None),
        "global_pool": pool if isinstance(pool, str) else None,  # other networks of timm's have a module there
        "label_names": None if subject.classes is None else list(subject.classes),
        "model_args": subject.kwargs,
        "pretrained_cfg": about,
    }
    return {name: value for name, value in config.items() if value is not None} | {
        "kind": subject.kind,
        "weights": subject.weights,
        "training": subject.training,
        "source": subject.source,
        "versions": {"vit3": __version__, "timm": version("timm"), "torch": torch.__version__},
    }


def open_hub_folder(folder: Path) -> Callable[..., tuple[Tensor, ...]]:
    """The network of a folder, built and loaded by timm alone; runs as ``run(*inputs)``."""
    return runner(timm.create_model(f"local-dir:{folder}", pretrained=True))


def _check_target(folder: Path) -> None:
    """What is not ours is not replaced."""
    ours = {WEIGHTS, CONFIG, CARD}
    if folder.exists() and not folder.is_dir():
        raise UserError(f"folder={folder} is a file; name a folder that is new or was exported before")
    if folder.is_dir() and (others := sorted(p.name for p in folder.iterdir() if p.name not in ours)):
        raise UserError(f"folder={folder} holds {others[0]}, which is no part of an export; name a new folder")


def _as_json(config: dict[str, Any]) -> str:
    try:
        return json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    except TypeError as error:
        raise UserError(f"{config['architecture']} cannot be described in JSON: {error}; give its mixer by name and "
                        "plain values as arguments") from error  # fmt: skip


def _upload(folder: Path, repository: str) -> None:
    """Give the folder to a repository of the hub, made if need be."""
    try:
        import huggingface_hub
    except ImportError as error:
        raise UserError(f"push={repository} needs huggingface_hub: pip install huggingface_hub") from error
    if repository.count("/") != 1 or not all(repository.split("/")):
        raise UserError(f"push={repository} must be OWNER/NAME; {folder} is written")
    try:
        api = huggingface_hub.HfApi()
        api.create_repo(repository, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=str(folder), commit_message=f"{folder.name} by vit3")
    except Exception as error:  # its own classes, httpx's or requests', by version
        raise UserError(f"push={repository} failed ({first_line(error)}); {folder} is written: log in by `hf auth "
                        "login`, then push again") from error  # fmt: skip
