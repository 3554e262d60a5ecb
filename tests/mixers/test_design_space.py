"""The mixer at every knob of the inner problem: closed gradients, operators and autograd are one function."""

import dataclasses
import random

import pytest
import torch

from tests.helpers import max_error
from vit3 import TTT
from vit3.inner import BranchSpec, Cost, InnerModel, InnerSpec, models, register_inner_model, spec
from vit3.inner.spec import _CHOICES, LOSSES, MODELS
from vit3.layers.rope import RoPE2d

H, W, DIM, HEADS = 3, 4, 12, 3
DWCONV = BranchSpec(model="dwconv", heads=1, extra=True)
MLP = dict(model="mlp", beside=())

# Every value of every knob at least once, alone on top of the released block or of the paper's base
KNOBS = [
    {},
    *(dict(model=model, beside=()) for model in MODELS),
    *(dict(MLP, loss=loss) for loss in LOSSES),
    dict(loss="huber", threshold=0.05),
    dict(model="mlp", ratio=2.0, depth=3),
    dict(model="swiglu", ratio=0.5),
    *(dict(model=model, residual="input") for model in ("fc", "mlp", "glu", "dwconv")),
    *(dict(model=model, residual="output_weight") for model in ("mlp", "swiglu")),
    *(dict(MLP, output_init=init) for init in ("zero", "identity")),
    dict(model="fc", init="zero", loss="mse"),
    dict(model="conv", init="identity", beside=()),
    dict(model="dwconv", kernel=5, dilation=2, beside=()),
    dict(beside=(BranchSpec(model="fc"), DWCONV)),
    dict(model="conv", beside=(BranchSpec(model="glu", heads=2, extra=True), BranchSpec(model="dwconv"))),
    dict(beside=(BranchSpec(model="dwconv"),)),
    dict(scale=None),
    *(dict(lr=lr) for lr in (0.0, 0.1, 10.0)),
    *(dict(rate=rate) for rate in ("learned", "per_head", "token", "token_head")),
    dict(MLP, rate="token_head", loss="rmse", batch="N/3"),
    dict(direction="ascent"),
    *(dict(batch=batch) for batch in ("N/2", "N/3", "5", "1")),
    *(dict(MLP, batch="N/4", order=order) for order in ("raster", "strided", "blockwise", "random")),
    *(dict(MLP, epochs=epochs) for epochs in (0, 2, 4)),
    *(dict(MLP, optimizer=optimizer, epochs=2) for optimizer in ("momentum", "muon", "adam")),
    dict(model="conv", beside=(), optimizer="muon"),
    dict(gradient_norm="none"),
    dict(gradient_norm="clip", max_norm=0.01),
    dict(renormalise=True, epochs=2),
    *(dict(control=control) for control in _CHOICES["control"] if "rate" not in control),
    *(dict(control=control, rate="token_head") for control in ("mean_rate", "shuffle_rate")),
]


def some_combinations(count):
    """Knobs drawn together, those that make no sense left out; the same every time."""
    rng, found = random.Random(0), []
    while len(found) < count:
        knobs = dict(
            model=rng.choice(MODELS), loss=rng.choice(LOSSES), rate=rng.choice(_CHOICES["rate"]),
            residual=rng.choice(_CHOICES["residual"]), order=rng.choice(_CHOICES["order"]),
            batch=rng.choice(["N", "N/3"]),
            optimizer=rng.choice(_CHOICES["optimizer"]), gradient_norm=rng.choice(_CHOICES["gradient_norm"]),
            renormalise=rng.choice([False, True]), direction=rng.choice(_CHOICES["direction"]),
            epochs=rng.choice([1, 2]), beside=rng.choice([(), (DWCONV,), (BranchSpec(model="mlp", ratio=1.5),)]),
        )  # fmt: skip
        try:
            InnerSpec(**knobs)
        except ValueError:
            continue
        found.append(knobs)
    return found


def _mixes_images(knobs):
    return knobs.get("control", "").endswith(("images", "swap_fast", "mean_fast"))  # on purpose


def short(knobs):
    return (
        "-".join(f"{k}={v if k != 'beside' else '+'.join(b.model for b in v)}" for k, v in knobs.items()) or "released"
    )


each_knob = pytest.mark.parametrize("knobs", KNOBS, ids=short)
every_spec = pytest.mark.parametrize("knobs", [*KNOBS, *some_combinations(30)], ids=short)


