"""A sheet of pictures of any sizes: rows of equal height, a line of text above each picture, a legend or a
colour bar below all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vit3.analysis.plots import new_figure

# All in inches.
_WIDTH, _LEAST = 14.0, 5.0  # of the page
_GAP, _GROUP_GAP, _MARGIN = 0.06, 0.28, 0.18
_NOTE, _TITLE, _ENTRY = 0.22, 0.36, 0.21  # heights of a line of text
_LETTER = 0.075  # width of a letter of the legend
_BAR, _BAR_HEIGHT = 4.0, 0.72  # width of a colour bar, and height with its numbers and its line of text
_SHRUNK = 0.75  # part of the usual height down to which a row shrinks so that one more group finds place


@dataclass
class Panel:
    """One picture.

    Attributes:
        pixels: [H, W, 3], uint8. note: the line above it. draw: adds to its axes, whose unit is a pixel.
        tail: end of the line, which stays whole where the note is too long for its picture.
    """

    pixels: np.ndarray
    note: str
    draw: Callable | None = None
    tail: str = ""


@dataclass(frozen=True)
class ColourBar:
    """What colours of pictures mean.

    Attributes:
        name: matplotlib's name of the colours. low, high: the values at their ends. label: what is shown.
    """

    name: str
    low: float
    high: float
    label: str

    def colours(self, values: np.ndarray) -> np.ndarray:
        """Values of any shape as colours [..., 3], uint8."""
        from matplotlib import colormaps

        parts = (values - self.low) / max(self.high - self.low, 1e-12)
        return colormaps[self.name](parts, bytes=True)[..., :3]


def draw_sheet(
    groups: Sequence[Sequence[Panel]],
    target: Path,
    title: str,
    legend: Sequence[tuple[str, tuple[int, int, int]]] = (),
    bar: ColourBar | None = None,
    row_height: float | None = None,
) -> None:
    """Write the sheet as a PNG file.

    Args:
        groups: panels that belong together and stay in one row. legend: names and their colours (0 to 255).
        bar: instead of a legend. row_height: in inches, at most; None lets the number of groups decide.
    """
    rows = _rows(groups, row_height)
    headline = 0.095 * max(map(len, title.split("\n")))  # at 11 points
    caption = _LETTER * len(bar.label) if bar else 0.0
    page = max([_LEAST, headline, caption, *(width for _, width, _ in rows)]) + 2 * _MARGIN
    columns, lines = _legend_grid(legend, page)
    foot = _BAR_HEIGHT if bar else lines * _ENTRY + (_MARGIN if lines else 0)
    title_lines = 1 + title.count("\n")
    height = _TITLE * title_lines + sum(h + _NOTE for _, _, h in rows) + _MARGIN + foot
    figure = new_figure(page, height)
    figure.set_layout_engine("none")
    figure.text(0.5, 1 - 0.5 * _TITLE * title_lines / height, title, ha="center", va="center", fontsize=11)
    top = _TITLE * title_lines
    for row, _, row_height in rows:
        left = _MARGIN
        for group in row:
            for panel in group:
                width = row_height * panel.pixels.shape[1] / panel.pixels.shape[0]
                place = (left / page, 1 - (top + _NOTE + row_height) / height, width / page, row_height / height)
                _draw_panel(figure, panel, place)
                figure.text(left / page, 1 - (top + _NOTE - 0.05) / height, _fitted(panel, width), fontsize=8,
                            ha="left", va="bottom", color="#333333")  # fmt: skip
                left += width + _GAP
            left += _GROUP_GAP - _GAP
        top += row_height + _NOTE
    for k, (name, colour) in enumerate(legend):
        x = _MARGIN + (k % columns) * (page - 2 * _MARGIN) / columns
        y = top + _MARGIN + (k // columns + 0.5) * _ENTRY
        _draw_entry(figure, x / page, 1 - y / height, page, height, name, colour)
    if bar:
        _draw_bar(figure, bar, page, height)
    figure.savefig(target)


def _rows(
    groups: Sequence[Sequence[Panel]], row_height: float | None
) -> list[tuple[list[Sequence[Panel]], float, float]]:
    """Groups of each row, its width and its height, in inches."""
    usual = row_height or (5.5 if len(groups) == 1 else 3.0 if len(groups) <= 6 else 2.3)
    rows, row = [], []
    for group in groups:
        if row and _width([*row, group], _SHRUNK * usual) > _WIDTH:
            rows.append(row)
            row = []
        row.append(group)
    rows = [*rows, row] if row else rows
    sized = []
    for row in rows:
        bare = _width(row, 0.0)
        height = min(usual, usual * (_WIDTH - bare) / (_width(row, usual) - bare))
        sized.append((row, _width(row, height), height))
    return sized


def _width(row: Sequence[Sequence[Panel]], height: float) -> float:
    inner = sum(height * p.pixels.shape[1] / p.pixels.shape[0] for group in row for p in group)
    return inner + sum(_GAP * (len(group) - 1) for group in row) + _GROUP_GAP * (len(row) - 1)


def _draw_panel(figure, panel: Panel, place: tuple[float, float, float, float]) -> None:
    axes = figure.add_axes(place)
    height, width = panel.pixels.shape[:2]
    axes.imshow(panel.pixels, extent=(0, width, height, 0), aspect="auto")  # corners of pixels at whole numbers
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set(linewidth=0.5, color="#999999")
    if panel.draw:
        panel.draw(axes)


def _fitted(panel: Panel, width: float) -> str:
    letters = max(3, int(width / 0.062) - len(panel.tail))  # at 8 points
    return (panel.note if len(panel.note) <= letters else panel.note[: letters - 1] + "…") + panel.tail


def _legend_grid(legend: Sequence[tuple[str, tuple]], page: float) -> tuple[int, int]:
    """Columns and lines of the legend."""
    if not legend:
        return 1, 0
    widest = 0.45 + _LETTER * max(len(name) for name, _ in legend)
    columns = max(1, min(len(legend), int((page - 2 * _MARGIN) / widest)))
    return columns, -(-len(legend) // columns)


def _draw_bar(figure, bar: ColourBar, page: float, height: float) -> None:
    """The bar at the left of the foot, what it shows below it."""
    axes = figure.add_axes((_MARGIN / page, 0.5 / height, _BAR / page, 0.12 / height))
    high = bar.high if bar.high > bar.low else bar.low + 1  # all values are equal
    axes.imshow(bar.colours(np.linspace(bar.low, high, 256))[None], aspect="auto", extent=(bar.low, high, 0, 1))
    axes.set_yticks([])
    axes.tick_params(labelsize=7, length=2, pad=1)
    figure.text(_MARGIN / page, 0.14 / height, bar.label, fontsize=8, va="baseline", color="#222222")


def _draw_entry(figure, x: float, y: float, page: float, height: float, name: str, colour: tuple) -> None:
    from matplotlib.patches import Rectangle

    side = 0.13
    box = Rectangle((x, y - side / 2 / height), side / page, side / height, transform=figure.transFigure,
                    facecolor=np.array(colour) / 255, edgecolor="#555555", linewidth=0.4)  # fmt: skip
    figure.add_artist(box)
    figure.text(x + (side + 0.07) / page, y, name, fontsize=8, va="center_baseline", color="#222222")
