"""Classifier-free guidance, the one implementation: outside of every model."""

from __future__ import annotations

import torch
from torch import Tensor

from vit3.diffusion.gaussian import LONGEST, Model


def guided(
    model: Model, x: Tensor, t: Tensor, y: Tensor, *, scale: float = 1.0, channels: int | None = 3,
    interval: tuple[float, float] = (0.0, 1.0), null_label: int | None = None,
) -> Tensor:  # fmt: skip
    """Predictions moved away from what the network says without a class: none + scale * (with class - none).

    With ``scale=1``, and at times outside of ``interval``, it is the model itself, called once. Otherwise the sum is
    formed, and given, in at least float32.

    Args:
        model: (x, t, y) to (B, out_chans, H, W). x: (B, C, H, W). t: times of the model (B,), 0 to 1000.
        y: labels (B,).
        scale: 1 for no guidance.
        channels: how many channels of the prediction are guided: 3 is what the code of DiT and of the paper does, with
            latents of 4 (and their published scores belong to it); None guides all C. A learned variance never is.
        interval: part of the times in which guidance acts, both ends included, in units of 0 (image) to 1 (noise)
            (2404.07724).
        null_label: the label for no class; None takes the model's ``null_label``.

    Raises:
        ValueError: channels below 1, an interval that is none, or no null label known.
    """
    check_guidance(channels, interval)
    acts = _acts(t, *interval)
    if scale == 1.0 or not acts.any():
        return model(x, t, y)
    null_label = getattr(model, "null_label", None) if null_label is None else null_label
    if null_label is None:
        raise ValueError("null_label is not known of this model; give null_label=LABEL, its number of classes")
    both = model(torch.cat([x, x]), torch.cat([t, t]), torch.cat([y, torch.full_like(y, null_label)]))
    both = both.to(torch.promote_types(both.dtype, torch.float32))  # bfloat16 would round the scale: 1.3 to 1.297
    conditional, none = both.chunk(2)
    first = min(x.shape[1], channels or x.shape[1])
    factor = torch.full_like(t, scale, dtype=both.dtype).where(acts, 1.0)[:, None, None, None]
    moved = none[:, :first] + factor * (conditional[:, :first] - none[:, :first])
    return torch.cat([moved, conditional[:, first:]], dim=1)


def check_guidance(channels: int | None, interval: tuple[float, float]) -> None:
    """Refuse what :func:`guided` cannot use, before a model is there.

    Args:
        channels, interval: as of :func:`guided`.

    Raises:
        ValueError: channels below 1, or an interval that is no part of 0 to 1.
    """
    if channels is not None and channels < 1:
        raise ValueError(f"channels={channels} of guidance must be at least 1, or None for all")
    if len(interval) != 2 or not 0 <= interval[0] <= interval[1] <= 1:
        raise ValueError(f"interval={interval} of guidance must be two numbers LOW, HIGH with 0 <= LOW <= HIGH <= 1")


def _acts(t: Tensor, low: float, high: float) -> Tensor:
    """At which of the times t (B,) guidance acts, (B,)."""
    return (t >= low * LONGEST) & (t <= high * LONGEST)
