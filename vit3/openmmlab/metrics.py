"""mmseg's IoU with classes that the data lack left out and named: :class:`PresentIoUMetric`."""

from __future__ import annotations

import math

from mmengine.registry import METRICS
from mmseg.evaluation import IoUMetric


@METRICS.register_module()
class PresentIoUMetric(IoUMetric):
    """IoU over the classes that have a true pixel.

    mmseg leaves a class out of the mean only where it is neither true nor predicted; one stray predicted pixel turns
    the undefined IoU of an absent class into 0. Here it is undefined either way.

    Attributes:
        absent: names of the classes without a true pixel in what was evaluated last.
        per_class: IoU, 0 to 1, of each of the others.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.absent: list[str] = []
        self.per_class: dict[str, float] = {}

    def compute_metrics(self, results: list) -> dict[str, float]:
        """Scores over all images, in per cent, as mmseg names them."""
        scores = super().compute_metrics(results)
        if self.format_only:
            return scores
        names = self.dataset_meta["classes"]
        intersect, union, _, true = (sum(areas) for areas in zip(*results))
        self.absent = [name for name, area in zip(names, true) if area == 0]
        self.per_class = {n: float(i / u) for n, i, u, area in zip(names, intersect, union, true) if area > 0}
        return scores

    @staticmethod
    def total_area_to_metrics(intersect, union, predicted, true, *args, **kwargs) -> dict:
        """Scores from areas in pixels per class, each of shape (K,); those of absent classes are NaN, but aAcc."""
        scores = IoUMetric.total_area_to_metrics(intersect, union, predicted, true, *args, **kwargs)
        for name, values in scores.items():
            if name != "aAcc":
                values[(true == 0).numpy()] = math.nan
        return scores
