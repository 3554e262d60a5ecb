"""DDPM as DiT trains it: a noise schedule, its posteriors, noise prediction with learned variance, the hybrid loss.

Sources: DDPM (2006.11239), improved DDPM (2102.09672) for the learned variance and the hybrid loss, DiT (2212.09748).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from itertools import accumulate, repeat

import torch
from torch import Tensor

Model = Callable[[Tensor, Tensor, Tensor], Tensor]

SCHEDULES = ("linear", "cosine")
LONGEST = 1000  # times of the model are 0 to 1000, however many steps a schedule has


def noise_schedule(name: str, steps: int) -> Tensor:
    """Variances beta (steps,) of the noise that each step adds, float64.

    Args:
        name: ``linear`` from 1e-4 to 0.02 at 1,000 steps (scaled for others), or ``cosine`` (2102.09672, eq. 17).

    Raises:
        ValueError: unknown name, or fewer than 2 steps.
    """
    if steps < 2:
        raise ValueError(f"steps={steps} of the noise schedule must be at least 2")
    if name == "linear":
        scale = 1000 / steps
        return torch.linspace(scale * 1e-4, min(scale * 0.02, 0.999), steps, dtype=torch.float64)
    if name != "cosine":
        raise ValueError(f"betas='{name}' is unknown; use one of: {', '.join(SCHEDULES)}")
    kept = torch.cos((torch.arange(steps + 1, dtype=torch.float64) / steps + 0.008) / 1.008 * math.pi / 2) ** 2
    return (1 - kept[1:] / kept[:-1]).clamp(max=0.999)


def spread(total: int, steps: int, quadratic: bool = False) -> list[int]:
    """``steps`` different times of 0 .. total - 1, the first and the last among them; a single one is the last.

    Args:
        quadratic: grow with the square of their number, denser at the image (DDIM, appendix D.2), instead of evenly;
            the even ones are those that DiT's code takes.

    Raises:
        ValueError: fewer steps than 1, or more than there are.
    """
    if not 1 <= steps <= total:
        raise ValueError(f"steps={steps} of a sampler must be from 1 to {total}, the steps of the noise schedule")
    if steps == 1:
        return [total - 1]
    if not quadratic:
        # a running sum, as in DiT's code: i * stride rounds some ties the other way (first at 21 of 1,000 steps)
        return [round(place) for place in accumulate(repeat((total - 1) / (steps - 1), steps - 1), initial=0.0)]
    places = []
    for i in range(steps):
        place = round((total - 1) * (i / (steps - 1)) ** 2)
        place = max(place, places[-1] + 1) if places else place  # different ones ...
        places.append(min(place, total - steps + i))  # ... of which enough are left for those that follow
    return places


class GaussianDiffusion:
    """x_t = sqrt(a_t) x_0 + sqrt(1 - a_t) noise, t = 0 .. steps - 1; the network predicts the noise.

    Args:
        steps: of the schedule. betas: its name, see :func:`noise_schedule`.
        learn_sigma: the network also says where the log variance of a step back lies between its bounds, the
            posterior's and beta's.

    Raises:
        ValueError: unknown schedule.
    """

    kind = "ddpm"

    def __init__(self, steps: int = 1000, betas: str = "linear", learn_sigma: bool = True):
        self.schedule, self.learn_sigma = betas, learn_sigma
        variances = noise_schedule(betas, steps)
        self._tabulate(variances, (1 - variances).cumprod(0))
        self.times = torch.arange(steps)  # what the network is told at each t
        if steps != LONGEST:
            self.times = self.times * (LONGEST / steps)

    def _tabulate(self, betas: Tensor, kept: Tensor) -> None:
        """Everything that follows from the betas and the a_t (steps,), in float64."""
        self.steps, self.betas, self.kept = len(betas), betas, kept
        before = torch.cat([torch.ones(1, dtype=torch.float64), self.kept[:-1]])  # a_(t-1)
        self.posterior_variance = betas * (1 - before) / (1 - self.kept)
        # of the first step back the variance is 0; as in DDPM's code the second's stands for it in logarithms
        stand_in = self.posterior_variance[1:2] if len(betas) > 1 else betas
        self.posterior_log_variance = torch.cat([stand_in, self.posterior_variance[1:]]).log()
        self.posterior_x0 = betas * before.sqrt() / (1 - self.kept)  # factors of x_0 and x_t in the mean
        self.posterior_xt = (1 - before) * (1 - betas).sqrt() / (1 - self.kept)

    def respaced(self, steps: int, quadratic: bool = False) -> GaussianDiffusion:
        """The process at some of its times alone, for drawing images in fewer steps than were trained.

        Args:
            steps, quadratic: how many times, and how they are spread, see :func:`spread`.

        Returns:
            A process of ``steps`` steps, whose betas lead from one of the times to the next and whose
            :meth:`model_times` are those of this one.

        Raises:
            ValueError: fewer steps than 1, or more than this process has.
        """
        places = spread(self.steps, steps, quadratic)
        kept = self.kept[places]
        spaced = copy.copy(self)
        spaced._tabulate(1 - kept / torch.cat([torch.ones(1, dtype=torch.float64), kept[:-1]]), kept)
        spaced.times = self.times[places]
        return spaced

    def out_chans(self, in_chans: int) -> int:
        """Channels that the network must predict for images of ``in_chans``."""
        return in_chans * (2 if self.learn_sigma else 1)

    def draw_times(self, count: int, device: torch.device | None = None) -> Tensor:
        """Times (count,) of training: every step equally likely."""
        return torch.randint(self.steps, (count,), device=device)

    def add_noise(self, x0: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        """x_t (B, C, H, W) for times t (B,)."""
        return _at(self.kept.sqrt(), t, x0) * x0 + _at((1 - self.kept).sqrt(), t, x0) * noise

    def x0_of(self, xt: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        """The image that gave x_t together with ``noise``."""
        return _at(self.kept.rsqrt(), t, xt) * xt - _at((1 / self.kept - 1).sqrt(), t, xt) * noise

    def posterior(self, x0: Tensor, xt: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log variance of q(x_(t-1) | x_t, x_0) (DDPM, eq. 7); the log variance (B, 1, 1, 1)."""
        mean = _at(self.posterior_x0, t, xt) * x0 + _at(self.posterior_xt, t, xt) * xt
        return mean, _at(self.posterior_log_variance, t, xt)

    def log_variance(self, fraction: Tensor, t: Tensor) -> Tensor:
        """Learned log variance (B, C, H, W), from -1 (posterior's) to 1 (beta's); improved DDPM, eq. 15."""
        low, high = _at(self.posterior_log_variance, t, fraction), _at(self.betas.log(), t, fraction)
        part = (fraction + 1) / 2
        return part * high + (1 - part) * low

    def losses(self, model: Model, x0: Tensor, t: Tensor, y: Tensor, noise: Tensor) -> dict[str, Tensor]:
        """The hybrid loss and its parts, one number per image.

        Args:
            model: (x, t, y) to predictions. x0: images or latents (B, C, H, W). t: times (B,). y: labels (B,).
            noise: as x0, standard normal.

        Returns:
            ``loss`` = ``mse`` + ``vb``, each (B,) in float32: squared error of the noise; with ``learn_sigma`` the term
            of the variational bound in bits per channel and pixel, of which only the variance learns.
        """
        xt = self.add_noise(x0, t, noise)
        output = model(xt, self.model_times(t), y).float()
        predicted, x0, xt, noise = output[:, : x0.shape[1]], x0.float(), xt.float(), noise.float()
        mse = ((predicted - noise) ** 2).flatten(1).mean(1)
        if not self.learn_sigma:
            return {"loss": mse}
        vb = self.bound(predicted.detach(), output[:, x0.shape[1] :], x0, xt, t)
        return {"loss": mse + vb, "mse": mse, "vb": vb}

    def bound(self, predicted: Tensor, fraction: Tensor, x0: Tensor, xt: Tensor, t: Tensor) -> Tensor:
        """Term t of the variational bound (B,), in bits per channel and pixel.

        The divergence of the model's step back from the posterior; at t = 0 the negative log likelihood of images that
        have 256 levels between -1 and 1.

        Args:
            predicted: noise. fraction: where the log variance lies, -1 to 1.
        """
        mean, log_variance = self.posterior(x0, xt, t)
        own_mean, _ = self.posterior(self.x0_of(xt, t, predicted), xt, t)
        own_log_variance = self.log_variance(fraction, t)
        divergence = gaussian_kl(mean, log_variance, own_mean, own_log_variance)
        first = -levels_log_likelihood(x0, own_mean, own_log_variance / 2)
        per_pixel = torch.where((t == 0)[:, None, None, None], first, divergence)
        return per_pixel.flatten(1).mean(1) / math.log(2)

    def model_times(self, t: Tensor) -> Tensor:
        """What the network is told for times t: 0 to 1000 for any number of steps."""
        return self.times.to(t.device)[t]


