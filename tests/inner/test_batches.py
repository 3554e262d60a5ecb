"""Which tokens make up each mini-batch."""

import pytest
import torch

from vit3.inner.batches import _dealt, batch_sizes, token_batches
from vit3.inner.spec import InnerSpec

ORDERS = ("raster", "strided", "blockwise", "random")


@pytest.mark.parametrize(
    ("batch", "sizes"),
    [("N", [10]), ("N/1", [10]), ("N/2", [5, 5]), ("N/3", [4, 3, 3]), ("4", [4, 4, 2]), ("10", [10]), ("99", [10])],
)
def test_sizes(batch, sizes):
    assert batch_sizes(batch, 10) == sizes


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("batch", ["N/2", "N/3", "N/4", "N/12", "5", "1"])
@pytest.mark.parametrize("grid", [(6, 6), (4, 9), (12, 3)], ids=str)
def test_every_token_once(order, batch, grid):
    batches = token_batches(batch, order, *grid)
    assert sorted(torch.cat(batches).tolist()) == list(range(36))
    sizes = sorted(map(len, batches))
    if order == "strided" and batch == "5":
        assert sizes == [4] * 4 + [5] * 4
    elif order != "blockwise":
        assert sizes == sorted(batch_sizes(batch, 36))


def test_orders():
    assert [b.tolist() for b in token_batches("N/2", "raster", 2, 4)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [b.tolist() for b in token_batches("N/2", "strided", 2, 4)] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert [b.tolist() for b in token_batches("N/2", "blockwise", 2, 4)] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    tiles = token_batches("N/4", "blockwise", 4, 4)
    assert tiles[1].tolist() == [2, 3, 6, 7] and tiles[2].tolist() == [8, 9, 12, 13]
    first, again = (torch.cat(_dealt.__wrapped__("N/2", "random", 3, 4)) for _ in range(2))
    assert torch.equal(first, again) and first.tolist() != list(range(12))


def test_one_batch_is_no_list():
    assert token_batches("N", "random", 3, 4) is None and token_batches("12", "strided", 3, 4) is None


def test_refusals():
    with pytest.raises(ValueError, match="inner.batch=N/9 wants 9 mini-batches, but there are 4 tokens"):
        token_batches("N/9", "raster", 2, 2)
    with pytest.raises(ValueError, match="blockwise cannot cut a grid of 3 x 3 tokens into 7 rectangles"):
        token_batches("N/7", "blockwise", 3, 3)
    for wrong in ("N/0", "n", "0", "-3", "2.5", "N/", ""):
        with pytest.raises(ValueError, match="must be N, N/k for k parts, or a number of tokens"):
            InnerSpec(batch=wrong)


def test_kept_indices_serve_any_mode_and_place():
    """The first call may be without autograd or on no device at all; later ones train on the same indices."""
    for context in (torch.inference_mode(), torch.device("meta")):
        for order in ORDERS:
            _dealt.cache_clear()
            with context:
                token_batches("N/3", order, 2, 3)
            batches = token_batches("N/3", order, 2, 3)
            assert not any(tokens.is_inference() or tokens.is_meta for tokens in batches)
    x = torch.ones(6, 1, requires_grad=True)
    x.index_select(0, batches[0]).sum().backward()
    assert x.grad.sum() == 2
