"""The one loader of weights: read a file without running its code, strip wrappers' prefixes, match, report."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from timm.models._manipulate import adapt_input_conv
from torch import Tensor, nn

from vit3.files import replacing
from vit3.models.heads import reorder_head
from vit3.models.places import resolve
from vit3.models.safetensors_file import decode, encode
from vit3.models.unpickle import WeightsError, read_checkpoint

logger = logging.getLogger(__name__)

# Where checkpoints keep their weights, best first; the EMA copy is taken only on request.
_RAW_KEYS = ("state_dict", "model")
_EMA_KEYS = ("state_dict_ema", "model_ema", "ema")  # the last is DiT's
_EXCHANGED = "ema_state_dict"  # MMEngine's files have the average under "state_dict" and here the raw weights
_PREFIXES = ("module.", "_orig_mod.", "model.", "backbone.")
_WRAPPERS = ("_orig_mod", "module")  # what torch.compile, DDP and averages call the network inside
_TRUNKS = ("backbone.", "body.")  # what detectors and segmentors call the part that classifiers share with them


@dataclass
class LoadReport:
    """What became of every tensor when a file met a model.

    Attributes:
        matched: names in both, of one shape. missing: only in the model. unexpected: only in the file.
        reshaped: in both, of different shapes. sizes: number of values of each of the model's tensors.
        adapted: those of ``matched`` that were made to fit, with what was done.
    """

    matched: list[str]
    missing: list[str]
    unexpected: list[str]
    reshaped: list[str]
    sizes: Mapping[str, int] = field(repr=False)
    adapted: Mapping[str, str] = field(default_factory=dict)

    @property
    def fraction(self) -> float:
        """The smaller of matched tensors / tensors and matched values / values of the model, 0 to 1."""
        total = sum(self.sizes.values())
        values = sum(self.sizes[name] for name in self.matched)
        return min(len(self.matched) / max(len(self.sizes), 1), values / max(total, 1))

    def __str__(self) -> str:
        values = {key: sum(self.sizes[n] for n in getattr(self, key)) for key in ("matched", "missing", "reshaped")}
        parts = [f"{key} {len(getattr(self, key))} tensors ({value:,} values)" for key, value in values.items()]
        adapted = "".join(f"; adapted {name} {how}" for name, how in self.adapted.items())
        parts.append(f"unexpected {len(self.unexpected)} tensors")
        return f"{', '.join(parts)}; the model has {len(self.sizes)}{adapted}"

    def require(self, minimum: float, what: str) -> None:
        """Raise :class:`WeightsError` if less than ``minimum`` (0 to 1) of the model was matched."""
        if self.fraction >= minimum:
            return
        examples = "; ".join(
            f"{key}: {', '.join(names[:3])}{', …' if len(names) > 3 else ''}"
            for key in ("missing", "unexpected", "reshaped")
            if (names := getattr(self, key))
        )
        raise WeightsError(
            f"{what} fits {100 * self.fraction:.1f} % of the model, at least {100 * minimum:.0f} % is needed "
            f"({self}; {examples})"
        )


def read_tensors(path: str | Path, ema: bool = False) -> dict[str, Tensor]:
    """Read the weights of a ``.safetensors`` file or a PyTorch checkpoint, wrappers' prefixes stripped.

    Pickled code of a checkpoint is never run: objects other than tensors and plain containers become inert.

    Args:
        path: the file.
        ema: take the exponential moving average instead of the raw weights.

    Raises:
        FileNotFoundError: no such file.
        WeightsError: the file is unreadable, or holds no weights of the wanted kind.
    """
    return _read(Path(path), ema).tensors


def stored_kinds(path: str | Path) -> tuple[str, ...]:
    """Which of ``raw`` and ``ema`` a file says it holds; none where it does not say. Errors as above."""
    path = Path(path)
    if path.suffix == ".safetensors":
        return tuple(kind for kind in ("raw", "ema") if decode(path)[1].get("weights") == kind)
    checkpoint = read_checkpoint(path)
    if not isinstance(checkpoint, Mapping):
        return ()
    if _EXCHANGED in checkpoint:
        return ("ema",)
    kinds = {"raw": _RAW_KEYS, "ema": _EMA_KEYS}
    return tuple(kind for kind, keys in kinds.items() if any(isinstance(checkpoint.get(k), Mapping) for k in keys))


def write_tensors(
    path: str | Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
    classes: Sequence[str] | None = None,
) -> None:
    """Write named weights to a ``.safetensors`` file, whole or not at all.

    Wrappers' prefixes are stripped and memory formats such as channels_last dropped: names and values are what counts.

    Args:
        path: the file; its folder is made if need be.
        tensors: a state dict, also of a compiled, DDP-wrapped or EMA model.
        metadata: short texts for the file's header; of these the loader reads ``weights``: ``raw`` or ``ema``.
        classes: names in the order of the labels, for the header: the loader moves a classifier's rows by them.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    plain = {name: value.detach().contiguous() for name, value in strip_prefixes(tensors).items()}
    header = dict(metadata or {}) | ({} if classes is None else {"classes": json.dumps(list(classes))})
    with replacing(path) as file:
        file.write(encode(plain, header))


