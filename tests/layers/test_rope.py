"""The rotation: against complex numbers, at any grid, in any dtype."""

import pytest
import torch

from vit3.analysis.parity import relative_error
from vit3.layers.rope import RoPE2d


def by_complex_numbers(x, h, w, base=10000.0):
    """The definition: channel pairs as complex numbers times exp(i angle), first half rows, second half columns."""
    n = x.shape[-1] // 4
    theta = 1 / base ** (torch.arange(n, dtype=torch.float64) / n)
    y = torch.empty_like(x, dtype=torch.float64)
    for token in range(h * w):
        angle = torch.cat((theta * (token // w), theta * (token % w)))
        z = torch.view_as_complex(x[:, token].double().unflatten(-1, (-1, 2)).contiguous())
        y[:, token] = torch.view_as_real(z * torch.polar(torch.ones_like(angle), angle)).flatten(-2)
    return y


@pytest.mark.parametrize("grid", [(1, 1), (1, 7), (5, 3), (4, 9)], ids=str)
def test_equals_complex_rotation(grid):
    x = torch.randn(2, grid[0] * grid[1], 16, dtype=torch.float64)
    assert relative_error(RoPE2d(16)(x, *grid), by_complex_numbers(x, *grid)) <= 1e-14


def test_middle_dimensions_share_the_rotation():
    x, rope = torch.randn(2, 15, 3, 8), RoPE2d(8)
    y = rope(x, 3, 5)
    assert all(torch.equal(y[:, :, i], rope(x[:, :, i], 3, 5)) for i in range(3))


def test_stores_nothing():
    rope = RoPE2d(16)
    rope(torch.randn(1, 6, 16), 2, 3)
    assert not rope.state_dict() and not list(rope.buffers())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_keeps_dtype(dtype):
    assert RoPE2d(8)(torch.randn(1, 6, 8).to(dtype), 2, 3).dtype == dtype


@pytest.mark.parametrize("dtype,bound", [(torch.bfloat16, 4e-3), (torch.float16, 5e-4)], ids=["bf16", "fp16"])
@pytest.mark.parametrize("autocast", [False, True])
def test_far_neighbours_differ(dtype, bound, autocast):
    """Angles are float32: at the far end of a 256-wide grid, 16-bit angles would be off by half a radian."""
    x, rope = torch.ones(1, 256, 64, dtype=dtype), RoPE2d(64)
    with torch.autocast("cpu", dtype, enabled=autocast):
        low = rope(x, 1, 256)
    exact = rope(x.double(), 1, 256)
    assert relative_error(low[:, -2:], exact[:, -2:]) <= bound
    step = exact[:, -1] - exact[:, -2]
    assert relative_error(low[:, -1].double() - low[:, -2].double(), step) <= 10 * bound


def test_dim():
    with pytest.raises(ValueError, match="dim=6 must be a multiple of 4"):
        RoPE2d(6)
