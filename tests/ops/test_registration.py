"""The fused operators under compilers, checkpointing, autocast, export and transforms."""

import copy
import logging

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.helpers import OPS, STEP, max_error
from vit3 import TTT
from vit3.analysis.loss_parity import BOUND, deviation, losses
from vit3.layers.rope import RoPE2d
from vit3.ops import backend as backends
from vit3.ops import launch, packed_ttt

FUSED = [op for op in OPS if op.backend == "fused"]
each_op = pytest.mark.parametrize("op", FUSED, ids=str)


@each_op
def test_registration_is_sound(op):
    """PyTorch's own check: schema, shapes without data, autograd, dynamic shapes."""
    tensors = op.inputs(h=2, w=3)
    options = (1.0, 1 / 3, "fused", False)
    torch.library.opcheck(getattr(torch.ops.vit3, f"{op.name}_ttt"), (*tensors, *options))


@pytest.mark.parametrize("rotated", [False, True])
def test_packed_registration_is_sound(rotated):
    mixer, rope = TTT(8, 2).double(), RoPE2d(8)
    qkv = torch.randn(2, 6, 36, dtype=torch.float64, requires_grad=True)
    cos, sin = rope.tables(2, 3, qkv)[:2] if rotated else (None, None)
    arguments = (qkv, mixer.w1, mixer.w2, mixer.w3, cos, sin, 2, 3, 1.0, 1 / 3, "fused", False)
    torch.library.opcheck(torch.ops.vit3.packed_ttt.default, arguments)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_whole(dynamic):
    mixer, rope = TTT(16, 2), RoPE2d(16)
    compiled = torch.compile(mixer, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for h, w in [(2, 3), (4, 5), (7, 3)]:
        x = torch.randn(2, h * w, 16)
        ours = torch.autograd.grad(compiled(x, h, w, rope=rope).square().sum(), [*mixer.parameters()])
        theirs = torch.autograd.grad(mixer(x, h, w, rope=rope).square().sum(), [*mixer.parameters()])
        assert max(map(max_error, ours, theirs)) <= 1e-5


def test_sizes_share_graphs():
    """Thirty image sizes: one graph for the first size, one for all others."""
    mixer, graphs = TTT(16, 2), []

    def count(graph, _):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(mixer, fullgraph=True, backend=count)
    with torch.no_grad():
        for side in range(2, 32):
            compiled(torch.randn(1, side * (side + 1), 16), side, side + 1)
    assert len(graphs) <= 3


def test_checkpointing_gives_the_same_gradients():
    mixer, x = TTT(16, 2), torch.randn(2, 15, 16, requires_grad=True)
    tensors = [x, *mixer.parameters()]
    plain = torch.autograd.grad(mixer(x, 3, 5).square().sum(), tensors)
    again = torch.autograd.grad(checkpoint(mixer, x, 3, 5, use_reentrant=False).square().sum(), tensors)
    assert all(map(torch.equal, plain, again))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_autocast_of_the_forward_pass_counts(dtype):
    """The backward pass, outside of autocast and inside, gives the same; weights keep float32 gradients."""
    mixer, x = TTT(32, 2), torch.randn(2, 15, 32)
    with torch.autocast("cpu", dtype):
        y, z = mixer(x, 3, 5), mixer(x, 3, 5)
        inside = torch.autograd.grad(z.sum(), [*mixer.parameters()])
    outside = torch.autograd.grad(y.sum(), [*mixer.parameters()])
    assert y.dtype == dtype and all(g.dtype == torch.float32 for g in outside)
    assert all(map(torch.equal, inside, outside))
    reference = TTT(32, 2, backend="reference")
    reference.load_state_dict(mixer.state_dict())
    with torch.autocast("cpu", dtype):
        y = reference(x, 3, 5)
    for a, b in zip(outside, torch.autograd.grad(y.sum(), [*reference.parameters()])):
        assert (a - b).norm() <= 2e-2 * b.norm()


def test_export():
    mixer = TTT(16, 2).eval()
    program = torch.export.export(mixer, (torch.randn(2, 6, 16), 2, 3))
    x = torch.randn(2, 6, 16)
    assert max_error(program.module()(x, 2, 3), mixer(x, 2, 3)) <= 1e-6


@each_op
def test_transforms_take_the_closed_form_or_refuse(op):
    tensors = [x.detach() for x in op.inputs()]
    tangents = [torch.randn_like(x) for x in tensors]
    closed = torch.func.jvp(lambda *t: op.run(*t, **STEP, backend="reference"), (*tensors,), (*tangents,))
    auto = torch.func.jvp(lambda *t: op.run(*t, **STEP, backend="auto"), (*tensors,), (*tangents,))
    assert max(map(max_error, closed, auto)) == 0
    with pytest.raises(ValueError, match="backend='fused' takes part in reverse-mode differentiation alone"):
        torch.func.vmap(lambda q: op.run(q, *tensors[1:], **STEP))(tensors[0][None])
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(tensors[0], tangents[0])
        with pytest.raises(ValueError, match="backend='fused' takes part in reverse-mode"):
            op.run(dual, *tensors[1:], **STEP)


@each_op
def test_third_derivatives(op):
    """They go through the closed form, as the second ones do."""
    tensors, result = op.inputs(h=2, w=3), []
    for backend in ("reference", "fused"):
        x = op.run(*tensors, **STEP, backend=backend).square().sum()
        for _ in range(3):
            x = sum(g.square().sum() for g in torch.autograd.grad(x, tensors, create_graph=True))
        result.append(x.detach())
    assert abs(result[0] - result[1]) <= 1e-9 * abs(result[0])


def test_kept_for_the_backward_pass():
    """qkv and the output, and D x 2D and nine numbers a head and sample: nothing else of the length of the input."""
    mixer, b, n = TTT(64, 2), 2, 1024
    x, kept = torch.randn(b, n, 64), {}
    weights = {p.untyped_storage().data_ptr() for p in mixer.parameters()} | {x.untyped_storage().data_ptr()}

    def pack(t):
        if t.untyped_storage().data_ptr() not in weights:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes() // 4
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = mixer(x, 32, 32)
    floor, state = 4 * b * n * (64 + 32), b * 2 * 32 * 64 + b * 32 * 9
    assert sum(kept.values()) <= floor + state
    assert y.requires_grad


def test_training_with_fused_is_training_with_the_closed_form():
    cpu = torch.device("cpu")
    assert deviation(losses("fused", cpu), losses("reference", cpu)) <= BOUND


def test_unfit_device_falls_back_with_one_line(monkeypatch, caplog):
    """As on a CUDA device of capability 7.5."""
    from vit3.ops.glu_ttt import triton

    x = torch.empty(0)
    monkeypatch.setattr(backends, "_triton_refusal", lambda op, x, d: launch.refusal(
        triton.LAUNCHES, d, torch.float16, launch.Limits(64 * 1024, (7, 5))))  # fmt: skip
    backends._log_once.cache_clear()

    class Cuda:
        device = torch.device("cuda")

    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert backends.implementation("glu_ttt", "auto", Cuda, 32).__name__ == "vit3.ops.glu_ttt.fused"
    assert len(caplog.records) == 1 and "compute capability 8.0" in caplog.text
    with pytest.raises(
        ValueError, match="backend='triton' cannot run glu_ttt: its kernels need compute capability 8.0"
    ):
        backends.implementation("glu_ttt", "triton", x, 32)


def test_deep_copies_run():
    mixer = TTT(16, 2)
    x = torch.randn(1, 6, 16)
    assert torch.equal(copy.deepcopy(mixer)(x, 2, 3), mixer(x, 2, 3))


def test_packed_equals_separate_calls():
    mixer, qkv = TTT(16, 2), torch.randn(2, 15, 72)
    weights = (mixer.w1, mixer.w2, mixer.w3)
    fused, closed = (packed_ttt(qkv, *weights, 3, 5, **STEP, backend=b) for b in ("fused", "reference"))
    assert max_error(fused, closed) <= 1e-6
