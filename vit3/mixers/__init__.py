"""Token mixers, all of one signature: ``mixer(x_BNC, h, w, rope=None) -> x_BNC``.

A model takes any of them by name or by class, so that a control differs from its model in this part alone.
"""

from __future__ import annotations

import difflib

from torch import nn

from vit3.mixers.delta import DeltaNet
from vit3.mixers.linear import LinearAttention
from vit3.mixers.retention import Retention
from vit3.mixers.softmax import SoftmaxAttention
from vit3.mixers.ttt import TTT
from vit3.mixers.ttt_lm import TTTMLP, TTTLinear

MIXERS: dict[str, type[nn.Module]] = {
    "ttt": TTT,
    "softmax": SoftmaxAttention,
    "linear": LinearAttention,
    "retention": Retention,
    "delta": DeltaNet,
    "ttt_linear": TTTLinear,
    "ttt_mlp": TTTMLP,
}


def register_mixer(name: str, mixer: type[nn.Module]) -> None:
    """Make ``mixer`` available to every model as ``mixer="name"``.

    Raises:
        ValueError: the name is taken.
    """
    if MIXERS.get(name, mixer) is not mixer:
        raise ValueError(f"mixer name '{name}' is taken by {MIXERS[name].__name__}; choose another")
    MIXERS[name] = mixer


def create_mixer(mixer: str | type[nn.Module], dim: int, num_heads: int, **options) -> nn.Module:
    """Build a mixer for ``dim`` channels and ``num_heads`` heads.

    Args:
        mixer: a registered name, or a class of the same signature.
        options: keyword arguments of that mixer.

    Raises:
        ValueError: unknown name.
    """
    if isinstance(mixer, str):
        if mixer not in MIXERS:
            near = difflib.get_close_matches(mixer, MIXERS, n=1)
            hint = f" (did you mean '{near[0]}'?)" if near else ""
            raise ValueError(f"mixer='{mixer}' is unknown{hint}; registered: {', '.join(sorted(MIXERS))}")
        mixer = MIXERS[mixer]
    return mixer(dim, num_heads, **options)


__all__ = [
    "MIXERS",
    "TTT",
    "TTTMLP",
    "DeltaNet",
    "LinearAttention",
    "Retention",
    "SoftmaxAttention",
    "TTTLinear",
    "create_mixer",
    "register_mixer",
]
