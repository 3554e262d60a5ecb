"""What goes into an exported network and what comes out: names, shapes, types, and which sides are free."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import torch
from timm.utils import unwrap_model
from torch import Tensor
from torch.export import Dim

from vit3.export.subject import KINDS, Subject
from vit3.layers.position import PositionTable

DYNAMIC = ("batch", "size")
IMAGE, TIMES, LABELS = "images", "times", "labels"
LARGE = 100.0  # images of normalised pixels are within about 3


@dataclass(frozen=True)
class Probe:
    """Inputs to try an exported network with, and in words what they show."""

    what: str
    inputs: tuple[Tensor, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the images or latents."""
        return tuple(self.inputs[0].shape)


@dataclass(frozen=True)
class Signature:
    """Inputs and outputs of an exported network, in their order.

    | kind | inputs | outputs |
    |---|---|---|
    | classifier | ``images`` (B, in_chans, H, W) float32, normalised | ``logits`` (B, classes) |
    | features | the same | ``map_4``, ``map_8``, … by their strides |
    | generator | ``latents`` (B, C, H, W) float32, ``times`` (B,) float32, ``labels`` (B,) int64 | ``noise`` |

    Attributes:
        kind: as of :class:`vit3.export.Subject`.
        inputs, outputs: names.
        in_chans: channels of the images or latents.
        img_size: nominal (height, width) in pixels, of a generator in latent pixels; the only one if sizes are fixed.
        dynamic: what is free: ``batch``, ``size``, both or nothing. A fixed batch is of 1.
        lowest: smallest side while sizes are free. PyTorch's exporter treats an axis of length 1 as another network,
            so the last grid must have two tokens a side: one pixel more than the largest stride (33 of H-ViT³, 17 of
            ViT³ with patches of 16, patch + 1 of DiT³).
        multiple: free sides are multiples of it; compilers take far less time where it is the largest stride.
        labels: of a generator, labels 0 to labels - 1; the last one stands for no class.
        about: what users of the file have to know (JSON): name, preprocessing, classes, weights, source.
    """

    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    in_chans: int
    img_size: tuple[int, int]
    dynamic: tuple[str, ...]
    lowest: int
    multiple: int = 1
    labels: int = 0
    about: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls, subject: Subject, dynamic: Sequence[str] | None = None, img_size: tuple[int, int] | None = None
    ) -> Signature:
        """The signature under which ``subject`` is exported.

        Args:
            subject: the network. dynamic: any of ``batch`` and ``size``; None for all that the network allows.
            img_size: nominal (height, width) instead of the subject's.

        Raises:
            ValueError: unknown kind, or an axis that cannot be free.
        """
        if subject.kind not in KINDS:
            raise ValueError(f"kind='{subject.kind}' is unknown; use one of: {', '.join(KINDS)}")
        model = unwrap_model(subject.model)
        size = tuple(img_size or subject.img_size)
        wanted = _checked_dynamic(model, subject.name, dynamic, size)
        stride = _largest_stride(model, subject.kind)
        about = {key: getattr(subject, key) for key in ("name", "kwargs", "preprocessing", "weights", "source")}
        about["classes"] = None if subject.classes is None else list(subject.classes)
        names = {
            "classifier": ((IMAGE,), ("logits",)),
            "features": ((IMAGE,), tuple(f"map_{stride}" for stride in getattr(model, "strides", ()))),
            "generator": (("latents", TIMES, LABELS), ("noise",)),
        }
        labels = model.num_classes + 1 if subject.kind == "generator" else 0
        inputs, outputs = names[subject.kind]
        return cls(subject.kind, inputs, outputs, subject.in_chans, size, wanted, stride + 1, 1, labels, about)

    def in_steps(self, multiple: int) -> Signature:
        """The same, with free sides that are multiples of ``multiple``.

        Raises:
            ValueError: ``multiple`` is below 1, or the nominal sides are not multiples of it.
        """
        if multiple < 1:
            raise ValueError(f"multiple={multiple} is not allowed; it must be at least 1")
        if multiple == 1 or "size" not in self.dynamic:
            return self
        if any(side % multiple for side in self.img_size):
            raise ValueError(f"multiple={multiple} does not divide img_size={list(self.img_size)}; use another")
        steps = max(2, -(-self.lowest // multiple))  # of one step the exporter would make a constant
        return replace(self, multiple=multiple, lowest=steps * multiple)

    @property
    def batch(self) -> str | None:
        """Name of the first axis if it is free."""
        return "batch" if "batch" in self.dynamic else None

    def axes(self) -> dict[str, dict[int, str]]:
        """Names of the free axes of each input, by their place."""
        first = {0: "batch"} if "batch" in self.dynamic else {}
        sides = {2: "height", 3: "width"} if "size" in self.dynamic else {}
        return {name: {**first, **sides} if i == 0 else dict(first) for i, name in enumerate(self.inputs)}

    def dynamic_shapes(self) -> tuple[dict[int, Dim] | None, ...]:
        """The free axes as :func:`torch.export.export` wants them."""
        step = self.multiple
        sides = [step * Dim(name, min=self.lowest // step) if step > 1 else Dim(name, min=self.lowest)
                 for name in ("height", "width")]  # fmt: skip
        dims = {"batch": Dim("batch"), "height": sides[0], "width": sides[1]}
        return tuple({at: dims[name] for at, name in axes.items()} or None for axes in self.axes().values())

    def make(self, batch: int, height: int, width: int, seed: int = 0, scale: float = 1.0) -> tuple[Tensor, ...]:
        """Random inputs, the same in every call: images or latents of spread ``scale``, all times and labels."""
        generator = torch.Generator().manual_seed(seed)
        images = scale * torch.randn(batch, self.in_chans, height, width, generator=generator)
        if self.kind != "generator":
            return (images,)
        times = 1000 * torch.rand(batch, generator=generator)
        return images, times, torch.randint(0, self.labels, (batch,), generator=generator)

    def example(self) -> tuple[Tensor, ...]:
        """Inputs that the network is traced with; free axes differ, so that none is taken for another."""
        if "size" not in self.dynamic:
            return self.make(self._batch(2), *self.img_size)
        height, width = (max(side, self.lowest) for side in self.img_size)
        return self.make(self._batch(2), height, self._side(width + self.lowest - 1))

    def probes(self) -> list[Probe]:
        """Inputs that must give what the network gives: other batches and sizes, and large values."""
        (height, width), batch = self.img_size, self._batch(2)
        if "size" in self.dynamic:
            height, width = max(height, self.lowest), max(width, self.lowest)
        batches = (1, 3, 8) if self.batch else (1,)
        found = [Probe(f"batch {n}", self.make(n, height, width, seed=n)) for n in batches]
        if "size" in self.dynamic:
            low, high = self._side(max(self.lowest, width * 3 // 4)), self._side(height * 5 // 4)
            low, high = (low | 1, high | 1) if self.multiple == 1 else (low, high)  # odd: no stride divides them
            found.append(Probe("smallest height", self.make(batch, self.lowest, low, seed=11)))
            found.append(Probe("larger, not square", self.make(batch, high, low, seed=12)))
        found.append(Probe(f"values times {LARGE:g}", self.make(batch, height, width, seed=13, scale=LARGE)))
        return found

    def refused(self) -> list[Probe]:
        """Inputs that were not declared: they must be refused, or give what the network gives."""
        (height, width), batch = self.img_size, self._batch(2)
        stride = self.lowest - self.multiple
        if "size" in self.dynamic:
            height, width = max(height, self.lowest), max(width, self.lowest)
            small = self.make(batch, stride, width, seed=22)
            found = [Probe(f"height below {self.lowest}", small)] if stride else []
            if self.multiple > 1:
                what = f"height no multiple of {self.multiple}"
                found.append(Probe(what, self.make(batch, height + 1, width, seed=24)))
        else:
            found = [Probe("another size", self.make(batch, height + stride, width, seed=22))]
        if not self.batch:
            found.append(Probe("another batch", self.make(batch + 1, height, width, seed=21)))
        images, *others = self.make(batch, height, width, seed=23)
        found.append(Probe("one channel more", (torch.cat([images, images[:, :1]], dim=1), *others)))
        return found

    def check(self, *inputs: Tensor) -> None:
        """Raise a ValueError unless ``inputs`` are declared."""
        if len(inputs) != len(self.inputs):
            raise ValueError(f"{len(inputs)} inputs were given; this file takes {', '.join(self.inputs)}")
        for name, x in zip(self.inputs, inputs):
            wanted = torch.int64 if name == LABELS else torch.float32
            if x.dtype != wanted:
                raise ValueError(f"{name} are {x.dtype}; this file takes {wanted}")
            axes, fixed = self.axes()[name], (1,) if name in (TIMES, LABELS) else (1, self.in_chans, *self.img_size)
            allowed = ", ".join(axes.get(i, str(side)) for i, side in enumerate(fixed))
            wrong = x.ndim != len(fixed) or any(
                (side < self.lowest or side % self.multiple if i >= 2 else side < 1) if i in axes else side != fixed[i]
                for i, side in enumerate(x.shape)
            )
            if wrong:
                low = f" with sides of at least {self.lowest}" if {2, 3} & axes.keys() else ""
                low += f" that are multiples of {self.multiple}" if low and self.multiple > 1 else ""
                raise ValueError(f"{name} are {tuple(x.shape)}, but this file was exported for ({allowed}){low}; "
                                 "resize them, or export the network again for this shape")  # fmt: skip
            if x.shape[0] != inputs[0].shape[0]:
                raise ValueError(f"{name} are {x.shape[0]}, but {self.inputs[0]} are {inputs[0].shape[0]}; "
                                 "give one for each")  # fmt: skip

    def to_json(self) -> str:
        """As text, to be kept in the exported file."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Signature:
        """The signature that :meth:`to_json` wrote."""
        values = json.loads(text)
        known = {f.name: values[f.name] for f in fields(cls)}
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in known.items()})

    def _side(self, side: int) -> int:
        """``side``, or the next one above it that is allowed."""
        return -(-side // self.multiple) * self.multiple

    def _batch(self, wanted: int) -> int:
        return wanted if self.batch else 1


def _checked_dynamic(model, name: str, dynamic: Sequence[str] | None, size: tuple[int, int]) -> tuple[str, ...]:
    """The free axes, in the order of ``DYNAMIC``."""
    reason = None
    if any(isinstance(module, PositionTable) for module in model.modules()):
        reason = "it has a table of positions, which is resampled for every other size"
    elif (getattr(model, "pretrained_cfg", None) or {}).get("fixed_input_size"):
        reason = "timm builds it for one size of images"
    if dynamic is None:
        return DYNAMIC if reason is None else ("batch",)
    if unknown := [axis for axis in dynamic if axis not in DYNAMIC]:
        raise ValueError(f"dynamic={unknown[0]} is unknown; use any of: {', '.join(DYNAMIC)}")
    if "size" in dynamic and reason is not None:
        raise ValueError(f"dynamic=size cannot be had with {name}: {reason}; use dynamic=[batch], and export it once "
                         f"for each size (now {size[0]} x {size[1]})")  # fmt: skip
    return tuple(axis for axis in DYNAMIC if axis in dynamic)


def _largest_stride(model, kind: str) -> int:
    """Pixels of the image, a side, for one token of the coarsest grid."""
    if kind == "generator":
        return model.patch_size
    if kind == "features":
        return max(model.strides)
    info = getattr(model, "feature_info", None) or [dict(reduction=32)]
    return max(entry["reduction"] for entry in info)
