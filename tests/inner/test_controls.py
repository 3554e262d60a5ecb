"""Controls, each against what it does by hand."""

import pytest
import torch

from vit3 import TTT
from vit3.inner import BranchSpec, InnerSpec
from vit3.inner.controls import controlled_fast, controlled_inputs, controlled_rate, controlled_start
from vit3.inner.spec import CONTROLS

B, G, N, D = 3, 2, 5, 4
NEXT = [1, 2, 0]  # the image after each; the first one after the last


def some(*shape):
    return torch.randn(shape, dtype=torch.float64)


def parts():
    return {name: some(B, G, N, D) for name in "qkv"}


def changed(control):
    """What ``controlled_inputs`` makes of q, k, v, and what it was given, by name."""
    given = parts()
    return given, dict(zip("qkv", controlled_inputs(control, *given.values()), strict=True))


def test_queries_are_keys():
    given, now = changed("query_is_key")
    assert all(now[name] is given[source] for name, source in zip("qkv", "kkv", strict=True))


@pytest.mark.parametrize("which", "qkv")
def test_of_the_next_image(which):
    given, now = changed(f"shuffle_{which}_images")
    assert torch.equal(now[which], given[which][NEXT])
    assert all(now[name] is given[name] for name in "qkv" if name != which)


@pytest.mark.parametrize("which", "qkv")
def test_among_tokens(which):
    given, now = changed(f"shuffle_{which}_tokens")
    order = [next(i for i in range(N) if torch.equal(given[which][0, 0, i], t)) for t in now[which][0, 0]]
    assert sorted(order) == list(range(N)) and order != list(range(N))
    assert torch.equal(now[which], given[which][:, :, order])  # one shuffle for all images and heads
    assert torch.equal(now[which], changed_again(f"shuffle_{which}_tokens", given)[which])
    assert all(now[name] is given[name] for name in "qkv" if name != which)


def changed_again(control, given):
    return dict(zip("qkv", controlled_inputs(control, *given.values()), strict=True))


def test_starts():
    torch.manual_seed(5)  # not that of the control's own noise
    weights = (3 * some(1, G, 40, 50), 0.2 * some(1, 60, 1, 3, 3))
    assert not any(w.any() for w in controlled_start("zero_start", weights))
    fresh = controlled_start("random_start", weights)
    for new, old in zip(fresh, weights, strict=True):
        assert new.shape == old.shape and new.std().item() == pytest.approx(old.std().item(), rel=0.1)
        assert abs(torch.corrcoef(torch.stack([new.flatten(), old.flatten()]))[0, 1]) < 0.1
    assert all(map(torch.equal, fresh, controlled_start("random_start", weights)))  # the same in every call


def test_fast_weights():
    weights = (some(B, G, D, D), some(B, 8, 1, 3, 3))
    assert not any(w.any() for w in controlled_fast("zero_fast", weights))
    for new, old in zip(controlled_fast("swap_fast", weights), weights, strict=True):
        assert torch.equal(new, old[NEXT])
    for new, old in zip(controlled_fast("mean_fast", weights), weights, strict=True):
        assert torch.allclose(new, ((old[0] + old[1] + old[2]) / 3).expand_as(old), rtol=0, atol=1e-15)


def test_rates():
    rate = some(B, G, N, 1)
    mean = controlled_rate("mean_rate", rate)
    assert mean.shape == rate.shape
    assert torch.allclose(mean[2, 1], rate[2, 1].sum().div(N).expand(N, 1), rtol=0, atol=1e-15)
    shuffled = controlled_rate("shuffle_rate", rate)
    assert torch.equal(shuffled.sort(dim=-2)[0], rate.sort(dim=-2)[0]) and not torch.equal(shuffled, rate)


@pytest.mark.parametrize("control", CONTROLS)
def test_the_rest_is_left_alone(control):
    """A control changes one of the four places, no more."""
    given, weights, rate = parts(), (some(1, G, D, D),), some(B, G, N, 1)
    changes = [
        any(a is not b for a, b in zip(controlled_inputs(control, *given.values()), given.values(), strict=True)),
        controlled_start(control, weights) is not weights,
        controlled_fast(control, weights) is not weights,
        controlled_rate(control, rate) is not rate,
    ]
    assert sum(changes) == (control != "none")


@pytest.mark.parametrize("control", CONTROLS)
@pytest.mark.parametrize("beside", [(), (BranchSpec(model="dwconv", extra=True),)], ids=["alone", "beside"])
def test_every_parameter_that_learns_has_a_gradient(control, beside):
    """Several processes wait for all gradients; what the control leaves out is frozen when the mixer is built."""
    rate = "token" if control.endswith("_rate") else "fixed"
    mixer = TTT(8, 2, inner=InnerSpec(model="mlp", beside=beside, control=control, rate=rate))
    mixer(torch.randn(2, 6, 8), 2, 3).sum().backward()
    frozen = {name for name, p in mixer.named_parameters() if not p.requires_grad}
    starts = {name for name, _ in mixer.named_parameters() if name[1:].isdigit()}
    assert frozen == (starts if control in ("zero_start", "random_start", "zero_fast") else set())
    assert {name for name, p in mixer.named_parameters() if p.grad is None} == frozen


def test_rates_that_never_learn():
    with pytest.raises(ValueError, match="inner.rate=token never learns with inner.epochs=0, which takes no step"):
        TTT(8, 2, inner=InnerSpec(rate="token", epochs=0))
    with pytest.raises(ValueError, match="inner.rate=learned never learns with inner.control=zero_fast"):
        TTT(8, 2, inner=InnerSpec(rate="learned", control="zero_fast"))
    mixer = TTT(8, 2, inner=InnerSpec(rate="token"))
    mixer.set_inner(mixer.inner.derive(epochs=0))  # as an intervention on what was learned
    assert all(p.requires_grad for p in mixer.parameters())
