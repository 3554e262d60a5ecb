"""A generator's run without its autoencoder: what the network sees, for tools that count and time."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import TypeVar

from vit3.build.generator import CACHED
from vit3.config import TrainConfig
from vit3.errors import UserError

_STABLE_DIFFUSION = (4, 8)  # channels of its latents, and pixels for one of them in either direction
Config = TypeVar("Config", bound=TrainConfig)


def as_latents(cfg: Config) -> tuple[Config, str]:
    """A copy of a run whose images are what the network sees, and a sentence that says what was assumed.

    An autoencoder is not loaded. A folder's ``config.json`` says the shape of its latents; for a name on the hub it is
    that of Stable Diffusion's. Classifiers and generators of pixels are copied as they are, with an empty sentence.

    Raises:
        UserError: the folder's file cannot be read, or the image sizes are no multiples of the autoencoder's factor.
    """
    cfg = copy.deepcopy(cfg)
    d = cfg.diffusion
    if d is None or (d.autoencoder is None and cfg.data.name != CACHED):
        return cfg, ""
    autoencoder, d.autoencoder = d.autoencoder, None
    if cfg.data.name == CACHED:
        cfg.data.name = "folder"  # of what looks like images of as many channels
        return cfg, f"cached latents of {cfg.data.in_chans} channels"
    channels, factor = _shape(autoencoder)
    if any(side % factor for side in cfg.data.img_size):
        raise UserError(
            f"data.img_size={cfg.data.img_size} must be multiples of {factor}, the factor of "
            f"diffusion.autoencoder={autoencoder}"
        )
    cfg.data.in_chans, cfg.data.img_size = channels, [side // factor for side in cfg.data.img_size]
    height, width = cfg.data.img_size
    whose = "as its config.json says" if Path(autoencoder).is_dir() else "as Stable Diffusion's has, assumed"
    return cfg, (
        f"latents {height}x{width} of {channels} channels, {whose}; diffusion.autoencoder={autoencoder} itself is not "
        "counted (data=latents trains without it)"
    )


def _shape(autoencoder: str) -> tuple[int, int]:
    """Channels and factor of an autoencoder."""
    folder = Path(autoencoder)
    if not folder.is_dir():
        return _STABLE_DIFFUSION
    file = next((f for f in (folder / "config.json", folder / "vae" / "config.json") if f.is_file()), None)
    try:
        facts = json.loads(file.read_text(encoding="utf-8"))
        return int(facts["latent_channels"]), 2 ** (len(facts["block_out_channels"]) - 1)
    except (AttributeError, OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"diffusion.autoencoder={autoencoder} has no config.json that says latent_channels and block_out_channels "
            "of a diffusers AutoencoderKL; choose another folder"
        ) from error
