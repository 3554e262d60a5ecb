"""Wrong arguments are named in one sentence."""

import pytest
import torch

from tests.helpers import OPS, STEP

each_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)


@each_op
@pytest.mark.parametrize("which", [1, 2], ids=["k", "v"])
def test_shapes_differ(op, which):
    tensors = op.inputs(grad=False)
    tensors[which] = tensors[which][:1]
    with pytest.raises(ValueError, match="q, k and v must share one shape"):
        op.run(*tensors, **STEP)


@each_op
def test_dimensions(op):
    q, k, v, *weights = op.inputs(grad=False)
    with pytest.raises(ValueError, match="q, k and v must share one shape"):
        op.run(q[0], k[0], v[0], *weights, **STEP)


@each_op
def test_no_token(op):
    q, k, v, *weights = op.inputs(grad=False)
    with pytest.raises(ValueError, match="no token"):
        op.run(q[:, :, :0], k[:, :, :0], v[:, :, :0], *weights, **STEP)


@each_op
def test_weight_shape(op):
    tensors = op.inputs(grad=False)
    for i in range(3, len(tensors)):
        wrong = [*tensors]
        wrong[i] = torch.cat((wrong[i], wrong[i]))
        with pytest.raises(ValueError, match=r"^w\d? must be .* to fit q; got"):
            op.run(*wrong, **STEP)


@each_op
def test_unknown_backend(op):
    with pytest.raises(ValueError, match="backend='cuda' is unknown; .* offers: auto, .*reference"):
        op.run(*op.inputs(grad=False), **STEP, backend="cuda")


@each_op
@pytest.mark.parametrize("backend", ["fused", "triton"])
def test_backend_not_there(op, backend):
    with pytest.raises(ValueError, match=f"backend='{backend}' is not available"):
        op.run(*op.inputs(grad=False), **STEP, backend=backend)


@each_op
def test_auto_is_reference(op):
    tensors = op.inputs(grad=False)
    assert torch.equal(op.run(*tensors, **STEP), op.run(*tensors, **STEP, backend="reference"))
