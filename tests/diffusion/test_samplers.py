"""Samplers against distributions whose score is known, slow loops of our own and diffusers; batches and refusals."""

import dataclasses
import math
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from torch import nn

from vit3.diffusion import SAMPLERS, GaussianDiffusion, RectifiedFlow, Sampler
from vit3.models.dit3 import DiT3
from vit3.seeding import Purpose, seed_of

with_diffusers = pytest.mark.skipif(find_spec("diffusers") is None, reason="needs diffusers")
MEAN, WIDTH = 0.3, 0.5  # of the data


def samplers(*names):
    """Cases of a test, by the samplers' names."""
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=with_diffusers if name == "dpmsolver" else ()) for name in names]
    )


each_sampler = samplers(*SAMPLERS)


def process_of(name, **options):
    if name in ("euler", "heun"):
        return RectifiedFlow()
    return GaussianDiffusion(**options)


def draw(sampler, model, count=2, shape=(1, 4, 4), labels=None, images=None, seed=0):
    labels = torch.zeros(count, dtype=torch.long) if labels is None else torch.tensor(labels)
    return sampler.sample(model, labels, images or range(count), shape=shape, seed=seed, device="cpu")


def noises(count, shape, seed=0, draws=1):
    """All noise of the images: (draws, count, C, H, W), float64."""
    streams = [torch.Generator().manual_seed(seed_of(seed, Purpose.SAMPLE, i)) for i in range(count)]
    return torch.stack([torch.stack([torch.randn(shape, generator=s) for s in streams]) for _ in range(draws)]).double()


class Exact:
    """What a perfect network says of data that are normal, pixel by pixel; for any variance, also the perfect one."""

    def __init__(self, process, steps=None, learn_sigma=False):
        self.process, self.learn_sigma = process, learn_sigma
        self.spaced = process.respaced(steps) if learn_sigma else None

    def __call__(self, x, t, y):
        x = x.double()
        if isinstance(self.process, RectifiedFlow):
            s = (t[0].item()) / 1000
            variance = ((1 - s) * WIDTH) ** 2 + s**2
            off = x - (1 - s) * MEAN
            return s / variance * off - (MEAN + (1 - s) * WIDTH**2 / variance * off)
        i = round(t[0].item() * self.process.steps / 1000)
        kept = self.process.kept[i].item()
        noise = math.sqrt(1 - kept) * (x - math.sqrt(kept) * MEAN) / (kept * WIDTH**2 + 1 - kept)
        if not self.learn_sigma:
            return noise
        return torch.cat([noise, torch.full_like(noise, self.fraction(t[0].item()))], 1)

    def fraction(self, time):
        """The true variance of x_(t-1) given x_t is the posterior's, and what the unknown image adds."""
        j = self.spaced.times.tolist().index(time)
        if j == 0:
            return -1.0
        kept, beta = self.spaced.kept[j].item(), self.spaced.betas[j].item()
        low = self.spaced.posterior_variance[j].item()
        unknown = WIDTH**2 * (1 - kept) / (kept * WIDTH**2 + 1 - kept)
        true = low + self.spaced.posterior_x0[j].item() ** 2 * unknown
        return 2 * (math.log(true) - math.log(low)) / (math.log(beta) - math.log(low)) - 1


def solution(process, start):
    """The end of the exact path from ``start``: pixels keep their place among all others, in units of the width."""
    if isinstance(process, RectifiedFlow):
        return MEAN + WIDTH * start
    last, first = process.kept[-1].item(), process.kept[0].item()
    place = (start - math.sqrt(last) * MEAN) / math.sqrt(last * WIDTH**2 + 1 - last)
    # the last step goes from x_0, which has a little noise, to the image that is expected
    return MEAN + WIDTH * place * math.sqrt(first) * WIDTH / math.sqrt(first * WIDTH**2 + 1 - first)


