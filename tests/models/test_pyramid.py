"""The simple feature pyramid of plain networks."""

import pytest
import torch

from vit3.models.pyramid import MapNorm, SimpleFeaturePyramid


@pytest.mark.parametrize("num_outs", [4, 5])
def test_maps(num_outs):
    pyramid = SimpleFeaturePyramid(16, 8, num_outs)
    x = torch.randn(2, 16, 7, 9)
    maps = pyramid([x])
    grids = [(28, 36), (14, 18), (7, 9), (4, 5), (2, 3)][:num_outs]  # strides 4, 8, 16, 32, 64 of 112 x 144 pixels
    assert [tuple(y.shape) for y in maps] == [(2, 8, *grid) for grid in grids]
    assert all(torch.equal(a, b) for a, b in zip(maps, pyramid(x)))
    sum((y * torch.randn_like(y)).sum() for y in maps).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in pyramid.parameters())


def test_last_map_is_every_second_value():
    *_, fourth, fifth = SimpleFeaturePyramid(16, 8)(torch.randn(1, 16, 7, 9))
    assert torch.equal(fifth, fourth[:, :, ::2, ::2])


def test_norm_is_over_channels():
    x = 3 * torch.randn(2, 32, 5, 6) + 1
    y = MapNorm(32)(x)
    assert y.mean(1).abs().max() < 1e-5 and (y.var(1, unbiased=False) - 1).abs().max() < 1e-3


@pytest.mark.parametrize("arguments", [(18,), (16, 8, 3), (16, 8, 6)])
def test_errors(arguments):
    with pytest.raises(ValueError, match="must be a multiple of 4 and num_outs="):
        SimpleFeaturePyramid(*arguments)
