"""The report of a scoring: every metric, and the protocol under which it holds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch_fidelity
from rich.table import Table

from vit3.engine.run_folder import environment
from vit3.errors import UserError
from vit3.files import replacing
from vit3.generation.compared import Reference, Samples
from vit3.generation.evaluation import Scores
from vit3.generation.features import Features

UNKNOWN = "unknown"
# What a published score must be stated with, as it stands in samples.json
SETTINGS = (
    *("checkpoint", "weights", "sampler", "steps", "guidance", "guidance_channels", "guidance_interval"),
    *("autoencoder", "seed", "img_size"),
)


def score_report(
    scores: Scores, samples: Samples, reference: Reference | None, network: Features, **options: Any
) -> dict[str, Any]:
    """Plain values of a report.

    Args:
        options: of the metrics: neighbours, splits.
    """
    settings = dict.fromkeys(SETTINGS, UNKNOWN) | (samples.settings or {})
    protocol = {
        "samples": samples.images.title,
        "n": samples.images.n,
        "pixels": list(samples.images.size),
        **settings,
        "reference": None if reference is None else reference.title,
        "reference_images": None if reference is None or reference.images is None else reference.images.n,
        "compared_with": scores.compared,
        "features": network.describe(),
        **options,
        "versions": {
            **environment(),
            "numpy": np.__version__,
            "torch_fidelity": torch_fidelity.__version__,
        },
    }
    report = {"scores": scores.values, "left_out": scores.left_out, "protocol": protocol}
    return report | ({"agreement_by_class": scores.per_class} if scores.per_class else {})


def write_report(path: Path, report: Mapping[str, Any]) -> None:
    """Write a report as JSON; what was there of other settings is replaced as a whole.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        with replacing(path) as file:
            file.write((json.dumps(report, indent=2) + "\n").encode())
    except OSError as error:
        raise UserError(f"output={path} cannot be written ({error}); choose another output=FILE") from error


def score_tables(report: Mapping[str, Any]) -> list[Table]:
    """A report as tables: the metrics, agreement by class where it is known, and the protocol."""
    scores = Table("metric", "value", box=None)
    for name, value in report["scores"].items():
        scores.add_row(name, f"{value:.4f}")
    for name, reason in report["left_out"].items():
        scores.add_row(name, f"left out: {reason}")
    tables = [scores]
    if by_class := report.get("agreement_by_class"):
        table = Table("class", "agreement", box=None)
        for name, value in by_class.items():
            table.add_row(name, f"{value:.4f}")
        tables.append(table)
    protocol = Table("protocol", "", box=None)
    for name, value in report["protocol"].items():
        if isinstance(value, Mapping):
            value = ", ".join(f"{key} {item}" for key, item in value.items())
        protocol.add_row(name, str(value))
    return [*tables, protocol]
