"""Imported by the server of a test's cells: pictures take longer to draw than these cells to train."""

from vit3.analysis import plots


def _empty(*args) -> None:
    for path in args:
        if getattr(path, "suffix", None) == ".png":
            path.write_bytes(b"")


plots.plot_curves = plots.plot_predictions = _empty
