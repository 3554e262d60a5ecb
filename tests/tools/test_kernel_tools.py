"""The self-test and the benchmark as commands."""

import csv
import sys

import pytest
import torch

import tools.benchmark
import tools.selftest
from vit3.analysis import benchmark, selftest
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


@pytest.mark.parametrize(
    "argument,word", [("--level=ops", "ops is none of op, mixer"), ("--threads=two", "must be numbers from 1 on")]
)
def test_wrong_arguments(monkeypatch, argument, word):
    with pytest.raises(SystemExit, match=word):
        run(monkeypatch, tools.benchmark.main, argument)
