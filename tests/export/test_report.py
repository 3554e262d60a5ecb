"""Reports of exports: what they say of files, shapes and failures."""

import hashlib
import json
import math
from dataclasses import replace

from tests.export.subjects import plain
from vit3.export.report import Result, figure, write_report
from vit3.export.verify import Check

GOOD = Check((8, 3, 48, 48), "batch 8", 3.21e-7, True, outputs=1.5)
LESS = Check((1, 3, 48, 48), "batch 1", 1e-9, True, outputs=1.5)
REFUSED = Check((8, 4, 48, 48), "one channel more: refused", None, True, declared=False)
BROKEN = Check((2, 3, 48, 48), "values times 100", math.nan, False, outputs=math.inf)


def test_files(tmp_path):
    (tmp_path / "net.onnx").write_bytes(b"graph")
    (tmp_path / "net.onnx.data").write_bytes(b"weights")
    (tmp_path / "net.pt2").write_bytes(b"program")
    files = (tmp_path / "net.onnx", tmp_path / "net.onnx.data")
    results = [
        Result("onnx", files, (LESS, GOOD, REFUSED), dynamic=("batch", "size"), lowest=17),
        Result("pt2", (tmp_path / "net.pt2",), (GOOD, BROKEN), dynamic=("batch",), bound=2e-2, relative=True),
    ]
    text = write_report(tmp_path, plain(), results).read_text(encoding="utf-8")
    sums = [hashlib.sha256(content).hexdigest() for content in (b"graph", b"weights", b"program")]
    assert (
        f"| onnx | net.onnx | stored | 0.00 | `{sums[0]}` | batch, size (sides from 17) | 3e-07 | 1e-04 | passed |"
        in text
    )
    assert f"| onnx | net.onnx.data | stored | 0.00 | `{sums[1]}` |  |  |  |  |" in text
    assert f"`{sums[2]}` | batch | nan of the range | 2e-02 of the range | **failed** |" in text
    assert "| onnx | 8 x 3 x 48 x 48 | batch 8 | 3e-07 | 2e+00 | passed |" in text
    assert "| pt2 | 2 x 3 x 48 x 48 | values times 100 | nan | inf | **failed** |" in text
    assert "| onnx | 8 x 4 x 48 x 48 | one channel more: refused | - | - | passed |" in text.split("not declared")[1]

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    values = json.loads((tmp_path / "export.json").read_text(encoding="utf-8"), parse_constant=refuse)
    assert values["name"] == "vit3_tiny" and values["passed"] is False
    assert [entry["passed"] for entry in values["formats"]] == [True, False]
    assert values["formats"][0]["difference"] == 3.21e-7 and values["formats"][1]["difference"] == "nan"
    assert values["formats"][0]["files"][1] == dict(file="net.onnx.data", bytes=7, sha256=sums[1])


def test_steps_failures_and_origin(tmp_path):
    (tmp_path / "net.pt2").write_bytes(b"program")
    small = Check((2, 3, 32, 64), "a | b: refused", None, True, declared=False)
    results = [
        Result("aoti", (tmp_path / "net.pt2",), (GOOD, small), dynamic=("size",), lowest=32, multiple=32),
        Result("onnx", (), (), error="no such package"),
    ]
    source = replace(plain(), img_size=(64, 96), source=dict(file="best_raw.pt", sha256="f00"))
    text = write_report(tmp_path, source, results).read_text(encoding="utf-8")
    assert "nominal size 64 x 96.\nSource: best_raw.pt, SHA-256 f00.\n" in text
    assert "| size (sides from 32, multiples of 32) |" in text and "| a / b: refused |" in text
    assert "| onnx | not written: no such package |" in text
    found = json.loads((tmp_path / "export.json").read_text(encoding="utf-8"))["formats"]
    assert [(entry["multiple"], entry["error"]) for entry in found] == [(32, None), (1, "no such package")]


def test_results():
    assert Result("pt2", (), (GOOD, REFUSED)).passed and not Result("pt2", (), ()).passed
    assert Result("pt2", (), (GOOD, LESS)).difference == 3.21e-7
    refused = Check((1, 3, 48, 48), "batch 1: refused", None, False)
    assert math.isnan(Result("pt2", (), (GOOD, refused)).difference)


def test_figures():
    assert [figure(value) for value in (3.21e-7, 0.0, None, "inf")] == ["3e-07", "0e+00", "-", "inf"]


def test_a_later_report_keeps_what_is_still_true(tmp_path):
    """Of files that are there unchanged the earlier words stay, with their weights; of others they go."""
    for name in ("a.onnx", "b.pt2", "c.pth"):
        (tmp_path / name).write_bytes(name.encode())
    first = [Result(kind, (tmp_path / name,), (GOOD,)) for kind, name in
             (("onnx", "a.onnx"), ("pt2", "b.pt2"), ("official", "c.pth"))]  # fmt: skip
    write_report(tmp_path, replace(plain(), weights="raw"), first)
    (tmp_path / "b.pt2").write_bytes(b"another")
    (tmp_path / "c.pth").write_bytes(b"new")
    write_report(tmp_path, replace(plain(), weights="ema"), [Result("official", (tmp_path / "c.pth",), (GOOD,))])
    found = json.loads((tmp_path / "export.json").read_text())["formats"]
    assert [(entry["format"], entry["weights"]) for entry in found] == [("onnx", "raw"), ("official", "ema")]
    (tmp_path / "export.json").write_text("no report")
    write_report(tmp_path, plain(), first[:1])
    assert len(json.loads((tmp_path / "export.json").read_text())["formats"]) == 1
