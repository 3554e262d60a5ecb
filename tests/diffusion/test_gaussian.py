"""Noise schedules, posteriors, the variational bound and respacing, each against another computation of the same."""

import math

import numpy as np
import pytest
import torch
from torch.distributions import Normal, kl_divergence

from vit3.diffusion import GaussianDiffusion
from vit3.diffusion.gaussian import gaussian_kl, levels_log_likelihood, noise_schedule, spread

TIGHT = dict(rtol=1e-10, atol=1e-12)
each_schedule = pytest.mark.parametrize("betas", ["linear", "cosine"])


def cosine(steps):
    """Improved DDPM, eq. 17, in plain Python."""

    def kept(u):
        return math.cos((u + 0.008) / 1.008 * math.pi / 2) ** 2

    return [min(1 - kept((i + 1) / steps) / kept(i / steps), 0.999) for i in range(steps)]


def tables(process):
    """beta_t, and the shares a_t and a_(t-1) of the image that are left, multiplied up one by one."""
    betas, kept = process.betas.tolist(), [1.0]
    for beta in betas:
        kept.append(kept[-1] * (1 - beta))
    return betas, kept[1:], kept[:-1]


def normal(*shape):
    return torch.randn(*shape, dtype=torch.float64)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def test_schedules():
    np.testing.assert_allclose(noise_schedule("linear", 1000), np.linspace(1e-4, 0.02, 1000), **TIGHT)
    np.testing.assert_allclose(noise_schedule("linear", 250), np.linspace(4e-4, 0.08, 250), **TIGHT)
    for steps in (10, 1000):
        np.testing.assert_allclose(noise_schedule("cosine", steps), cosine(steps), **TIGHT)


@pytest.mark.parametrize("steps", [2, 5, 20])
def test_variances_of_short_schedules_are_below_one(steps):
    assert (0 < noise_schedule("linear", steps)).all() and (noise_schedule("linear", steps) < 1).all()


@each_schedule
def test_noise_adds_up_step_by_step(betas):
    """Mean and variance of x_t, from the chain of single steps."""
    process = GaussianDiffusion(40, betas)
    x0, mean, variance = 0.7, 0.7, 0.0
    ones = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    for t, beta in enumerate(process.betas.tolist()):
        mean, variance = math.sqrt(1 - beta) * mean, (1 - beta) * variance + beta
        t = torch.tensor([t])
        assert process.add_noise(x0 * ones, t, 0 * ones).item() == pytest.approx(mean, abs=1e-12)
        assert process.add_noise(0 * ones, t, ones).item() == pytest.approx(math.sqrt(variance), abs=1e-12)


def test_image_of_its_noise():
    process, t = GaussianDiffusion(), torch.tensor([0, 3, 500, 999])
    x0, noise = normal(4, 3, 2, 2), normal(4, 3, 2, 2)
    torch.testing.assert_close(process.x0_of(process.add_noise(x0, t, noise), t, noise), x0, rtol=1e-9, atol=1e-9)


@each_schedule
@pytest.mark.parametrize("t", [1, 7, 39])
def test_posterior_by_bayes_rule_on_a_grid(betas, t):
    """Mean and variance of q(x_(t-1) | x_t, x_0), integrated numerically."""
    process, x0, xt = GaussianDiffusion(40, betas), 0.4, -0.9
    all_betas, _, before = tables(process)
    beta, kept = all_betas[t], before[t]
    wide = math.sqrt(process.posterior_variance[t])
    centre = process.posterior(torch.full((1, 1, 1, 1), x0), torch.full((1, 1, 1, 1), xt), torch.tensor([t]))[0].item()
    grid = centre + wide * np.linspace(-12, 12, 20001)
    density = np.exp(
        -((xt - math.sqrt(1 - beta) * grid) ** 2) / (2 * beta)
        - (grid - math.sqrt(kept) * x0) ** 2 / (2 * (1 - kept))
        - (
            -((xt - math.sqrt(1 - beta) * centre) ** 2) / (2 * beta)
            - (centre - math.sqrt(kept) * x0) ** 2 / 2 / (1 - kept)
        )
    )
    density /= density.sum()
    mean = (density * grid).sum()
    variance = (density * (grid - mean) ** 2).sum()
    exact = torch.full((1, 1, 1, 1), 1.0, dtype=torch.float64)
    ours, log_variance = process.posterior(x0 * exact, xt * exact, torch.tensor([t]))
    assert ours.item() == pytest.approx(mean, abs=1e-9)
    assert log_variance.exp().item() == pytest.approx(variance, rel=1e-8)


