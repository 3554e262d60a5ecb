"""A random autoencoder as small as diffusers builds one, for whoever needs latents."""

from __future__ import annotations

from pathlib import Path

import torch


def tiny_autoencoder(
    folder: Path, *, factor: int = 2, in_chans: int = 3, channels: int = 4, scale: float = 0.7,
    shift: float | None = None,
) -> Path:  # fmt: skip
    """Save a random ``AutoencoderKL`` as diffusers does; returns the folder.

    Args:
        factor: pixels per latent, 1, 2, 4 or 8 (as Stable Diffusion's). channels: of the latents.
        scale, shift: its scaling and shift factor.
    """
    from diffusers import AutoencoderKL

    levels = factor.bit_length()
    state = torch.get_rng_state()
    torch.manual_seed(5)
    vae = AutoencoderKL(
        in_channels=in_chans, out_channels=in_chans, latent_channels=channels, layers_per_block=1, norm_num_groups=4,
        down_block_types=("DownEncoderBlock2D",) * levels, up_block_types=("UpDecoderBlock2D",) * levels,
        block_out_channels=(8,) * levels, mid_block_add_attention=False, scaling_factor=scale, shift_factor=shift,
    )  # fmt: skip
    torch.set_rng_state(state)
    vae.save_pretrained(folder)
    return Path(folder)
