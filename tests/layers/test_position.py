"""The position table: its own grid exactly, others resampled, dtype kept."""

import pytest
import torch
import torch.nn.functional as F

from vit3.layers.position import PositionTable


def test_adds_its_own_table_row_by_row():
    table, x = PositionTable(8, (3, 5)), torch.randn(2, 15, 8)
    y = table(x, 3, 5)
    for row in range(3):
        for column in range(5):
            assert torch.equal(y[:, 5 * row + column], x[:, 5 * row + column] + table.weight[0, row, column])


def test_a_row_for_all_places():
    table, x = PositionTable(8, (3, 5), shared=True), torch.randn(2, 20, 8)
    plain = PositionTable(8, (3, 5))
    plain.load_state_dict({"weight": table.weight})
    assert sum(p.numel() for p in table.parameters()) == 16 * 8 and table.shared.abs().min() > 0
    torch.testing.assert_close(table(x, 4, 5) - plain(x, 4, 5), table.shared.expand(2, 20, 8), rtol=0, atol=1e-6)


@pytest.mark.parametrize("grid", [(1, 1), (5, 3), (6, 10), (2, 9)], ids=str)
def test_other_grids_are_resampled(grid):
    table, x = PositionTable(4, (3, 5)).double(), torch.randn(1, grid[0] * grid[1], 4, dtype=torch.float64)
    planes = table.weight[0].permute(2, 0, 1)[:, None]  # each channel as a picture of its own
    wanted = F.interpolate(planes, grid, mode="bicubic", align_corners=False, antialias=False)
    torch.testing.assert_close(table(x, *grid) - x, wanted[:, 0].flatten(1).T[None], rtol=0, atol=1e-12)


def test_resampling_keeps_a_constant_and_the_direction_of_a_slope():
    table = PositionTable(2, (4, 6))
    with torch.no_grad():
        table.weight[..., 0] = 3.0
        table.weight[..., 1] = torch.arange(4.0)[:, None]
    y = table(torch.zeros(1, 8 * 3, 2), 8, 3).view(8, 3, 2)
    torch.testing.assert_close(y[..., 0], torch.full((8, 3), 3.0))
    assert (y.diff(dim=0)[..., 1] > 0).all() and y.diff(dim=1)[..., 1].abs().max() < 1e-5


@pytest.mark.parametrize("grid", [(4, 4), (5, 3)], ids=str)
@pytest.mark.parametrize("table_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtype_is_that_of_the_tokens(dtype, table_dtype, grid):
    table = PositionTable(8, (4, 4)).to(table_dtype)
    x = torch.randn(2, grid[0] * grid[1], 8, dtype=dtype)
    y = table(x, *grid)
    assert y.dtype == dtype
    y.float().sum().backward()
    assert table.weight.grad.dtype == table_dtype and table.weight.grad.isfinite().all()


def test_sixteen_bit_tables_are_resampled_in_float32():
    table = PositionTable(16, (7, 7)).bfloat16()
    wide = PositionTable(16, (7, 7))
    wide.load_state_dict(table.state_dict())
    zeros = torch.zeros(1, 20 * 13, 16)
    assert torch.equal(table(zeros, 20, 13), wide(zeros, 20, 13))


def test_start_is_small():
    weight = PositionTable(192, (14, 14)).weight
    assert 0.019 < weight.std() < 0.021 and weight.abs().max() < 0.12


def test_empty_grid():
    with pytest.raises(ValueError, match=r"grid=\(0, 3\) must have at least 1 row"):
        PositionTable(8, (0, 3))
