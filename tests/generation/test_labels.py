"""Classes of generated images: all or the given ones in turn, mistakes in one sentence."""

from __future__ import annotations

from collections import Counter

import pytest

from vit3.errors import UserError
from vit3.generation.labels import label_of, labels_in_turn

NAMES = ("tench", "goldfish", "great white shark")


def test_all_classes_are_balanced():
    in_turn = labels_in_turn(None, NAMES)
    assert [label_of(i, in_turn) for i in range(5)] == [0, 1, 2, 0, 1]
    assert set(Counter(label_of(i, in_turn) for i in range(30)).values()) == {10}


@pytest.mark.parametrize(
    ("wanted", "labels"),
    [([2, 0], (2, 0)), (["goldfish", 0], (1, 0)), ("tench", (0,)), (2, (2,)), (("goldfish",), (1,))],
)
def test_given_classes_in_the_order_given(wanted, labels):
    assert labels_in_turn(wanted, NAMES) == labels


def test_a_number_is_a_label_also_where_names_are_numbers():
    names = ("0", "10", "2")  # the order of a folder
    assert labels_in_turn([2, "2", 1][::2], names) == (2, 1) and labels_in_turn(["10"], names) == (1,)


def test_one_class():
    assert labels_in_turn(None, ("only",)) == (0,) and label_of(7, (0,)) == 0


@pytest.mark.parametrize(
    ("wanted", "sentence"),
    [
        (["goldfisch"], r"'goldfisch', which is no class .* did you mean goldfish\?"),
        ([3], "label 3, but labels go from 0 to 2"),
        ([-1], "label -1, but"),
        ([True], "'True', which is no class"),
        ([1.5], "'1.5', which is no class"),
        ([], "asks for no class"),
        ([1, "goldfish"], r"twice for label 1 \(goldfish\)"),
    ],
)
def test_mistakes(wanted, sentence):
    with pytest.raises(UserError, match=sentence):
        labels_in_turn(wanted, NAMES)
