"""Convolutional layers and the padding rule."""

import pytest
import torch
import torch.nn.functional as F

from vit3.layers.conv import ConvDownsample, ConvMlp, ConvStem
from vit3.layers.grid import crop, pad_to_multiple, to_map, to_tokens


@pytest.mark.parametrize(
    "size,multiple,padded", [((8, 8), 4, (8, 8)), ((5, 7), 4, (8, 8)), ((1, 9), 2, (2, 10)), ((33, 31), 16, (48, 32))]
)
def test_padding_is_right_and_bottom(size, multiple, padded):
    x = torch.randn(1, 2, *size)
    y = pad_to_multiple(x, multiple)
    assert y.shape[-2:] == padded
    assert torch.equal(y[..., : size[0], : size[1]], x)
    assert y.count_nonzero() == x.count_nonzero()
    assert torch.equal(crop(y, *size), x)


def test_tokens_run_row_by_row():
    x = torch.arange(2 * 3 * 4 * 5).view(2, 3, 4, 5)
    tokens = to_tokens(x)
    assert torch.equal(tokens[:, 1 * 5 + 2], x[:, :, 1, 2])
    assert torch.equal(to_map(tokens, 4, 5), x)


@pytest.mark.parametrize("size,grid", [((32, 32), (8, 8)), ((65, 97), (17, 25)), ((1, 3), (1, 1))])
def test_stem_grid(size, grid):
    x, h, w = ConvStem(3, 16)(torch.randn(2, 3, *size))
    assert (h, w) == grid and x.shape == (2, h * w, 16)


@pytest.mark.parametrize("grid,halved", [((4, 4), (2, 2)), ((17, 25), (9, 13)), ((1, 1), (1, 1))])
def test_downsample_grid(grid, halved):
    x, h, w = ConvDownsample(8, 16)(torch.randn(2, grid[0] * grid[1], 8), *grid)
    assert (h, w) == halved and x.shape == (2, h * w, 16)


def test_downsample_pads_with_zeros():
    down, x = ConvDownsample(8, 16).eval(), torch.randn(2, 8, 3, 5)
    padded = F.pad(x, (0, 1, 0, 1))
    assert torch.equal(down(to_tokens(x), 3, 5)[0], down(to_tokens(padded), 4, 6)[0])


def test_conv_mlp_sees_neighbours():
    mlp = ConvMlp(4, 8)
    x = torch.randn(1, 5 * 7, 4, requires_grad=True)
    mlp(x, 5, 7)[0, 2 * 7 + 3].sum().backward()
    reached = x.grad[0].abs().sum(-1).view(5, 7) > 0
    expected = torch.zeros(5, 7, dtype=torch.bool)
    expected[1:4, 2:5] = True
    assert torch.equal(reached, expected)