def mixer_of(knobs, backend="auto", **changes):
    """A mixer in float64 whose weights are large enough for every part to matter."""
    torch.manual_seed(1)
    mixer = TTT(DIM, HEADS, inner=InnerSpec(**{**knobs, **changes}), backend=backend).double()
    with torch.no_grad():
        for name, p in mixer.named_parameters():
            if name.startswith("w") or name == "rate":
                p.add_(torch.randn_like(p) * 0.3)
    return mixer


def tokens(batch=2, seed=2):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, H * W, DIM, dtype=torch.float64, generator=generator)


def values_and_gradients(mixer, rope=None):
    x = tokens().requires_grad_()
    y = mixer(x, H, W, rope=rope)
    direction = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(3))
    parameters = {name: p for name, p in mixer.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(y, [x, *parameters.values()], direction, allow_unused=True, materialize_grads=True)
    return y, dict(zip(["x", *parameters], gradients, strict=True))


@every_spec
def test_one_function(knobs):
    """Dispatched, closed and autograd: equal values and equal outer gradients of everything."""
    y, gradients = values_and_gradients(mixer_of(knobs, "autograd"))
    for backend in ("closed", "auto"):
        ours, theirs = values_and_gradients(mixer_of(knobs, backend))
        assert max_error(ours, y) <= 1e-12
        for name, gradient in gradients.items():
            bound = 1e-12 * max(1.0, gradient.abs().max().item())
            assert max_error(theirs[name], gradient) <= bound, (backend, name)


@each_knob
def test_modes_are_equal(knobs):
    for backend in ("auto", "autograd"):
        mixer, x = mixer_of(knobs, backend), tokens()
        y = mixer(x, H, W)
        with torch.no_grad():
            assert max_error(mixer(x, H, W), y) <= 1e-13
        with torch.inference_mode():
            assert max_error(mixer(x.clone(), H, W), y) <= 1e-13
        assert max_error(mixer.eval()(x, H, W), y) <= 1e-13


@pytest.mark.parametrize("knobs", [k for k in KNOBS if not _mixes_images(k)], ids=short)
def test_samples_do_not_see_each_other(knobs):
    mixer, x = mixer_of(knobs), tokens(3)
    together = mixer(x, H, W)
    assert all(max_error(mixer(x[i : i + 1], H, W), together[i : i + 1]) <= 1e-12 for i in range(3))


@pytest.mark.parametrize(
    "knobs", [dict(model=model, beside=()) for model in MODELS] + [dict(MLP, loss=loss) for loss in LOSSES], ids=short
)
def test_gradcheck(knobs):
    mixer = TTT(4, 2, inner=InnerSpec(**knobs)).double()
    for p in mixer.parameters():
        p.data.normal_(std=0.4)
    x = torch.randn(1, 4, 4, dtype=torch.float64, requires_grad=True)
    names = list(dict(mixer.named_parameters()))

    def run(x, *parameters):
        return torch.func.functional_call(mixer, dict(zip(names, parameters)), (x, 2, 2))

    assert torch.autograd.gradcheck(run, (x, *mixer.parameters()))


def value_gradient(knobs):
    """Gradient of the rows of ``qkv`` that make the values of the M heads."""
    _, gradients = values_and_gradients(mixer_of(knobs))
    return gradients["qkv.weight"][2 * DIM : 3 * DIM]


def test_which_losses_teach_the_values():
    assert torch.count_nonzero(value_gradient(dict(MLP, loss="mae"))) == 0
    for loss in ("dot", "mse", "rmse", "smooth_l1", "cosine"):
        assert value_gradient(dict(MLP, loss=loss)).abs().max() > 1e-6, loss


@pytest.mark.parametrize("loss", LOSSES)
def test_report_shows_the_signal(loss):
    mixer, x = mixer_of(dict(MLP, loss=loss)), tokens()
    y, reports = mixer(x, H, W, return_inner=True)
    report = reports["mlp"]
    assert torch.equal(y, mixer(x, H, W)) and report["loss_before"].shape == (2, HEADS)
    assert (report["mixed_derivative"] == 0).all() == (loss == "mae")
    assert (report["signal_share"] <= 1).all() and (report["signal_share"] == 0).all() == (loss == "mae")


def test_a_small_step_lowers_every_loss():
    for loss in LOSSES:
        for up in (False, True):
            knobs = dict(MLP, loss=loss, lr=1e-3, gradient_norm="none", direction="ascent" if up else "descent")
            report = mixer_of(knobs)(tokens(), H, W, return_inner=True)[1]["mlp"]
            change = report["loss_after"].sum() - report["loss_before"].sum()
            assert (change > 0) if up else (change < 0), loss


def test_branches_have_their_own_names():
    inner = InnerSpec(model="mlp", beside=(BranchSpec(model="fc"), BranchSpec(model="mlp", heads=2, extra=True)))
    mixer = TTT(DIM, HEADS, inner=inner)
    shapes = {name: tuple(p.shape) for name, p in mixer.named_parameters() if name.startswith("w")}
    assert shapes == {
        "w1": (1, 2, 4, 4),
        "w2": (1, 2, 4, 4),
        "w3": (1, 1, 4, 4),
        "w4": (1, 2, 4, 4),
        "w5": (1, 2, 4, 4),
    }
    assert mixer.qkv.out_features == 3 * (DIM + 8) and mixer.proj.in_features == DIM + 8
    reports = mixer(tokens().float(), H, W, return_inner=True)[1]
    assert list(reports) == ["mlp", "fc", "mlp_2"] and list(reports["mlp_2"]["fast_weights"]) == ["w4", "w5"]


def test_each_branch_has_its_heads():
    """A branch's output depends on its own heads' queries alone."""
    mixer = TTT(DIM, HEADS, inner=InnerSpec(model="fc", beside=(BranchSpec(model="dwconv"),))).double()
    mixer.proj.weight.data = torch.eye(DIM, dtype=torch.float64)
    x, before = tokens(), None
    for change in (0.0, 1.0):
        mixer.qkv.bias.data[8:12] += change  # queries of the last head
        y = mixer(x, H, W)
        if before is not None:
            assert torch.equal(y[..., :8], before[..., :8]) and not torch.equal(y[..., 8:], before[..., 8:])
        before = y


@pytest.mark.parametrize("knobs", [dict(), MLP, dict(model="fc", beside=(BranchSpec(model="dwconv"),))], ids=short)
def test_rope_turns_the_heads(knobs):
    rope = RoPE2d(DIM)
    y, gradients = values_and_gradients(mixer_of(knobs, "autograd"), rope)
    ours, theirs = values_and_gradients(mixer_of(knobs), rope)
    assert max_error(ours, y) <= 1e-12 and max(max_error(theirs[n], g) for n, g in gradients.items()) <= 1e-11
    assert max_error(mixer_of(knobs)(tokens(), H, W), y) > 1e-3


@pytest.mark.parametrize("rate", ["learned", "per_head", "token", "token_head"])
def test_rates_start_and_learn(rate):
    plain, rated = (TTT(DIM, HEADS, inner=InnerSpec(**MLP, rate=r)).double() for r in ("fixed", rate))
    rated.load_state_dict({**plain.state_dict(), **{n: p for n, p in rated.state_dict().items() if "rate" in n}})
    if rate.startswith("token"):
        rated.rate.weight.data.zero_()  # sigmoid(0) = 1/2 of the loss
        plain = TTT(DIM, HEADS, inner=InnerSpec(**MLP, scale=0.5 / 3)).double()
        plain.load_state_dict({n: p for n, p in rated.state_dict().items() if "rate" not in n})
    assert max_error(rated(tokens(), H, W), plain(tokens(), H, W)) <= 1e-12
    rated(tokens(), H, W).square().sum().backward()
    gradient = next(p.grad for n, p in rated.named_parameters() if "rate" in n)
    assert gradient.abs().min() > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_low_precision(dtype, autocast):
    for knobs in (MLP, dict(model="conv", beside=()), dict(MLP, loss="rmse", rate="token_head", optimizer="muon")):
        mixer, x = mixer_of(knobs), tokens()
        exact = mixer(x, H, W)
        mixer, x = (mixer.float(), x.float()) if autocast else (mixer.to(dtype), x.to(dtype))
        with torch.autocast("cpu", dtype, enabled=autocast):
            y = mixer(x, H, W)
        assert y.dtype == dtype and (y - exact).norm() <= 3e-2 * exact.norm()


@pytest.mark.parametrize(
    "knobs", [dict(MLP), dict(model="glu", beside=()), dict(model="glu", loss="mse"), dict(model="conv")]
)
def test_macs_are_projections_and_inner_problem(knobs):
    mixer = TTT(DIM, HEADS, inner=InnerSpec(**knobs))
    inner = mixer.macs(H, W) - H * W * (mixer.qkv.weight.numel() + mixer.proj.weight.numel())
    twice = TTT(DIM, HEADS, inner=InnerSpec(**knobs, epochs=2))
    assert 0 < inner < twice.macs(H, W) - mixer.macs(H, W) + inner
    for rate, outputs in (("token", 1), ("token_head", sum(b.heads for b in mixer.branches))):
        gated = TTT(DIM, HEADS, inner=InnerSpec(**knobs, rate=rate))
        assert gated.macs(H, W) - mixer.macs(H, W) == H * W * DIM * outputs
    assert TTT(DIM, HEADS).macs(H, W) == H * W * (DIM * 48 + 16 * DIM + 6 * 4 * DIM + 18 * 4)


@pytest.mark.parametrize("backend", ["reference", "fused", "triton"])
def test_asked_for_an_operator_that_is_not(backend):
    with pytest.raises(ValueError, match=f"backend='{backend}' has no operator for this inner problem"):
        TTT(DIM, HEADS, inner=InnerSpec(**MLP), backend=backend)
    assert TTT(DIM, HEADS, inner=InnerSpec(beside=()), backend="fused").backend == "fused"


@pytest.mark.parametrize("backend", ["auto", "closed"])
def test_rope_needs_even_heads(backend):
    with pytest.raises(ValueError, match="make heads of 3 channels; use an even one"):
        TTT(12, 4, backend=backend)(torch.randn(1, 6, 12), 2, 3, rope=RoPE2d(12))


def test_too_few_heads():
    with pytest.raises(ValueError, match="inner.beside takes all of the num_heads=3 heads"):
        TTT(DIM, HEADS, inner=InnerSpec(beside=(BranchSpec(model="fc", heads=3),)))


@pytest.mark.parametrize(
    ("knobs", "sentence"),
    [
        (dict(loss="l2"), "inner.loss=l2 is not allowed; use one of: dot, mse"),
        (dict(ratio=2.0), "inner.ratio=2.0 means nothing of inner model 'glu'; it is a knob of mlp, swiglu"),
        (dict(model="mlp", kernel=5), "inner.kernel=5 means nothing of inner model 'mlp'"),
        (dict(model="dwconv", kernel=4), "inner.kernel=4 must be odd"),
        (dict(model="mlp", depth=1), "inner.depth=1 is not allowed; it must be at least 2"),
        (dict(model="mlp", ratio=2.0, residual="output_weight"), "needs square weights; set inner.ratio=1"),
        (dict(model="fc", residual="output_weight"), "needs an output layer, which 'fc' has not"),
        (dict(init="zero"), "inner.init=zero never learns with inner.model=glu"),
        (dict(optimizer="muon"), "makes matrices orthogonal, and a depthwise kernel is none"),
        (dict(control="mean_rate"), "needs a rate per token; set inner.rate=token"),
        (dict(model="fc", init="zero", renormalise=True), "keeps weights that start at zero there"),
        (dict(lr=-1.0), "inner.lr=-1.0 is not allowed; it must be at least 0"),
        (dict(epochs=-1), "inner.epochs=-1 is not allowed"),
        (dict(batch="N/x"), "must be N, N/k for k parts"),
        (dict(batch=None), "inner.batch=None must be N, N/k for k parts"),
        (dict(epochs=1.5), "inner.epochs=1.5 must be a whole number"),
        (dict(model="dwconv", kernel=5.0), "inner.kernel=5.0 must be a whole number"),
        (dict(lr=True), "inner.lr=True must be a finite number"),
        (dict(renormalise="yes"), "inner.renormalise='yes' is not allowed; use true or false"),
        (dict(beside=({"model": "dwconv"},)), "inner.beside=.* must be a list of BranchSpec, empty for none"),
        (dict(beside=BranchSpec()), "inner.beside=.* must be a list of BranchSpec, empty for none"),
        (dict(loss="smooth_l1", threshold=2.0), "inner.threshold=2.0 means nothing with inner.loss=smooth_l1"),
        (dict(momentum=0.5), "inner.momentum=0.5 means nothing with inner.optimizer=sgd"),
        (dict(max_norm=0.5), "inner.max_norm=0.5 means nothing with inner.gradient_norm=soft; it is a knob of clip"),
        (dict(output_init="zero", loss="cosine"), "inner.loss=cosine has no direction at predictions of zero"),
        (dict(MLP, output_init="zero", optimizer="adam"), "inner.optimizer=adam divides gradients by their size"),
    ],
)
def test_nonsense_is_refused(knobs, sentence):
    with pytest.raises(ValueError, match=sentence):
        InnerSpec(**knobs)


def test_a_number_of_tokens_may_be_a_number():
    assert InnerSpec(batch=4) == InnerSpec(batch="4")


@pytest.mark.parametrize(
    "knobs",
    [
        dict(model="fc", beside=(DWCONV,), batch="N/3", order="random", rate="token_head"),
        dict(MLP, control="random_start"),
        dict(MLP, control="shuffle_k_tokens"),
    ],
    ids=short,
)
def test_compiles_as_one_graph(knobs):
    torch._dynamo.reset()
    compiled = torch.compile(mixer_of(knobs), fullgraph=True, backend="eager")
    ours, theirs = values_and_gradients(mixer_of(knobs)), values_and_gradients(compiled)
    assert max_error(theirs[0], ours[0]) <= 1e-12
    gradients = dict(zip(ours[1], theirs[1].values(), strict=True))
    assert all(max_error(gradients[name], g) <= 1e-11 for name, g in ours[1].items())


def test_learned_factor_multiplies_the_rate():
    fixed, learned = mixer_of(MLP, lr=3.0), mixer_of(MLP, lr=6.0, rate="learned")
    learned.load_state_dict({**fixed.state_dict(), "rate": torch.tensor([0.5], dtype=torch.float64).log()})
    assert max_error(learned(tokens(), H, W), fixed(tokens(), H, W)) <= 1e-12


def test_every_choice_is_tried():
    tried = {name: set() for name in _CHOICES}
    for knobs in KNOBS:
        inner = InnerSpec(**knobs)
        for part in (inner, *inner.beside):
            for field in dataclasses.fields(part):
                tried.get(field.name, set()).add(getattr(part, field.name))
    assert {name: set(values) for name, values in _CHOICES.items()} == tried


def test_an_inner_model_of_ones_own(monkeypatch):
    """Registered under a name, trained by autograd, reported, counted; here a GLU again, so that numbers are known."""

    class Mine(InnerModel):
        def __init__(self, spec, heads, head_dim):
            super().__init__(spec, heads, head_dim)
            self.shapes, self.norm_dims = ((1, heads, head_dim, head_dim),) * 2, ((-2,), (-2,))

        def _forward(self, weights, x, grid):
            return (x @ weights[0]) * torch.nn.functional.silu(x @ weights[1])

        def cost(self):
            return Cost(2 * self.head_dim**2, 0, 2 * self.head_dim**2)

    monkeypatch.setattr("vit3.inner.models._CLASSES", dict(models._CLASSES))
    register_inner_model("mine", Mine)
    try:
        y, gradients = values_and_gradients(mixer_of(dict(model="mine")))
        wanted, theirs = values_and_gradients(mixer_of({}))
        assert max_error(y, wanted) <= 1e-12
        assert max(max_error(gradients[name], g) for name, g in theirs.items()) <= 1e-12
        with torch.inference_mode():
            mine, glu = (mixer_of(k)(tokens(), H, W, return_inner=True)[1] for k in (dict(model="mine"), {}))
        assert max_error(mine["mine"]["grad_norm"]["w1"], glu["glu"]["grad_norm"]["w1"]) <= 1e-12
        assert mixer_of(dict(model="mine")).macs(H, W) == mixer_of({}).macs(H, W)
        with pytest.raises(ValueError, match="inner model 'glu' is taken by Gated"):
            register_inner_model("glu", Mine)
        with pytest.raises(ValueError, match="is no subclass of"):
            register_inner_model("other", dict)
    finally:
        spec.MODELS.remove("mine")


def test_training_another_way_with_the_same_weights():
    mixer = mixer_of({})
    y, start = mixer(tokens(), H, W), mixer.inner
    mixer.set_inner(start.derive(epochs=0))
    still = mixer(tokens(), H, W)
    lazy = mixer_of({}, lr=0.0)
    assert max_error(still, lazy(tokens(), H, W)) <= 1e-12 and max_error(still, y) > 1e-4
    mixer.set_inner(start)
    assert torch.equal(mixer(tokens(), H, W), y)
    for change in (dict(model="fc"), dict(beside=()), dict(rate="token"), dict(residual="input")):
        with pytest.raises(ValueError, match="needs other parameters than"):
            mixer.set_inner(start.derive(**change))
    with pytest.raises(ValueError, match="inner.lrr is no knob"):
        start.derive(lrr=1)
