"""The one loader of weights: read a file without running its code, strip wrappers' prefixes, match, report."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import safetensors.torch
from torch import Tensor, nn

from vit3.files import replacing
from vit3.models.heads import reorder_head
from vit3.models.unpickle import WeightsError, read_checkpoint

logger = logging.getLogger(__name__)

# Where checkpoints keep their weights, best first; the EMA copy is taken only on request.
_RAW_KEYS = ("state_dict", "model")
_EMA_KEYS = ("state_dict_ema", "model_ema", "ema")  # the last is DiT's
_EXCHANGED = "ema_state_dict"  # MMEngine's files have the average under "state_dict" and here the raw weights
_PREFIXES = ("module.", "_orig_mod.", "model.", "backbone.")
_TRUNKS = ("backbone.", "body.")  # what detectors and segmentors call the part that classifiers share with them


@dataclass
class LoadReport:
    """What became of every tensor when a file met a model.

    Attributes:
        matched: names in both, of one shape. missing: only in the model. unexpected: only in the file.
        reshaped: in both, of different shapes. sizes: number of values of each of the model's tensors.
    """

    matched: list[str]
    missing: list[str]
    unexpected: list[str]
    reshaped: list[str]
    sizes: Mapping[str, int] = field(repr=False)

    @property
    def fraction(self) -> float:
        """The smaller of matched tensors / tensors and matched values / values of the model, 0 to 1."""
        total = sum(self.sizes.values())
        values = sum(self.sizes[name] for name in self.matched)
        return min(len(self.matched) / max(len(self.sizes), 1), values / max(total, 1))

    def __str__(self) -> str:
        values = {key: sum(self.sizes[n] for n in getattr(self, key)) for key in ("matched", "missing", "reshaped")}
        parts = [f"{key} {len(getattr(self, key))} tensors ({value:,} values)" for key, value in values.items()]
        return f"{', '.join(parts)}, unexpected {len(self.unexpected)} tensors; the model has {len(self.sizes)}"

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
    return _read(Path(path), ema)[0]


def holds_average(path: str | Path) -> bool:
    """Whether a checkpoint holds a moving average beside, or instead of, its raw weights; errors as above."""
    path = Path(path)
    checkpoint = {} if path.suffix == ".safetensors" else read_checkpoint(path)
    return isinstance(checkpoint, Mapping) and any(isinstance(checkpoint.get(key), Mapping) for key in _EMA_KEYS)


def write_tensors(path: str | Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write named weights to a ``.safetensors`` file, whole or not at all.

    Wrappers' prefixes are stripped and memory formats such as channels_last dropped: names and values are what counts.

    Args:
        path: the file; its folder is made if need be.
        tensors: a state dict, also of a compiled, DDP-wrapped or EMA model.
        metadata: short texts for the file's header.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    plain = {name: value.detach().contiguous() for name, value in strip_prefixes(tensors).items()}
    with replacing(path) as file:
        file.write(safetensors.torch.save(plain, metadata))


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


def load_weights(
    model: nn.Module,
    path: str | Path,
    *,
    ema: bool = False,
    minimum: float = 0.95,
    classes: Sequence[str] | None = None,
) -> LoadReport:
    """Load a file into a model; a classifier of another size keeps its fresh weights, all else has to fit.

    Of a detector's or segmentor's file the backbone is taken (:func:`trunk`). What a backbone's file may lack, its
    ``model.fresh`` says.

    Args:
        model: a classifier or backbone. path: see :func:`read_tensors`. ema: take the moving average.
        minimum: fraction of the model without its classifier and without what is fresh that must match, 0 to 1.
        classes: names of the model's classes; where the file names its own, rows of the classifier go by name.

    Returns:
        The report over the whole model.

    Raises:
        FileNotFoundError, WeightsError: no such file, unreadable, or too little of it fits.
    """
    tensors, named = _read(Path(path), ema)
    tensors = trunk(tensors)
    classifier = model.get_classifier() if hasattr(model, "get_classifier") else None
    heads = {name for name, module in model.named_modules() if module is classifier}
    if named is not None and classes is not None:
        for head in heads:
            tensors, sentence = reorder_head(tensors, head, list(named), list(classes))
            logger.info("%s: %s", path, sentence)
    head = {f"{name}.{leaf}" for name in heads for leaf in ("weight", "bias")}
    body = {name: value for name, value in tensors.items() if name not in head}
    own = dict(zip(strip_prefixes(model.state_dict()), model.state_dict()))
    fresh = {name for name in own if name.startswith(getattr(model, "fresh", ())) and name not in tensors}
    match(body, model, ignore=head | fresh).require(minimum, str(path))
    report = match(tensors, model)
    model.load_state_dict({own[name]: tensors[name] for name in report.matched}, strict=False)
    return report


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


def _read(path: Path, ema: bool) -> tuple[dict[str, Tensor], Sequence[str] | None]:
    """The weights of a file and, if it names them, its classes in the order of their labels."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    if path.suffix == ".safetensors":
        try:
            return strip_prefixes(safetensors.torch.load_file(path)), None
        except safetensors.SafetensorError as error:
            raise WeightsError(f"{path} is not a readable safetensors file ({error})") from error
    checkpoint = read_checkpoint(path)
    classes = checkpoint.get("classes") if isinstance(checkpoint, Mapping) else None
    return strip_prefixes(_state_dict(checkpoint, path, ema)), classes


def _state_dict(checkpoint, path: Path, ema: bool) -> dict[str, Tensor]:
    """The weights inside a checkpoint: under a known key, or the checkpoint itself."""
    if isinstance(checkpoint, Mapping):
        for key in _EMA_KEYS if ema and _EXCHANGED not in checkpoint else _RAW_KEYS:
            if isinstance(checkpoint.get(key), Mapping):
                checkpoint = checkpoint[key]
                break
        else:
            if ema:
                raise WeightsError(f"{path} holds no EMA weights (looked for {' and '.join(_EMA_KEYS)})")
            if averaged := next((key for key in _EMA_KEYS if isinstance(checkpoint.get(key), Mapping)), None):
                raise WeightsError(
                    f"{path} holds a moving average alone ({averaged}); take it by ema=True, or save it as state_dict"
                )
        tensors = {name: value for name, value in checkpoint.items() if isinstance(value, Tensor)}
        if tensors:
            return tensors
    raise WeightsError(f"{path} holds no weights: expected named tensors, or such under {' or '.join(_RAW_KEYS)}")
