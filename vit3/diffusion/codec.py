"""Codecs: from a batch of the data to what noise is added to, and back to images: pixels, an autoencoder, its moments.

Each has ``channels`` and ``grid``, what the network sees, and ``pixels``, the reverse of ``grid``; ``encode(batch) ->
x0``, which draws from torch's global generator where it draws; ``decode(x0) -> images``, in [-1, 1]; ``describe()``,
plain values for reports.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vit3.errors import UserError, first_line


class Pixels:
    """Images as they are.

    Args:
        in_chans: their channels.
    """

    def __init__(self, in_chans: int):
        self.channels = in_chans

    def grid(self, img_size: Sequence[int]) -> tuple[int, int]:
        """(height, width) of x0 for images of ``img_size``."""
        return tuple(img_size)

    def pixels(self, grid: Sequence[int]) -> tuple[int, int]:
        """(height, width) of images of x0 of size ``grid``."""
        return tuple(grid)

    def encode(self, images: Tensor) -> Tensor:
        """x0 of images (B, C, H, W) in [-1, 1]: themselves."""
        return images

    def decode(self, x0: Tensor) -> Tensor:
        """Images of x0, cut off at -1 and 1."""
        return x0.float().clamp(-1, 1)

    def describe(self) -> dict[str, Any]:
        return {"codec": "pixels", "autoencoder": None, "channels": self.channels}


class Autoencoder:
    """Latents of a diffusers ``AutoencoderKL``: x0 = (z - shift) * scale, z drawn from the posterior of each image.

    Args:
        vae: the network; it is frozen and set to evaluation here.
        scale: factor that brings latents to a standard deviation of about 1; None takes the network's own, and 1 where
            it has none.
        shift: as the network's own where None.
        place: where it came from, for reports.
        chunk: images that are decoded at once: decoding takes some hundred times the memory of its latents.

    Raises:
        ValueError: scale is not positive.
    """

    def __init__(
        self, vae: nn.Module, scale: float | None = None, shift: float | None = None, *, place: str | None = None,
        chunk: int = 8,
    ):  # fmt: skip
        self.vae = vae.eval().requires_grad_(False)
        self.scale, self.shift = _own(scale, vae, "scaling_factor", 1.0), _own(shift, vae, "shift_factor", 0.0)
        if not self.scale > 0:
            raise ValueError(f"scale={self.scale} of the latents must be positive")
        self.place, self.chunk = place, chunk
        self.channels: int = vae.config.latent_channels
        self.factor: int = 2 ** (len(vae.config.block_out_channels) - 1)  # pixels per latent, either way

    def grid(self, img_size: Sequence[int]) -> tuple[int, int]:
        """(height, width) of the latents of images of ``img_size``.

        Raises:
            ValueError: the sides are no multiples of the autoencoder's factor.
        """
        if any(side % self.factor for side in img_size):
            raise ValueError(f"img_size={list(img_size)} must be multiples of {self.factor}, the autoencoder's factor")
        return tuple(side // self.factor for side in img_size)

    def pixels(self, grid: Sequence[int]) -> tuple[int, int]:
        """(height, width) of images of latents of size ``grid``."""
        return tuple(side * self.factor for side in grid)

    @torch.no_grad()  # not inference mode: latents are what gradients are computed at
    def moments(self, images: Tensor) -> Tensor:
        """Mean and standard deviation of the latents of images (B, C, H, W) in [-1, 1]: (B, 2 channels, h, w).

        Neither shifted nor scaled. The deviation, not its logarithm, because it keeps its digits in float16.

        Raises:
            ValueError: the images have other channels than the autoencoder.
        """
        if images.shape[1] != self.vae.config.in_channels:
            raise ValueError(
                f"images have {images.shape[1]} channels, the autoencoder takes {self.vae.config.in_channels}; "
                f"set data.in_chans={self.vae.config.in_channels}"
            )
        self.grid(images.shape[-2:])
        posterior = self.vae.encode(images).latent_dist
        return torch.cat([posterior.mean, posterior.std], dim=1)

    def encode(self, images: Tensor) -> Tensor:
        """x0 (B, channels, h, w), drawn, of images (B, C, H, W) in [-1, 1]."""
        return _draw(self.moments(images), self.scale, self.shift)

    def decode(self, x0: Tensor) -> Tensor:
        """Images (B, C, H, W) in [-1, 1] of x0 (B, channels, h, w)."""
        return self.decode_latents(x0.float() / self.scale + self.shift)

    @torch.no_grad()
    def decode_latents(self, latents: Tensor) -> Tensor:
        """Images in [-1, 1] of latents that are neither shifted nor scaled, ``chunk`` at a time."""
        parts = [self.vae.decode(part).sample.float().clamp(-1, 1) for part in latents.split(self.chunk)]
        return torch.cat(parts)

    def digest(self) -> str:
        """SHA-256 of the weights, by name, type and values."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.vae.state_dict().items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def describe(self) -> dict[str, Any]:
        return {
            "codec": "autoencoder", "autoencoder": self.place, "autoencoder_sha256": self.digest(),
            "channels": self.channels, "factor": self.factor, "scale": self.scale, "shift": self.shift,
        }  # fmt: skip


