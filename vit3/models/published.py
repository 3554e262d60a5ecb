"""The published weights: where they are, what they scored, and how ``pretrained=True`` gets them."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, generate_default_cfgs
from timm.models._builder import resolve_pretrained_cfg
from torch import nn

from vit3.models.places import resolve
from vit3.models.unpickle import WeightsError
from vit3.models.weights import load_weights, stored_kinds

logger = logging.getLogger(__name__)

# Addresses and figures as the authors' README gives them (the published scores of the files it links).
PUBLISHED: dict[str, dict] = json.loads((Path(__file__).parent / "published.json").read_text())
# Of generators: figures of the paper's table 10, those of DiT beside them (``dit``), and those that the README gives
# for the files it links, which the authors trained again after the first were lost (``retrained``).
PUBLISHED_GENERATORS: dict[str, dict] = json.loads((Path(__file__).parent / "published_generators.json").read_text())


def linked() -> tuple[str, ...]:
    """Names of the models whose weights are published."""
    return tuple(name for name, facts in (PUBLISHED | PUBLISHED_GENERATORS).items() if "address" in facts)


def published_cfgs(names: tuple[str, ...], first_conv: str):
    """timm's pretrained configurations of ``names``: preprocessing of the paper's evaluation, address of the file."""
    return generate_default_cfgs(
        {
            f"{name}.{PUBLISHED[name]['tag']}": dict(
                url=PUBLISHED[name]["address"],
                num_classes=1000,
                input_size=(3, 224, 224),
                pool_size=None,
                crop_pct=224 / 256,  # resize to 256, crop the centre
                interpolation="bicubic",
                mean=IMAGENET_DEFAULT_MEAN,
                std=IMAGENET_DEFAULT_STD,
                first_conv=first_conv,
                classifier="head",
                license="mit",
                paper_ids="arXiv:2512.01643",
            )
            for name in names
        }
    )


def build(cls: type[nn.Module], name: str, pretrained: bool, **kwargs) -> nn.Module:
    """Build a registered model through timm; the published file is fetched and converted first if it is wanted.

    Takes timm's ``device`` and ``dtype`` of the new model besides what ``cls`` takes. Of ``local-dir:FOLDER`` and
    ``hf-hub:OWNER/NAME`` the weights must have the SHA-256 that their ``config.json`` gives.

    Raises:
        RuntimeError: the published file cannot be downloaded.
        WeightsError: a file with another SHA-256.
    """
    device, dtype = _target(kwargs)
    overlay = dict(kwargs.pop("pretrained_cfg_overlay", None) or {})
    if pretrained:
        cfg = dataclasses.asdict(resolve_pretrained_cfg(name, kwargs.get("pretrained_cfg"), overlay))
        if cfg["source"]:
            resolve(_place_of(cfg), cache_dir=kwargs.get("cache_dir"))  # timm reads it without a look at its SHA-256
        elif cfg["url"] == PUBLISHED[name]["address"] and not (cfg["file"] or cfg["state_dict"]):
            if kwargs.get("mixer", "ttt") != "ttt":
                raise ValueError(f"pretrained=True: the published weights of {name} fit mixer='ttt' only")
            if kwargs.get("pos", "cpe") != "cpe":
                raise ValueError(f"pretrained=True: the published weights of {name} fit pos='cpe' only; leave pos out")
            overlay["file"] = str(fetch(name, kwargs.get("cache_dir")))
    with device:
        model = build_model_with_cfg(cls, name, pretrained, pretrained_cfg_overlay=overlay, **kwargs)
    return model if dtype is None else model.to(dtype)


def build_generator(cls: type[nn.Module], name: str, pretrained: bool, **kwargs) -> nn.Module:
    """Build a registered generator; the published file is fetched and converted first if it is wanted.

    Parts whose shapes the file does not have, such as the labels of other classes, stay fresh, which is logged.

    Takes timm's ``device`` and ``dtype`` of the new model besides what ``cls`` takes.

    Raises:
        ValueError: there is no published file, or it does not fit the network asked for.
        RuntimeError: it cannot be downloaded.
    """

    def published(**options) -> str:
        generators = [other for other in linked() if other in PUBLISHED_GENERATORS]
        if name not in generators:
            raise ValueError(f"pretrained=True: no weights of {name} are published; there are: {', '.join(generators)}")
        if options.get("mixer", "ttt") != "ttt" or not options.get("cpe", True):
            raise ValueError(f"pretrained=True: the published weights of {name} fit mixer='ttt' with cpe=True only")
        return name

    return _build_without_timm(cls, name, pretrained, published, kwargs)


def build_dense(cls: type[nn.Module], name: str, pretrained: bool, **kwargs) -> nn.Module:
    """Build a registered dense backbone ``CLASSIFIER_dense``; if wanted, on the published trunk of the classifier.

    Takes timm's ``device`` and ``dtype`` of the new model besides what ``cls`` takes.

    Raises:
        ValueError: the published file does not fit the network asked for, or ``features_only``.
        RuntimeError: it cannot be downloaded.
    """
    if kwargs.pop("features_only", False):
        raise ValueError(f"features_only=True: {name} gives maps without it; leave it out")

    def published(**options) -> str:
        if options.get("mixer", "ttt") != "ttt":
            raise ValueError(f"pretrained=True: the published weights of {name} fit mixer='ttt' only")
        return name.removesuffix("_dense")

    return _build_without_timm(cls, name, pretrained, published, kwargs)


def _build_without_timm(cls: type[nn.Module], name: str, pretrained: bool, published: Callable[..., str], kwargs: dict):
    """Build what timm's builder, made for classifiers, cannot; weights come from where timm would take them.

    Args:
        published: the name whose published file fits these arguments of ``cls``; called if no other place is named.
    """
    device, dtype = _target(kwargs)
    kwargs.pop("pretrained_model_args", None)  # they are in kwargs already
    cache_dir, cfg = kwargs.pop("cache_dir", None), kwargs.pop("pretrained_cfg", None) or {}
    cfg = dataclasses.asdict(cfg) if dataclasses.is_dataclass(cfg) else {} if isinstance(cfg, str) else dict(cfg)
    cfg |= kwargs.pop("pretrained_cfg_overlay", None) or {}
    place = _place_of(cfg)
    if pretrained and place is None:
        source = published(**kwargs)
    with device:
        model = cls(**kwargs)
    if pretrained:
        report = load_weights(model, fetch(source, cache_dir) if place is None else resolve(place, cache_dir=cache_dir))
        if report.missing and place is not None:
            raise WeightsError(f"{place} lacks {len(report.missing)} tensors of {name}, {report.missing[0]} for one")
        if fresh := report.reshaped + report.missing:
            logger.info("%s: %s weights, but fresh: %s", name, "given" if place else "published", ", ".join(fresh))
    if cfg:
        model.pretrained_cfg = model.default_cfg = cfg
    return model if dtype is None else model.to(dtype)


def _place_of(cfg: dict[str, Any]) -> str | None:
    """The place that a configuration of timm names, in the words of :func:`vit3.models.places.resolve`."""
    if cfg.get("source") == "hf-hub":
        return f"hf-hub:{cfg['hf_hub_id']}"
    return cfg.get("file")


def _target(kwargs: dict) -> tuple[torch.device, torch.dtype | None]:
    """Take out timm's arguments for the device and the dtype of a new model."""
    return torch.device(kwargs.pop("device", None) or torch.get_default_device()), kwargs.pop("dtype", None)


