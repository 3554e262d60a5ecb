"""Whole models in 16 bit: they run, give the right dtype, and stay near float64."""

import copy

import pytest
import torch

from tests.helpers import narrow
from vit3.analysis.parity import load_by_rule, relative_error

families = pytest.mark.parametrize("name", ["vit3_tiny", "h_vit3_tiny"])
low = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


@families
@low
@torch.no_grad()
def test_cast_model(name, dtype):
    model, x = narrow(name).eval(), torch.randn(1, 3, 64, 96)
    y = model.to(dtype)(x.to(dtype))
    assert y.dtype == dtype and y.isfinite().all()


@families
@low
def test_autocast(name, dtype):
    model, x = narrow(name), torch.randn(2, 3, 64, 96)
    with torch.autocast("cpu", dtype):
        y = model(x)
        loss = y.float().square().mean()
    loss.backward()
    assert y.dtype == dtype and y.isfinite().all()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters())


@families
@pytest.mark.parametrize("dtype,bound", [(torch.bfloat16, 5e-2), (torch.float16, 1e-2)], ids=["bf16", "fp16"])
@torch.no_grad()
def test_near_float64(name, dtype, bound):
    """Bounds of a whole network of few layers; the mixer's own are in tests/mixers."""
    model, x = load_by_rule(narrow(name)).eval(), torch.randn(2, 3, 64, 96)
    exact = copy.deepcopy(model).double()(x.double())
    with torch.autocast("cpu", dtype):
        y = model(x)
    assert relative_error(y, exact) <= bound


@low
@torch.no_grad()
def test_wide_grid(dtype):
    """A 128 x 256 grid of tokens, where 16-bit angles would have collapsed."""
    model, x = load_by_rule(narrow("h_vit3_tiny")).eval(), torch.randn(1, 3, 512, 1024)
    expected = model(x)
    y = model.to(dtype)(x.to(dtype))
    assert y.dtype == dtype
    assert relative_error(y, expected) <= 5e-2
