"""MMEngine's Runner, built quietly: its log in the run folder, warnings alone in the terminal."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import uuid
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.registry import MODELS
from mmengine.runner import Runner
from torch import nn

from vit3.errors import UserError
from vit3.models.unpickle import WeightsError
from vit3.models.weights import match, strip_prefixes, trunk

logger = logging.getLogger(__name__)

# What the libraries say of themselves at every start, and a user cannot mend; in log lines and in Python's warnings
_CHATTER = (
    "will be deprecated",
    "is the alias of",
    "The prefix is not set in metric class",
    "Default ``avg_non_ignore`` is False",
    "The draw is False",
    "torch.meshgrid",
    "`broadcast_buffers` is deprecated",
    "_NUM_THREADS environment variable",
    "For binary segmentation, we suggest using",
    "faster_coco_eval is not installed",
    "Grad strides do not match bucket view strides",
    "will force set the currentdefault scope",
    "is skipped since its requires_grad=False",
)
_OURS = ("HViT3", "ViT3", "TimmBackbone", "SimpleFeaturePyramid")


class PlainRunner(Runner):
    """MMEngine's Runner less its copy of the config: the run folder has it, as composed."""

    def dump_config(self) -> None:
        """Nothing."""

    def build_train_loop(self, loop):
        """As MMEngine's; what a data set or its loader refuses is said in one sentence."""
        with naming_parts():
            return super().build_train_loop(loop)

    def load_checkpoint(self, *args, **kwargs):
        """As MMEngine's; a file that is missing or damaged is said in one sentence."""
        with naming_parts():
            return super().load_checkpoint(*args, **kwargs)

    def _init_model_weights(self) -> None:
        with naming_parts():  # files of start weights
            super()._init_model_weights()


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Context in which the libraries print nothing (pycocotools prints tables); their log file has it all."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        for text in _CHATTER:
            warnings.filterwarnings("ignore", f".*{text}")
        yield


def build_runner(config: Config) -> Runner:
    """A Runner whose name is its own, so that two in one process share nothing, and which says warnings alone.

    Raises:
        UserError: the config names a part that nobody has registered.
    """
    unique = f"vit3-{uuid.uuid4().hex[:12]}"
    config.experiment_name = unique
    if config.get("visualizer"):
        config.visualizer.name = unique
    with naming_parts():
        runner = PlainRunner.from_cfg(config)
    for handler in runner.logger.handlers:
        if type(handler) is logging.StreamHandler:
            handler.setStream(sys.stderr)
            handler.setLevel(logging.WARNING)
            handler.addFilter(lambda record: not any(text in record.getMessage() for text in _CHATTER))
    return runner


def build_model(config: Config, device: torch.device) -> nn.Module:
    """The model of a config alone, in evaluation mode."""
    with naming_parts():
        model = MODELS.build(config.model)
    return model.to(device).eval()


@contextlib.contextmanager
def naming_parts() -> Iterator[None]:
    """Context in which what the parts of a config refuse is said in one sentence.

    Of an unknown ``type=`` it also says the names that this package registers.
    """
    try:
        yield
    except (ValueError, TypeError, FileNotFoundError) as error:
        raise UserError(f"the config does not work: {error}") from error
    except KeyError as error:
        text = str(error).strip("\"'")
        if "registry" not in text:
            raise
        ours = ", ".join(name for name in _OURS if MODELS.get(name) is not None)
        raise UserError(
            f"{text.split('. Please')[0]}; of this package there are {ours or 'none'}, which need "
            'custom_imports = dict(imports=["vit3.openmmlab"]) in the config'
        ) from error


class StartWeights(Hook):
    """Says what ``load_from=`` gives a Runner, and lets it take only what has the backbone."""

    def __init__(self, path: Any):
        self.path = path

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        model = runner.model.module if hasattr(runner.model, "module") else runner.model
        tensors = strip_prefixes(checkpoint.get("state_dict", checkpoint))
        backbone = {name: value for name, value in tensors.items() if name.startswith("backbone.")}
        try:
            match(trunk(backbone), model.backbone).require(0.95, f"load_from={self.path}: its backbone")
        except WeightsError as error:
            raise UserError(f"{error}; a classifier goes to model.backbone.init_cfg.checkpoint=FILE") from error
        logger.info("load_from    %s: %s", self.path, match(tensors, model))


class WholeCheckpoint(Hook):
    """Lets a Runner take weights only where the file has every tensor of the model."""

    def __init__(self, path: Any):
        self.path = path

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        model = runner.model.module if hasattr(runner.model, "module") else runner.model
        require_all(checkpoint, model, self.path)


def require_all(checkpoint: dict, model: nn.Module, path: Any) -> None:
    """Raise a UserError unless ``checkpoint`` has every tensor of ``model``, in its shape."""
    tensors = checkpoint.get("state_dict", checkpoint)
    try:
        match({name.removeprefix("module."): value for name, value in tensors.items()}, model).require(1.0, str(path))
    except WeightsError as error:
        raise UserError(f"{error}; is it a checkpoint of this config?") from error
