"""Our numbers equal the authors'."""

import dataclasses
import functools
import zlib

import pytest
import torch

from tests.helpers import GOLDEN
from vit3.analysis import parity

# These float32 gradients are ill-conditioned: float64 differs from the golden values by 2e-3, and so does float32 with
# another instruction set (AVX2: 2.5e-3) or another release of the kernels (torch 2.6: 2.1e-3) than the golden run's.
GOLDEN_PLATFORM = torch.backends.cpu.get_cpu_capability() == "AVX512" and torch.__version__.startswith("2.14.")
ROUNDING = "h_vit3_tiny: largest of 362 gradient norms' deviations"


@functools.cache
def rows_of(check):
    return list(getattr(parity, check)(GOLDEN))


@pytest.mark.parametrize("check", ["block_rows", "classifier_rows", "gradient_rows", "dense_rows", "generator_rows"])
def test_golden(check):
    rows = rows_of(check)
    if not GOLDEN_PLATFORM:
        rows = [dataclasses.replace(row, bound=5e-3) if row.what == ROUNDING else row for row in rows]
    assert rows
    assert [row for row in rows if not row.passed] == []


def test_every_case_is_compared():
    assert len(rows_of("block_rows")) == 4 * 9
    assert len(rows_of("dense_rows")) == 2 * 4
    assert len(rows_of("generator_rows")) == 2 * 2


def test_rule():
    """Standard normal values by the name's checksum, scaled by kind."""
    shapes = {
        "a.weight": (3, 5, 2, 2),
        "a.bias": (3,),
        "n.weight": (3,),
        "n.running_var": (3,),
        "n.num_batches_tracked": (),
        "w1": (1, 2, 4, 4),
        "rope.rotations": (7, 7, 8, 2),
    }
    weights = parity.weights_by_rule(shapes)
    assert weights.keys() == shapes.keys() - {"rope.rotations"}
    assert all(weights[name].shape == torch.Size(shapes[name]) for name in weights)
    assert weights["n.num_batches_tracked"] == 0
    x = {name: parity.image(shape, zlib.crc32(name.encode())) for name, shape in shapes.items()}
    assert torch.allclose(weights["a.weight"], x["a.weight"] * 0.5 / 20**0.5)
    assert torch.allclose(weights["w1"], x["w1"] / 2)
    assert torch.allclose(weights["a.bias"], x["a.bias"] * 0.02)
    assert torch.allclose(weights["n.weight"], 1 + x["n.weight"] * 0.1)
    assert torch.allclose(weights["n.running_var"], 1 + x["n.running_var"].abs() * 0.1)


@pytest.mark.parametrize("size", [1, 2048, 2049, 4096, 75264])
def test_subsample_size(size):
    assert 0 < parity.subsample(torch.zeros(size)).numel() <= 2048


def test_subsample_visits_every_column():
    index = torch.arange(192).expand(224, 192).contiguous()
    assert len(parity.subsample(index).unique()) == 192


def test_wrong_numbers_fail():
    assert parity.relative_error(torch.zeros(2), torch.zeros(3)) == float("inf")
    assert not parity.Row("x", float("nan"), 1.0).passed
    assert not parity.Row("x", 2.0, 1.0).passed


def test_markdown():
    text = parity.to_markdown([parity.Row("a", 1.23e-7, 2e-6), parity.Row("b", 1.0, 2e-6)])
    assert "| a | 1e-07 | 2e-06 | pass |" in text
    assert "| b | 1e+00 | 2e-06 | FAIL |" in text
    assert "1 of 2 comparisons hold" in text and parity.COMMIT in text
