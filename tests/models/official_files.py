"""Synthetic files in the layout of the authors' checkpoints, for tests."""

import argparse
import functools
import json
import sys
import types

import numpy as np
import torch

from tests.helpers import GOLDEN
from vit3.analysis.parity import weights_by_rule

OFFICIAL = {name.replace("vittt", "vit3"): name for name in ("vittt_tiny", "vittt_small", "vittt_base")}
OFFICIAL |= {f"h_{ours}": f"h_{theirs}" for ours, theirs in OFFICIAL.items()}


def official_shapes(name):
    """Names and shapes of the authors' state dict of one of our models."""
    return _shapes()[OFFICIAL[name]]


@functools.cache
def _shapes():
    return json.loads((GOLDEN / "classifiers_state_dict.json").read_text())


@functools.cache
def official_weights(name):
    """A full official state dict: weights by rule, rotation tables as the authors' constructor makes them."""
    weights = weights_by_rule(official_shapes(name))
    for key, shape in official_shapes(name).items():
        if key.endswith("rotations"):
            h, w, pairs, _ = shape
            theta = 1 / 10000.0 ** (torch.arange(pairs // 2) / (pairs // 2))
            rows = (torch.arange(h)[:, None] * theta)[:, None].expand(h, w, pairs // 2)
            columns = (torch.arange(w)[:, None] * theta)[None].expand(h, w, pairs // 2)
            angle = torch.cat((rows, columns), dim=-1)
            weights[key] = torch.view_as_real(torch.polar(torch.ones_like(angle), angle))
    return {key: weights[key] for key in official_shapes(name)}


def official_generator(seed=0, **changes):
    """A state dict of the authors' smallest DiT³, by rule; what its table of places holds must not matter."""
    shapes = json.loads((GOLDEN / "dit_state_dict.json").read_text())["DiTTT-S/8"]
    torch.manual_seed(seed)
    return {"pos_embed": torch.randn(shapes["pos_embed"]), **weights_by_rule(shapes), **changes}


def yacs_like_config():
    """A nested dict subclass with state of its own, as yacs makes."""
    module = types.ModuleType("throwaway_yacs")
    exec(
        "class CfgNode(dict):\n"
        "    def __init__(self, *args):\n"
        "        super().__init__(*args)\n"
        "        self.__dict__['__immutable__'] = False\n",
        module.__dict__,
    )
    sys.modules["throwaway_yacs"] = module
    node = module.CfgNode
    return node({"MODEL": node({"TYPE": "vittt", "DROP_PATH_RATE": 0.2}), "DATA": node({"IMG_SIZE": 224})})


def save_official(path, weights, **extra):
    """Write a checkpoint as the authors' trainer does, with objects whose classes the reader will not have."""
    state = {
        "model": weights,
        "config": yacs_like_config(),
        "args": argparse.Namespace(cfg="x.yaml", opts=["A", "B"]),
        "max_accuracy": np.float64(81.2),
        "epoch": 299,
        **extra,
    }
    try:
        torch.save(state, path)
    finally:
        del sys.modules["throwaway_yacs"]
    return path
