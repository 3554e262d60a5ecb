"""Comparison with the network itself: it sees what is wrong, and lets pass what is refused or right."""

import pytest
import torch

from tests.export.subjects import subject
from vit3.export.signature import Signature
from vit3.export.verify import verify

SOURCE = subject("dense")
SIGNATURE = Signature.of(SOURCE)


@torch.no_grad()
def itself(images):
    return SOURCE.model(images)


def failures(run, signature=SIGNATURE, **options):
    return [check for check in verify(SOURCE.model, run, signature, **options) if not check.passed]


def test_the_network_itself_passes():
    checks = verify(SOURCE.model, itself, SIGNATURE)
    assert all(check.passed for check in checks)
    assert {check.difference for check in checks} == {0.0, None}
    assert [check.declared for check in checks] == 6 * [True] + 2 * [False]
    assert any(check.what.endswith("runs, equal") for check in checks)  # below the smallest side it is right


def flipped(images):
    first, second = itself(images)
    return first, -second


def few_images(images):
    """A graph in which a batch of two was a constant."""
    return tuple(y[:2] for y in itself(images))


def not_finite(images):
    return tuple(y / (images.abs().max() < 50) for y in itself(images))


def no_numbers(images):
    first, second = itself(images)
    return first, second * float("nan")  # which is no maximum beside a number


def another_order(images):
    return itself(images)[::-1]


def missing(images):
    return itself(images)[:1]


@pytest.mark.parametrize(
    "run, wrong",
    [(flipped, 6), (another_order, 6), (missing, 6), (few_images, 2), (not_finite, 1), (no_numbers, 6)],
)
def test_wrong_outputs_fail(run, wrong):
    found = failures(run)
    assert len([check for check in found if check.declared]) == wrong, found


def test_a_shape_that_was_declared_must_run():
    def small(images):
        if images.shape[0] > 3:
            raise RuntimeError("too many\nimages")
        return itself(images)

    (check,) = failures(small)
    assert check.shape[0] == 8 and check.difference is None and check.what == "batch 8: refused, too many"


def test_a_shape_that_was_not_declared_must_not_be_wrong():
    fixed = Signature.of(SOURCE, ("batch",))

    def cut(images):
        return itself(images[:, :3, :40])  # reads less than it was given

    found = failures(cut, fixed)
    assert [check.what for check in found] == [
        "another size: runs, wrong",
        "one channel more: runs, the network refuses it",
    ]


def test_bounds():
    def shifted(images):
        return tuple(y + 1e-3 for y in itself(images))

    assert len([c for c in failures(shifted) if c.declared]) == 6
    assert not failures(shifted, bound=2e-3)
    assert verify(SOURCE.model, shifted, SIGNATURE)[0].difference == pytest.approx(1e-3, rel=1e-2)
    largest = max(float(y.abs().max()) for y in itself(SIGNATURE.probes()[0].inputs[0]))
    first = verify(SOURCE.model, shifted, SIGNATURE, relative=True)[0]
    assert first.difference == pytest.approx(1e-3 / largest, rel=1e-2) and first.outputs == largest


def test_modes_come_back():
    SOURCE.model.train()
    SOURCE.model.norm0.eval()

    def in_evaluation(images):
        assert not SOURCE.model.training and not SOURCE.model.norm1.training
        return itself(images)

    assert not [check for check in failures(in_evaluation) if check.declared]
    assert SOURCE.model.training and not SOURCE.model.norm0.training
    SOURCE.model.eval()


def test_the_network_inside_wrappers_is_compared():
    def refuse(graph, inputs):
        raise AssertionError("compiled code is no reference")

    wrapped = torch.compile(SOURCE.model, backend=refuse)
    assert all(check.passed for check in verify(wrapped, itself, SIGNATURE))
