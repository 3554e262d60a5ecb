"""The feed-forward network in pieces is the whole one."""

import timm.layers
import torch

from tests.helpers import max_error
from vit3.models.mlp import ROWS, Mlp


def test_pieces_make_the_whole():
    mlp, whole = Mlp(8, 16), timm.layers.Mlp(8, 16)
    whole.load_state_dict(mlp.state_dict())
    x = torch.randn(3, ROWS - 5, 8)  # three pieces, no border of which is one of a sample
    with torch.no_grad():
        assert max_error(mlp(x), whole(x)) <= 1e-6
    assert max_error(mlp(x), whole(x)) <= 1e-6  # training
