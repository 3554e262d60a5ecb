"""Any image size and aspect ratio, without rebuilding; padding as documented."""

import pytest
import timm
import torch
import torch.nn.functional as F

from tests.helpers import ODD_SIZES, light, narrow, same_dict
from vit3.models import MODEL_NAMES

each_model = pytest.mark.parametrize("name", MODEL_NAMES)
families = pytest.mark.parametrize("name", ["vit3_tiny", "h_vit3_tiny"])
sizes = pytest.mark.parametrize("size", [*ODD_SIZES, (72, 72)], ids=str)


def grids(model, size):
    """The grid that each mixer was called with."""
    seen = []
    hooks = [
        module.register_forward_pre_hook(lambda _, args: seen.append((args[1], args[2], args[0].shape[1])))
        for name, module in model.named_modules()
        if name.endswith(".attn")
    ]
    with torch.no_grad():
        model.eval()(torch.randn(1, 3, *size))
    for hook in hooks:
        hook.remove()
    assert all(h * w == n for h, w, n in seen)
    return [(h, w) for h, w, _ in seen]


@each_model
@sizes
@torch.no_grad()
def test_odd_sizes_run(name, size):
    assert light(name).eval()(torch.randn(1, 3, *size)).isfinite().all()


@families
@sizes
def test_odd_sizes_train(name, size):
    model = narrow(name)
    model(torch.randn(2, 3, *size)).square().sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(
    "size,expected",
    [
        ((65, 97), [(17, 25), (9, 13), (5, 7), (3, 4)]),
        ((33, 31), [(9, 8), (5, 4), (3, 2), (2, 1)]),
        ((200, 336), [(50, 84), (25, 42), (13, 21), (7, 11)]),
        ((64, 96), [(16, 24), (8, 12), (4, 6), (2, 3)]),
    ],
    ids=str,
)
def test_hierarchical_grids(size, expected):
    assert grids(narrow("h_vit3_tiny"), size) == expected


@pytest.mark.parametrize(
    "size,expected",
    [((32, 128), (2, 8)), ((128, 32), (8, 2)), ((65, 97), (5, 7)), ((33, 31), (3, 2)), ((1, 1), (1, 1))],
)
def test_plain_grid(size, expected):
    assert grids(narrow("vit3_tiny"), size) == [expected] * 2


@pytest.mark.parametrize("name,stride", [("vit3_tiny", 16), ("h_vit3_tiny", 4)])
@pytest.mark.parametrize("size", ODD_SIZES, ids=str)
@torch.no_grad()
def test_padding_is_zeros_at_right_and_bottom(name, stride, size):
    model, x = narrow(name).eval(), torch.randn(1, 3, *size)
    padded = F.pad(x, (0, -size[1] % stride, 0, -size[0] % stride))
    assert torch.equal(model(x), model(padded))


@families
@torch.no_grad()
def test_built_size_does_not_matter(name):
    """Weights of a model built for 224 load strictly into one built for another size, with equal results."""
    small, large = narrow(name, img_size=224).eval(), narrow(name, img_size=(384, 200)).eval()
    assert large.load_state_dict(small.state_dict(), strict=True)
    for size in ((224, 224), (65, 97)):
        x = torch.randn(1, 3, *size)
        assert torch.equal(small(x), large(x))


@each_model
def test_state_dict_has_no_size(name):
    with torch.device("meta"):
        shapes = [
            {k: v.shape for k, v in timm.create_model(name, img_size=size).state_dict().items()} for size in (224, 384)
        ]
    assert shapes[0] == shapes[1]


@families
@torch.no_grad()
def test_forward_keeps_no_state(name):
    """Seeing another size first changes neither the state dict nor the next result."""
    model, x = narrow(name).eval(), torch.randn(1, 3, 64, 64)
    before, expected = {k: v.clone() for k, v in model.state_dict().items()}, model(x)
    model(torch.randn(2, 3, 65, 97))
    assert same_dict(before, model.state_dict())
    assert torch.equal(model(x), expected)
