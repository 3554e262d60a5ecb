"""Export every published network (fresh weights, seed 0): ``python scripts/study_export.py OUT [NAME …]``.

Writes a report for each network and ``summary.md`` below OUT; what passed by a report there is left out, so the same
command goes on where it stopped. Takes hours on two CPU cores, most of them in the tracing of free sizes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import timm
import torch

from vit3.export import Subject
from vit3.export.formats import FORMATS, export
from vit3.export.report import Result, write_report
from vit3.export.signature import Signature
from vit3.models import DENSE_NAMES, GENERATOR_NAMES, MODEL_NAMES

NAMES = (*MODEL_NAMES, *DENSE_NAMES, "dit3_s_8")
STEP = 32  # of the sides that AOTInductor's packages take


def fresh(name: str) -> Subject:
    """A published network whose gates and norms are not at their start, where they would hide what the rest does."""
    torch.manual_seed(0)
    model = timm.create_model(name).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    kind = "generator" if name in GENERATOR_NAMES else "features" if name in DENSE_NAMES else "classifier"
    size = model.img_size if kind == "generator" else (224, 224)
    return Subject(model, kind, name, {}, size, source={"file": "fresh weights, seed 0", "sha256": None})


def exported(subject: Subject, formats: Sequence[str], folder: Path) -> Iterator[Result]:
    """Write formats into a folder, with a report after each; gives what came of them."""
    results = []
    step = subject.model.patch_size if subject.kind == "generator" else STEP
    for result in export(subject, formats, Signature.of(subject), folder, multiple=step):
        results.append(result)
        write_report(folder, subject, results)
        yield result


def passed(folder: Path) -> set[str]:
    """Formats that are equal to their network by the report in a folder."""
    path = folder / "export.json"
    report = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"formats": []}
    return {entry["format"] for entry in report["formats"] if entry["passed"]}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(NAMES)}; all if not given")
    parser.add_argument("--formats", default=",".join(FORMATS), help="with commas between them")
    options = parser.parse_args()
    if unknown := set(options.names) - set(NAMES) | set(options.formats.split(",")) - set(FORMATS):
        parser.error(f"{', '.join(sorted(unknown))} is none of {', '.join((*NAMES, *FORMATS))}")
    for name in options.names or NAMES:
        folder = options.out / name
        formats = [kind for kind in options.formats.split(",") if kind not in passed(folder)]
        folder.mkdir(parents=True, exist_ok=True)
        for result in exported(fresh(name), formats, folder) if formats else ():
            print(name, result.format, result.error or f"passed {result.passed}, {result.seconds:.0f} s", flush=True)
    lines = ["| network | format | MB | written in | largest difference | passed |", "|---|---|---:|---:|---:|---|"]
    for name in NAMES:
        if (path := options.out / name / "export.json").exists():
            lines += [f"| `{name}` | {row}" for row in rows(json.loads(path.read_text(encoding="utf-8")))]
    (options.out / "summary.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def rows(report: dict) -> list[str]:
    """One row of the table for each format of a report."""
    found = []
    for entry in report["formats"]:
        size = sum(file["bytes"] for file in entry["files"]) / 1e6
        word = "yes" if entry["passed"] else "**no**"
        difference = entry["difference"] if isinstance(entry["difference"], str) else f"{entry['difference']:.0e}"
        found.append(f"{entry['format']} | {size:.1f} | {entry['seconds']:.0f} s | {difference} | {word} |")
    return found


if __name__ == "__main__":
    main()
