"""Samplers: how an image is drawn, step by step, with a trained network.

DDPM and DDIM are a few lines on the formulas that training uses. The schedulers of diffusers are not used for them:
they keep the schedule in float32 (at the first times 1 - a_t is then wrong from the fourth digit), stop the noise at
time 0 and not at the last step, and the one for DDIM steps over evenly spaced times only, which rounded ones are not.
Its multistep DPM-Solver++ is used, with our tables and with times that lie denser at the image: where the exact
score is known (normal distributions of width 0.03 to 0.5, guidance 1 and 4), 20 steps then miss the solution by 0.01
to 0.09 of the width, and by 0.03 to 1.1 with evenly spaced times.

Sources: DDPM (2006.11239), improved DDPM (2102.09672) for respaced steps, DDIM (2010.02502), DPM-Solver++ (2211.01095).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from vit3.diffusion.flow import RectifiedFlow
from vit3.diffusion.gaussian import LONGEST, GaussianDiffusion, Model
from vit3.diffusion.guidance import check_guidance, guided
from vit3.seeding import Purpose, seed_of

Predict = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Sampler:
    """Draws images with a network that was trained for a process.

    Args:
        process: what the network was trained for.
        name: one of :data:`SAMPLERS`: ``ddpm`` (random; what published scores of DiT belong to, with 250 steps),
            ``ddim`` or ``dpmsolver`` (DPM-Solver++ of second order; both without randomness after the start), and for
            rectified flow ``euler`` or ``heun`` (second order, two calls of the network per step).
        steps: from noise to image; with a noise schedule at most as many as it has.
        guidance, channels, interval: ``scale``, ``channels`` and ``interval`` of :func:`vit3.diffusion.guided`.

    Raises:
        ValueError: a name that is unknown or does not fit the process, or numbers out of range.
        ModuleNotFoundError: ``dpmsolver`` without diffusers.
    """

    process: GaussianDiffusion | RectifiedFlow
    name: str
    steps: int
    guidance: float = 1.0
    channels: int | None = 3
    interval: tuple[float, float] = (0.0, 1.0)

    def __post_init__(self):
        fitting = [name for name, (process, _) in SAMPLERS.items() if isinstance(self.process, process)]
        if self.name not in fitting:
            raise ValueError(
                f"sampler='{self.name}' does not draw from {self.process.kind}; use one of: {', '.join(fitting)}"
            )
        if self.steps < 1:
            raise ValueError(f"steps={self.steps} of a sampler must be at least 1")
        if isinstance(self.process, GaussianDiffusion):
            self.process.respaced(self.steps)
        check_guidance(self.channels, self.interval)
        if self.name == "dpmsolver" and find_spec("diffusers") is None:
            raise ModuleNotFoundError("sampler='dpmsolver' needs diffusers: pip install 'vit3[gen]'", name="diffusers")

    @torch.no_grad()
    def sample(
        self,
        model: Model,
        labels: Tensor,
        images: Sequence[int],
        *,
        shape: tuple[int, int, int],
        seed: int,
        device: torch.device | str,
        progress: Callable[[int], None] | None = None,
    ) -> Tensor:
        """Draw images, each of which depends on the seed, its number and its label alone.

        All noise of an image comes from a generator of its own on the CPU: in any batch, in any process and on any
        device it is the same. Training mode and autocast of the network are the caller's.

        Args:
            model: (x, t, y) to predictions, on ``device``. labels: (B,), one per image. images: their numbers, from 0.
            shape: (channels, height, width) of what the network sees. seed: at least 0.
            progress: called with 1 after each of the ``steps`` steps.

        Returns:
            Images or latents (B, C, H, W), float32, on ``device``; not clipped.

        Raises:
            ValueError: labels and images that do not match, or a network that was made for another process.
        """
        if labels.shape != (len(images),) or len(images) == 0:
            raise ValueError(
                f"labels must be one for each of the images, of which there must be at least 1; got labels of shape "
                f"{tuple(labels.shape)} for {len(images)} images"
            )
        labels, expected = labels.to(device), self.process.out_chans(shape[0])

        def predict(x: Tensor, t: Tensor) -> Tensor:
            options = dict(scale=self.guidance, channels=self.channels, interval=self.interval)
            output = guided(model, x, t, labels, **options)
            if output.shape[1] != expected:
                raise ValueError(
                    f"learn_sigma={self.process.learn_sigma} of the process wants {expected} channels of the model for "
                    f"images of {shape[0]}, which gives {output.shape[1]}; use the process that it was trained with"
                )
            return output.float()

        normal = _Noise(seed, images, shape, device)
        _, walk = SAMPLERS[self.name]
        x = normal()
        for later in walk(self.process, self.steps, predict, x, normal):
            x = later
            if progress is not None:
                progress(1)
        return x


class _Noise:
    """Standard normal numbers (B, C, H, W), new ones at each call, from one generator per image."""

    def __init__(self, seed: int, images: Sequence[int], shape: tuple[int, int, int], device: torch.device | str):
        seeds = [seed_of(seed, Purpose.SAMPLE, int(number)) for number in images]
        self.generators = [torch.Generator().manual_seed(value) for value in seeds]
        self.shape, self.device = shape, device

    def __call__(self) -> Tensor:
        drawn = [torch.randn(self.shape, generator=generator, dtype=torch.float32) for generator in self.generators]
        return torch.stack(drawn).to(self.device)


# What follows yields the images after each step: (process, steps, predict, x at the start, new noise) -> x, x, ...


def _ddpm(process: GaussianDiffusion, steps: int, predict: Predict, x: Tensor, normal: _Noise) -> Iterator[Tensor]:
    """A draw from the network's distribution of each step back; of the last one its mean. x_0 is not clipped, as in
    DiT's sampling."""
    spaced = process.respaced(steps)
    for i, t in _back(spaced, x):
        noise, fraction = _parts(predict(x, spaced.model_times(t)), x)
        mean, log_variance = spaced.posterior(spaced.x0_of(x, t, noise), x, t)
        if process.learn_sigma:
            log_variance = spaced.log_variance(fraction, t)
        x = mean + (log_variance / 2).exp() * normal() if i > 0 else mean
        yield x


