"""Time operators, mixers and models against their controls: ``python tools/benchmark.py --out docs/benchmarks/NAME``.

Runs a quick self-test first and reports nothing if a result is wrong. Writes ``results.csv``, ``results.md`` and
``time_and_memory.png``; on a CPU, ``--threads 1,2`` measures each number of threads.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import platform
import shlex
import sys
from dataclasses import asdict
from pathlib import Path

import timm
import torch
from rich.console import Console
from rich.table import Table

import vit3
from vit3.analysis import benchmark, selftest
from vit3.analysis.benchmark import Row
from vit3.analysis.plots import plot_growth

LEVELS = ("op", "mixer", "growth", "model")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="auto", help="auto (CUDA if there is one), cpu or cuda")
    parser.add_argument(
        "--dtype", choices=("fp32", "fp16", "bf16"), help="fp32 on a CPU and bf16 on a GPU if not given"
    )
    parser.add_argument("--threads", default="", help="numbers of CPU threads, such as 1,2; PyTorch's if not given")
    parser.add_argument("--level", default=",".join(LEVELS), help=f"some of {','.join(LEVELS)}")
    parser.add_argument("--quick", action="store_true", help="the first shape of each level")
    parser.add_argument("--out", type=Path, help="folder of the results (outputs/benchmark/DATE if not given)")
    options = parser.parse_args()
    levels = options.level.split(",")
    if unknown := set(levels) - set(LEVELS):
        sys.exit(f"error: --level={options.level}: {', '.join(sorted(unknown))} is none of {', '.join(LEVELS)}")
    try:
        threads = [int(n) for n in options.threads.split(",")] if options.threads else [torch.get_num_threads()]
    except ValueError:
        threads = [0]
    if min(threads) < 1:
        sys.exit(f"error: --threads={options.threads} must be numbers from 1 on, such as 1,2")
    if options.device not in ("auto", "cpu", "cuda"):
        sys.exit(f"error: --device={options.device} must be auto, cpu or cuda")
    device = torch.device(
        ("cuda" if torch.cuda.is_available() else "cpu") if options.device == "auto" else options.device
    )
    name = options.dtype or ("fp32" if device.type == "cpu" else "bf16")
    dtype = dict(fp32=torch.float32, fp16=torch.float16, bf16=torch.bfloat16)[name]
    console = Console(width=None if sys.stdout.isatty() else 160)

    f = next((f for f in selftest.run(device, quick=True) if not isinstance(f, str) and not f.passed), None)
    if f is not None:
        sys.exit(
            f"error: the self-test fails ({f.backend} in {f.dtype}, {f.what} at {f.where}: {f.error:.1e} above "
            f"{f.bound:.1e}), so no timing is reported; see tools/selftest.py"
        )
    rows: list[Row] = []
    for count in threads if device.type == "cpu" else [0]:
        if count:
            torch.set_num_threads(count)
        for row in measure(levels, device, dtype, options.quick):
            rows.append(row)
            console.print(
                f"{row.level:6} {row.case:24} {row.contender:18} {row.direction:16} {count or '':1} "
                f"{row.p50_ms:9.2f} ms  {row.to_reference:5.2f} x",
                highlight=False,
            )
    out = options.out or Path("outputs/benchmark") / datetime.date.today().isoformat()
    out.mkdir(parents=True, exist_ok=True)
    machine = describe(device)
    write_csv(out / "results.csv", rows, machine)
    command = "python tools/benchmark.py " + shlex.join(sys.argv[1:])
    (out / "results.md").write_text(to_markdown(rows, machine, command), encoding="utf-8")
    if any(row.level == "growth" for row in rows):
        plot_growth([row for row in rows if row.threads == rows[-1].threads], out / "time_and_memory.png")
    report = Table("target", "wanted", "measured", "", title="Targets")
    for target in targets(rows):
        report.add_row(*target)
    console.print(report)
    print(f"written to {out}")


def measure(levels: list[str], device: torch.device, dtype: torch.dtype, quick: bool):
    """Rows of the chosen levels, as they come."""
    shapes = benchmark.CPU_SHAPES if device.type == "cpu" else benchmark.GPU_SHAPES
    shapes = shapes[2:3] if quick else shapes
    if "op" in levels:
        copy = benchmark.copy_bandwidth(device)
        for shape in shapes:
            yield from benchmark.op_rows(shape, device, dtype, copy)
    if "mixer" in levels:
        for shape in shapes:
            yield from benchmark.mixer_rows(shape, device, dtype)
    if "growth" in levels:
        yield from benchmark.growth_rows(device, dtype, benchmark.GROWTH[:2] if quick else benchmark.GROWTH)
    if "model" in levels:
        for size in benchmark.MODEL_SIZES[device.type][: 1 if quick else None]:
            yield from benchmark.model_rows(size, device, dtype)


def describe(device: torch.device) -> dict[str, str]:
    """Machine and versions."""
    if device.type == "cuda":
        machine = torch.cuda.get_device_name(device)
    else:
        cpuinfo = Path("/proc/cpuinfo")
        lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
        name = names[0] if names else platform.processor()
        machine = f"{name}, {len(names)} cores, {torch.backends.cpu.get_cpu_capability()}"
    versions = dict(torch=torch.__version__, timm=timm.__version__, vit3=vit3.__version__)
    return dict(machine=machine, date=datetime.date.today().isoformat(), **versions)


def write_csv(path: Path, rows: list[Row], machine: dict[str, str]) -> None:
    """One line per row, with the machine."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=[*asdict(rows[0]), *machine])
        writer.writeheader()
        for row in rows:
            values = {k: f"{v:.5g}" if isinstance(v, float) else v for k, v in asdict(row).items()}
            writer.writerow(values | machine)


