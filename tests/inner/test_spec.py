"""The inner problem as plain values: through JSON and back, in words where it is none."""

import json

import pytest

from vit3.inner import BranchSpec, InnerSpec
from vit3.mixers import TTT

SPECS = [
    InnerSpec(),
    InnerSpec(beside=()),
    InnerSpec(model="mlp", ratio=2.0, depth=3, lr=0.5, scale=None, loss="mse", batch="N/4", optimizer="momentum"),
    InnerSpec(beside=(BranchSpec("conv", kernel=5, heads=1), BranchSpec("fc", heads=2, extra=True)), rate="token"),
]


@pytest.mark.parametrize("spec", SPECS)
def test_there_and_back_through_json(spec):
    plain = json.loads(json.dumps(spec.to_plain()))
    assert plain == spec.to_plain() and InnerSpec.of(plain) == spec
    mixer = TTT(16, 4, inner=plain)
    assert mixer.inner == spec and {*mixer.state_dict()} == {*TTT(16, 4, inner=spec).state_dict()}


def test_few_values_are_enough():
    assert TTT(16, 4, inner={"lr": 0.5}).inner == InnerSpec(lr=0.5)


def test_unknown_values_are_named():
    with pytest.raises(ValueError, match="inner.epoch is no knob of the inner problem; use one of: model, ratio"):
        TTT(16, 4, inner={"epoch": 0})
    with pytest.raises(ValueError, match="inner.size is no knob"):
        TTT(16, 4, inner={"beside": [{"size": 3}]})
    with pytest.raises(ValueError, match="inner.model=glue is not allowed"):
        TTT(16, 4, inner={"model": "glue"})
