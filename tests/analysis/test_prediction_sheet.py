"""The sheet of predictions: one scale of colours for all maps, names cut before probabilities."""

import numpy as np
import pytest
from matplotlib import colormaps
from PIL import Image

from vit3.analysis import prediction_sheet, sheet
from vit3.analysis.prediction_sheet import Predicted, draw_predictions

GREY, RGB = np.full((4, 6, 1), 90, np.uint8), np.full((4, 6, 3), 7, np.uint8)


@pytest.fixture
def drawn(monkeypatch):
    """What the sheet is asked to draw."""
    calls = {}
    monkeypatch.setattr(prediction_sheet, "draw_sheet", lambda groups, *args, **how: calls.update(groups=groups, **how))
    return calls


def test_all_maps_share_one_scale(drawn, tmp_path):
    maps = {2: np.array([[0.5, 0.75, 1.0]]), 4: np.array([[0.5], [0.5]])}
    draw_predictions(
        [Predicted(GREY, "cat", 0.5, maps), Predicted(RGB, "dog", 1.0, {2: np.array([[2.5], [0.5]])})],
        tmp_path / "a.png",
        "",
    )
    (image, first, second), (_, other) = drawn["groups"]
    ends = colormaps["viridis"]([0, 255], bytes=True)[:, :3]
    assert (drawn["bar"].low, drawn["bar"].high) == (0.5, 2.5)
    assert (first.pixels[:, :2] == ends[0]).all() and (second.pixels == ends[0]).all()  # tokens of 2 pixels
    assert (other.pixels[: len(RGB) // 2] == ends[1]).all() and (other.pixels[len(RGB) // 2 :] == ends[0]).all()
    assert (first.pixels[:, 4:] == colormaps["viridis"](0.25, bytes=True)[:3]).all()
    assert image.pixels.shape == first.pixels.shape == (4, 6, 3) and (image.pixels == 90).all()
    assert [p.note for p in (image, first, second)] == ["cat", "block 2", "block 4"] and image.tail == "  50.0 %"


def test_without_maps_there_is_no_bar_and_the_probability_stays_whole(monkeypatch, tmp_path):
    said, fitted = [], sheet._fitted
    monkeypatch.setattr(sheet, "_fitted", lambda *args: said.append(fitted(*args)) or said[-1])
    draw_predictions([Predicted(RGB, "a long name " * 9, 0.125, {})], tmp_path / "a.png", "title")
    assert len(said) == 1 and said[0].startswith("a long name") and said[0].endswith("…  12.5 %")
    size = Image.open(tmp_path / "a.png").size
    draw_predictions([Predicted(RGB, "a", 0.1, {1: np.ones((1, 1))})], tmp_path / "b.png", "title")
    assert Image.open(tmp_path / "b.png").size[1] > size[1]  # the bar below
