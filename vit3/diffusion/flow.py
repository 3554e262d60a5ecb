"""Rectified flow: straight lines between image and noise, whose velocity is learnt.

Sources: flow matching (2210.02747), rectified flow (2209.03003); SiT (2401.08740) for transformers; logit-normal times
from Stable Diffusion 3 (2403.03206).
"""

from __future__ import annotations

import torch
from torch import Tensor

from vit3.diffusion.gaussian import LONGEST, Model

TIME_SAMPLING = ("uniform", "logit_normal")


class RectifiedFlow:
    """x_s = (1 - s) x_0 + s noise for s from 0 to 1; the network predicts the velocity noise - x_0.

    Times are t = 1000 s here, which is what the network is told: the scale that its time embedding was made for.

    Args:
        time_sampling: how times of training are drawn: ``uniform``, or ``logit_normal``, more of them in the middle.

    Raises:
        ValueError: unknown time_sampling.
    """

    kind, learn_sigma = "flow", False

    def __init__(self, time_sampling: str = "logit_normal"):
        if time_sampling not in TIME_SAMPLING:
            raise ValueError(f"time_sampling='{time_sampling}' is unknown; use one of: {', '.join(TIME_SAMPLING)}")
        self.time_sampling = time_sampling

    def out_chans(self, in_chans: int) -> int:
        """Channels that the network must predict for images of ``in_chans``."""
        return in_chans

    def draw_times(self, count: int, device: torch.device | None = None) -> Tensor:
        """Times (count,) of training, 0 to 1000."""
        if self.time_sampling == "uniform":
            return LONGEST * torch.rand(count, device=device)
        return LONGEST * torch.randn(count, device=device).sigmoid()

    def add_noise(self, x0: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        """x_s (B, C, H, W) for times t (B,)."""
        s = (t / LONGEST).to(torch.promote_types(x0.dtype, torch.float32))[:, None, None, None]
        return (1 - s) * x0 + s * noise

    def moved(self, x: Tensor, velocity: Tensor, t: Tensor, after: Tensor) -> Tensor:
        """Where x at times t (B,) is at times ``after`` (B,), straight on at that velocity."""
        return x + ((after - t) / LONGEST)[:, None, None, None] * velocity

    def losses(self, model: Model, x0: Tensor, t: Tensor, y: Tensor, noise: Tensor) -> dict[str, Tensor]:
        """Squared error of the velocity, one number per image; arguments as of
        :meth:`vit3.diffusion.gaussian.GaussianDiffusion.losses`."""
        velocity = model(self.add_noise(x0, t, noise), self.model_times(t), y).float()
        return {"loss": ((velocity - (noise - x0).float()) ** 2).flatten(1).mean(1)}

    def model_times(self, t: Tensor) -> Tensor:
        """What the network is told for times t: the same."""
        return t
