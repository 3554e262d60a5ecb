"""Inner models: definitions by hand, closed gradients against autograd, starts, costs."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from vit3.inner import InnerSpec, Loss, ModelSpec, inner_model
from vit3.inner.cost import training_cost
from vit3.inner.train import inner_train

B, G, D, GRID = 2, 3, 4, (3, 5)
N = GRID[0] * GRID[1]
SPECS = [
    ModelSpec("fc"),
    ModelSpec("silu_fc"),
    ModelSpec("mlp"),
    ModelSpec("mlp", ratio=2.5, depth=3),
    ModelSpec("mlp", depth=2, residual="output_weight"),
    ModelSpec("glu"),
    ModelSpec("swiglu", ratio=2),
    ModelSpec("swiglu", residual="output_weight"),
    ModelSpec("conv"),
    ModelSpec("conv", kernel=5, dilation=2),
    ModelSpec("dwconv"),
    ModelSpec("dwconv", kernel=5, dilation=2),
    *(ModelSpec(name, residual="input") for name in ("fc", "silu_fc", "mlp", "glu", "swiglu", "conv", "dwconv")),
]
each_spec = pytest.mark.parametrize(
    "spec", SPECS, ids=lambda s: f"{s.model}-r{s.ratio}-l{s.depth}-k{s.kernel}-{s.residual}"
)


def tokens():
    return torch.randn(B, G, N, D, dtype=torch.float64)


def weights_of(model, grad=False):
    """One set per sample, large enough for every part to matter."""
    stored = tuple(torch.randn(shape, dtype=torch.float64) / shape[-1] ** 0.5 for shape in model.shapes)
    return tuple(
        (w + 0.1 * torch.randn(B, *w.shape[1:], dtype=w.dtype)).requires_grad_(grad) for w in model.start(stored)
    )


def by_hand(spec, w, x):
    """f(W, x) for one sample and head: x (N, D), in plain matrix terms."""
    eye = torch.eye(D, dtype=x.dtype)
    if spec.residual == "output_weight":
        w = (*w[:-1], w[-1] + eye)
    if spec.model == "fc":
        y = x @ w[0]
    elif spec.model == "silu_fc":
        y = F.silu(x @ w[0])
    elif spec.model == "mlp":
        y = x
        for layer in w[:-1]:
            y = F.silu(y @ layer)
        y = y @ w[-1]
    elif spec.model in ("glu", "swiglu"):
        y = (x @ w[0]) * F.silu(x @ w[1])
        y = y @ w[2] if spec.model == "swiglu" else y
    else:
        y = conv_by_hand(spec, w[0], x)
    return y + x if spec.residual == "input" else y


def conv_by_hand(spec, kernel, x):
    """Every output entry as a sum over taps inside the grid: kernel (D, I, k, k)."""
    h, w = GRID
    maps, y, half = x.view(h, w, D), torch.zeros(h, w, D, dtype=x.dtype), spec.kernel // 2
    for r, c, o in itertools.product(range(h), range(w), range(D)):
        for i, a, b in itertools.product(range(kernel.shape[1]), range(spec.kernel), range(spec.kernel)):
            row, column = r + (a - half) * spec.dilation, c + (b - half) * spec.dilation
            if 0 <= row < h and 0 <= column < w:
                y[r, c, o] += kernel[o, i, a, b] * maps[row, column, i if spec.model == "conv" else o]
    return y.view(N, D)


@each_spec
def test_definition(spec):
    model, x = inner_model(spec, G, D), tokens()
    weights = weights_of(model)
    y = model.apply(weights, x, GRID)
    for b, g in itertools.product(range(B), range(G)):
        if spec.model in ("conv", "dwconv"):
            own = (weights[0][b, g * D : (g + 1) * D],)
        else:
            own = tuple(w[b, g] for w in weights)
        assert torch.allclose(y[b, g], by_hand(spec, own, x[b, g]), rtol=0, atol=1e-12)


@each_spec
@pytest.mark.parametrize("loss", ["dot", "mse"])
def test_closed_gradients(spec, loss):
    """Equal to autograd's, for a loss that needs the prediction and one that does not."""
    model, k, v = inner_model(spec, G, D), tokens(), tokens()
    weights, loss = weights_of(model, grad=True), Loss(loss, 0.3, 1.0)
    wanted = torch.autograd.grad(loss.value(model.apply(weights, k, GRID), v).sum(), weights)
    error = loss.error(None, v) if not loss.needs_prediction else lambda prediction: loss.error(prediction, v)
    for ours, theirs in zip(model.gradients(weights, k, GRID, error), wanted, strict=True):
        assert ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["fc", "silu_fc", "mlp", "glu", "swiglu", "conv", "dwconv"])