def test_first_posterior():
    """Of the first step the mean is the image, and the logarithm of its variance, 0, is replaced by the second's."""
    process, t = GaussianDiffusion(), torch.tensor([0])
    x0 = normal(1, 1, 2, 2)
    mean, log_variance = process.posterior(x0, normal(1, 1, 2, 2), t)
    torch.testing.assert_close(mean, x0, **TIGHT)
    assert process.posterior_variance[0] == 0
    assert log_variance.item() == pytest.approx(math.log(process.posterior_variance[1]), abs=1e-12)


@each_schedule
def test_learned_log_variance(betas):
    """Improved DDPM, eq. 15: exp(v log beta + (1 - v) log of the posterior's), v from 0 to 1."""
    process = GaussianDiffusion(30, betas)
    all_betas, kept, before = tables(process)
    for t in (1, 12, 29):
        low = all_betas[t] * (1 - before[t]) / (1 - kept[t])
        for v in (0.0, 0.3, 1.0):
            wanted = v * math.log(all_betas[t]) + (1 - v) * math.log(low)
            fraction = torch.full((1, 1, 1, 1), 2 * v - 1, dtype=torch.float64)
            assert process.log_variance(fraction, torch.tensor([t])).item() == pytest.approx(wanted, abs=1e-10)


def test_kl():
    mean, log_variance, mean2, log_variance2 = normal(4, 50)
    wanted = kl_divergence(Normal(mean, (log_variance / 2).exp()), Normal(mean2, (log_variance2 / 2).exp()))
    torch.testing.assert_close(gaussian_kl(mean, log_variance, mean2, log_variance2), wanted, **TIGHT)


LEVELS = torch.arange(256, dtype=torch.float64) / 127.5 - 1


@pytest.mark.parametrize("mean", [-1.0, -0.3, 0.02, 0.99])
@pytest.mark.parametrize("scale", [0.01, 0.1, 0.7])
def test_levels(mean, scale):
    """Probabilities of the 256 levels sum to one and are those of the normal distribution, as far as tanh is its."""
    mean, log_scale = torch.tensor(mean, dtype=torch.float64), torch.tensor(math.log(scale), dtype=torch.float64)
    ours = levels_log_likelihood(LEVELS, mean, log_scale).exp()
    assert ours.sum().item() == pytest.approx(1, abs=1e-6)
    edges = torch.cat([torch.tensor([-math.inf]), (LEVELS[1:] + LEVELS[:-1]) / 2, torch.tensor([math.inf])])
    below = torch.special.ndtr((edges.double() - mean) / scale)
    assert (ours - below.diff()).abs().max() < 2 * 3.2e-4  # the approximation's error at both edges of a bin


def bound_by_hand(process, predicted, fraction, x0, xt, t):
    """Term t of the bound in bits, one number: the posterior by precisions, the step back by DDPM's eq. 11."""
    betas, kept, before = tables(process)
    beta, a, b = betas[t], kept[t], before[t]
    own = (xt - beta / math.sqrt(1 - a) * predicted) / math.sqrt(1 - beta)
    v = (fraction + 1) / 2
    if t == 0:
        low = betas[1] * (1 - before[1]) / (1 - kept[1])
        scale = math.exp((v * math.log(beta) + (1 - v) * math.log(low)) / 2)
        cdf = [
            0.5 * (1 + math.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u**3)))
            for u in ((x0 + 1 / 255 - own) / scale, (x0 - 1 / 255 - own) / scale)
        ]
        inside = cdf[0] if x0 < -0.999 else 1 - cdf[1] if x0 > 0.999 else cdf[0] - cdf[1]
        return -math.log2(max(inside, 1e-12))
    variance = 1 / ((1 - beta) / beta + 1 / (1 - b))
    mean = variance * (math.sqrt(1 - beta) / beta * xt + math.sqrt(b) / (1 - b) * x0)
    scale = math.exp((v * math.log(beta) + (1 - v) * math.log(variance)) / 2)
    posterior, step = (
        Normal(*torch.tensor(pair, dtype=torch.float64)) for pair in ((mean, math.sqrt(variance)), (own, scale))
    )
    return kl_divergence(posterior, step).item() / math.log(2)


