"""Every knob of the inner problem, once, each with its place in the paper."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Optional, Tuple

# OmegaConf reads these annotations at run time, hence typing's spelling.

MODELS = ["fc", "silu_fc", "mlp", "glu", "swiglu", "conv", "dwconv"]  # register_inner_model adds to them
LOSSES = ("dot", "mse", "rmse", "mae", "smooth_l1", "huber", "cosine")
CONTROLS = (
    "none",
    "query_is_key",
    "shuffle_q_tokens",
    "shuffle_k_tokens",
    "shuffle_v_tokens",
    "shuffle_q_images",
    "shuffle_k_images",
    "shuffle_v_images",
    "zero_start",
    "random_start",
    "zero_fast",
    "swap_fast",
    "mean_fast",
    "mean_rate",
    "shuffle_rate",
)

_CHOICES = {
    "model": MODELS,
    "residual": ("none", "input", "output_weight"),
    "init": ("random", "zero", "identity"),
    "output_init": ("same", "zero", "identity"),
    "loss": LOSSES,
    "rate": ("fixed", "learned", "per_head", "token", "token_head"),
    "direction": ("descent", "ascent"),
    "order": ("raster", "strided", "blockwise", "random"),
    "optimizer": ("sgd", "momentum", "muon", "adam"),
    "gradient_norm": ("none", "soft", "clip"),
    "control": CONTROLS,
}

# name: (lowest, highest) allowed, both included; None = no bound
_RANGES = {
    "ratio": (1e-3, None),
    "depth": (2, None),
    "kernel": (1, None),
    "dilation": (1, None),
    "heads": (1, None),
    "lr": (0, None),
    "scale": (1e-12, None),
    "threshold": (1e-12, None),
    "epochs": (0, None),
    "momentum": (0, 0.9999),
    "max_norm": (1e-12, None),
}


# Knobs that only some inner models have
_ONLY_FOR = {
    "ratio": ("mlp", "swiglu"),
    "depth": ("mlp",),
    "kernel": ("conv", "dwconv"),
    "dilation": ("conv", "dwconv"),
}

_WHOLE = ("depth", "kernel", "dilation", "heads", "epochs")
_SWITCHES = ("extra", "renormalise")

# knobs of the training that have no effect with most values of another one: name: (the other one, its values)
_ONLY_WITH = {
    "threshold": ("loss", ("huber",)),
    "momentum": ("optimizer", ("momentum", "muon")),
    "max_norm": ("gradient_norm", ("clip",)),
}


def _check_values(spec: ModelSpec) -> None:
    """Every knob by itself: a known choice, a finite number in its range."""
    for name, allowed in _CHOICES.items():
        value = getattr(spec, name, allowed[0])
        if value not in allowed:
            raise ValueError(f"inner.{name}={value} is not allowed; use one of: {', '.join(allowed)}")
    for name, (low, high) in _RANGES.items():
        value = getattr(spec, name, low)
        if value is None and name == "scale":
            continue
        if isinstance(value, bool) or not (isinstance(value, (int, float)) and math.isfinite(value)):
            raise ValueError(f"inner.{name}={value!r} must be a finite number")
        if name in _WHOLE and not isinstance(value, int):
            raise ValueError(f"inner.{name}={value!r} must be a whole number")
        if value < low or (high is not None and value > high):
            bounds = f"at least {low:g}" if high is None else f"between {low:g} and {high:g}"
            raise ValueError(f"inner.{name}={value} is not allowed; it must be {bounds}")
    for name in _SWITCHES:
        if not isinstance(getattr(spec, name, False), bool):
            raise ValueError(f"inner.{name}={getattr(spec, name)!r} is not allowed; use true or false")


def _from_values(spec: type, values: Mapping[str, Any]) -> Any:
    known = [field.name for field in dataclasses.fields(spec)]
    if unknown := [name for name in values if name not in known]:
        raise ValueError(f"inner.{unknown[0]} is no knob of the inner problem; use one of: {', '.join(known)}")
    return spec(**values)


@dataclass(frozen=True)
class ModelSpec:
    """An inner model f(W, x), which keeps the head dim D.

    Attributes:
        model: ``fc`` xW; ``silu_fc`` silu(xW); ``mlp`` linear layers with silu between; ``glu`` xW1 * silu(xW2);
            ``swiglu`` (xW1 * silu(xW2))W3; ``conv`` dense convolution per head; ``dwconv`` depthwise (table 4).
        ratio: hidden width of ``mlp`` and ``swiglu`` in units of D (table 4: r).
        depth: linear layers of ``mlp`` (table 4: l; figure 3).
        kernel: side of the kernel of ``conv`` and ``dwconv``, odd.
        dilation: distance of its taps.
        residual: ``input`` f(x) + x, ``output_weight`` the last weight is used as W + I, or ``none`` (table 6).
        init: learned start W0: ``random`` (truncated normal, std 0.02), ``zero``, or ``identity``
            (for a convolution: the centre tap).
        output_init: start of the last weight alone: ``zero``, ``identity`` (table 6), or the ``same`` as the others.
    """

    model: str = "glu"
    ratio: float = 1.0
    depth: int = 2
    kernel: int = 3
    dilation: int = 1
    residual: str = "none"
    init: str = "random"
    output_init: str = "same"

    def __post_init__(self):
        _check_values(self)
        model, where = self.model, f"of inner model '{self.model}'"
        if self.kernel % 2 == 0:
            raise ValueError(f"inner.kernel={self.kernel} must be odd, so that it has a centre")
        for name, models in _ONLY_FOR.items():
            if model not in models and getattr(self, name) != getattr(ModelSpec, name):
                raise ValueError(
                    f"inner.{name}={getattr(self, name)} means nothing {where}; it is a knob of {', '.join(models)}"
                )
        square = ("fc", "silu_fc", "glu", "conv", "dwconv")  # their last weight maps D to D
        wants = [name for name in ("residual", "output_init") if getattr(self, name) in ("output_weight", "identity")]
        if self.init == "identity":
            wants.append("init")
        for name in wants:
            if model not in square and self.ratio != 1:
                raise ValueError(f"inner.{name}={getattr(self, name)} needs square weights; set inner.ratio=1, "
                                 f"or leave inner.{name} at '{getattr(ModelSpec, name)}'")  # fmt: skip
        if self.residual == "output_weight" and model not in ("mlp", "swiglu"):
            raise ValueError(f"inner.residual=output_weight needs an output layer, which '{model}' has not; "
                             "use inner.residual=input, or inner.model=mlp or swiglu")  # fmt: skip
        if self.init == "zero" and model in ("mlp", "glu", "swiglu"):
            raise ValueError(f"inner.init=zero never learns with inner.model={model}: each gradient is a product "
                             "with another weight, all zero; use inner.output_init=zero, or another model")  # fmt: skip


@dataclass(frozen=True)
class BranchSpec(ModelSpec):
    """One more inner model, which learns beside the first one.

    Attributes:
        heads: on how many heads it runs.
        extra: these heads come on top of the mixer's M, so that the projections are wider, as in the released block;
            otherwise it takes them from the first inner model, as the paper's text reads.
    """

    heads: int = 1
    extra: bool = False


@dataclass(frozen=True)
class InnerSpec(ModelSpec):
    """The inner problem: the first inner model, those beside it, and how all of them are trained on (k, v).

    The default is the authors' released block: a GLU on all heads and a 3x3 depthwise convolution on one extra head,
    dot-product loss, one full-batch step of rate 1, soft gradient norm.

    Attributes:
        beside: further inner models. The first one has all heads that they leave.
        loss: table 1 and appendix 8, and two of ours: ``huber`` (smooth_l1 at any threshold) and ``cosine``.
        scale: factor of the loss. The released block uses 1/3 in both branches (the square root of the nine taps of
            its convolution); None is the paper's 1/sqrt(D). ``rmse`` has it under the root.
        threshold: where ``huber`` turns from square to straight.
        lr: inner learning rate eta (table 3; 1.0 in the released models).
        rate: what multiplies lr: nothing (``fixed``), a learned factor exp(s) of the mixer (``learned``) or of each
            head (``per_head``), or a gate sigmoid(x w) of each token (``token``, the paper's dynamic rate) or of each
            token and head (``token_head``).
        direction: ``ascent`` flips the sign of the step (control of arXiv 2602.21204).
        batch: tokens per step: ``N`` all, ``N/k`` for k equal parts, or a number (table 2).
        order: how tokens are dealt to mini-batches: ``raster`` row by row (the paper's), ``strided`` every k-th,
            ``blockwise`` rectangles of the grid, ``random`` a fixed shuffle.
        epochs: passes over the tokens (table 2); 0 leaves W0 as it is (the no-update control).
        optimizer: ``sgd``, ``momentum``, ``muon`` (five Newton-Schulz steps) or ``adam``.
        momentum: of ``momentum`` and ``muon``, over the steps of one image.
        gradient_norm: ``soft`` g / (norm + 1), as the released block; ``clip`` to max_norm; or ``none``. Norms are
            taken per output column, or per channel over a kernel.
        max_norm: of ``clip``.
        renormalise: scale each column back to its norm in W0 after every step (as LaCT does).
        control: an intervention that breaks one part of the mixer on purpose, see :mod:`vit3.inner.controls`.
    """

    beside: Tuple[BranchSpec, ...] = (BranchSpec(model="dwconv", extra=True),)
    loss: str = "dot"
    scale: Optional[float] = 1.0 / 3.0
    threshold: float = 1.0
    lr: float = 1.0
    rate: str = "fixed"
    direction: str = "descent"
    batch: str = "N"
    order: str = "raster"
    epochs: int = 1
    optimizer: str = "sgd"
    momentum: float = 0.9
    gradient_norm: str = "soft"
    max_norm: float = 1.0
    renormalise: bool = False
    control: str = "none"

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> InnerSpec:
        """From plain values by name, those of ``beside`` too.

        Raises:
            ValueError: no such knob, or a value that is not allowed.
        """
        values = dict(values)
        if "beside" in values:
            values["beside"] = tuple(_from_values(BranchSpec, branch) for branch in values["beside"])
        return _from_values(cls, values)

    def __post_init__(self):
        super().__post_init__()
        if not (isinstance(self.beside, (tuple, list)) and all(isinstance(b, BranchSpec) for b in self.beside)):
            raise ValueError(f"inner.beside={self.beside!r} must be a list of BranchSpec, empty for none")
        object.__setattr__(self, "beside", tuple(self.beside))
        object.__setattr__(self, "batch", str(self.batch))
        if not re.fullmatch(r"N|N/[1-9]\d*|[1-9]\d*", self.batch):
            raise ValueError(f"inner.batch={self.batch} must be N, N/k for k parts, or a number of tokens")
        for name, (other, values) in _ONLY_WITH.items():
            if getattr(self, other) not in values and getattr(self, name) != getattr(InnerSpec, name):
                raise ValueError(f"inner.{name}={getattr(self, name)} means nothing with inner.{other}="
                                 f"{getattr(self, other)}; it is a knob of {' and '.join(values)}")  # fmt: skip
        for branch in (self, *self.beside):
            zero = "zero" in (branch.init, branch.output_init)
            if zero and self.loss == "cosine" and branch.residual == "none":
                raise ValueError("inner.loss=cosine has no direction at predictions of zero, with which a zero start "
                                 "begins; use another inner.init and inner.output_init, or another loss")  # fmt: skip
            stuck = zero and branch.model in ("mlp", "glu", "swiglu") and branch.residual != "output_weight"
            if stuck and self.optimizer in ("adam", "muon"):
                raise ValueError(f"inner.optimizer={self.optimizer} divides gradients by their size, and with "
                                 f"inner.output_init=zero the first ones of '{branch.model}' are zero; use sgd or "
                                 "momentum, or inner.output_init=same")  # fmt: skip
        if self.optimizer == "muon":
            for branch in (self, *self.beside):
                if branch.model == "dwconv":
                    raise ValueError("inner.optimizer=muon makes matrices orthogonal, and a depthwise kernel is none; "
                                     "use sgd, momentum or adam, or inner models fc, mlp, glu, conv")  # fmt: skip
        if self.renormalise and any("zero" in (branch.init, branch.output_init) for branch in (self, *self.beside)):
            raise ValueError("inner.renormalise=true keeps weights that start at zero there; use another inner.init")
        if self.control in ("mean_rate", "shuffle_rate") and not self.rate.startswith("token"):
            raise ValueError(f"inner.control={self.control} needs a rate per token; set inner.rate=token")

    def to_plain(self) -> dict[str, Any]:
        """Plain values by name, which JSON and YAML can hold: the inverse of :meth:`of`."""
        plain = dataclasses.asdict(self)
        return plain | {"beside": list(plain["beside"])}

    def derive(self, **changes) -> InnerSpec:
        """The same with some knobs changed; unknown names are errors in words."""
        known = {field.name for field in dataclasses.fields(self)}
        for name in changes:
            if name not in known:
                raise ValueError(f"inner.{name} is no knob; known: {', '.join(sorted(known))}")
        return dataclasses.replace(self, **changes)
