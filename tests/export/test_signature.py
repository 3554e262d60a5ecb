"""Names, shapes and free axes of exported networks; which inputs they are tried with."""

import dataclasses

import pytest
import torch

from tests.export.subjects import plain, subject
from vit3.export.signature import Signature


@pytest.mark.parametrize(
    "family, inputs, outputs, lowest",
    [
        ("vit3", ("images",), ("logits",), 17),
        ("h_vit3", ("images",), ("logits",), 5),
        ("dense", ("images",), ("map_4", "map_8"), 9),
        ("dit3", ("latents", "times", "labels"), ("noise",), 5),
    ],
)
def test_names_and_lowest_sides(family, inputs, outputs, lowest):
    signature = Signature.of(subject(family))
    assert (signature.inputs, signature.outputs, signature.lowest) == (inputs, outputs, lowest)
    assert signature.dynamic == ("batch", "size")


def test_the_last_grid_has_two_tokens_a_side():
    source = plain()
    source.model.feature_info = [dict(reduction=4), dict(reduction=8)]
    assert Signature.of(source, ("size", "batch")).dynamic == ("batch", "size")
    assert Signature.of(source).lowest == 9
    del source.model.feature_info  # networks of others may have none
    assert Signature.of(source).lowest == 33


def test_probes_of_free_axes():
    shapes = [probe.shape for probe in Signature.of(plain(), img_size=(224, 160)).probes()]
    assert {shape[0] for shape in shapes} >= {1, 3, 8}
    others = [shape[2:] for shape in shapes if shape[2:] != (224, 160)]
    assert len(set(others)) == 2 and all(h != w and h % 2 and w % 2 for h, w in others)
    assert min(min(size) for size in others) == 17
    signature = Signature.of(plain(), img_size=(64, 64))
    batch, _, height, width = signature.example()[0].shape
    assert batch != 1 and height != width  # equal ones would be taken for one axis
    assert max(float(probe.inputs[0].abs().max()) for probe in signature.probes()) > 100


def test_in_steps():
    """Sides in multiples: lowest ones, inputs to trace with and to try, and what is refused."""
    free = Signature.of(plain(), img_size=(64, 48))
    assert free.in_steps(1) is free and Signature.of(plain(), ("batch",)).in_steps(32).multiple == 1
    with pytest.raises(ValueError, match=r"multiple=32 does not divide img_size=\[64, 48\]"):
        free.in_steps(32)
    for none in (0, -16):
        with pytest.raises(ValueError, match=f"multiple={none} is not allowed; it must be at least 1"):
            free.in_steps(none)
    signature = free.in_steps(16)
    assert (signature.multiple, signature.lowest, free.in_steps(8).lowest) == (16, 32, 24)
    assert Signature.of(plain(), img_size=(64, 64)).in_steps(64).lowest == 128  # never one step, a constant
    (image,) = signature.dynamic_shapes()
    assert image[2].__name__ == "16*height" and image[2].root.min == 2
    inputs = [signature.example(), *(probe.inputs for probe in signature.probes())]
    for x in inputs:
        signature.check(*x)
    assert {side % 16 for (x,) in inputs for side in x.shape[2:]} == {0}
    assert max(inputs[0][0].shape[2:]) > 64 and max(side for (x,) in inputs for side in x.shape[2:]) == 80
    refused = {probe.what: probe for probe in signature.refused()}
    assert [*refused] == ["height below 32", "height no multiple of 16", "one channel more"]
    assert refused["height below 32"].shape == (2, 3, 16, 48)
    for probe in refused.values():
        with pytest.raises(ValueError, match="with sides of at least 32 that are multiples of 16"):
            signature.check(*probe.inputs)
    with pytest.raises(ValueError, match=r"images are \(0, 3, 64, 48\)"):
        signature.check(torch.zeros(0, 3, 64, 48))


@pytest.mark.parametrize(
    "dynamic, batches, refused",
    [
        ((), {1}, {(1, 3, 64, 48), (2, 3, 48, 48), (1, 4, 48, 48)}),
        (("batch",), {1, 2, 3, 8}, {(2, 3, 64, 48), (2, 4, 48, 48)}),
        (("size",), {1}, {(1, 3, 16, 48), (2, 3, 48, 48), (1, 4, 48, 48)}),
    ],
)
def test_fixed_axes(dynamic, batches, refused):
    signature = Signature.of(plain(), dynamic)
    assert {probe.shape[0] for probe in signature.probes()} == batches
    assert {probe.shape for probe in signature.refused()} == refused
    for probe in signature.probes():
        signature.check(*probe.inputs)
    for probe in signature.refused():
        with pytest.raises(ValueError, match="images are .* but this file was exported for"):
            signature.check(*probe.inputs)


def test_inputs_are_the_same_in_every_call():
    signature = Signature.of(subject("dit3"))
    for a, b in zip(signature.probes(), signature.probes()):
        assert all(map(torch.equal, a.inputs, b.inputs))
    images, times, labels = signature.make(200, 16, 16, scale=100)
    assert 90 < images.std() < 110 and 0 <= times.min() < 50 and 950 < times.max() <= 1000
    assert (labels.min(), labels.max()) == (0, 5)  # the last one is that of no class


def test_check_names_what_is_wrong():
    signature = Signature.of(subject("dit3"))
    images, times, labels = signature.make(2, 16, 16)
    for inputs, message in (
        ((images,), "1 inputs were given; this file takes latents, times, labels"),
        ((images.double(), times, labels), "latents are torch.float64; this file takes torch.float32"),
        ((images, times, labels.int()), "labels are torch.int32"),
        ((images, times[:1], labels), "times are 1, but latents are 2"),
        ((images, times[:, None], labels), r"times are \(2, 1\), but this file was exported for \(batch\)"),
        ((images[..., :4], times, labels), r"exported for \(batch, 4, height, width\) with sides of at least 5"),
    ):
        with pytest.raises(ValueError, match=message):
            signature.check(*inputs)


def test_what_cannot_be_free():
    table = plain(pos="table", img_size=48)
    assert Signature.of(table).dynamic == ("batch",)
    with pytest.raises(ValueError, match="dynamic=size cannot be had with vit3_tiny: it has a table of positions"):
        Signature.of(table, ("batch", "size"))
    fixed = plain()
    fixed.model.pretrained_cfg["fixed_input_size"] = True
    with pytest.raises(ValueError, match="timm builds it for one size"):
        Signature.of(fixed, ("size",))
    with pytest.raises(ValueError, match="dynamic=channels is unknown; use any of: batch, size"):
        Signature.of(plain(), ("channels",))
    with pytest.raises(ValueError, match="kind='music' is unknown"):
        Signature.of(dataclasses.replace(plain(), kind="music"))


def test_json():
    signature = Signature.of(plain(), ("batch",))
    assert Signature.from_json(signature.to_json()) == signature
    assert signature.about["classes"] == list("abcde")
