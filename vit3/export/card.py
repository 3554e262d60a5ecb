"""The model card of an exported folder: what the network is, what was measured, how it is loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from vit3.export.subject import Subject

CARD = "README.md"
_TASKS = {"classifier": "image-classification", "features": "image-feature-extraction"}
_QUOTED = "quoted"  # of subject.training: figures of others, each with its source
_PAPER = "ViT³: Unlocking Test-Time Training in Vision, arXiv 2512.01643"


def model_card(subject: Subject, config: Mapping[str, Any], name: str, repository: str | None = None) -> str:
    """Markdown with a YAML head as the hub reads it; every number is one that ``subject.training`` gives.

    Args:
        config: what the folder's ``config.json`` says, SHA-256 included. name: of the folder.
        repository: ``OWNER/NAME`` on the hub, if it goes there.
    """
    measured = {key: value for key, value in subject.training.items() if key not in (_QUOTED, "dataset")}
    sections = [
        _head(subject, config),
        f"# {name}\n\n{_summary(subject)}",
        "## Use\n\n" + _usage(subject, f"hf-hub:{repository}" if repository else f"local-dir:{name}"),
        _table("Input", _inputs(subject)),
        _table("Training and measured results", measured),
        _table("Quoted, not measured here", subject.training.get(_QUOTED) or {}),
        _table(
            "Origin",
            {
                **subject.source,
                "weights": subject.weights,
                "SHA-256 of model.safetensors": config["sha256"],
                **config["versions"],
            },
        ),  # fmt: skip
        f"Source of the architecture: {_PAPER}.",
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _head(subject: Subject, config: Mapping[str, Any]) -> str:
    """YAML; its strings are JSON's, which YAML reads too."""
    task = _TASKS.get(subject.kind)
    lines = [f"license: {json.dumps(config['pretrained_cfg']['license'])}", "library_name: timm"]
    lines += [] if task is None else [f"pipeline_tag: {task}"]
    lines += ["tags:", *(f"- {tag}" for tag in ("timm", "vit3", "test-time-training", task or "image-generation"))]
    datasets = subject.training.get("dataset") or []
    datasets = [datasets] if isinstance(datasets, str) else datasets
    if datasets:
        lines += ["datasets:", *(f"- {json.dumps(name)}" for name in datasets)]
    return "\n".join(["---", *lines, "---"])


def _summary(subject: Subject) -> str:
    what = {
        "classifier": "Image classifier",
        "features": "Backbone that gives a map of each stage",
        "generator": "Class-conditional denoiser of a diffusion model",
    }[subject.kind]
    count = sum(p.numel() for p in subject.model.parameters())
    classes = "" if subject.classes is None else f", {len(subject.classes):,} classes"
    return f"{what} `{subject.name}`: {count:,} parameters{classes}."


def _usage(subject: Subject, place: str) -> str:
    """Three lines of Python."""
    h, w = subject.img_size
    image = f"torch.randn(1, {subject.in_chans}, {h}, {w})"
    arguments = f"{image}, torch.tensor([500]), torch.tensor([0])" if subject.kind == "generator" else image
    lines = ["import torch, vit3", f'model = vit3.create_model("{place}", pretrained=True).eval()',
             f"output = model({arguments})"]  # fmt: skip
    return "```python\n" + "\n".join(lines) + "\n```"


def _inputs(subject: Subject) -> dict[str, Any]:
    h, w = subject.img_size
    unit = "latent pixels" if subject.kind == "generator" else "pixels"
    return {"channels": subject.in_chans, f"nominal size, {unit}": f"{h} x {w}", **subject.preprocessing}


def _table(title: str, facts: Mapping[str, Any]) -> str:
    if not facts:
        return ""
    rows = "\n".join(f"| {_cell(name)} | {_cell(value)} |" for name, value in facts.items())
    return f"## {title}\n\n| | |\n|---|---|\n{rows}"


def _cell(value: Any) -> str:
    """One cell of a table; nested values as JSON."""
    if isinstance(value, float):
        value = float(f"{value:.5g}")  # more is not known
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text.replace("|", "\\|").replace("\n", " ")