@samplers("ddim", "dpmsolver", "euler", "heun")
def test_order(name):
    """Twice as many steps leave a half, or a quarter, of the error against the exact solution."""
    order = 2 if name in ("dpmsolver", "heun") else 1
    process = process_of(name, steps=4000, learn_sigma=False)
    wanted = solution(process, noises(8, (1, 4, 4))[0])
    errors = []
    for steps in (33, 65, 129):
        x = draw(Sampler(process, name, steps), Exact(process), 8)
        errors.append((x - wanted).square().mean().sqrt().item())
    assert errors[-1] < 0.03 * WIDTH
    orders = [math.log2(a / b) for a, b in zip(errors, errors[1:])]
    assert orders == pytest.approx([order, order], abs=0.25)


@each_sampler
def test_mean_and_width_of_the_data(name):
    """Also DDPM's, at few steps, where the network knows the variance."""
    process = process_of(name, learn_sigma=name == "ddpm")
    steps = 12 if name == "ddpm" else 100
    shape = (1, 100, 100)
    x = draw(Sampler(process, name, steps), Exact(process, steps, learn_sigma=name == "ddpm"), 4, shape)
    n = x.numel()
    assert abs(x.mean() - MEAN) < 4 * WIDTH / math.sqrt(n) + 0.002
    assert abs(x.std() - WIDTH) < (4 / math.sqrt(2 * n) + (0.035 if name == "ddim" else 0.012)) * WIDTH


def test_fixed_variance_is_the_smaller_one():
    """The width that DDPM then ends with, by the recursion of single steps back."""
    process, steps = GaussianDiffusion(100, learn_sigma=False), 30
    spaced = process.respaced(steps)
    variance = 1.0
    for j in reversed(range(steps)):
        kept, beta = spaced.kept[j].item(), spaced.betas[j].item()
        factor = (1 - beta / (kept * WIDTH**2 + 1 - kept)) / math.sqrt(1 - beta)
        variance = factor**2 * variance + spaced.posterior_variance[j].item()
    assert math.sqrt(variance) < 0.95 * WIDTH
    x = draw(Sampler(process, "ddpm", steps), Exact(process), 4, (1, 100, 100))
    assert x.std().item() == pytest.approx(math.sqrt(variance), rel=4 / math.sqrt(2 * x.numel()))


def toy(learn_sigma):
    """A network that is nonlinear in all that it sees, elementwise; in the precision of x."""

    def network(x, t, y):
        place = (t.to(x.dtype) / 1000 + 0.1 * y)[:, None, None, None]
        noise = torch.tanh(0.8 * x + place)
        return torch.cat([noise, torch.sin(3 * x + place)], 1) if learn_sigma else noise

    return network


@pytest.mark.parametrize("steps, learn_sigma", [(1000, True), (100, False)])
def test_ddpm_is_the_loop_of_its_paper(steps, learn_sigma):
    """All steps of the schedule in double precision, with the same noise: DDPM, eq. 11, and improved DDPM, eq. 15."""
    shape, labels = (2, 3, 5), torch.tensor([0, 7])
    noise, network = noises(2, shape, seed=5, draws=steps), toy(learn_sigma)
    betas = np.linspace(0.1 / steps, 20 / steps, steps)
    kept = np.cumprod(1 - betas)
    x = noise[0]
    for i, t in enumerate(range(steps - 1, -1, -1)):
        output = network(x, torch.full((2,), t * 1000 / steps), labels)
        x = (x - betas[t] / math.sqrt(1 - kept[t]) * output[:, :2]) / math.sqrt(1 - betas[t])
        if t > 0:
            log_variance = low = math.log(betas[t] * (1 - kept[t - 1]) / (1 - kept[t]))
            if learn_sigma:
                v = (output[:, 2:] + 1) / 2
                log_variance = v * math.log(betas[t]) + (1 - v) * low
            x = x + torch.as_tensor(log_variance / 2).exp() * noise[i + 1]
    ours = draw(
        Sampler(GaussianDiffusion(steps, learn_sigma=learn_sigma), "ddpm", steps),
        network,
        2,
        shape,
        labels.tolist(),
        seed=5,
    )
    assert ours.dtype == torch.float32
    assert (ours - x).norm() / x.norm() < 1e-5


