"""Scoring: which outputs of a network the wanted metrics need, and the metrics from them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vit3.errors import UserError
from vit3.generation.compared import Reference, Samples
from vit3.generation.features import Features, collect
from vit3.generation.scores import Statistics, frechet_distance, inception_score, precision_recall

logger = logging.getLogger(__name__)

METRICS = ("fid", "sfid", "is", "precision", "recall")
_DISTANCES = {"fid": "features", "sfid": "spatial"}  # whose statistics are compared
_MANIFOLDS = ("precision", "recall")


@dataclass(frozen=True)
class Scores:
    """What came out.

    Attributes:
        values: by name of the metric in the network's features. left_out: metrics that were wanted, and why they are
            not there. compared: what of the reference each metric was computed from. per_class: share of images of each
            class asked for that the network takes for it.
    """

    values: dict[str, float]
    left_out: dict[str, str]
    compared: dict[str, str]
    per_class: dict[str, float]


def score(
    samples: Samples, reference: Reference | None, network: Features, metrics: Sequence[str], *,
    neighbours: int = 3, splits: int = 10, batch_size: int = 64, device: torch.device | None = None,
) -> Scores:  # fmt: skip
    """Score samples.

    Args:
        reference: what they are compared with; None where only ``is`` is wanted. network: in whose features.
        metrics: some of ``METRICS``. neighbours: of precision and recall. splits: of the Inception Score.
        batch_size: images per forward pass. device: where distances between images are computed.

    Raises:
        UserError: unknown metric, a reference that is missing or does not fit, nothing left to compute, or too few
            images for a metric.
    """
    wanted, left_out = _wanted(metrics, reference, network)
    for metric, reason in left_out.items():
        logger.warning("%s is left out: %s", metric, reason)
    if not wanted:
        raise UserError(f"metrics={list(metrics)}: none of them can be computed here; {next(iter(left_out.values()))}")
    stored = reference.statistics if reference is not None and network.published else {}
    _check(wanted, samples, reference, network, stored, neighbours, splits)
    kinds = [kind for metric, kind in _DISTANCES.items() if metric in wanted]
    missing = [kind for kind in kinds if kind not in stored]
    pairwise = ["features"] if set(_MANIFOLDS) & set(wanted) else []
    asks = samples.asked is not None and network.classes is not None
    logits = ["logits"] if "is" in wanted or asks else []
    own = collect(network, samples.images, batch_size, statistics=kinds, keep=[*pairwise, *logits])
    theirs = None
    if missing or pairwise:
        theirs = collect(network, reference.images, batch_size, statistics=missing, keep=pairwise)
    values: dict[str, float] = {}
    compared: dict[str, str] = {}
    for metric in [metric for metric in _DISTANCES if metric in wanted]:
        kind, name = _DISTANCES[metric], network.metric_names[metric]
        other = stored.get(kind) or theirs.statistics[kind]
        _warn_small(name, own.statistics[kind], other)
        values[name] = frechet_distance(own.statistics[kind], other)
        compared[name] = "statistics in the file" if kind in stored else f"{theirs.n:,} images"
    if "is" in wanted:
        name = network.metric_names["is"]
        values[name], values[f"{name}_std"] = inception_score(own.kept["logits"], splits)
    if pairwise:
        pair = (collected.kept["features"].to(device) for collected in (own, theirs))
        both = dict(zip(_MANIFOLDS, precision_recall(*pair, neighbours)))
        values |= {metric: both[metric] for metric in _MANIFOLDS if metric in wanted}
        compared |= {metric: f"{theirs.n:,} images" for metric in _MANIFOLDS if metric in wanted}
    per_class: dict[str, float] = {}
    if asks:
        unknown = sorted(set(samples.asked) - set(network.classes))
        if unknown:
            left_out["agreement"] = f"{network.name} does not know the classes asked for: {', '.join(unknown[:5])}"
            logger.warning("agreement is left out: %s", left_out["agreement"])
        else:
            values["agreement"], per_class = agreement(own.kept["logits"], samples.asked, network.classes)
    return Scores(values, left_out, compared, per_class)


def agreement(logits: Tensor, asked: Sequence[str], classes: Sequence[str]) -> tuple[float, dict[str, float]]:
    """Share of images that are taken for the class asked for: of all, and by class.

    Args:
        logits: (n, K). asked: n names. classes: K names, those asked for among them.
    """
    right = [classes[label] == name for label, name in zip(logits.argmax(dim=1).tolist(), asked)]
    count, hits = Counter(asked), Counter(name for name, ok in zip(asked, right) if ok)
    return sum(right) / len(right), {name: hits[name] / count[name] for name in classes if name in count}


def _wanted(metrics: Sequence[str], reference: Reference | None, network: Features) -> tuple[list[str], dict[str, str]]:
    """Metrics that can be computed, and why others cannot."""
    unknown = [metric for metric in metrics if metric not in METRICS]
    if unknown or not metrics:
        raise UserError(f"metrics={list(metrics)} is not allowed; choose some of: {', '.join(METRICS)}")
    wanted, left_out = [], {}
    for metric in dict.fromkeys(metrics):
        kind = _DISTANCES.get(metric)
        if metric not in network.metric_names:
            left_out[metric] = f"{network.name} has no {kind} features"
        elif metric == "is":
            wanted.append(metric)
        elif reference is None:
            raise UserError(
                f"reference has no value, and {metric} compares with one; give reference=FOLDER, reference=FILE.npz or "
                "reference=digits, or metrics=[is]"
            )
        elif reference.images is not None or (network.published and kind in reference.statistics):
            wanted.append(metric)
        elif kind and not network.published:
            left_out[metric] = f"{reference.title} holds statistics of Inception's features alone, no images"
        else:
            left_out[metric] = f"{reference.title} holds no images" + (f" and no {kind} statistics" if kind else "")
    return wanted, left_out


def _check(
    wanted: list[str], samples: Samples, reference: Reference | None, network: Features,
    stored: dict[str, Statistics], neighbours: int, splits: int,
) -> None:  # fmt: skip
    """Refuse before the long computation what would be refused after it."""
    if "is" in wanted and samples.images.n < splits:
        raise UserError(f"splits={splits} is more than the {samples.images.n} samples; lower splits, or leave is out")
    if set(_MANIFOLDS) & set(wanted):
        fewest = min(samples.images.n, reference.images.n)
        if fewest <= neighbours:
            raise UserError(f"neighbours={neighbours} is not less than the {fewest} images; lower neighbours")
    for kind, statistics in stored.items():
        if len(statistics.mu) != network.dims[kind]:
            raise UserError(
                f"{reference.title} holds {kind} statistics of {len(statistics.mu)} numbers, and {network.name} gives "
                f"{network.dims[kind]}; give a reference that was made with it"
            )
    if reference is not None and reference.images is not None and reference.images.size != samples.images.size:
        sizes = ["x".join(map(str, images.size)) for images in (samples.images, reference.images)]
        logger.warning("samples are %s and the reference %s pixels; the network resizes both", *sizes)


def _warn_small(name: str, own: Statistics, other: Statistics) -> None:
    sizes = [(what, s.n) for what, s in (("samples", own), ("images of the reference", other)) if s.n is not None]
    for what, n in sizes:
        if n <= len(own.mu):
            logger.warning(
                "%s: %d %s are too few for %d features (their covariance has not full rank); compare it with scores of "
                "as many images alone", name, n, what, len(own.mu),
            )  # fmt: skip
