"""Time operators, mixers and models against their controls: ``python tools/benchmark.py --out docs/benchmarks/NAME``.

Runs a quick self-test first and reports nothing if a result is wrong. Writes ``results.csv``, ``results.md`` and
``time_and_memory.png``; on a CPU, ``--threads 1,2`` measures each number of threads. ``--runtime`` compares eager,
torch.compile, AOTInductor and onnxruntime instead, on one network on the CPU, and draws ``runtimes.png``.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import os
import platform
import shlex
import sys
from dataclasses import asdict
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import timm
import torch
from rich.console import Console
from rich.table import Table

import vit3
from vit3.analysis import benchmark, selftest
from vit3.analysis.benchmark import Row
from vit3.analysis.plots import plot_growth, plot_runtimes
from vit3.errors import UserError
from vit3.export import Subject, runtimes

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
    parser.add_argument("--runtime", action="store_true", help="runtimes of one network on the CPU, and nothing else")
    parser.add_argument("--model", default="vit3_tiny", help="of --runtime: a classifier of ours, as timm knows it")
    parser.add_argument("--batch", default="1,16", help="of --runtime: numbers of images in one call")
    parser.add_argument("--size", default="224", help="of --runtime: side of the images in pixels")
    parser.add_argument("--out", type=Path, help="folder of the results (outputs/benchmark/DATE if not given)")
    options = parser.parse_args()
    levels = options.level.split(",")
    if unknown := set(levels) - set(LEVELS):
        sys.exit(f"error: --level={options.level}: {', '.join(sorted(unknown))} is none of {', '.join(LEVELS)}")
    threads = numbers("threads", options.threads) if options.threads else [torch.get_num_threads()]
    if options.device not in ("auto", "cpu", "cuda"):
        sys.exit(f"error: --device={options.device} must be auto, cpu or cuda")
    if options.runtime and (options.device == "cuda" or options.dtype not in (None, "fp32")):
        sys.exit("error: --runtime measures on the CPU in fp32; leave --device and --dtype out")
    found = "cuda" if torch.cuda.is_available() and not options.runtime else "cpu"
    device = torch.device(found if options.device == "auto" else options.device)
    name = options.dtype or ("fp32" if device.type == "cpu" else "bf16")
    dtype = dict(fp32=torch.float32, fp16=torch.float16, bf16=torch.bfloat16)[name]
    if options.runtime:
        subject, batches = subject_of(options.model, *numbers("size", options.size)), numbers("batch", options.batch)
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
        if options.runtime:
            console.print(f"exports and compiles {options.model} first, which takes minutes")
            measured = runtimes.runtime_rows(subject, tuple(batches), say=console.print)
        else:
            measured = measure(levels, device, dtype, options.quick)
        try:
            for row in measured:
                rows.append(row)
                console.print(
                    f"{row.level:7} {row.case:24} {row.contender:18} {row.direction:16} {count or '':1} "
                    f"{row.p50_ms:9.2f} ms  {row.to_reference:5.2f} x",
                    highlight=False,
                )
        except UserError as error:
            sys.exit(f"error: {error}")
    out = options.out or Path("outputs/benchmark") / datetime.date.today().isoformat()
    write_results(out, rows, describe(device))
    if met := targets(rows):
        report = Table("target", "wanted", "measured", "", title="Targets")
        for target in met:
            report.add_row(*target)
        console.print(report)
    print(f"written to {out}")


def numbers(option: str, text: str) -> list[int]:
    """Whole numbers from 1 on with commas between them; anything else ends the program."""
    try:
        found = [int(n) for n in text.split(",")]
    except ValueError:
        found = [0]
    if min(found) < 1:
        sys.exit(f"error: --{option}={text} must be numbers from 1 on, such as 1,2")
    return found


def subject_of(name: str, *size: int) -> Subject:
    """The classifier ``name`` with fresh weights (they cost what trained ones do) for images of ``size``."""
    names = timm.list_models(module=["vit3", "h_vit3"])
    if name not in names:
        sys.exit(f"error: --model={name} is none of {', '.join(names)}")
    if len(size) > 2:
        sys.exit(f"error: --size={','.join(map(str, size))} must be one side, or height and width")
    torch.manual_seed(0)
    return Subject(timm.create_model(name).eval(), "classifier", name, {}, (size[0], size[-1]))


def write_results(out: Path, rows: list[Row], machine: dict[str, str]) -> None:
    """``results.csv``, ``results.md`` and the pictures of what was measured."""
    out.mkdir(parents=True, exist_ok=True)
    write_csv(out / "results.csv", rows, machine)
    command = "python tools/benchmark.py " + shlex.join(sys.argv[1:])
    (out / "results.md").write_text(to_markdown(rows, machine, command), encoding="utf-8")
    last = [row for row in rows if row.threads == rows[-1].threads]
    if any(row.level == "growth" for row in rows):
        plot_growth(last, out / "time_and_memory.png")
    if any(row.level == "runtime" for row in rows):
        plot_runtimes(last, out / "runtimes.png")


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
    """Machine, what else it does, and versions."""
    if device.type == "cuda":
        machine = torch.cuda.get_device_name(device)
    else:
        cpuinfo = Path("/proc/cpuinfo")
        lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
        name = names[0] if names else platform.processor()
        machine = f"{name}, {len(names)} cores, {torch.backends.cpu.get_cpu_capability()}"
    load = f"{os.getloadavg()[2]:.1f} processes ready to run, this one included, mean of 15 minutes"
    versions = dict(torch=torch.__version__, timm=timm.__version__, vit3=vit3.__version__)
    if find_spec("onnxruntime"):
        versions["onnxruntime"] = import_module("onnxruntime").__version__
    return dict(machine=machine, load=load, date=datetime.date.today().isoformat(), **versions)


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
        "for models DeiT-T; for runtimes eager PyTorch). Saved: what is kept for the backward pass, in elements per "
        "token and channel.",
        "",
    ]
    if met := targets(rows):
        lines += ["## Targets", "", "| target | wanted | measured | |", "|---|---|---|---|"]
        lines += [*(f"| {' | '.join(target)} |" for target in met), ""]
    lines += runtime_table([row for row in rows if row.level == "runtime"])
    lines += [
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


def runtime_table(rows: list[Row]) -> list[str]:
    """What is measured of runtimes alone; nothing without them."""
    if not rows:
        return []
    head = ["case", "threads", "runtime", "images/s", "times as fast", "peak resident set MB", "seconds until ready"]
    lines = ["## Runtimes", "", runtimes.__doc__.split("\n\n", 1)[1].strip(), "", *runtimes.CONDITIONS, ""]
    lines += [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for r in rows:
        numbers = [f"{r.images_s:.1f}", f"{r.to_reference:.2f}", f"{r.peak_mb:.0f}", f"{r.ready_s:.1f}"]
        lines.append(f"| {' | '.join([r.case, str(r.threads), r.contender, *numbers])} |")
    return [*lines, ""]


if __name__ == "__main__":
    main()
