"""Maps of what the inner step changed: against the inner models run by hand, and nothing of the network changed."""

import pytest
import torch

from tests.helpers import max_error, narrow, shallow
from vit3.analysis.inner_maps import evenly_spaced, inner_maps
from vit3.analysis.interventions import intervened
from vit3.inner import ModelSpec, inner_model
from vit3.mixers import TTT


def mixers_of(model):
    return [module for module in model.modules() if isinstance(module, TTT)]


def by_hand(mixer, x, h, w):
    """The map of one mixer without rotation, from its report and the inner models themselves."""
    _, report = mixer(x, h, w, return_inner=True)
    own, extra = mixer.qkv(x).split([3 * mixer.dim, 3 * mixer.head_dim], -1)
    q = own[..., : mixer.dim].unflatten(-1, (mixer.num_heads, -1)).transpose(1, 2)
    q3 = extra[..., : mixer.head_dim][:, None]
    glu = inner_model(ModelSpec("glu"), mixer.num_heads, mixer.head_dim)
    conv = inner_model(ModelSpec("dwconv"), 1, mixer.head_dim)
    fast = {**report["glu"]["fast_weights"], **report["dwconv"]["fast_weights"]}

    def outputs(w1, w2, w3):
        heads = torch.cat([glu.apply((w1, w2), q, (h, w)), conv.apply((w3,), q3, (h, w))], dim=1)
        return heads.transpose(1, 2).flatten(2)

    trained = outputs(fast["w1"], fast["w2"], fast["w3"])
    start = outputs(*(getattr(mixer, name).expand_as(fast[name]) for name in ("w1", "w2", "w3")))
    return ((trained - start).norm(dim=-1) / trained.norm(dim=-1)).unflatten(1, (h, w))


@torch.no_grad()
def test_against_the_inner_models_run_by_hand():
    model = narrow("vit3_tiny", patch_size=8).eval()
    images, inputs = torch.randn(2, 3, 24, 40), []
    for mixer in mixers_of(model):  # a start that is not small beside the step
        for weight in (mixer.w1, mixer.w2, mixer.w3, mixer.qkv.weight):
            torch.nn.init.normal_(weight, std=0.1)
        mixer.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    found = inner_maps(model, images)
    assert [(m.block, m.name) for m in found] == [(1, "blocks.0.attn"), (2, "blocks.1.attn")]
    for m, mixer, x in zip(found, mixers_of(model), list(inputs), strict=True):
        wanted = by_hand(mixer, x, 3, 5)
        assert m.values.shape == (2, 3, 5) and wanted.std() > 0.01
        assert max_error(m.values, wanted) < 1e-4 * wanted.max()


def test_the_network_stays_as_it_was():
    model = narrow("h_vit3_tiny").train()
    for mixer in mixers_of(model):
        mixer.backend = "fused"
    images = torch.randn(1, 3, 64, 96)
    model.eval()
    with torch.no_grad():
        before = model(images)
    kept = [(mixer.inner, mixer.backend) for mixer in mixers_of(model)]
    model.train()
    found = inner_maps(model, images, [1, 3])
    assert model.training and [m.block for m in found] == [2, 4]
    assert [tuple(m.values.shape) for m in found] == [(1, 8, 12), (1, 2, 3)]
    assert kept == [(mixer.inner, mixer.backend) for mixer in mixers_of(model)]
    assert not any(m._forward_hooks or m.proj._forward_pre_hooks for m in mixers_of(model))
    model.eval()
    with torch.no_grad():
        assert torch.equal(model(images), before)


def test_later_blocks_get_what_the_trained_network_feeds_them():
    model, images = narrow("vit3_tiny").eval(), torch.randn(1, 3, 32, 32)
    (alone,) = inner_maps(model, images, [1])
    assert torch.equal(alone.values, inner_maps(model, images)[1].values)


def test_without_a_step_nothing_changes():
    for name in ("vit3_tiny", "h_vit3_tiny"):  # the latter's rotation is of both outputs
        model = shallow(name)
        with intervened(model, dict(epochs=0)):
            found = inner_maps(model, torch.randn(1, 3, 32, 48))
        assert all(m.values.abs().max() == 0 for m in found) and found
    (found,) = inner_maps(shallow("vit3_tiny").bfloat16(), torch.randn(1, 3, 32, 48).bfloat16())
    assert found.values.shape == (1, 2, 3) and found.values.dtype == torch.float32
    model = shallow("vit3_tiny")
    with intervened(model, dict(control="zero_fast")):  # where the output is zero
        assert inner_maps(model, torch.randn(1, 3, 32, 48))[0].values.abs().max() == 0


def test_networks_without_such_mixers_have_no_maps():
    model = shallow("vit3_tiny", mixer="softmax")
    assert inner_maps(model, torch.randn(1, 3, 32, 32)) == []
    for block in (1, -1):
        with pytest.raises(ValueError, match=f"blocks=.{block}., but the network has 1 TTT mixers, counted from 0"):
            inner_maps(shallow("vit3_tiny"), torch.randn(1, 3, 32, 32), [block])


def test_blocks_evenly_spaced():
    assert evenly_spaced(12, 4) == [2, 5, 8, 11] and evenly_spaced(12, 1) == [11]
    assert evenly_spaced(3, 9) == [0, 1, 2] and evenly_spaced(5, 0) == evenly_spaced(0, 4) == []
    assert all(len(set(evenly_spaced(n, k))) == k for n in range(1, 30) for k in range(1, n + 1))
