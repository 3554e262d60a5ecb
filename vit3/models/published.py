"""The published weights: where they are, what they scored, and how ``pretrained=True`` gets them."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, generate_default_cfgs
from timm.models._builder import resolve_pretrained_cfg
from torch import nn

from vit3.models.unpickle import WeightsError
from vit3.models.weights import holds_average, load_weights

logger = logging.getLogger(__name__)

# Addresses and figures as the authors' README gives them (the published scores of the files it links).
PUBLISHED: dict[str, dict] = json.loads((Path(__file__).parent / "published.json").read_text())
# Of generators: figures of the paper's table 10, those of DiT beside them (``dit``), and those that the README gives
# for the files it links, which the authors trained again after the first were lost (``retrained``).
PUBLISHED_GENERATORS: dict[str, dict] = json.loads((Path(__file__).parent / "published_generators.json").read_text())


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

    Takes timm's ``device`` and ``dtype`` of the new model besides what ``cls`` takes.

    Raises:
        RuntimeError: the published file cannot be downloaded.
    """
    device, dtype = _place(kwargs)
    overlay = dict(kwargs.pop("pretrained_cfg_overlay", None) or {})
    if pretrained:
        if kwargs.get("mixer", "ttt") != "ttt":
            raise ValueError(f"pretrained=True: the published weights of {name} fit mixer='ttt' only")
        if kwargs.get("pos", "cpe") != "cpe":
            raise ValueError(f"pretrained=True: the published weights of {name} fit pos='cpe' only; leave pos out")
        cfg = dataclasses.asdict(resolve_pretrained_cfg(name, kwargs.get("pretrained_cfg"), overlay))
        if cfg["url"] == PUBLISHED[name]["address"] and not (cfg["file"] or cfg["source"] or cfg["state_dict"]):
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
    device, dtype = _place(kwargs)
    cache_dir = kwargs.pop("cache_dir", None)
    for unused in ("pretrained_cfg", "pretrained_cfg_overlay"):
        kwargs.pop(unused, None)
    if pretrained:
        published = [other for other, figures in PUBLISHED_GENERATORS.items() if "address" in figures]
        if name not in published:
            raise ValueError(f"pretrained=True: no weights of {name} are published; there are: {', '.join(published)}")
        if kwargs.get("mixer", "ttt") != "ttt" or not kwargs.get("cpe", True):
            raise ValueError(f"pretrained=True: the published weights of {name} fit mixer='ttt' with cpe=True only")
    with device:
        model = cls(**kwargs)
    if pretrained:
        report = load_weights(model, fetch(name, cache_dir))
        if report.reshaped:
            logger.info("%s: published weights, but fresh: %s", name, ", ".join(report.reshaped))
    return model if dtype is None else model.to(dtype)


def _place(kwargs: dict) -> tuple[torch.device, torch.dtype | None]:
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
        convert(original, converted, name, ema=name in PUBLISHED_GENERATORS and holds_average(original))
    except WeightsError as error:
        original.unlink()  # or every later call would meet the same bad file
        raise RuntimeError(f"pretrained=True: what was downloaded for {name} is not its weights ({error})") from error
    return converted
