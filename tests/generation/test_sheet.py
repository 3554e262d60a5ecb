"""Sheets: every image is on it, unscaled or by whole factors, in the row of its class."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from vit3.generation.sheet import save_sheet

NAMES = ("cat", "dog, domestic dog", "a name that is much too long for a sheet")


def drawn(path):
    return np.asarray(Image.open(path).convert("RGB")).astype(int)


def flat(colors, size=(60, 60)):
    """Images of one colour each."""
    return np.array(colors, np.uint8)[:, None, None, :] * np.ones((1, *size, 1), np.uint8)


def boxes(sheet, color):
    """Top, left, height and width of what has a colour."""
    rows, columns = np.nonzero((sheet == color).all(axis=2))
    return rows.min(), columns.min(), np.ptp(rows) + 1, np.ptp(columns) + 1


def test_rows_are_classes(tmp_path):
    colors = [(200, 0, 0), (0, 200, 0), (0, 0, 200), (200, 200, 0)]
    save_sheet(flat(colors), [1, 0, 1, 2], NAMES, tmp_path / "s.png", "four")
    red, green, blue, yellow = (boxes(drawn(tmp_path / "s.png"), color) for color in colors)
    assert {box[2:] for box in (red, green, blue, yellow)} == {(60, 60)}
    assert green[0] < red[0] == blue[0] < yellow[0]  # rows in the order of the labels
    assert green[1] == red[1] == yellow[1] and blue[1] == red[1] + 63


def test_pixels_are_those_of_the_images(tmp_path):
    image = torch.randint(0, 256, (1, 6, 8, 3), dtype=torch.uint8)
    save_sheet(image, torch.tensor([0]), NAMES, tmp_path / "s.png", "small")
    sheet, large = drawn(tmp_path / "s.png"), image[0].numpy().repeat(6, axis=0).repeat(6, axis=1)
    top, left = 30, sheet.shape[1] - 48 - 3
    found = [x for x in range(sheet.shape[1] - 47) if np.array_equal(sheet[top : top + 36, x : x + 48], large)]
    assert len(found) == 1 and 0 < found[0] <= left


def test_grey_is_drawn_as_colours(tmp_path):
    grey = flat([(10,), (90,)])
    save_sheet(grey, [0, 1], NAMES, tmp_path / "grey.png", "t")
    save_sheet(grey.repeat(3, axis=3), [0, 1], NAMES, tmp_path / "rgb.png", "t")
    assert np.array_equal(drawn(tmp_path / "grey.png"), drawn(tmp_path / "rgb.png"))


def test_many_classes_stand_beside_each_other(tmp_path):
    colors = [(i, 250 - i, 128) for i in range(40)]
    save_sheet(flat(colors), range(40), [f"class {i}" for i in range(1000)], tmp_path / "s.png", "forty")
    sheet = drawn(tmp_path / "s.png")
    assert 0.5 < sheet.shape[0] / sheet.shape[1] < 2
    found = [boxes(sheet, color) for color in colors]
    assert {box[2:] for box in found} == {(60, 60)} and len({box[:2] for box in found}) == 40
    assert found[0][1] < found[-1][1]


@pytest.mark.parametrize(
    ("images", "labels"), [(flat([(1, 1)]), [0]), (flat([(1, 1, 1)]), [0, 1]), (np.zeros((0, 4, 4, 3), np.uint8), [])]
)
def test_refusals(tmp_path, images, labels):
    with pytest.raises(ValueError, match=r"a sheet needs images \(n, H, W, 1 or 3\) and n labels"):
        save_sheet(images, labels, NAMES, tmp_path / "s.png", "t")