def targets(rows: list[Row]) -> list[tuple[str, str, str, str]]:
    """What is aimed at, what was measured, and whether it is met."""
    found: list[tuple[str, str, str, str]] = []

    def judge(what: str, row: Row, wanted: float, measured: float, *, least: bool) -> None:
        threads = f", {row.threads} thread{'s' * (row.threads > 1)}" if row.threads else ""
        met = measured >= wanted if least else measured <= wanted
        sign = "≥" if least else "≤"
        found.append((what + threads, f"{sign} {wanted:g}", f"{measured:.2f}", "met" if met else "not met"))

    for row in rows:
        best = "triton" if row.dtype != "float32" or row.threads == 0 else "fused"
        forward = row.direction == "forward"
        if row.level == "mixer" and row.contender == "fused" and row.threads:
            what = f"mixer {row.direction}, {row.case}: time / reference"
            judge(what, row, 1.0 if forward else 1.05, 1 / row.to_reference, least=False)
        if row.level == "mixer" and row.contender in ("fused", "triton") and row.saved_elements:
            c, m = (int(word[1:]) for word in row.case.split()[1:3])
            what = f"mixer {row.case}, {row.contender}: saved / floor"
            judge(what, row, 1.1, row.saved_elements / (4 * (1 + 1 / m)), least=False)
        if row.level == "op" and row.contender == best == "triton":
            judge(
                f"op {row.direction}, {row.case}: bandwidth / copy",
                row,
                0.6 if forward else 0.45,
                row.copy_fraction,
                least=True,
            )
            judge(
                f"op {row.direction}, {row.case}: reference / time",
                row,
                8 if forward else 6,
                row.to_reference,
                least=True,
            )
        if row.level == "model" and row.contender == "vit3_tiny":
            wanted = next((w for size, w in ((1248, 4.6), (512, 1.3), (224, 0.7)) if f" {size}x" in row.case), None)
            if wanted and (row.threads or wanted == 4.6):
                judge(f"ViT³-T / DeiT-T, {row.case}: images/s", row, wanted, row.to_reference, least=True)
    growth = [row for row in rows if row.level == "growth" and row.contender in ("fused", "triton")]
    for key in sorted({(r.contender, r.direction, r.threads) for r in growth}):
        group = [r for r in growth if (r.contender, r.direction, r.threads) == key]
        if len(group) > 1:
            what = f"growth of time, {key[0]}, {key[1]}: exponent"
            judge(what, group[0], 1.05, benchmark.exponent(group), least=False)
    return found


def to_markdown(rows: list[Row], machine: dict[str, str], command: str) -> str:
    """Machine, targets and all rows."""
    lines = ["# Benchmark", "", *(f"- {key}: {value}" for key, value in machine.items()), f"- command: `{command}`", ""]
    lines += [
        "Medians of calls that take turns in one loop; ratios are to the first contender of the case (the closed form; "
        "for models DeiT-T). Saved: what is kept for the backward pass, in elements per token and channel.",
        "",
        "## Targets",
        "",
        "| target | wanted | measured | |",
        "|---|---|---|---|",
        *(f"| {' | '.join(target)} |" for target in targets(rows)),
        "",
        "## All",
        "",
        "| level | case | threads | contender | direction | p20 ms | median ms | p80 ms "
        "| times as fast | saved | peak MB | of a copy |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        optional = ["" if value is None else f"{value:.2f}" for value in (r.saved_elements, r.peak_mb, r.copy_fraction)]
        numbers = [f"{r.p20_ms:.2f}", f"{r.p50_ms:.2f}", f"{r.p80_ms:.2f}", f"{r.to_reference:.2f}", *optional]
        lines.append(f"| {' | '.join([r.level, r.case, str(r.threads or ''), r.contender, r.direction, *numbers])} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
