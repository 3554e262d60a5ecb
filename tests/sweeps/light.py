"""Imported by the server of a test's cells: no pictures, few test images, for both take longer than their training."""

from vit3.analysis import plots
from vit3.data.digits import Digits

_IMAGES = 32


def _empty(*args) -> None:
    for path in args:
        if getattr(path, "suffix", None) == ".png":
            path.write_bytes(b"")


def _few(self: Digits, split: str) -> None:
    _whole(self, split)
    if split == "val":
        self.images, self.labels = self.images[:_IMAGES], self.labels[:_IMAGES]


plots.plot_curves = plots.plot_predictions = _empty
_whole, Digits.__init__ = Digits.__init__, _few
