"""Wrong arguments are named in one sentence."""

import pytest
import torch

from tests.helpers import OPS, STEP
from vit3.ops import packed_ttt
from vit3.ops.rotary import rotary_tables

each_op = pytest.mark.parametrize("op", OPS, ids=str)


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
    with pytest.raises(ValueError, match="backend='cuda' is unknown; use one of: auto, reference, fused, triton"):
        op.run(*op.inputs(grad=False), **STEP, backend="cuda")


@each_op
def test_auto_is_fused_on_a_cpu(op):
    tensors = op.inputs(grad=False)
    assert torch.equal(op.run(*tensors, **STEP, backend="auto"), op.run(*tensors, **STEP, backend="fused"))


def test_packed_shapes():
    shapes = dict(qkv=(2, 6, 3 * 16 + 3 * 8), w1=(1, 2, 8, 8), w2=(1, 2, 8, 8), w3=(8, 1, 3, 3))
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    packed_ttt(**tensors, h=2, w=3, **STEP)
    for change, sentence in [
        (dict(w2=torch.zeros(1, 2, 8, 4)), "w1 and w2 must both be"),
        (dict(w3=torch.zeros(4, 1, 3, 3)), r"w3 must be \(D, 1, 3, 3\) = \(8, 1, 3, 3\)"),
        (dict(qkv=torch.zeros(2, 6, 70)), "qkv must be .*72.*got"),
        (dict(h=3), "qkv has 6 tokens, but the grid h=3, w=3 has 9"),
        (dict(rotary=rotary_tables(3, 2, 16, 10000.0, torch.float32, "cpu")), "rotary is for a grid of 3 x 2"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            packed_ttt(**{**tensors, "h": 2, "w": 3, **change}, **STEP)