def fetch(name: str, cache_dir: str | None = None) -> Path:
    """Download and convert the published file of ``name``, once; return the converted file.

    Raises:
        RuntimeError: it cannot be downloaded, or is not what it should be.
    """
    folder = Path(cache_dir) if cache_dir else Path(torch.hub.get_dir()) / "checkpoints"
    original, converted = folder / f"{name}.official.pth", folder / f"{name}.safetensors"
    if converted.exists():
        return converted
    if not original.exists():
        address = (PUBLISHED.get(name) or PUBLISHED_GENERATORS[name])["address"]
        folder.mkdir(parents=True, exist_ok=True)
        try:
            torch.hub.download_url_to_file(address, str(original))
        except OSError as error:  # URLError and HTTPError are OSErrors
            raise RuntimeError(
                f"pretrained=True: the weights of {name} could not be downloaded from {address} ({error}); fetch the "
                f"file on a machine with network, run `python tools/convert.py FILE.pth {name}.safetensors`, and pass "
                f"checkpoint_path='{name}.safetensors' instead"
            ) from error
    from vit3.models.official import convert

    try:
        # published scores of generators belong to the moving average; files may hold it alone, as plain weights
        convert(original, converted, name, ema=name in PUBLISHED_GENERATORS and "ema" in stored_kinds(original))
    except WeightsError as error:
        original.unlink()  # or every later call would meet the same bad file
        raise RuntimeError(f"pretrained=True: what was downloaded for {name} is not its weights ({error})") from error
    return converted