def gaussian_kl(mean: Tensor, log_variance: Tensor, mean2: Tensor, log_variance2: Tensor) -> Tensor:
    """KL divergence, in nats, of the first of two normal distributions from the second, element by element."""
    ratio, distance = log_variance2 - log_variance, (mean - mean2) ** 2
    return 0.5 * (-1 + ratio + (-ratio).exp() + distance * (-log_variance2).exp())


def levels_log_likelihood(x: Tensor, mean: Tensor, log_scale: Tensor) -> Tensor:
    """Log probability, in nats, that a normal variable falls into the bin of ``x``, one of 256 levels from -1 to 1.

    The outermost bins are open. The normal distribution function is the tanh approximation of DDPM's code.
    """
    narrow = (-log_scale).exp()
    above = _normal_cdf(narrow * (x - mean + 1 / 255))
    below = _normal_cdf(narrow * (x - mean - 1 / 255))
    inside = torch.where(x < -0.999, above, torch.where(x > 0.999, 1 - below, above - below))
    return inside.clamp(min=1e-12).log()


def _normal_cdf(x: Tensor) -> Tensor:
    return 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _at(table: Tensor, t: Tensor, like: Tensor) -> Tensor:
    """Entries t (B,) of a table as (B, 1, 1, 1), on the device and in (at least) float32."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    return table.to(device=t.device, dtype=dtype)[t][:, None, None, None]
