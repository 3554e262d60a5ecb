"""Formats in turn: graphs that are shared, bounds, whole files, and one that fails alone. Writers are stood in for."""

import logging
from pathlib import Path

import pytest

from tests.export.subjects import plain
from vit3.errors import UserError
from vit3.export import formats
from vit3.export.formats import export
from vit3.export.onnx import HALF_BOUND
from vit3.export.runner import runner
from vit3.export.signature import Signature
from vit3.export.verify import BOUND

SOURCE = plain()
SIGNATURE = Signature.of(SOURCE)


@pytest.fixture
def calls(monkeypatch):
    """What the writers were given; every file is opened as the network itself."""
    calls = []

    def traced(subject, signature):
        calls.append(("program", signature.multiple))
        return f"graph in steps of {signature.multiple}"

    def write(name):
        def writer(program, signature, path, **options):
            calls.append((name, program, signature.multiple, options))
            path.write_bytes(name.encode())
            if name == "write_onnx":
                Path(f"{path}.data").write_bytes(b"weights")

        return writer

    monkeypatch.setattr(formats, "export_program", traced)
    for name in ("write_onnx", "save_program", "write_package"):
        monkeypatch.setattr(formats, name, write(name))
    for name in ("open_onnx", "open_program", "open_package"):
        monkeypatch.setattr(formats, name, lambda path: runner(SOURCE.model))
    return calls


def test_graphs_are_made_once_for_each_step(calls, tmp_path):
    results = list(export(SOURCE, ["onnx", "aoti", "pt2"], SIGNATURE, tmp_path, multiple=16, device="cuda"))
    assert calls == [
        ("program", 1),
        ("write_onnx", "graph in steps of 1", 1, {"dtype": "float32"}),
        ("program", 16),
        ("write_package", "graph in steps of 16", 16, {"device": "cuda"}),
        ("save_program", "graph in steps of 1", 1, {}),
    ]
    assert [(r.format, r.multiple, r.lowest, r.dynamic) for r in results] == [
        ("onnx", 1, 17, ("batch", "size")),
        ("aoti", 16, 32, ("batch", "size")),
        ("pt2", 1, 17, ("batch", "size")),
    ]
    assert "height no multiple of 16: runs, equal" in [check.what for check in results[1].checks]
    assert all(r.passed and (r.bound, r.relative) == (BOUND, False) for r in results)
    names = [[file.name for file in r.files] for r in results]
    assert names == [["vit3_tiny.onnx", "vit3_tiny.onnx.data"], ["vit3_tiny_aoti.pt2"], ["vit3_tiny.pt2"]]
    assert {file.name for file in tmp_path.iterdir()} == {name for files in names for name in files}


def test_half_precision_has_a_bound_of_its_own(calls, tmp_path, monkeypatch):
    bounds, verify = [], formats.verify
    monkeypatch.setattr(formats, "verify", lambda *args: (bounds.append(args[3:]), verify(*args))[1])
    half, graph = export(SOURCE, ["onnx", "pt2"], SIGNATURE, tmp_path, dtype="float16")
    assert (half.bound, half.relative, half.files[0].name) == (HALF_BOUND, True, "vit3_tiny_float16.onnx")
    assert (graph.bound, graph.relative) == (BOUND, False) and calls[1][-1] == {"dtype": "float16"}
    assert bounds == [(HALF_BOUND, True), (BOUND, False)]


