"""Scores against computations that share no algebra with them, and against torch-fidelity on the same features."""

import math

import numpy as np
import pytest
import torch
from torch_fidelity.metric_fid import KEY_METRIC_FID, fid_features_to_statistics, fid_statistics_to_metric

from vit3.generation.scores import RunningStatistics, Statistics, frechet_distance, inception_score, precision_recall


def statistics_of(features, batch=7):
    running = RunningStatistics()
    for part in features.split(batch):
        running.add(part)
    return running.result()


@pytest.mark.parametrize("batch", [1, 7, 64, 200])
def test_statistics_do_not_depend_on_the_batches(batch):
    x = 1e3 + torch.randn(200, 5) * torch.tensor([1e-2, 1, 3, 10, 100])  # far from zero: sums of squares would cancel
    found = statistics_of(x, batch)
    np.testing.assert_allclose(found.mu, x.double().numpy().mean(0), rtol=1e-13)
    np.testing.assert_allclose(found.sigma, np.cov(x.double().numpy(), rowvar=False), rtol=1e-9, atol=1e-12)
    assert found.n == 200 and found.mu.dtype == found.sigma.dtype == np.float64


def test_distance_of_gaussians_in_closed_form():
    """Covariances with the same axes: each axis adds (difference of means)² + (difference of deviations)²."""
    axes = np.linalg.qr(np.random.default_rng(0).normal(size=(6, 6)))[0]
    a, b = np.array([1.0, 2, 3, 0.5, 0, 4]), np.array([2.0, 2, 1, 0.1, 3, 0])
    mu = np.arange(6.0)
    first = Statistics(mu, axes @ np.diag(a**2) @ axes.T)
    second = Statistics(mu + 0.5, axes @ np.diag(b**2) @ axes.T)
    assert frechet_distance(first, second) == pytest.approx(6 * 0.25 + ((a - b) ** 2).sum(), abs=1e-6)


def test_distance_by_matrix_square_root():
    """The other way to the trace: a symmetric root of one covariance around the other, no eigenvalues of products."""
    from scipy.linalg import sqrtm

    first, second = (statistics_of(torch.randn(60, 8) @ torch.randn(8, 8) + shift) for shift in (0.0, 0.3))
    root = sqrtm(first.sigma).real
    middle = sqrtm(root @ second.sigma @ root).real
    expected = ((first.mu - second.mu) ** 2).sum() + np.trace(first.sigma + second.sigma - 2 * middle)
    assert frechet_distance(first, second) == pytest.approx(expected, abs=1e-6)
    assert frechet_distance(second, first) == pytest.approx(expected, abs=1e-6)


def test_distance_of_one_feature_by_hand():
    a, b = Statistics(np.array([1.0]), np.array([[4.0]])), Statistics(np.array([4.0]), np.array([[9.0]]))
    assert frechet_distance(a, b) == pytest.approx(9 + (2 - 3) ** 2, abs=1e-12)
    assert frechet_distance(a, a) == pytest.approx(0, abs=1e-12)


def test_distance_is_torch_fidelitys():
    first, second = torch.randn(40, 12), torch.randn(30, 12) * 2 + 1
    theirs = [fid_features_to_statistics(x.double()) for x in (first, second)]
    expected = fid_statistics_to_metric(*theirs, verbose=False)[KEY_METRIC_FID]
    assert frechet_distance(statistics_of(first), statistics_of(second)) == pytest.approx(expected, rel=1e-9)


def test_fewer_images_than_features():
    """Covariances without full rank: still a distance, zero to itself."""
    x, y = torch.randn(5, 30), torch.randn(6, 30)
    assert frechet_distance(statistics_of(x), statistics_of(y)) > 1
    assert frechet_distance(statistics_of(x), statistics_of(x)) == pytest.approx(0, abs=1e-5)


def test_inception_score_by_hand():
    """One split: exp of the mean over images of Σ p log(p / q), with q the mean of p."""
    logits = torch.randn(12, 4) * 3
    p = [[math.exp(v) for v in row] for row in logits.double().tolist()]
    p = [[v / sum(row) for v in row] for row in p]
    q = [sum(column) / 12 for column in zip(*p)]
    expected = math.exp(sum(v * math.log(v / w) for row in p for v, w in zip(row, q)) / 12)
    assert inception_score(logits, splits=1) == (pytest.approx(expected, rel=1e-9), 0.0)


def test_inception_score_at_its_ends():
    """As many as the classes where all are certain and equally frequent; one where all images look the same."""
    certain = torch.eye(5).repeat(20, 1) * 1e3
    assert inception_score(certain, splits=1)[0] == pytest.approx(5)
    assert inception_score(torch.randn(1, 5).repeat(100, 1), splits=10) == (pytest.approx(1), pytest.approx(0))
    assert inception_score(certain, splits=4)[0] > 3.5  # in the order of their classes, unshuffled, they would be 1.25
    ordered = torch.eye(5).repeat_interleave(20, 0) * 1e3
    assert inception_score(ordered, splits=5)[0] > 3


def within(points, centres, neighbours):
    """Share of ``points`` in a ball around any of ``centres`` to its n-th neighbour, one pair after the other."""
    radius = [sorted(math.dist(c, other) for other in centres)[neighbours] for c in centres]
    return sum(any(math.dist(p, c) <= r for c, r in zip(centres, radius)) for p in points) / len(points)


@pytest.mark.parametrize("neighbours", [1, 3])
def test_precision_and_recall_by_brute_force(neighbours):
    samples, reference = torch.randn(40, 3) * 0.5 + 0.4, torch.randn(55, 3)
    precision, recall = precision_recall(samples, reference, neighbours)
    a, b = samples.double().tolist(), reference.double().tolist()
    assert precision == pytest.approx(within(a, b, neighbours)) and recall == pytest.approx(within(b, a, neighbours))
    assert 0.2 < recall < precision < 1  # a narrow set lies inside a wide one, not the other way round


@pytest.mark.parametrize("chunk", [7, 64])
def test_chunks_change_nothing(monkeypatch, chunk):
    samples, reference = torch.randn(50, 30), torch.randn(45, 30) + 0.2
    whole = precision_recall(samples, reference)
    monkeypatch.setattr("vit3.generation.scores._CHUNK", chunk)
    assert precision_recall(samples, reference) == pytest.approx(whole, abs=1e-7)


def test_refused():
    x = torch.randn(3, 2)
    with pytest.raises(ValueError, match=r"neighbours=3 needs more images than the 3 of the samples; use at most"):
        precision_recall(x, torch.randn(9, 2))
    with pytest.raises(ValueError, match=r"splits=10 is more than the 3 images; use at most splits=3"):
        inception_score(x)
    with pytest.raises(ValueError, match=r"1 image\(s\) have no covariance"):
        statistics_of(x[:1])
    with pytest.raises(ValueError, match="statistics of 2 and of 3 features cannot be compared"):
        frechet_distance(statistics_of(x), statistics_of(torch.randn(4, 3)))
    with pytest.raises(ValueError, match=r"mu \(2,\) and sigma \(3, 3\) are no mean and covariance"):
        Statistics(np.zeros(2), np.eye(3))
    with pytest.raises(ValueError, match="sigma holds values that are not finite"):
        Statistics(np.zeros(2), np.full((2, 2), np.nan))
