"""What every registered mixer promises: signature, errors, registry."""

import pytest
import torch
from torch import nn

from tests.helpers import max_error
from vit3.layers.rope import RoPE2d
from vit3.mixers import MIXERS, create_mixer, register_mixer

each_mixer = pytest.mark.parametrize("name", MIXERS)


@each_mixer
@pytest.mark.parametrize("rope", [False, True])
def test_shape_and_gradients(name, rope):
    mixer, x = create_mixer(name, 16, 2), torch.randn(2, 15, 16, requires_grad=True)
    y = mixer(x, 3, 5, rope=RoPE2d(16) if rope else None)
    y.square().sum().backward()
    assert y.shape == x.shape
    assert all(t.grad is not None for t in (x, *mixer.parameters()))


@each_mixer
def test_rope_has_an_effect(name):
    mixer, x = create_mixer(name, 16, 2), torch.randn(1, 15, 16)
    assert max_error(mixer(x, 3, 5), mixer(x, 3, 5, rope=RoPE2d(16))) > 0


@each_mixer
@pytest.mark.parametrize("dim,heads", [(10, 3), (8, 0), (0, 1), (2, 4)])
def test_heads(name, dim, heads):
    with pytest.raises(ValueError, match=f"dim={dim} must be a positive multiple of num_heads={heads}"):
        create_mixer(name, dim, heads)


@each_mixer
def test_grid(name):
    with pytest.raises(ValueError, match="15 tokens, but the grid h=4, w=4 has 16"):
        create_mixer(name, 16, 2)(torch.randn(1, 15, 16), 4, 4)


@each_mixer
def test_channels(name):
    with pytest.raises(ValueError, match="8 channels, but this mixer was built for dim=16"):
        create_mixer(name, 16, 2)(torch.randn(1, 15, 8), 3, 5)


@each_mixer
def test_dimensions(name):
    with pytest.raises(ValueError, match="x must be tokens"):
        create_mixer(name, 16, 2)(torch.randn(1, 16, 3, 5), 3, 5)


@each_mixer
def test_macs_grow_with_tokens(name):
    mixer = create_mixer(name, 16, 2)
    assert mixer.macs(4, 8) >= 2 * mixer.macs(4, 4) > 0


def test_unknown_name():
    with pytest.raises(ValueError, match="mixer='sofmax' is unknown .did you mean 'softmax'.*registered:"):
        create_mixer("sofmax", 16, 2)


def test_class_instead_of_name():
    assert type(create_mixer(MIXERS["ttt"], 16, 2)) is MIXERS["ttt"]


def test_register(monkeypatch):
    class Mine(nn.Identity):
        pass

    monkeypatch.delitem(MIXERS, "mine", raising=False)
    register_mixer("mine", Mine)
    try:
        register_mixer("mine", Mine)  # again is fine
        with pytest.raises(ValueError, match="'mine' is taken by Mine"):
            register_mixer("mine", nn.Identity)
        assert isinstance(create_mixer("mine", 16, 2), Mine)
    finally:
        del MIXERS["mine"]


@pytest.mark.parametrize("rope", [None, RoPE2d(12)], ids=["plain", "rope"])
def test_softmax_is_attention(rope):
    mixer, x = create_mixer("softmax", 12, 3).double(), torch.randn(2, 6, 12, dtype=torch.float64)
    q, k, v = mixer.qkv(x).split(12, dim=-1)
    if rope:
        q, k = rope(q, 2, 3), rope(k, 2, 3)
    out = torch.zeros_like(x)
    for b in range(2):
        for head in range(3):
            part = slice(4 * head, 4 * head + 4)
            for n in range(6):
                weight = torch.stack([q[b, n, part] @ k[b, i, part] / 2 for i in range(6)]).exp()
                out[b, n, part] = (weight / weight.sum()) @ v[b, :, part]
    assert max_error(mixer(x, 2, 3, rope=rope), mixer.proj(out)) <= 1e-14
