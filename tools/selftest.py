"""Test the operators on this machine against float64: ``python tools/selftest.py``; exit status 1 if one is wrong.

``--quick`` takes a few shapes; ``--backend`` and ``--dtype`` choose; ``--csv`` and ``--markdown`` write the table.
"""

from __future__ import annotations

import argparse
import csv
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from vit3.analysis import selftest

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="auto", help="auto (CUDA if there is one), cpu or cuda")
    parser.add_argument(
        "--backend", choices=("reference", "fused", "triton"), help="only this one; an error if it cannot run"
    )
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="only this one")
    parser.add_argument("--quick", action="store_true", help="few shapes")
    parser.add_argument("--csv", type=Path, help="write every finding here")
    parser.add_argument("--markdown", type=Path, help="write the table here")
    options = parser.parse_args()
    if options.device not in ("auto", "cpu", "cuda"):
        sys.exit(f"error: --device={options.device} must be auto, cpu or cuda")
    device = torch.device(
        ("cuda" if torch.cuda.is_available() else "cpu") if options.device == "auto" else options.device
    )
    chosen = dict(
        backends=(options.backend,) if options.backend else ("reference", "fused", "triton"),
        dtypes=(DTYPES[options.dtype],) if options.dtype else tuple(DTYPES.values()),
        quick=options.quick,
        forced=options.backend is not None,
    )
    console, findings = Console(width=None if sys.stdout.isatty() else 160), []
    try:
        for found in selftest.run(device, **chosen):
            if isinstance(found, str):
                console.print(found)
                continue
            if not findings or (found.backend, found.dtype) != (findings[-1].backend, findings[-1].dtype):
                console.print(f"testing {found.backend} in {found.dtype}")
            findings.append(found)
    except ValueError as error:
        sys.exit(f"error: {error}")
    rows = selftest.table(findings)
    report = Table(*rows[0], title=f"Self-test on {device}: largest error / bound") if rows else Table()
    for row in rows:
        report.add_row(*row.values())
    console.print(report)
    if options.csv:
        _write_csv(options.csv, findings)
    if options.markdown:
        options.markdown.write_text(to_markdown(rows), encoding="utf-8")
    wrong = [f for f in findings if not f.passed]
    for f in wrong:
        print(f"WRONG: {f.backend} in {f.dtype}, {f.what} at {f.where}: error {f.error:.1e}, bound {f.bound:.1e}")
    print(f"{len(findings)} comparisons, {len(wrong)} above their bound" if findings else "nothing could be tested")
    sys.exit(bool(wrong) or not findings)


def to_markdown(rows: list[dict[str, str]]) -> str:
    """The table as Markdown."""
    head = list(rows[0]) if rows else []
    lines = [head, ["---"] * len(head), *(list(row.values()) for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _write_csv(path: Path, findings: list[selftest.Finding]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=[*asdict(findings[0]), "passed"] if findings else ["passed"])
        writer.writeheader()
        writer.writerows(asdict(f) | {"passed": f.passed} for f in findings)


if __name__ == "__main__":
    main()
