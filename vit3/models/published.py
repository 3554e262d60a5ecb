"""The published weights: where they are, what they scored, and how ``pretrained=True`` gets them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, generate_default_cfgs
from timm.models._builder import resolve_pretrained_cfg
from torch import nn

from vit3.models.unpickle import WeightsError

# Addresses and figures as the authors' README gives them (the published scores of the files it links).
PUBLISHED: dict[str, dict] = json.loads((Path(__file__).parent / "published.json").read_text())


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
    device, dtype = torch.device(kwargs.pop("device", None) or torch.get_default_device()), kwargs.pop("dtype", None)
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
        address = PUBLISHED[name]["address"]
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
        convert(original, converted, name)
    except WeightsError as error:
        original.unlink()  # or every later call would meet the same bad file
        raise RuntimeError(f"pretrained=True: what was downloaded for {name} is not its weights ({error})") from error
    return converted