def test_each_format_is_announced_and_opened_by_its_own_reader(calls, tmp_path, monkeypatch, caplog):
    opened = []
    for name in ("open_onnx", "open_program", "open_package"):
        monkeypatch.setattr(formats, name, lambda path, name=name: opened.append(name) or runner(SOURCE.model))
    monkeypatch.setattr(formats, "write_official", lambda subject, path: path.touch())
    monkeypatch.setattr(formats, "open_official", lambda path, subject: opened.append(subject) or runner(SOURCE.model))
    arrived, save = [], formats.save_program

    def saving(program, signature, path):
        arrived.append((path.parent.parent, path.parent.name))
        save(program, signature, path)

    monkeypatch.setattr(formats, "save_program", saving)
    caplog.set_level(logging.INFO)
    list(export(SOURCE, ["aoti", "official", "onnx", "pt2"], SIGNATURE, tmp_path))
    assert opened == ["open_package", SOURCE, "open_onnx", "open_program"]
    assert (tmp_path / "vit3_tiny_official.pth").is_file()
    ((place, name),) = arrived  # on the same disk, hidden
    assert place == tmp_path and name.startswith(".vit3_tiny.pt2.")
    slow = " (takes minutes where the network is large)"
    assert [message.removesuffix(slow) for message in caplog.messages] == [
        f"{name:12} writing, then comparing" for name in ("aoti", "official", "onnx", "pt2")
    ]
    assert [message.endswith(slow) for message in caplog.messages] == [True, False, True, False]


def test_weights_are_there_before_the_file_that_names_them(calls, tmp_path, monkeypatch):
    order, replace = [], Path.replace
    monkeypatch.setattr(Path, "replace", lambda self, to: (order.append(to.name), replace(self, to))[1])
    list(export(SOURCE, ["onnx"], SIGNATURE, tmp_path))
    assert order == ["vit3_tiny.onnx.data", "vit3_tiny.onnx"]


@pytest.mark.parametrize("kind", [ValueError, RuntimeError, OSError, ModuleNotFoundError, UserError])
def test_a_format_that_fails_leaves_the_others_and_no_half_file(calls, tmp_path, monkeypatch, kind):
    def fail(program, signature, path, **options):
        path.write_bytes(b"half")
        raise kind("no room")

    monkeypatch.setattr(formats, "write_onnx", fail)
    (tmp_path / "vit3_tiny.onnx").write_bytes(b"from before")
    failed, graph = export(SOURCE, ["onnx", "pt2"], SIGNATURE, tmp_path)
    assert (failed.error, failed.files, failed.passed) == ("no room", (), False) and failed.seconds > 0
    assert graph.passed and graph.error is None
    assert {f.name: f.read_bytes() for f in tmp_path.iterdir()} == {
        "vit3_tiny.onnx": b"from before",
        "vit3_tiny.pt2": b"save_program",
    }


def test_what_is_written_but_not_compared_is_said_so(calls, tmp_path, monkeypatch):
    """Where a file cannot be opened, or the comparison itself fails: the file is there and the others go on."""

    def missing(path):
        raise ModuleNotFoundError("no onnxruntime")

    monkeypatch.setattr(formats, "open_onnx", missing)
    unopened, graph = export(SOURCE, ["onnx", "pt2"], SIGNATURE, tmp_path)
    assert (unopened.error, unopened.passed) == ("no onnxruntime", False) and graph.passed
    assert unopened.files[0] == tmp_path / "vit3_tiny.onnx" and unopened.files[0].is_file()

    def broken(*args, **options):
        raise MemoryError("too large")

    monkeypatch.setattr(formats, "verify", broken)
    (result,) = export(SOURCE, ["pt2"], SIGNATURE, tmp_path)
    assert (result.error, result.passed) == ("the comparison failed: too large", False)
    assert result.files == (tmp_path / "vit3_tiny.pt2",) and result.dynamic == ("batch", "size")


def test_weights_alone_need_no_graph(calls, tmp_path, monkeypatch):
    write, pushed = formats.write_hub_folder, []

    def pushing(*args, push, **how):
        pushed.append(push)
        return write(*args, **how)

    monkeypatch.setattr(formats, "write_hub_folder", pushing)
    (result,) = export(SOURCE, ["safetensors"], SIGNATURE, tmp_path, license="apache-2.0", push="me/net")
    assert pushed == ["me/net"]
    assert result.passed and result.difference == 0 and not calls
    assert [file.name for file in result.files][0] == "model.safetensors" and len(result.files) == 3
    assert 'license: "apache-2.0"' in (tmp_path / "vit3_tiny_hub" / "README.md").read_text(encoding="utf-8")
