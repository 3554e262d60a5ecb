"""Sheets during training: when one is drawn, of which images, and that none is drawn twice."""

from __future__ import annotations

import pytest

from tests.generation.stub import CLASSES, Stub
from vit3.generation.during import FOLDER, SampleSheets


class Drawing(Stub):
    """Notes the labels too; a sheet has no progress."""

    def __init__(self):
        super().__init__()
        self.labels = []

    def __call__(self, labels, numbers):
        self.labels.append(labels.tolist())
        return super().__call__(labels, numbers, lambda steps: None)


@pytest.mark.parametrize(
    ("every", "due"),
    [(1, [1, 2, 3, 4]), (2, [2, 4]), (3, [3, 4]), (0, [4])],  # the last of all in any case
)
def test_each_sheet_is_drawn_once(tmp_path, every, due):
    draw = Drawing()
    sheets = SampleSheets(draw, CLASSES, tmp_path, every, 5)
    for epoch in range(1, 5):
        assert (sheets(epoch) is None) == bool(not every or epoch % every)
    assert sheets(4, last=True) == tmp_path / FOLDER / "epoch-0004.png"
    assert [path.name for path in sorted((tmp_path / FOLDER).iterdir())] == [f"epoch-{n:04d}.png" for n in due]
    assert draw.batches == [[0, 1, 2, 3, 4]] * len(due) and draw.labels == [[0, 1, 2, 0, 1]] * len(due)


def test_a_sheet_that_was_taken_away_is_drawn_again(tmp_path):
    draw = Drawing()
    sheets = SampleSheets(draw, CLASSES, tmp_path, 1, 3)
    sheets(1).unlink()
    assert sheets(1, last=True).exists() and len(draw.batches) == 2