class Moments:
    """Latents whose mean and standard deviation were kept: drawn and scaled as :class:`Autoencoder` does.

    Args:
        channels: of the latents, half of those of the moments.
        scale, shift: as of :class:`Autoencoder`; None takes the autoencoder's.
        autoencoder: what made them, for images; None if none are asked for. weights: SHA-256 of its weights, for
            reports, where it is not there.

    Raises:
        ValueError: neither scale nor autoencoder, or latents of other channels than the autoencoder's.
    """

    def __init__(
        self, channels: int, scale: float | None = None, autoencoder: Autoencoder | None = None, *,
        shift: float | None = None, weights: str | None = None,
    ):  # fmt: skip
        if scale is None and autoencoder is None:
            raise ValueError("scale of the latents is not known; give scale=FACTOR, or the autoencoder that made them")
        if autoencoder is not None and autoencoder.channels != channels:
            raise ValueError(f"channels={channels} of latents are not the {autoencoder.channels} of the autoencoder")
        self.channels, self.autoencoder, self.weights = channels, autoencoder, weights
        self.scale = autoencoder.scale if scale is None else scale
        self.shift = getattr(autoencoder, "shift", 0.0) if shift is None else shift

    def grid(self, img_size: Sequence[int]) -> tuple[int, int]:
        """(height, width) of x0 for images of ``img_size`` in pixels; without an autoencoder they are latents."""
        return tuple(img_size) if self.autoencoder is None else self.autoencoder.grid(img_size)

    def pixels(self, grid: Sequence[int]) -> tuple[int, int]:
        """(height, width) of images of latents of size ``grid``; without an autoencoder that of the latents."""
        return tuple(grid) if self.autoencoder is None else self.autoencoder.pixels(grid)

    def encode(self, moments: Tensor) -> Tensor:
        """x0 (B, channels, h, w), drawn, of moments (B, 2 channels, h, w).

        Raises:
            ValueError: not as many channels.
        """
        if moments.shape[1] != 2 * self.channels:
            raise ValueError(
                f"moments have {moments.shape[1]} channels; mean and deviation of {self.channels} have "
                f"{2 * self.channels}"
            )
        return _draw(moments, self.scale, self.shift)

    def decode(self, x0: Tensor) -> Tensor:
        """Images in [-1, 1] of x0.

        Raises:
            ValueError: there is no autoencoder.
        """
        if self.autoencoder is None:
            raise ValueError("cached latents alone give no images; set autoencoder=FOLDER_OR_NAME, which made them")
        return self.autoencoder.decode_latents(x0.float() / self.scale + self.shift)

    def describe(self) -> dict[str, Any]:
        if self.autoencoder is not None:  # where latents come from changes nothing in what is drawn
            return {**self.autoencoder.describe(), "scale": self.scale, "shift": self.shift}
        facts = {"channels": self.channels, "scale": self.scale, "shift": self.shift}
        return {"codec": "moments", "autoencoder": None, "autoencoder_sha256": self.weights, **facts}


def load_autoencoder(
    place: str | Path, scale: float | None = None, device: torch.device | str = "cpu", *, key: str = "autoencoder"
) -> Autoencoder:
    """The autoencoder of a folder or of the Hugging Face hub.

    Args:
        place: a folder as diffusers saves it, alone or in ``vae/`` of a whole pipeline, for which no network is used;
            or OWNER/NAME on the hub. scale: None takes the autoencoder's own.
        key: what the user calls ``place``, for the sentences.

    Raises:
        UserError: diffusers is missing, nothing is there, or it is no whole ``AutoencoderKL``.
    """
    try:
        from diffusers import AutoencoderKL
        from safetensors import SafetensorError
    except ModuleNotFoundError as error:
        raise UserError(f"{key}={place} needs {error.name}: pip install -e '.[gen]'") from error
    folder, source = Path(place), str(place)
    local = folder.is_dir()
    if local and not (folder / "config.json").is_file() and (folder / "vae").is_dir():
        source = str(folder / "vae")
    if not local and (str(place).startswith((".", "~", "/")) or str(place).count("/") != 1):
        raise UserError(f"{key}={place} is neither a folder nor a name on the hub (OWNER/NAME)")
    try:
        vae, info = AutoencoderKL.from_pretrained(
            source, local_files_only=local, use_safetensors=True, low_cpu_mem_usage=False, output_loading_info=True
        )
    except (OSError, ValueError, TypeError, KeyError, RuntimeError, SafetensorError) as error:
        cure = (
            "it must hold config.json and diffusion_pytorch_model.safetensors of an AutoencoderKL"
            if local
            else f"without network, run `hf download {place} --local-dir FOLDER` elsewhere and set {key}=FOLDER"
        )
        raise UserError(f"{key}={place} cannot be loaded ({first_line(error)}); {cure}") from error
    if missing := info["missing_keys"]:
        first = sorted(missing)[0]
        raise UserError(f"{key}={place} lacks {len(missing)} of its tensors ({first}, …); it is no whole AutoencoderKL")
    return Autoencoder(vae.to(device), scale, place=str(place))


def _draw(moments: Tensor, scale: float, shift: float) -> Tensor:
    """x0 (B, C, h, w) in float32 of mean and deviation (B, 2C, h, w); the one place where latents are scaled."""
    mean, std = moments.float().chunk(2, dim=1)
    return (mean + std * torch.randn_like(mean) - shift) * scale


def _own(given: float | None, vae: nn.Module, name: str, default: float) -> float:
    """The value given, else the network's, else the default."""
    own = getattr(vae.config, name, None) if given is None else given
    return default if own is None else float(own)
