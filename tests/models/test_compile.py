"""``torch.compile(fullgraph=True)`` gives eager's numbers, for one and for many sizes."""

import copy
import shutil

import pytest
import torch

from tests.helpers import narrow, shallow
from vit3.analysis.parity import relative_error
from vit3.mixers import TTT

families = pytest.mark.parametrize("name", ["vit3_tiny", "h_vit3_tiny"])
INPUTS = [(2, 64, 96), (3, 96, 64), (4, 33, 31), (2, 65, 97), (5, 72, 80)]  # batch, height, width


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def check_dynamic(model, **options):
    """One graph or two serve all sizes, with eager's numbers."""
    compiled = torch.compile(model.eval(), fullgraph=True, dynamic=True, **options)
    with torch.no_grad():
        for batch, height, width in INPUTS:
            x = torch.randn(batch, 3, height, width)
            assert relative_error(compiled(x), model(x)) <= 1e-5, (batch, height, width)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


@families
def test_dynamic_sizes(name):
    check_dynamic(shallow(name), backend="aot_eager")


@pytest.mark.slow
@families
def test_dynamic_sizes_of_all_stages(name):
    check_dynamic(narrow(name), backend="aot_eager")


@pytest.mark.parametrize("name", ["vit3_tiny", pytest.param("h_vit3_tiny", marks=pytest.mark.slow)])
def test_gradients(name):
    model = shallow(name)
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
    model = shallow(name, drop_path_rate=0.2)
    model.set_grad_checkpointing()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    compiled(torch.randn(2, 3, 64, 64)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on the CPU")
def test_inductor():
    check_dynamic(shallow("vit3_tiny"))


def test_inner_report_compiles_whole():
    mixer, x = TTT(32, 2).eval(), torch.randn(2, 15, 32)
    y, inner = torch.compile(mixer, fullgraph=True, backend="aot_eager")(x, 3, 5, return_inner=True)
    z, wanted = mixer(x, 3, 5, return_inner=True)
    torch.testing.assert_close(y, z)
    torch.testing.assert_close(inner["glu"]["loss_after"], wanted["glu"]["loss_after"])
