"""scripts/study_export.py without its hours: what it exports in which steps, where it goes on, its table."""

import json
import sys

import pytest
import timm
import torch
from torch import nn

from scripts import study_export as study
from vit3.export.report import Result
from vit3.export.signature import Signature


@pytest.mark.parametrize(
    ("name", "kind", "size", "step"),
    [
        ("vit3_tiny", "classifier", (224, 224), 32),
        ("h_vit3_tiny_dense", "features", (224, 224), 32),
        ("dit3_s_8", "generator", (32, 40), 8),
    ],
)
def test_networks_and_the_steps_of_their_sides(monkeypatch, tmp_path, name, kind, size, step):
    def create(name):
        model = nn.Linear(50, 50)
        model.img_size, model.patch_size, model.in_chans = (32, 40), 8, 3
        return model

    monkeypatch.setattr(timm, "create_model", create)
    subject = study.fresh(name)
    torch.manual_seed(0)
    start = create(name).weight
    assert (subject.kind, subject.name, subject.img_size, subject.model.training) == (kind, name, size, False)
    assert subject.source["file"] == "fresh weights, seed 0"
    assert 0.01 < (subject.model.weight - start).std() < 0.03
    given = []

    def export(subject, formats, signature, folder, multiple):
        given.append((formats, multiple))
        for made in formats:
            yield Result(made, (), (), error="no room")
            assert json.loads((folder / "export.json").read_text())["formats"][-1]["format"] == made  # after each

    monkeypatch.setattr(study, "export", export)
    monkeypatch.setattr(Signature, "of", lambda subject: None)
    assert [result.format for result in study.exported(subject, ["pt2", "onnx"], tmp_path)] == ["pt2", "onnx"]
    assert given == [(["pt2", "onnx"], step)]


def test_what_passed_is_left_out_and_the_table_has_all(monkeypatch, tmp_path, capsys):
    made = []

    def exported(subject, formats, folder):
        made.append((subject, formats))
        entries = [
            dict(format="pt2", passed=True, difference=2e-6, seconds=61.2, files=[dict(bytes=3e6), dict(bytes=5e5)]),
            dict(format="onnx", passed=False, difference="nan", seconds=1.0, files=[]),
        ]
        (folder / "export.json").write_text(json.dumps({"formats": entries}))
        yield Result("onnx", (), (), error="no room")

    monkeypatch.setattr(study, "fresh", lambda name: name)
    monkeypatch.setattr(study, "exported", exported)
    monkeypatch.setattr(sys, "argv", ["study", str(tmp_path), "vit3_tiny", "--formats", "pt2,onnx"])
    study.main()
    study.main()
    assert made == [("vit3_tiny", ["pt2", "onnx"]), ("vit3_tiny", ["onnx"])]
    assert capsys.readouterr().out == "vit3_tiny onnx no room\n" * 2
    assert (tmp_path / "summary.md").read_text().splitlines()[2:] == [
        "| `vit3_tiny` | pt2 | 3.5 | 61 s | 2e-06 | yes |",
        "| `vit3_tiny` | onnx | 0.0 | 1 s | nan | **no** |",
    ]
    monkeypatch.setattr(sys, "argv", ["study", str(tmp_path), "--formats", "pt2"])
    made.clear()
    study.main()  # all of them but the one that has passed
    assert [name for name, _ in made] == [name for name in study.NAMES if name != "vit3_tiny"]
    for wrong in (["vit3_tin"], ["--formats", "onxx"]):
        monkeypatch.setattr(sys, "argv", ["study", str(tmp_path), *wrong])
        with pytest.raises(SystemExit):
            study.main()
        assert f"{wrong[-1]} is none of vit3_tiny" in capsys.readouterr().err
