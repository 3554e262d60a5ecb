"""Maps of the backbone against neck and heads: the sentence says what to set."""

from __future__ import annotations

import pytest

pytest.importorskip("mmengine", reason="needs the extra mm")

from torch import nn  # noqa: E402

from vit3.errors import UserError  # noqa: E402
from vit3.openmmlab.channels import check_channels  # noqa: E402


def model(**parts):
    """A network of parts that have attributes alone."""
    whole = nn.Module()
    for name, values in parts.items():
        part = nn.Module()
        part.__dict__.update(values)
        whole.add_module(name, part)
    return whole


MAPS = dict(channels=(8, 16))


def test_what_fits_passes():
    check_channels(model(backbone=MAPS, neck=dict(in_channels=[8, 16])))
    check_channels(model(backbone=MAPS, neck=dict(in_channels=16)))  # of a simple feature pyramid
    check_channels(model(backbone=MAPS, decode_head=dict(in_index=(0, 1), in_channels=(8, 16))))
    check_channels(model(backbone=MAPS, decode_head=dict(in_index=[0, 1], in_channels=24)))  # joined
    check_channels(model(backbone=MAPS, decode_head=dict(in_index=-1, in_channels=16)))
    check_channels(model(backbone=MAPS, neck=dict(in_channels=[8, 16]), decode_head=dict(in_index=3, in_channels=9)))
    check_channels(model(backbone={}, neck=dict(in_channels=[1])))  # of another library, which says nothing


@pytest.mark.parametrize(
    "parts, words",
    [
        (dict(neck=dict(in_channels=[8, 8, 16])), "set model.neck.in_channels=[8, 16]"),
        (dict(decode_head=dict(in_index=(0, 1), in_channels=(16, 8))), "set model.decode_head.in_channels=[8, 16]"),
        (dict(auxiliary_head=dict(in_index=0, in_channels=16)), "set model.auxiliary_head.in_channels=8"),
        (dict(auxiliary_head=dict(in_index=2, in_channels=16)), "model.auxiliary_head.in_index=[2] asks for a map"),
    ],
)
def test_what_does_not_fit_says_what_to_set(parts, words):
    with pytest.raises(UserError) as error:
        check_channels(model(backbone=MAPS, **parts))
    assert words in str(error.value)
