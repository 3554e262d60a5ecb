"""Key maps to and from the authors' checkpoints.

Names and shapes of parameters and buffers are theirs already. What differs are tables sized for one image size, which
ours computes for the grid at hand: their H-ViT³ stores rotations per block (``layers.*.blocks.*.rope.rotations``),
their DiT³ the places of its tokens (``pos_embed``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path

import timm
import torch
from torch import Tensor, nn

from vit3.files import sha256_of
from vit3.layers.rope import RoPE2d
from vit3.models import DENSE_NAMES, GENERATOR_NAMES, MODEL_NAMES
from vit3.models.weights import LoadReport, WeightsError, match, read_tensors, trunk, write_tensors

_ROTATIONS = re.compile(r"^layers\.(\d+)\.blocks\.(\d+)\.(attn\.)?rope\.rotations$")
OFFICIAL_NAMES = (*MODEL_NAMES, *DENSE_NAMES, *GENERATOR_NAMES)
_PLACES = "pos_embed"
_LATENTS = (32, 32)  # what the published generators were trained on: 256 x 256 pixels
_MINIMUM = 0.95  # of the model must be matched by a converted file


def from_official(tensors: Mapping[str, Tensor], model_name: str) -> dict[str, Tensor]:
    """Rename tensors of the authors' model to ours; any tensors will do, weights as well as gradients.

    Args:
        tensors: all parameters by the authors' names, with all buffers or with none.
        model_name: one of ours, such as ``h_vit3_tiny``, or of ``DENSE_NAMES``: backbones of detectors and segmentors.

    Raises:
        ValueError: unknown model, or names that are missing or too many.
    """
    renamed = {name: value for name, value in tensors.items() if not _is_table(name, model_name)}
    _check_names(renamed, model_name)
    return renamed


def to_official(
    tensors: Mapping[str, Tensor], model_name: str, img_size: tuple[int, int] | None = None
) -> dict[str, Tensor]:
    """Rename our tensors to the authors' names: the inverse of :func:`from_official`.

    Args:
        tensors: all parameters by our names, with all buffers or with none.
        model_name: one of ours.
        img_size: (height, width) for which tables are written: rotations of H-ViT³ (only along with buffers; pixels,
            224 x 224 if not given), places of DiT³ (latent pixels, 32 x 32 if not given).

    Raises:
        ValueError: unknown model, or names that are missing or too many.
    """
    has_buffers = _check_names(tensors, model_name)
    renamed = dict(tensors)
    if model_name in GENERATOR_NAMES:
        model = skeleton(model_name)
        h, w = (math.ceil(side / model.patch_size) for side in img_size or _LATENTS)
        renamed[_PLACES] = model.position.table(h, w)[None]
    elif has_buffers:
        for name, module in skeleton(model_name).named_modules():
            if isinstance(module, RoPE2d):
                h, w = (math.ceil(side / 4) for side in img_size or (224, 224))
                for _ in range(int(name.split(".")[1])):
                    h, w = math.ceil(h / 2), math.ceil(w / 2)
                place = name.replace(".rope", ".attn.rope") if model_name in DENSE_NAMES else name
                renamed[f"{place}.rotations"] = _rotations(module.dim, h, w)
    return renamed


def convert(source: str | Path, target: str | Path, model_name: str | None = None, ema: bool = False) -> LoadReport:
    """Convert a downloaded official file to a safetensors file with our names.

    Args:
        source: the authors' ``.pth``; none of its pickled code is run.
        target: the ``.safetensors`` file to write; its header records name and SHA-256 of the source.
        model_name: one of ours; None takes the one whose tensors fit best.
        ema: take the moving average that some of their files carry.

    Returns:
        The report of the match, at least 95 %.

    Raises:
        FileNotFoundError, WeightsError: no such file, not readable, or less than 95 % of the model matched.
    """
    tensors = trunk(read_tensors(source, ema=ema))
    families = GENERATOR_NAMES if "x_embedder.proj.weight" in tensors else (*MODEL_NAMES, *DENSE_NAMES)
    names = [model_name] if model_name else families
    reports = {}
    for name in names:
        kept = {k: v for k, v in tensors.items() if not _is_table(k, name)}
        reports[name] = match(kept, skeleton(name))
    model_name = max(reports, key=lambda name: reports[name].fraction)
    report = reports[model_name]
    report.require(_MINIMUM, f"{source} as {model_name}")
    metadata = {"model": model_name, "source": Path(source).name, "weights": "ema" if ema else "raw"}
    metadata["source_sha256"] = sha256_of(Path(source))
    write_tensors(target, {name: tensors[name] for name in report.matched}, metadata)
    return report


def _is_table(name: str, model_name: str) -> bool:
    if model_name in GENERATOR_NAMES:
        return name == _PLACES
    return model_name.startswith("h_vit3") and bool(_ROTATIONS.match(name))


def skeleton(model_name: str) -> nn.Module:
    """The published model without memory for its weights.

    Raises:
        ValueError: unknown model.
    """
    if model_name not in OFFICIAL_NAMES:
        raise ValueError(f"model_name='{model_name}' is unknown; use one of: {', '.join(OFFICIAL_NAMES)}")
    with torch.device("meta"):
        return timm.create_model(model_name)


def _check_names(tensors: Mapping[str, Tensor], model_name: str) -> bool:
    """Make sure that the names are the model's parameters and all of its buffers or none; return which."""
    model = skeleton(model_name)
    parameters = {name for name, _ in model.named_parameters()}
    buffers = {name for name, _ in model.named_buffers()}
    has_buffers = bool(buffers & tensors.keys()) or not buffers
    wanted = parameters | buffers if has_buffers else parameters
    missing, unexpected = wanted - tensors.keys(), tensors.keys() - wanted
    if missing or unexpected:
        raise WeightsError(
            f"tensors are not those of {model_name}: {len(missing)} missing {sorted(missing)[:3]}, "
            f"{len(unexpected)} unexpected {sorted(unexpected)[:3]}"
        )
    return has_buffers


def _rotations(dim: int, h: int, w: int) -> Tensor:
    """The authors' table (h, w, dim / 2, 2): cosine and sine, from rotating the vector (1, 0) in every pair."""
    unit = torch.tensor([1.0, 0.0]).repeat(dim // 2).expand(1, h * w, dim)
    return RoPE2d(dim)(unit, h, w).view(h, w, dim // 2, 2)