def test_starts(name):
    def start(**knobs):
        model = inner_model(ModelSpec(name, **knobs), G, D)
        weights = tuple(torch.empty(shape, dtype=torch.float64) for shape in model.shapes)
        model.init(weights)
        return model, model.start(weights)

    model, weights = start()
    assert all(0.01 < w.std() < 0.03 for w in weights if w.numel() > 30)
    model, weights = start(output_init="zero")
    assert not weights[-1].any() and all(w.any() for w in weights[:-1])
    model, weights = start(init="identity")
    x = tokens()
    if name in ("fc", "conv", "dwconv"):
        assert torch.equal(model.apply(weights, x, GRID), x)
    elif name == "silu_fc":
        assert torch.equal(model.apply(weights, x, GRID), F.silu(x))
    model, weights = start(output_init="identity")
    assert torch.equal(weights[-1].flatten()[: D + 2], start(init="identity")[1][-1].flatten()[: D + 2])


@pytest.mark.parametrize(
    "spec", [s for s in SPECS if s.model != "dwconv"], ids=lambda s: f"{s.model}-{s.residual}-{s.ratio}"
)
@pytest.mark.parametrize("loss", ["dot", "mse"])
@pytest.mark.parametrize("knobs", [{}, {"epochs": 3}, {"batch": "N/4"}], ids=str)
def test_cost_is_what_is_multiplied(spec, loss, knobs):
    """The formula against a counter of every matrix product and convolution that runs."""
    inner = InnerSpec(**vars(spec), beside=(), loss=loss, **knobs)
    model, k = inner_model(spec, G, D), tokens()
    start = model.start(tuple(torch.randn(shape, dtype=torch.float64) for shape in model.shapes))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        fast = inner_train(model, start, k, k, inner, grid=GRID)
        training = counter.get_total_flops()
        model.apply(fast, k, GRID)
    assert training == 2 * B * training_cost(model, inner, N)
    assert counter.get_total_flops() - training == 2 * B * G * N * model.cost().predict


def test_products_of_the_paper():
    """Products of D x D matrices per token for one dot-product step and the query pass: paper tables 1, 2, 4, 6."""

    def products(model, loss="dot", epochs=1, **knobs):
        spec = InnerSpec(model=model, beside=(), loss=loss, epochs=epochs, **knobs)
        inner = inner_model(spec, 6, 64)
        total = training_cost(inner, spec, 196) + 6 * 196 * inner.cost().predict
        return total / (6 * 196 * 64 * 64)

    assert products("fc") == 2
    assert products("silu_fc") == 3
    assert [products("mlp", ratio=r) for r in (1, 2, 3, 4)] == [6, 12, 18, 24]
    assert products("mlp", depth=3) == 10
    assert products("swiglu") == 9
    assert products("glu") == 6
    assert products("conv") == 18
    assert products("dwconv") == 2 * 9 / 64
    assert [products("mlp", epochs=e) for e in (1, 2, 3, 4)] == [6, 10, 14, 18]
    assert [products("mlp", loss=loss) for loss in ("mse", "rmse", "mae", "smooth_l1")] == [7] * 4


@each_spec
def test_norms_are_of_output_columns_and_kernels(spec):
    model = inner_model(spec, G, D)
    wanted = (-3, -2, -1) if spec.model in ("conv", "dwconv") else (-2,)
    assert model.norm_dims == (wanted,) * len(model.shapes)


def test_hidden_width_is_rounded_and_never_zero():
    widths = [inner_model(ModelSpec("mlp", ratio=ratio), G, D).shapes[0][-1] for ratio in (0.001, 0.4, 1.0, 2.4)]
    assert widths == [1, 2, 4, 10]


def test_spread_of_the_start():
    model = inner_model(ModelSpec("fc"), 8, 64)
    (weight,) = weights = (torch.empty(model.shapes[0]),)
    model.init(weights)
    assert weight.std().item() == pytest.approx(0.02, rel=0.03) and abs(weight.mean().item()) < 0.001


@pytest.mark.parametrize("spec", [ModelSpec("mlp", ratio=2.5, depth=3), ModelSpec("conv"), ModelSpec("fc")], ids=str)
@pytest.mark.parametrize("knobs", [{}, {"epochs": 2, "batch": "N/3"}], ids=str)
def test_cost_of_muon(spec, knobs):
    """Counted as the others, and by hand per matrix of p x q, p <= q: five times two p x p x q and one p x p x p."""
    plain, muon = (InnerSpec(**vars(spec), beside=(), optimizer=optimizer, **knobs) for optimizer in ("sgd", "muon"))
    model, k = inner_model(spec, G, D), tokens()
    start = model.start(tuple(torch.randn(shape, dtype=torch.float64) for shape in model.shapes))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        inner_train(model, start, k, k, muon, grid=GRID)
    assert counter.get_total_flops() == 2 * B * training_cost(model, muon, N)
    sides = {"mlp": [(4, 10), (10, 10), (4, 10)], "conv": [(4, 36)], "fc": [(4, 4)]}[spec.model]
    by_hand = 5 * sum(2 * p * p * q + p**3 for p, q in sides) * G * (6 if knobs else 1)
    assert training_cost(model, muon, N) - training_cost(model, plain, N) == by_hand