def _ddim(process: GaussianDiffusion, steps: int, predict: Predict, x: Tensor, normal: _Noise) -> Iterator[Tensor]:
    """The image as far as it is known, with the same noise at the level of the next time (2010.02502, eq. 12)."""
    spaced = process.respaced(steps)
    for i, t in _back(spaced, x):
        noise, _ = _parts(predict(x, spaced.model_times(t)), x)
        image = spaced.x0_of(x, t, noise)
        x = spaced.add_noise(image, t - 1, noise) if i > 0 else image
        yield x


def _dpmsolver(process: GaussianDiffusion, steps: int, predict: Predict, x: Tensor, normal: _Noise) -> Iterator[Tensor]:
    """DPM-Solver++(2M) by diffusers at quadratic times; its last step, to the image, is of first order."""
    from diffusers import DPMSolverMultistepScheduler

    spaced = process.respaced(steps, quadratic=True)
    scheduler = DPMSolverMultistepScheduler(
        num_train_timesteps=steps,
        trained_betas=spaced.betas.numpy(),
        algorithm_type="dpmsolver++",
        solver_order=2,
        solver_type="midpoint",
        final_sigmas_type="zero",
    )
    scheduler.alphas_cumprod = spaced.kept  # it made its own in float32
    scheduler.set_timesteps(timesteps=list(range(steps))[::-1])
    for i, t in _back(spaced, x):
        noise, _ = _parts(predict(x, spaced.model_times(t)), x)
        x = scheduler.step(noise, i, x, return_dict=False)[0]
        yield x


def _euler(process: RectifiedFlow, steps: int, predict: Predict, x: Tensor, normal: _Noise) -> Iterator[Tensor]:
    for t, after in _straight(steps, x):
        x = process.moved(x, predict(x, t), t, after)
        yield x


def _heun(process: RectifiedFlow, steps: int, predict: Predict, x: Tensor, normal: _Noise) -> Iterator[Tensor]:
    """The mean of the velocities at both ends of each step, the second one taken where the first leads."""
    for t, after in _straight(steps, x):
        first = predict(x, t)
        second = predict(process.moved(x, first, t, after), after)
        x = process.moved(x, (first + second) / 2, t, after)
        yield x


# name: the process it draws from, how
SAMPLERS = {
    "ddpm": (GaussianDiffusion, _ddpm),
    "ddim": (GaussianDiffusion, _ddim),
    "dpmsolver": (GaussianDiffusion, _dpmsolver),
    "euler": (RectifiedFlow, _euler),
    "heun": (RectifiedFlow, _heun),
}


def _back(spaced: GaussianDiffusion, x: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Times steps - 1 .. 0, each as a number and as (B,)."""
    for i in reversed(range(spaced.steps)):
        yield i, torch.full((len(x),), i, device=x.device)


def _straight(steps: int, x: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Begin and end of each of ``steps`` equal steps from 1000 to 0, each (B,)."""
    times = torch.linspace(LONGEST, 0, steps + 1, dtype=torch.float64).float().tolist()
    for t, after in zip(times, times[1:]):
        yield torch.full((len(x),), t, device=x.device), torch.full((len(x),), after, device=x.device)


def _parts(output: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Predicted noise, and the rest, where the variance lies."""
    return output[:, : x.shape[1]], output[:, x.shape[1] :]
