"""The self-test and the benchmark as commands."""

import csv
import sys

import pytest
import torch

import tools.benchmark
import tools.selftest
from vit3.analysis import benchmark, selftest
from vit3.export import resident, runtimes
from vit3.ops.packed_ttt import packed_ttt


def run(monkeypatch, main, *arguments):
    monkeypatch.setattr(sys, "argv", ["tool", *map(str, arguments)])
    main()


@pytest.fixture
def wrong(monkeypatch):
    monkeypatch.setattr(selftest, "packed_ttt", lambda *a, backend, **o: packed_ttt(*a, backend=backend, **o) * (
        1.1 if backend == "fused" else 1))  # fmt: skip


def test_selftest(monkeypatch, tmp_path, capsys):
    table, findings = tmp_path / "table.md", tmp_path / "findings.csv"
    with pytest.raises(SystemExit) as stop:
        run(monkeypatch, tools.selftest.main, "--quick", "--backend", "fused", "--markdown", table, "--csv", findings)
    assert stop.value.code == 0
    assert "0 above their bound" in capsys.readouterr().out
    assert table.read_text().startswith("| backend | dtype | output |")
    assert {r["passed"] for r in csv.DictReader(findings.open())} == {"True"}


def test_red_selftest(monkeypatch, wrong, capsys):
    with pytest.raises(SystemExit) as stop:
        run(monkeypatch, tools.selftest.main, "--quick", "--backend", "fused", "--dtype", "fp32")
    assert stop.value.code == 1
    assert "WRONG: fused in float32, output at" in capsys.readouterr().out


def test_nothing_is_timed_after_a_red_selftest(monkeypatch, wrong, tmp_path):
    with pytest.raises(SystemExit, match="self-test fails .fused in float64, output at .* no timing is reported"):
        run(monkeypatch, tools.benchmark.main, "--quick", "--device", "cpu", "--out", tmp_path / "results")
    assert not (tmp_path / "results").exists()


def test_benchmark(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(selftest, "run", lambda *args, **kwargs: [])
    monkeypatch.setattr(benchmark, "CPU_SHAPES", ((1, 16, 2, 4, 4),) * 3)
    monkeypatch.setattr(benchmark, "GROWTH", (4, 8))
    monkeypatch.setattr(benchmark, "backends", lambda device, dtype: ("reference", "fused"))
    timed = benchmark.timed
    monkeypatch.setattr(benchmark, "timed", lambda calls, device, seconds=0: timed(calls, device, 0.01))
    threads = torch.get_num_threads()
    run(
        monkeypatch, tools.benchmark.main, "--quick", "--device", "cpu", "--level", "op,mixer,growth", "--out", tmp_path
    )
    torch.set_num_threads(threads)
    rows = list(csv.DictReader((tmp_path / "results.csv").open()))
    assert {r["level"] for r in rows} == {"op", "mixer", "growth"}
    assert {"machine", "torch", "p20_ms", "p50_ms", "p80_ms", "to_reference", "saved_elements"} <= set(rows[0])
    text = (tmp_path / "results.md").read_text()
    assert "mixer forward, B1 C16 M2 4x4: time / reference" in text and "`python tools/benchmark.py --quick" in text
    assert (tmp_path / "time_and_memory.png").exists()


def test_runtimes(monkeypatch, tmp_path, capsys):
    def measured(subject, batches, say):
        assert (subject.name, subject.kind, subject.img_size, batches) == ("vit3_tiny", "classifier", (64, 64), (1, 4))
        say("onnxruntime is left out")
        for batch in batches:
            for name, factor in (("eager", 1.0), ("AOTInductor", 2.0)):
                yield benchmark.Row("runtime", f"vit3_tiny B{batch} 64x64 pixels", 16, name, "forward", 1, "float32",
                                    5, 5, 5, factor, peak_mb=123.4, images_s=200.0 * batch, ready_s=1.25)  # fmt: skip

    monkeypatch.setattr(selftest, "run", lambda *args, **kwargs: [])
    monkeypatch.setattr(runtimes, "runtime_rows", measured)
    run(monkeypatch, tools.benchmark.main, "--runtime", "--batch", "1,4", "--size", "64", "--out", tmp_path)
    assert "onnxruntime is left out" in capsys.readouterr().out
    rows = list(csv.DictReader((tmp_path / "results.csv").open()))
    assert [r["images_s"] for r in rows] == ["200", "200", "800", "800"]
    text = (tmp_path / "results.md").read_text()
    assert "| vit3_tiny B4 64x64 pixels | 1 | AOTInductor | 800.0 | 2.00 | 123 | 1.2 |" in text
    assert "peak resident set" in text.lower() and "Targets" not in text
    assert (tmp_path / "runtimes.png").exists()


def test_no_runtime_is_timed_where_outputs_differ(monkeypatch, tmp_path):
    monkeypatch.setattr(selftest, "run", lambda *args, **kwargs: [])
    monkeypatch.setattr(runtimes, "missing", lambda: {})
    monkeypatch.setattr(runtimes, "write_artefacts", lambda subject, folder, names: {name: folder for name in names})
    monkeypatch.setattr(
        resident, "open_runner", lambda name, file, x, threads, build: lambda: torch.zeros(len(x), 1000)
    )
    with pytest.raises(SystemExit, match="error: eager at batch 1: its output differs by .* no timing is reported"):
        run(monkeypatch, tools.benchmark.main, "--runtime", "--size", "32", "--out", tmp_path / "results")
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    "argument,word",
    [
        ("--level=ops", "ops is none of op, mixer"),
        ("--threads=two", "--threads=two must be numbers from 1 on"),
        ("--batch=0", "--batch=0 must be numbers from 1 on"),
        ("--size=64,64,64", "must be one side, or height and width"),
        ("--model=vit4_tiny", "--model=vit4_tiny is none of .*vit3_tiny"),
        ("--dtype=bf16", "on the CPU in fp32"),
    ],
)
def test_wrong_arguments(monkeypatch, argument, word):
    with pytest.raises(SystemExit, match=word):
        run(monkeypatch, tools.benchmark.main, "--runtime", argument)