@each_schedule
def test_bound_is_that_of_a_computation_by_hand(betas):
    process, t = GaussianDiffusion(50, betas), torch.tensor([0, 0, 1, 20, 49])
    x0 = normal(5, 1, 2, 2).clamp(-1, 1)  # some at the open ends
    x0[0, 0, 0, 0], x0[0, 0, 0, 1] = -1, 1
    noise = normal(5, 1, 2, 2)
    predicted, fraction, xt = noise + 0.1 * normal(5, 1, 2, 2), normal(5, 1, 2, 2), process.add_noise(x0, t, noise)
    ours = process.bound(predicted, fraction, x0, xt, t)
    for i in range(5):
        values = zip(*(tensor[i].flatten().tolist() for tensor in (predicted, fraction, x0, xt)))
        wanted = np.mean([bound_by_hand(process, *value, t[i].item()) for value in values])
        assert ours[i].item() == pytest.approx(wanted, rel=1e-6, abs=1e-9)


class Network:
    """Gives what it was made with, and remembers what it was asked."""

    def __init__(self, output):
        self.output = output

    def __call__(self, x, t, y):
        self.x, self.t, self.y = x, t, y
        return self.output


def test_hybrid_loss():
    """loss = mse + vb; the network is shown x_t, and its mean learns nothing from vb."""
    process, t, y = GaussianDiffusion(250), torch.tensor([0, 3, 30]), torch.tensor([2, 0, 1])
    x0, noise = normal(3, 2, 4, 3).float().clamp(-1, 1), normal(3, 2, 4, 3).float()
    near = noise + 0.1 * normal(3, 2, 4, 3).float()
    output = torch.cat([near, normal(3, 2, 4, 3).float()], 1).requires_grad_()
    network = Network(output)
    parts = process.losses(network, x0, t, y, noise)
    assert torch.equal(network.x, process.add_noise(x0, t, noise)) and network.y is y
    assert network.t.tolist() == [0, 12, 120]
    mse = [((output[i, :2] - noise[i]) ** 2).mean().item() for i in range(3)]
    vb = process.bound(output[:, :2].double(), output[:, 2:].double(), x0.double(), network.x.double(), t)
    torch.testing.assert_close(parts["mse"], torch.tensor(mse))
    torch.testing.assert_close(parts["vb"].double(), vb, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(parts["loss"], parts["mse"] + parts["vb"])
    (gradient,) = torch.autograd.grad(parts["loss"].sum(), output)
    torch.testing.assert_close(gradient[:, :2], 2 * (output[:, :2] - noise).detach() / noise[0].numel())
    fraction = output[:, 2:].detach().double().requires_grad_()
    vb = process.bound(output[:, :2].detach().double(), fraction, x0.double(), network.x.double(), t)
    (wanted,) = torch.autograd.grad(vb.sum(), fraction)
    torch.testing.assert_close(gradient[:, 2:].double(), wanted, rtol=1e-3, atol=1e-6)
    assert (wanted.abs().amax((1, 2, 3)) > 1e-5).all()


def test_loss_of_a_perfect_network():
    process, t = GaussianDiffusion(), torch.tensor([1, 400, 999])
    x0, noise = normal(3, 1, 4, 4).float().clamp(-1, 1), normal(3, 1, 4, 4).float()
    parts = process.losses(Network(torch.cat([noise, -torch.ones_like(noise)], 1)), x0, t, t, noise)
    assert (parts["mse"] == 0).all() and parts["vb"].abs().max() < 1e-6


def test_loss_without_variance_is_the_squared_error_alone():
    process, t = GaussianDiffusion(learn_sigma=False), torch.tensor([5])
    parts = process.losses(
        Network(torch.zeros(1, 3, 2, 2)), torch.zeros(1, 3, 2, 2), t, t, torch.full((1, 3, 2, 2), 2.0)
    )
    assert set(parts) == {"loss"} and parts["loss"].tolist() == [4]
    assert (process.out_chans(3), GaussianDiffusion().out_chans(3)) == (3, 6)


def test_loss_in_low_precision_is_formed_in_float32():
    process, t = GaussianDiffusion(), torch.tensor([0, 999])
    network = Network(normal(2, 2, 4, 4).bfloat16())
    parts = process.losses(network, normal(2, 1, 4, 4).float(), t, t, normal(2, 1, 4, 4).float())
    assert all(part.dtype == torch.float32 and part.isfinite().all() for part in parts.values())


def test_training_times():
    times = GaussianDiffusion(20).draw_times(4000)
    counts = torch.bincount(times, minlength=20)
    assert len(counts) == 20 and (counts - 200).abs().max() < 5 * math.sqrt(200)


@pytest.mark.parametrize("steps, wanted", [(1000, 1.0), (250, 4.0), (4000, 0.25)])
def test_model_times(steps, wanted):
    t = torch.arange(steps)
    np.testing.assert_allclose(GaussianDiffusion(steps).model_times(t), wanted * t.numpy())


def guided_diffusion_times(total, steps):
    """The times of OpenAI's and DiT's code for one section."""
    stride = (total - 1) / (steps - 1)
    now, times = 0.0, []
    for _ in range(steps):
        times.append(round(now))
        now += stride
    return times


@pytest.mark.parametrize("betas", ["linear", "cosine"])
@pytest.mark.parametrize("steps", [2, 21, 250, 1000])
def test_respaced(steps, betas):
    """Each new step does what the steps that it stands for did together."""
    whole = GaussianDiffusion(1000, betas)
    spaced = whole.respaced(steps)
    times = guided_diffusion_times(1000, steps)
    assert spaced.steps == len(set(times)) == steps and times[-1] == 999
    assert spaced.model_times(torch.arange(steps)).tolist() == times
    together, start = [], 0
    for time in times:
        together.append(1 - math.prod((1 - whole.betas[start : time + 1]).tolist()))
        start = time + 1
    np.testing.assert_allclose(spaced.betas, together, rtol=1e-9, atol=1e-13)
    assert torch.equal(spaced.kept, whole.kept[times])
    variance = [b * (1 - p) / (1 - k) for b, k, p in zip(*tables(spaced))]
    np.testing.assert_allclose(spaced.posterior_variance, variance, rtol=1e-6, atol=1e-12)
    assert whole.steps == 1000 and whole.betas.shape == (1000,)


def test_respaced_to_one_step():
    """From pure noise to the image, and no logarithm of nothing."""
    spaced = GaussianDiffusion(100).respaced(1)
    assert spaced.model_times(torch.tensor([0])).tolist() == [990]
    assert spaced.posterior_x0.tolist() == [1] and spaced.posterior_log_variance.isfinite().all()


def test_quadratic_times():
    assert spread(101, 11, quadratic=True) == [i * i for i in range(11)]
    assert spread(50, 1, quadratic=True) == [49]
    for steps in range(2, 51):
        times = spread(50, steps, quadratic=True)
        assert len(times) == steps and times[0] == 0 and times[-1] == 49
        assert all(a < b for a, b in zip(times, times[1:]))


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: GaussianDiffusion(1), "steps=1 of the noise schedule must be at least 2"),
        (lambda: GaussianDiffusion(betas="sqrt"), "betas='sqrt' is unknown; use one of: linear, cosine"),
        (lambda: GaussianDiffusion(50).respaced(51), "steps=51 of a sampler must be from 1 to 50"),
        (lambda: GaussianDiffusion(50).respaced(0), "steps=0 of a sampler must be from 1 to 50"),
    ],
)
def test_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()
