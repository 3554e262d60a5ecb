"""Pictures show what they claim: curves of every series, wrong images marked as such."""

from __future__ import annotations

import json

import numpy as np

from vit3.analysis import plots


def drawn(monkeypatch, draw, *args):
    """The figure that a plotting function saved."""
    figures = []
    original = plots.new_figure

    def keep(*size):
        figures.append(original(*size))
        return figures[-1]

    monkeypatch.setattr(plots, "new_figure", keep)
    draw(*args)
    return figures[-1]


def test_wrong_predictions_are_marked(monkeypatch, tmp_path):
    images = np.zeros((3, 4, 4, 1), np.uint8) + np.array([0, 40, 80], np.uint8)[:, None, None, None]
    labels, predictions = np.array([0, 1, 1]), np.array([1, 1, 1])
    figure = drawn(
        monkeypatch, plots.plot_predictions, images, labels, predictions, ("a", "b"), tmp_path / "x.png", "t"
    )
    (axes,) = figure.axes
    titles = [(text.get_text(), text.get_color()) for text in axes.texts]
    assert titles == [("b (is a)", plots._WRONG), ("b", "#222222"), ("b", "#222222")]
    sheet = axes.images[0].get_array()
    assert [int((sheet == value).all(axis=-1).sum()) for value in (0, 40, 80)] == [16] * 3


def test_curves_hold_the_numbers(monkeypatch, tmp_path):
    records = [
        {"epoch": e, "train/loss": 3.0 - e, "val/loss": 2.0 - e, "val/top1": 50 + e % 2, "val_ema/loss": 1.0,
         "val_ema/top1": 40}
        for e in range(4)
    ]  # fmt: skip
    (tmp_path / "m.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    figure = drawn(monkeypatch, plots.plot_curves, tmp_path / "m.jsonl", tmp_path / "c.png", "t")
    loss, accuracy = figure.axes
    series = {line.get_label(): list(line.get_ydata()) for axes in (loss, accuracy) for line in axes.get_lines()}
    assert series["training (augmented)"] == [3, 2, 1, 0] and series["test"] == [2, 1, 0, -1]
    assert series["top-1"] == [50, 51, 50, 51] and series["top-1, EMA"] == [40] * 4
    assert accuracy.texts[0].get_text() == "last 51.00 %, best 51.00 % (epoch 2)"
