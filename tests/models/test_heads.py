"""A classifier's rows follow the names of the classes."""

from __future__ import annotations

import pytest
import torch

from vit3.models.heads import reorder_head

WEIGHTS = {
    "body.weight": torch.ones(2, 2),
    "head.weight": torch.arange(6.0).reshape(3, 2),
    "head.bias": torch.tensor([0.0, 1, 2]),
}


def test_rows_are_selected_by_name():
    moved, sentence = reorder_head(WEIGHTS, "head", ["a", "b", "c"], ["c", "a"])
    assert moved["head.bias"].tolist() == [2, 0] and moved["head.weight"].tolist() == [[4, 5], [0, 1]]
    assert moved["body.weight"] is WEIGHTS["body.weight"] and WEIGHTS["head.bias"].tolist() == [0, 1, 2]
    assert sentence == "the classifier is kept: 2 of its 3 classes, put in the order of the data"


def test_equal_lists_change_nothing():
    same, sentence = reorder_head(WEIGHTS, "head", ["a", "b", "c"], ["a", "b", "c"])
    assert all(torch.equal(same[name], WEIGHTS[name]) for name in WEIGHTS) and "same order" in sentence


def test_a_new_class_drops_the_classifier():
    kept, sentence = reorder_head(WEIGHTS, "head", ["a", "b", "c"], ["a", "new"])
    assert list(kept) == ["body.weight"]
    assert sentence == "the classifier starts anew: 1 of 2 classes are not among the 3 of the weights, new for one"


@pytest.mark.parametrize(
    "head, source, target, words",
    [
        ("fc", "abc", "abc", "head=fc is not in these weights"),
        ("head", "ab", "ab", "has 3 rows, source has 2 class names"),
        ("head", "aba", "ab", "source has a class name twice"),
    ],
)
def test_what_does_not_fit_is_said(head, source, target, words):
    with pytest.raises(ValueError, match=words):
        reorder_head(WEIGHTS, head, list(source), list(target))
