"""Back to the authors' layout: a checkpoint that their code loads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import timm
import torch
from torch import Tensor

from vit3.errors import UserError
from vit3.export.runner import runner
from vit3.export.subject import Subject
from vit3.files import replacing
from vit3.inner import InnerSpec
from vit3.mixers import TTT
from vit3.models import DENSE_NAMES
from vit3.models.official import OFFICIAL_NAMES, from_official, skeleton, to_official
from vit3.models.weights import bare, read_tensors, strip_prefixes

# What the authors' code builds for any number of classes
_BY_CLASSES = ("head.weight", "head.bias", "y_embedder.embedding_table.weight")


def write_official(subject: Subject, path: Path) -> Path:
    """Write ``{"model": tensors}`` by the authors' names, as their code loads it; plain tensors, nothing pickled else.

    Tables that their models have for one image size are written for the subject's; for backbones of detectors and
    segmentors, which their code builds so, for 224 x 224 pixels.

    Args:
        path: the ``.pth``; its folder is made if need be.

    Raises:
        UserError: the network is none of the published ones, or trains its inner models in another way; the number of
            classes alone may differ.
    """
    tensors = strip_prefixes(bare(subject.model).state_dict())
    _check_shapes(subject.name, tensors)
    _check_inner(subject)
    size = None if subject.name in DENSE_NAMES else subject.img_size
    official = to_official(tensors, subject.name, size)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        torch.save({"model": {name: value.detach().cpu().contiguous() for name, value in official.items()}}, file)
    return path


def open_official(path: Path, subject: Subject) -> Callable[..., tuple[Tensor, ...]]:
    """The network of such a file, by our names again; runs as ``run(*inputs)``."""
    model = timm.create_model(subject.name, **subject.kwargs)
    model.load_state_dict(from_official(read_tensors(path), subject.name))
    return runner(model)


def _check_shapes(name: str, tensors: dict[str, Tensor]) -> None:
    if name not in OFFICIAL_NAMES:
        raise UserError(
            f"format=official: the authors have no model for {name}; use one of: {', '.join(OFFICIAL_NAMES)}"
        )
    wanted = {key: value.shape for key, value in skeleton(name).state_dict().items()}
    if names := sorted(wanted.keys() ^ tensors.keys()):
        place = "lacks" if names[0] in wanted else "has"
        raise UserError(f"format=official: this {name} is not the published network: it {place} {names[0]} (and "
                        f"differs in {len(names)} tensors); leave format=official out")  # fmt: skip
    for key, shape in wanted.items():
        own = tensors[key].shape
        if own != shape and not (key in _BY_CLASSES and own[1:] == shape[1:]):
            raise UserError(f"format=official: this {name} is not the published network: {key} is {tuple(own)}, theirs "
                            f"{tuple(shape)}; leave format=official out")  # fmt: skip


def _check_inner(subject: Subject) -> None:
    """Tensors do not say how inner models are trained, and the authors' code knows its own way alone."""
    plain = InnerSpec()
    for module in bare(subject.model).modules():
        if isinstance(module, TTT) and module.inner != plain:
            other = next(name for name, value in vars(plain).items() if getattr(module.inner, name) != value)
            raise UserError(f"format=official: this {subject.name} has inner.{other}={getattr(module.inner, other)}, "
                            f"the authors' code {getattr(plain, other)}; leave format=official out")  # fmt: skip