def strip_prefixes(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Remove what DDP, compile, EMA, task and detector wrappers put before every name of a model."""
    tensors = dict(tensors)
    while True:
        prefix = next((p for p in _PREFIXES if tensors and all(name.startswith(p) for name in tensors)), None)
        if prefix is None:
            return tensors
        tensors = {name[len(prefix) :]: value for name, value in tensors.items()}


def trunk(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The backbone's tensors of a detector or segmentor, by its own names; of any other model all tensors."""
    tensors = strip_prefixes(tensors)
    for prefix in _TRUNKS:
        part = {name: value for name, value in tensors.items() if name.startswith(prefix)}
        if not part and prefix == _TRUNKS[0]:
            return tensors
        tensors = strip_prefixes({name[len(prefix) :]: value for name, value in part.items()}) or tensors
    return tensors


def bare(model: nn.Module) -> nn.Module:
    """The network inside the wrappers of torch.compile, DDP and moving averages."""
    while (names := [name for name, _ in model.named_children()]) and len(names) == 1 and names[0] in _WRAPPERS:
        model = getattr(model, names[0])
    return model


def load_weights(
    model: nn.Module,
    place: str | Path,
    *,
    ema: bool = False,
    minimum: float = 0.95,
    classes: Sequence[str] | None = None,
) -> LoadReport:
    """Load weights into a model; what the file has in another size is adapted by these rules, all else has to fit.

    * First convolution, for images of another number of channels (timm's ``adapt_input_conv``): for one channel the
      sum over the file's channels; for n channels these repeated up to n, times theirs / n. A network of latents
      (``model.colours = False``) has it fresh. Adapted tensors count as matched.
    * Classifier: of the same size it is loaded as it is; where both name their classes, its rows go by name, and it
      starts fresh if the file lacks one of them; of another size it stays fresh.
    * Of a detector's or segmentor's file the backbone is taken (:func:`trunk`). What a backbone's file may lack, its
      ``model.fresh`` says.

    Which weights were taken, raw ones or their moving average, is logged.

    Args:
        model: a classifier, backbone or generator, also inside wrappers.
        place: see :func:`vit3.models.places.resolve`; files are read as by :func:`read_tensors`.
        ema: take the moving average; only then it is taken.
        minimum: fraction of the model without its classifier and without what is fresh that must match, 0 to 1.
        classes: names of the model's classes, in the order of their labels.

    Returns:
        The report over the whole model.

    Raises:
        FileNotFoundError, WeightsError: no such place, unreadable, too little of it fits, or values that are not
            finite or not floating point.
    """
    model, path = bare(model), resolve(place)
    content = _read(path, ema)
    logger.info("%s: taking %s", path, content.kind)
    tensors = trunk(content.tensors)
    classifier = model.get_classifier() if hasattr(model, "get_classifier") else None
    heads = {name for name, module in model.named_modules() if module is classifier}
    if content.classes is not None and classes is not None:
        for head in heads:
            tensors, sentence = reorder_head(tensors, head, list(content.classes), list(classes))
            logger.info("%s: %s", path, sentence)
    tensors, adapted = _adapt_channels(tensors, model)
    head = {f"{name}.{leaf}" for name in heads for leaf in ("weight", "bias")}
    body = {name: value for name, value in tensors.items() if name not in head}
    own = dict(zip(strip_prefixes(model.state_dict()), model.state_dict()))
    fresh = {name for name in own if name.startswith(getattr(model, "fresh", ())) and name not in tensors}
    match(body, model, ignore=head | fresh).require(minimum, str(path))
    report = match(tensors, model)
    report.adapted = adapted
    held = model.state_dict()
    _check_values({name: tensors[name] for name in report.matched if held[own[name]].is_floating_point()}, path)
    model.load_state_dict({own[name]: tensors[name] for name in report.matched}, strict=False)
    return report


def _adapt_channels(tensors: dict[str, Tensor], model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The first convolution, if it alone differs in channels, and what was done to which tensor."""
    wanted = getattr(model, "in_chans", None)
    for name, module in model.named_modules() if getattr(model, "colours", True) else ():
        if not isinstance(module, nn.Conv2d) or module.in_channels != (wanted or module.in_channels):
            continue
        weight, own = tensors.get(f"{name}.weight"), module.weight.shape
        if weight is None or weight.ndim != 4 or module.groups != 1 or weight.shape[1] == own[1]:
            break
        if (weight.shape[0], *weight.shape[2:]) != (own[0], *own[2:]):
            break
        adapted = adapt_input_conv(own[1], weight, base_chans=weight.shape[1])
        name = f"{name}.weight"
        return tensors | {name: adapted}, {name: f"from {weight.shape[1]} to {own[1]} channels"}
    return tensors, {}


def _check_values(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Raise a WeightsError for weights that a network cannot compute with, as it would without a word."""
    for name, value in tensors.items():
        if not value.is_floating_point():
            raise WeightsError(f"{path}: {name} is {value.dtype}, as quantised weights are; give the file of floating "
                               "point weights that it was made of")  # fmt: skip
        if not value.isfinite().all():
            raise WeightsError(f"{path}: {name} has values that are not finite, as after a training that diverged; "
                               "give an earlier checkpoint")  # fmt: skip


def match(tensors: Mapping[str, Tensor], model: nn.Module, ignore: Collection[str] = ()) -> LoadReport:
    """Compare named tensors with a model's state dict, without the names to ``ignore``; nothing is loaded."""
    own = {name: value for name, value in strip_prefixes(model.state_dict()).items() if name not in ignore}
    same = {name: tensors[name].shape == value.shape for name, value in own.items() if name in tensors}
    return LoadReport(
        matched=[name for name, fits in same.items() if fits],
        missing=[name for name in own if name not in tensors],
        unexpected=[name for name in tensors if name not in own],
        reshaped=[name for name, fits in same.items() if not fits],
        sizes={name: value.numel() for name, value in own.items()},
    )


@dataclass
class _Content:
    """Weights of a file, its classes in the order of their labels if it names them, and what the weights are."""

    tensors: dict[str, Tensor]
    classes: Sequence[str] | None
    kind: str


def _read(path: Path, ema: bool) -> _Content:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    if path.suffix == ".safetensors":
        return _read_safetensors(path, ema)
    checkpoint = read_checkpoint(path)
    classes = checkpoint.get("classes") if isinstance(checkpoint, Mapping) else None
    tensors, kind = _state_dict(checkpoint, path, ema)
    return _Content(strip_prefixes(tensors), classes, kind)


def _read_safetensors(path: Path, ema: bool) -> _Content:
    tensors, header = decode(path)
    stored = header.get("weights", "stored")
    if ema and stored == "raw":
        raise WeightsError(f"{path} holds raw weights, no moving average; take it without ema=True")
    classes = json.loads(header["classes"]) if "classes" in header else None
    return _Content(strip_prefixes(tensors), classes, f"its {stored} weights, the only ones")


def _state_dict(checkpoint, path: Path, ema: bool) -> tuple[dict[str, Tensor], str]:
    """The weights inside a checkpoint, under a known key or the checkpoint itself; and what they are, in words."""
    kind = "its weights, the only ones"
    if isinstance(checkpoint, Mapping):
        held = [key for key in (*_RAW_KEYS, *_EMA_KEYS) if isinstance(checkpoint.get(key), Mapping)]
        averaged = next((key for key in held if key in _EMA_KEYS), None)
        exchanged = _EXCHANGED in checkpoint
        key = next((key for key in held if (key in _EMA_KEYS) == (ema and not exchanged)), None)
        if key is not None:
            if exchanged or key in _EMA_KEYS:
                kind = f"its moving average ({key})"
            else:
                kind = f"its raw weights ({key})" + ("; ema=True takes the moving average" if averaged else "")
            checkpoint = checkpoint[key]
        elif ema and not exchanged:
            raise WeightsError(f"{path} holds no EMA weights (looked for {' and '.join(_EMA_KEYS)})")
        elif averaged:
            raise WeightsError(
                f"{path} holds a moving average alone ({averaged}); take it by ema=True, or save it as state_dict"
            )
        tensors = {name: value for name, value in checkpoint.items() if isinstance(value, Tensor)}
        if tensors:
            return tensors, kind
    raise WeightsError(f"{path} holds no weights: expected named tensors, or such under {' or '.join(_RAW_KEYS)}")
