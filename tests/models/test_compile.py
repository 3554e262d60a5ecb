"""``torch.compile(fullgraph=True)`` gives eager's numbers, for one and for many sizes."""

import copy
import shutil

import pytest
import torch

from tests.helpers import narrow
from vit3.analysis.parity import relative_error

families = pytest.mark.parametrize("name", ["vit3_tiny", "h_vit3_tiny"])
INPUTS = [(2, 64, 64), (3, 64, 96), (4, 33, 31), (2, 96, 64), (5, 72, 80)]


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@families
@torch.no_grad()
def test_dynamic_sizes(name):
    model = narrow(name).eval()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch, height, width in INPUTS:
        x = torch.randn(batch, 3, height, width)
        assert relative_error(compiled(x), model(x)) <= 1e-5, (batch, height, width)


@families
def test_gradients(name):
    model = narrow(name)
    twin = copy.deepcopy(model)
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 3, 64, 64)
    model(x).square().sum().backward()
    compiled(x).square().sum().backward()
    for (n, p), q in zip(model.named_parameters(), twin.parameters()):
        assert torch.allclose(p.grad, q.grad, rtol=1e-4, atol=1e-4 * p.grad.abs().max().item() + 1e-5), n


@families
def test_checkpointing_and_drop_path(name):
    """One graph with stochastic depth and recomputation."""
    model = narrow(name, drop_path_rate=0.2)
    model.set_grad_checkpointing()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    compiled(torch.randn(2, 3, 64, 64)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on the CPU")
@torch.no_grad()
def test_inductor():
    model = narrow("vit3_tiny", depth=1).eval()
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    for batch, height, width in INPUTS[:3]:
        x = torch.randn(batch, 3, height, width)
        assert relative_error(compiled(x), model(x)) <= 1e-5
