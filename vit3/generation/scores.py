"""Numbers that compare two sets of features: Fréchet distance, Inception Score, precision and recall.

The formulas are torch-fidelity's, called on features; here stands what they leave open: statistics of sets that do not
fit into memory, and what is refused.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch_fidelity.metric_fid import KEY_METRIC_FID, fid_statistics_to_metric
from torch_fidelity.metric_isc import KEY_METRIC_ISC_MEAN, KEY_METRIC_ISC_STD, isc_features_to_metric
from torch_fidelity.metric_prc import calculate_precision_recall_part

_CHUNK = 1000  # rows of distances at once: 200 MB for 50,000 images


@dataclass(frozen=True)
class Statistics:
    """Mean and covariance of the features of a set of images.

    Attributes:
        mu: (F,) float64. sigma: (F, F) float64, divided by n - 1. n: images; None where a file does not say it.
    """

    mu: np.ndarray
    sigma: np.ndarray
    n: int | None = None

    def __post_init__(self):
        size = self.mu.shape[0] if self.mu.ndim == 1 else None
        if size is None or self.sigma.shape != (size, size):
            raise ValueError(
                f"mu {self.mu.shape} and sigma {self.sigma.shape} are no mean and covariance, which are (F,) and (F, F)"
            )
        for name, value in (("mu", self.mu), ("sigma", self.sigma)):
            if not np.isfinite(value).all():
                raise ValueError(f"{name} holds values that are not finite; compute the statistics again")


class RunningStatistics:
    """Mean and covariance of features that come batch by batch, in float64 whatever the batches' size."""

    def __init__(self):
        self._n, self._mean, self._scatter = 0, None, None

    def add(self, features: Tensor) -> None:
        """Take in features (b, F); merges of means and scatters as in Chan, Golub & LeVeque (1979), eq. 1.5."""
        x = features.double()
        n, mean = x.shape[0], x.mean(dim=0)
        centred = x - mean
        scatter = centred.T @ centred  # [F, b] @ [b, F] -> [F, F]
        if self._n == 0:
            self._n, self._mean, self._scatter = n, mean, scatter
            return
        total, delta = self._n + n, mean - self._mean
        self._scatter += scatter + torch.outer(delta, delta) * (self._n * n / total)
        self._mean = self._mean + delta * (n / total)
        self._n = total

    def result(self) -> Statistics:
        """What was taken in so far.

        Raises:
            ValueError: fewer than two images, which have no covariance.
        """
        if self._n < 2:
            raise ValueError(f"{self._n} image(s) have no covariance; give at least 2")
        return Statistics(self._mean.numpy(), (self._scatter / (self._n - 1)).numpy(), self._n)


def frechet_distance(a: Statistics, b: Statistics) -> float:
    """Fréchet distance of two Gaussians: ``|mu_a - mu_b|² + tr(S_a + S_b - 2 (S_a S_b)^½)`` (Heusel et al., 2017).

    Raises:
        ValueError: the two have different numbers of features.
    """
    if a.mu.shape != b.mu.shape:
        raise ValueError(
            f"statistics of {a.mu.shape[0]} and of {b.mu.shape[0]} features cannot be compared; use the same network"
        )
    plain = [{"mu": np.asarray(s.mu, np.float64), "sigma": np.asarray(s.sigma, np.float64)} for s in (a, b)]
    return fid_statistics_to_metric(*plain, verbose=False)[KEY_METRIC_FID]


def inception_score(logits: Tensor, splits: int = 10) -> tuple[float, float]:
    """Mean and standard deviation over ``splits`` of ``exp(E KL(p(y|x) ‖ p(y)))`` (Salimans et al., 2016).

    Images are shuffled first, always in the same way, because samples come in the order of their classes.

    Args:
        logits: (N, K). splits: parts of nearly equal size.

    Raises:
        ValueError: fewer images than splits.
    """
    if len(logits) < splits:
        raise ValueError(f"splits={splits} is more than the {len(logits)} images; use at most splits={len(logits)}")
    found = isc_features_to_metric(logits, splits)
    return found[KEY_METRIC_ISC_MEAN], found[KEY_METRIC_ISC_STD]


def precision_recall(samples: Tensor, reference: Tensor, neighbours: int = 3) -> tuple[float, float]:
    """Share of samples within the reference's manifold, and of the reference within the samples'.

    A set's manifold is the union of balls around its points that reach to their ``neighbours``-th neighbour
    (Kynkäänniemi et al., 2019). Distances are computed in chunks: memory grows with the larger set alone.

    Args:
        samples: features (N, F). reference: features (M, F).

    Raises:
        ValueError: a set has too few images to have that many neighbours.
    """
    for name, features in (("samples", samples), ("reference", reference)):
        if len(features) <= neighbours:
            raise ValueError(
                f"neighbours={neighbours} needs more images than the {len(features)} of the {name}; "
                f"use at most neighbours={len(features) - 1}"
            )
    return calculate_precision_recall_part(samples.float(), reference.float(), neighbours, _CHUNK)