@with_diffusers
def test_ddpm_is_that_of_diffusers():
    """250 of 1,000 steps with learned variance; its tables are of float32."""
    from diffusers import DDPMScheduler

    process, network, shape, steps = GaussianDiffusion(), toy(True), (4, 3, 5), 250
    scheduler = DDPMScheduler(
        trained_betas=process.betas.numpy(),
        variance_type="learned_range",
        clip_sample=False,
        timestep_spacing="linspace",
    )
    scheduler.set_timesteps(steps)
    streams = [torch.Generator().manual_seed(seed_of(0, Purpose.SAMPLE, i)) for i in range(3)]
    x = torch.stack([torch.randn(shape, generator=stream) for stream in streams])
    for t in scheduler.timesteps:
        x = scheduler.step(network(x, t.repeat(3), torch.zeros(3)), t, x, generator=streams).prev_sample
    ours = draw(Sampler(process, "ddpm", steps), network, 3, shape)
    assert (ours - x).norm() / x.norm() < 1e-4


def test_ddim_is_the_formula_of_its_paper():
    """2010.02502, eq. 12, without noise, at rounded times."""
    shape, steps, network = (1, 4, 4), 21, toy(True)
    kept = np.cumprod(1 - np.linspace(1e-4, 0.02, 1000))
    times = GaussianDiffusion().respaced(steps).times.tolist()
    x = noises(2, shape)[0]
    for j in reversed(range(steps)):
        a, before = kept[times[j]], kept[times[j - 1]] if j else 1.0
        noise = network(x, torch.full((2,), times[j]), torch.zeros(2))[:, :1]
        x = math.sqrt(before) * (x - math.sqrt(1 - a) * noise) / math.sqrt(a) + math.sqrt(1 - before) * noise
    ours = draw(Sampler(GaussianDiffusion(), "ddim", steps), network)
    assert (ours - x).norm() / x.norm() < 1e-5


@with_diffusers
def test_dpmsolver_is_the_formula_of_its_paper():
    """2211.01095, algorithm 2, in double precision; the last step is the image itself."""
    process, steps, network, shape = GaussianDiffusion(), 15, toy(True), (1, 4, 4)
    kept, times = process.kept.numpy(), process.respaced(steps, quadratic=True).times.tolist()[::-1]
    alpha, sigma = np.sqrt(kept), np.sqrt(1 - kept)
    snr = np.log(alpha / sigma)
    x, image, last = noises(2, shape)[0], None, None
    for k, t in enumerate(times):
        earlier = image
        image = (x - sigma[t] * network(x, torch.full((2,), t), torch.zeros(2))[:, :1]) / alpha[t]
        if k == steps - 1:
            break
        after = times[k + 1]
        h = snr[after] - snr[t]
        towards = image
        if earlier is not None:
            r = (snr[t] - snr[last]) / h
            towards = (1 + 1 / (2 * r)) * image - 1 / (2 * r) * earlier
        x, last = sigma[after] / sigma[t] * x - alpha[after] * math.expm1(-h) * towards, t
    ours = draw(Sampler(process, "dpmsolver", steps), network)
    assert (ours - image).norm() / image.norm() < 1e-5


@pytest.mark.parametrize("name", ["euler", "heun"])
def test_flow_is_integrated_by_the_book(name):
    """Explicit Euler, and Heun's improved Euler, from 1 to 0."""
    steps, network, x = 5, toy(False), noises(2, (1, 4, 4))[0]
    zeros = torch.zeros(2)
    for k in range(steps):
        s, after = 1 - k / steps, 1 - (k + 1) / steps
        slope = network(x, torch.full((2,), 1000 * s, dtype=torch.float64), zeros)
        if name == "heun":
            there = x - slope / steps
            slope = (slope + network(there, torch.full((2,), 1000 * after, dtype=torch.float64), zeros)) / 2
        x = x - slope / steps
    ours = draw(Sampler(RectifiedFlow(), name, steps), toy(False))
    assert (ours - x).norm() / x.norm() < 1e-5


