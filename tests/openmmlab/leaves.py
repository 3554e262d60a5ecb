"""The leaves below configs/detection and configs/segmentation, read and built for tests."""

from __future__ import annotations

import functools
from unittest import mock

import torch
from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope
from torch import nn

import vit3.openmmlab  # noqa: F401  operators before anything of mmdet, then the backbones
from tests.helpers import ROOT
from vit3.openmmlab.cost import without_weights

FILES = {
    file.stem: file
    for room in ("detection", "segmentation")
    for file in sorted((ROOT / "configs" / room).glob("[!_]*.py"))
}


@functools.cache
def read(leaf: str) -> Config:
    """The config of a leaf; shared, so do not change it."""
    with quick_bases():
        return Config.fromfile(FILES[leaf])


def quick_bases():
    """Context in which a library's 200 lists of models are not read, a second for each base."""
    return mock.patch("mmengine.config.config._get_external_cfg_path", side_effect=ValueError)


@functools.cache
def built(leaf: str) -> nn.Module:
    """The whole network of a leaf, without values."""
    config = read(leaf)
    with DefaultScope.overwrite_default_scope(config.default_scope), torch.device("meta"):
        return MODELS.build(without_weights(config.model))
