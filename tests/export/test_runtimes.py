"""Runtimes: what is compared before timing, what a process of its own measures, what is left out."""

import os
import subprocess
import sys

import numpy as np
import pytest
import timm
import torch

from vit3.analysis import benchmark
from vit3.analysis.benchmark import Row
from vit3.analysis.plots import plot_runtimes
from vit3.errors import UserError
from vit3.export import Subject, resident, runtimes
from vit3.export.runtimes import check, measure_alone, missing, runtime_rows

TINY = dict(depth=1, embed_dim=32, num_heads=2, num_classes=5)


@pytest.fixture(scope="module")
def subject():
    torch.manual_seed(0)
    return Subject(timm.create_model("vit3_tiny", **TINY).eval(), "classifier", "vit3_tiny", TINY, (48, 64))


@pytest.fixture
def briefly(monkeypatch):
    """No seconds spent on timing."""
    timed = benchmark.timed
    monkeypatch.setattr(benchmark, "timed", lambda calls, device, seconds: timed(calls, device, 0.01))


def compare(subject, names, batches):
    """Rows by runtime and batch, each as it should be."""
    rows = list(runtime_rows(subject, batches, names, say=pytest.fail))
    assert [(r.contender, r.case) for r in rows] == [
        (name, f"vit3_tiny B{batch} 48x64 pixels") for batch in batches for name in names
    ]
    found = {(r.contender, int(r.case.split()[1][1:])): r for r in rows}
    for (_, batch), row in found.items():
        assert (row.level, row.threads, row.tokens) == ("runtime", torch.get_num_threads(), 12)
        assert row.images_s == pytest.approx(1e3 * batch / row.p50_ms) and 0 < row.ready_s < 300
        assert row.to_reference == pytest.approx(found["eager", batch].p50_ms / row.p50_ms)
    return found


def test_eager_alone(subject, briefly):
    rows = compare(subject, ("eager",), (3,))
    assert 100 < rows["eager", 3].peak_mb


@pytest.mark.slow
def test_all_runtimes(subject, briefly):
    rows = compare(subject, runtimes.RUNTIMES, (1, 3))
    assert 20 < rows["onnxruntime", 1].peak_mb < rows["eager", 1].peak_mb / 2  # no PyTorch in that process
    assert rows["AOTInductor", 1].peak_mb < rows["eager", 1].peak_mb < rows["torch.compile", 1].peak_mb


def test_memory_is_that_of_the_process_alone():
    """Not of the process that starts it, whose own memory Linux counts in ``ru_maxrss``."""
    held = np.ones(2**25)  # 256 MB here
    code = "import os; exec(open(os.environ['RESIDENT']).read().split('def main')[0]); print(peak_bytes())"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ, RESIDENT=resident.__file__)
    )
    assert 2**22 < int(result.stdout) < 2**27 < held.nbytes, result.stderr
    assert resident.peak_bytes() > held.nbytes


def test_nothing_is_timed_where_outputs_differ(subject, monkeypatch):
    opened = resident.open_runner
    monkeypatch.setattr(resident, "open_runner", lambda *args: lambda: opened(*args)() + 2e-4)
    monkeypatch.setattr(runtimes, "measure_alone", lambda *args: pytest.fail("measured"))
    monkeypatch.setattr(benchmark, "timed", lambda *args: pytest.fail("timed"))
    with pytest.raises(UserError, match="eager at batch 3: its output differs by 2.0e-04 from eager, above 0.0001"):
        list(runtime_rows(subject, (3,), ("eager",)))


def test_outputs_of_a_process_of_its_own_are_compared_too(tmp_path):
    onnx = pytest.importorskip("onnx")
    x, y = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2, 3]) for name in "xy")
    graph = onnx.helper.make_graph([onnx.helper.make_node("Identity", ["x"], ["y"])], "identity", [x], [y])
    onnx.save(onnx.helper.make_model(graph, ir_version=10), tmp_path / "model.onnx")
    x = np.ones((2, 3), np.float32)
    alone = measure_alone("onnxruntime", tmp_path / "model.onnx", x, x, 1, {}, tmp_path)
    assert 2**22 < alone["peak_bytes"] < 2**28 and alone["ready_s"] > 0
    with pytest.raises(UserError, match="onnxruntime in a process of its own at batch 2: .* so no timing is reported"):
        measure_alone("onnxruntime", tmp_path / "model.onnx", x, -x, 1, {}, tmp_path)


@pytest.mark.parametrize("output", [np.full((2, 5), 1.2e-4), np.full((2, 5), np.nan), np.zeros((2, 4))])
def test_check(output):
    check("eager", np.full((2, 5), 0.8e-4), np.zeros((2, 5)), 2)
    with pytest.raises(UserError, match="no timing is reported"):
        check("onnxruntime", output, np.zeros((2, 5)), 2)


def test_what_is_missing_is_left_out(subject, briefly, monkeypatch):
    monkeypatch.setattr(runtimes, "find_spec", lambda name: None if name == "onnxruntime" else object())
    monkeypatch.setattr(runtimes, "_compiler", lambda: False)
    assert "pip install 'vit3[export]'" in missing()["onnxruntime"] and "onnxscript" not in missing()["onnxruntime"]
    monkeypatch.setattr(runtimes, "measure_alone", lambda *args: dict(peak_bytes=2**20, ready_s=1.0))
    said = []
    rows = list(runtime_rows(subject, (2,), say=said.append))
    assert [row.contender for row in rows] == ["eager"]
    assert [line.split()[0] for line in said] == ["onnxruntime", "torch.compile", "AOTInductor"]


def test_a_process_that_fails_is_said(subject, tmp_path):
    (tmp_path / "broken.onnx").write_bytes(b"no graph")
    x = np.zeros((1, 3, 48, 64), np.float32)
    with pytest.raises(UserError, match="onnxruntime does not run in a process of its own: .*broken.onnx"):
        measure_alone("onnxruntime", tmp_path / "broken.onnx", x, x, 1, {}, tmp_path)


def test_picture(tmp_path):
    rows = [
        Row("runtime", f"vit3_tiny B{b} 64x64 pixels", 16, name, "forward", 2, "float32", 1, 1, 1, 1,
            peak_mb=90.0 * b, images_s=7.0 * b)
        for b in (1, 16)
        for name in runtimes.RUNTIMES
    ]  # fmt: skip
    plot_runtimes(rows, tmp_path / "runtimes.png")
    assert (tmp_path / "runtimes.png").stat().st_size > 10_000