@each_sampler
def test_image_depends_on_seed_number_and_label_alone(name):
    """To the last bit in any batch and order; the network here is elementwise."""
    sampler, network = Sampler(process_of(name), name, 6), toy(name not in ("euler", "heun"))
    labels = [0, 1, 2, 3, 4]
    whole = draw(sampler, network, labels=labels, images=[0, 1, 2, 3, 4])
    for numbers in ([2], [4, 0], [3, 1, 2]):
        assert torch.equal(draw(sampler, network, labels=numbers, images=numbers), whole[numbers])
    for other in (dict(labels=[0], images=[1]), dict(labels=[2], images=[0]), dict(labels=[0], images=[0], seed=1)):
        assert (draw(sampler, network, **other) - whole[:1]).abs().max() > 1e-3


@each_sampler
def test_global_generators_are_left_alone(name):
    torch.manual_seed(7)
    wanted = torch.randn(3)
    torch.manual_seed(7)
    draw(Sampler(process_of(name), name, 3), toy(name not in ("euler", "heun")))
    assert torch.equal(torch.randn(3), wanted)


class Counted(nn.Module):
    """A network with a weight, which notes how it is called."""

    null_label = 4

    def __init__(self, out_chans):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.5))
        self.out_chans, self.calls = out_chans, []

    def forward(self, x, t, y):
        self.calls.append((len(x), t[0].item(), x.dtype, y.tolist()))
        return (self.weight * x.mean(1, keepdim=True) + 0.2 * y[:, None, None, None]).repeat(1, self.out_chans, 1, 1)


@each_sampler
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_calls_of_the_network(name, steps):
    """From noise on, without gradients, with float32 even if the network answers in less; progress once per step."""
    process, done = process_of(name), []
    network = Counted(process.out_chans(3))
    sampler = Sampler(process, name, steps)
    with torch.autocast("cpu", torch.bfloat16):
        x = sampler.sample(
            network, torch.tensor([1, 2]), [8, 9], shape=(3, 2, 7), seed=0, device="cpu", progress=done.append
        )
    assert x.shape == (2, 3, 2, 7) and x.dtype == torch.float32 and not x.requires_grad and x.isfinite().all()
    assert done == [1] * steps and network.training
    assert len(network.calls) == steps * (2 if name == "heun" else 1)
    assert network.calls[0] == (2, 1000 if name in ("euler", "heun") else 999, torch.float32, [1, 2])
    assert all(dtype == torch.float32 for _, _, dtype, _ in network.calls)


@pytest.mark.parametrize("name", ["ddim", "euler"])
def test_guidance(name):
    """Scale 1 is the network itself, bit for bit; scale, channels and interval reach the one implementation."""
    process = process_of(name)

    def drawn(**options):
        network = Counted(process.out_chans(4))
        x = draw(Sampler(process, name, 4, **options), network, labels=[1, 2], shape=(4, 2, 2))
        return x, [call[0] for call in network.calls]

    plain, calls = drawn()
    assert calls == [2] * 4
    same, calls = drawn(guidance=1.0, channels=None, interval=(0.2, 0.5))
    assert torch.equal(same, plain) and calls == [2] * 4
    first, calls = drawn(guidance=3.0)
    assert calls == [4] * 4
    every, _ = drawn(guidance=3.0, channels=None)
    moved = [(x - plain).abs().amax((0, 2, 3)) > 1e-3 for x in (first, every)]
    assert moved[0].tolist()[:3] == [True] * 3 and moved[1].tolist() == [True] * 4
    assert (first - every).abs().max() > 1e-3
    _, calls = drawn(guidance=3.0, interval=(0.5, 0.8))
    # at 999, 666, 333, 0 and at 1000, 750, 500, 250
    assert calls == ([2, 4, 2, 2] if name == "ddim" else [2, 4, 4, 2])


@each_sampler
@pytest.mark.parametrize("grid", [(4, 16), (16, 4), (5, 3)])
@pytest.mark.parametrize("classes, chans, learn_sigma", [(1, 1, True), (10, 3, False), (1000, 4, True)])
def test_any_model(name, grid, classes, chans, learn_sigma):
    """Grids that are not square, from 1 class up, with and without variance, guided."""
    process = process_of(name, learn_sigma=learn_sigma)
    torch.manual_seed(0)
    network = DiT3(2, chans, classes, process.learn_sigma, embed_dim=16, depth=1, num_heads=2)
    nn.init.normal_(network.final_layer.linear.weight, std=0.05)
    sampler = Sampler(process, name, 3, guidance=1.5, channels=None)
    x = draw(sampler, network, labels=[classes - 1, 0], shape=(chans, *grid))
    assert x.shape == (2, chans, *grid) and x.isfinite().all() and x.std() > 0.01


@samplers("ddpm", "ddim", "dpmsolver")
@pytest.mark.parametrize("steps", [1, 12])
def test_schedules_of_few_steps_and_cosine(name, steps):
    for betas in ("linear", "cosine"):
        process = GaussianDiffusion(12, betas, learn_sigma=False)
        x = draw(Sampler(process, name, steps), Exact(process), 4, (1, 40, 40))
        assert abs(x.mean() - MEAN) < 0.08 and x.std() < 1.1 * WIDTH
    with pytest.raises(ValueError, match="steps=13 of a sampler must be from 1 to 12"):
        Sampler(process, name, 13)


@pytest.mark.parametrize(
    "process, options, words",
    [
        (
            GaussianDiffusion(),
            dict(name="euler"),
            "sampler='euler' does not draw from ddpm; use one of: ddpm",
        ),
        (
            RectifiedFlow(),
            dict(name="ddim"),
            "sampler='ddim' does not draw from flow; use one of: euler, heun",
        ),
        (RectifiedFlow(), dict(name="euler", steps=0), "steps=0 of a sampler must be at least 1"),
        (GaussianDiffusion(), dict(steps=1001), "steps=1001 of a sampler must be from 1 to 1000"),
        (GaussianDiffusion(), dict(channels=0), "channels=0 of guidance"),
        (GaussianDiffusion(), dict(interval=(0.5, 1.5)), r"interval=\(0.5, 1.5\) of guidance"),
    ],
)
def test_refused(process, options, words):
    with pytest.raises(ValueError, match=words):
        Sampler(process, **{"name": "ddim", "steps": 10, **options})


def test_a_network_of_low_precision_costs_no_digits_of_the_formulas():
    """What it gives is taken as it is, and no sum is formed in bfloat16."""
    network = toy(True)
    low, wide = (lambda x, t, y: network(x, t, y).bfloat16()), (lambda x, t, y: network(x, t, y).bfloat16().float())
    sampler = Sampler(GaussianDiffusion(), "ddpm", 5)
    assert torch.equal(draw(sampler, low), draw(sampler, wide))


def test_dpmsolver_without_diffusers(monkeypatch):
    monkeypatch.setattr("vit3.diffusion.samplers.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="sampler='dpmsolver' needs diffusers: pip install"):
        Sampler(GaussianDiffusion(), "dpmsolver", 10)


def test_what_does_not_match():
    sampler = Sampler(GaussianDiffusion(), "ddim", 2)
    for labels, images in (([0, 1], [5]), ([], [])):
        with pytest.raises(ValueError, match="labels must be one for each of the images"):
            sampler.sample(toy(True), torch.tensor(labels), images, shape=(1, 2, 2), seed=0, device="cpu")
    with pytest.raises(ValueError, match="learn_sigma=True of the process wants 2 channels of the model"):
        draw(sampler, toy(False))
    plain = dataclasses.replace(sampler, process=GaussianDiffusion(learn_sigma=False))
    with pytest.raises(ValueError, match="learn_sigma=False of the process wants 1 channels .* which gives 2"):
        draw(plain, toy(True))
