"""tools/export.py: from a run to files that are compared with it, and what it refuses."""

import errno
import json
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import timm
import torch
from vit3.tools import export as tool
from vit3.tools.export import run_export

from tests.toy import compose_config, trained
from vit3.errors import Interrupted, UserError
from vit3.export import formats
from vit3.export.report import Result
from vit3.export.verify import Check
from vit3.models.weights import read_tensors, write_tensors

NARROW = ("++model.kwargs.depth=1", "++model.kwargs.embed_dim=32", "model.kwargs.patch_size=4")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run folder of one epoch of one narrow block, with averaged weights."""
    return trained(tmp_path_factory.mktemp("run"), "engine.ema_decay=0.9", *NARROW)


def exported(checkpoint, output, *overrides):
    run_export(compose_config(f"checkpoint={checkpoint}", f"output={output}", *overrides, root="export"))
    return json.loads((output / "export.json").read_text())


def report_of(report, name):
    return next(entry for entry in report["formats"] if entry["format"] == name)


def test_a_run_becomes_files_that_are_equal_to_it(run, tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        report = exported(run, tmp_path, "weights=ema", "format=[safetensors,pt2]")
    assert [entry["format"] for entry in report["formats"]] == ["safetensors", "pt2"]
    for entry in report["formats"]:
        assert entry["passed"] and {check["shape"][0] for check in entry["checks"]} >= {1, 3, 8}
        assert all((tmp_path / file["file"]).exists() for file in entry["files"])
        assert f"{entry['format']:12} " in caplog.text
    assert max(check["difference"] or 0 for check in report_of(report, "safetensors")["checks"]) == 0
    loaded = timm.create_model(f"local-dir:{tmp_path / 'vit3_tiny_hub'}", pretrained=True)
    ours = torch.load(run / "best_ema.pt", weights_only=True)["state_dict_ema"]
    assert all(torch.equal(value, ours[name]) for name, value in loaded.state_dict().items())
    config = json.loads((tmp_path / "vit3_tiny_hub" / "config.json").read_text())
    record = torch.load(run / "best_ema.pt", weights_only=True)["record"]
    assert config["training"]["top1"] == record["val_ema/top1"] and config["weights"] == "ema"
    assert f"report: {tmp_path / 'export.md'}" in caplog.text and "| pt2 |" in (tmp_path / "export.md").read_text()


def test_a_hub_folder_and_a_bare_file_are_exported_again(run, tmp_path):
    exported(run, tmp_path / "a", "weights=raw")
    again = exported(tmp_path / "a" / "vit3_tiny_hub", tmp_path / "b")
    first, second = (read_tensors(tmp_path / name / "vit3_tiny_hub" / "model.safetensors") for name in "ab")
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    assert again["formats"][0]["passed"]


@pytest.mark.parametrize("place", ["{}", "local-dir:{}", "{}/model.safetensors"])
def test_without_output_a_hub_folder_is_exported_beside_it(run, tmp_path, place):
    """Files of ours inside it would stop the next export to it, and would be uploaded with it."""
    exported(run, tmp_path, "weights=raw")
    hub = tmp_path / "vit3_tiny_hub"
    before = {file.name for file in hub.iterdir()}
    run_export(compose_config(f"checkpoint={place.format(hub)}", root="export"))
    assert {file.name for file in hub.iterdir()} == before
    assert (tmp_path / "export" / "vit3_tiny_hub" / "model.safetensors").is_file()


def test_a_hub_folder_with_foreign_arguments(run, tmp_path):
    exported(run, tmp_path / "a", "weights=raw")
    file = tmp_path / "a" / "vit3_tiny_hub" / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"model_args": {"evil": 1}}))
    with pytest.raises(UserError, match="cannot be loaded as vit3_tiny: .*evil"):
        exported(file.parent, tmp_path / "b")


def test_kinds_of_weights_are_never_guessed(run, tmp_path):
    with pytest.raises(UserError, match="set weights=ema or weights=raw"):
        exported(run, tmp_path)
    newest = max((run / "checkpoints").glob("*.pt"))
    with pytest.raises(UserError, match="set weights=ema or weights=raw"):
        exported(newest, tmp_path)
    with pytest.raises(UserError, match="weights=ema, but .* holds raw weights"):
        exported(run / "best_raw.pt", tmp_path, "weights=ema")


def test_a_wrong_file_ends_the_command(run, tmp_path, monkeypatch):
    """Damage what was written: it stays, the report says so, the command fails."""
    open_folder = formats.open_hub_folder

    def damaged(path):
        whole = open_folder(path)
        return lambda *inputs: tuple(-output for output in whole(*inputs))

    monkeypatch.setattr(formats, "open_hub_folder", damaged)
    with pytest.raises(UserError, match="not verified: safetensors;"):
        exported(run, tmp_path, "weights=raw")
    report = json.loads((tmp_path / "export.json").read_text())
    assert not report["formats"][0]["passed"] and (tmp_path / "vit3_tiny_hub" / "model.safetensors").exists()


def test_a_format_that_cannot_be_is_a_sentence_and_the_others_are_made(run, tmp_path):
    with pytest.raises(UserError, match="not verified: official;"):
        exported(run, tmp_path, "weights=raw", "format=[official,safetensors]")  # this narrow one is not the authors'
    report = json.loads((tmp_path / "export.json").read_text())
    assert "not the published network" in report_of(report, "official")["error"]
    assert report_of(report, "safetensors")["passed"]


def test_each_format_is_reported_as_soon_as_it_is_there(run, tmp_path, monkeypatch):
    """A process that is killed during the next one, which may take an hour, loses nothing."""
    write = formats.write_official

    def look(subject, path):
        report = json.loads((tmp_path / "export.json").read_text())
        assert [entry["format"] for entry in report["formats"]] == ["safetensors"]
        write(subject, path)

    monkeypatch.setattr(formats, "write_official", look)
    with pytest.raises(UserError, match="not verified: official"):  # narrower than the authors' networks
        exported(run, tmp_path, "weights=raw", "format=[safetensors,official]")


def test_a_full_disk_is_a_sentence(run, tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(formats, "write_hub_folder", full)
    with pytest.raises(UserError, match="not verified: safetensors;"):
        exported(run, tmp_path, "weights=raw")
    assert "No space left" in (tmp_path / "export.md").read_text()
    monkeypatch.setattr(tool, "write_report", full)
    with pytest.raises(UserError, match="the report cannot be written .*No space left"):
        exported(run, tmp_path, "weights=raw")


def test_the_backbone_of_a_classifier(tmp_path, monkeypatch):
    """A file of a classifier's weights as a backbone of detectors: the norms of its maps alone are fresh."""
    create, narrow = timm.create_model, dict(dims=(16, 16), depths=(1, 1), num_heads=(2, 2))
    dense = {**narrow, "out_indices": (0, 1)}
    monkeypatch.setattr(
        timm, "create_model", lambda name, **o: create(name, **(narrow if name == "h_vit3_tiny" else dense), **o)
    )
    model = timm.create_model("h_vit3_tiny", num_classes=3, in_chans=1)
    write_tensors(tmp_path / "c.safetensors", model.state_dict())
    report = exported(tmp_path / "c.safetensors", tmp_path / "out", "model_name=h_vit3_tiny_dense", "img_size=[64,64]")
    assert report["formats"][0]["passed"]
    dense = timm.create_model(f"local-dir:{tmp_path / 'out' / 'h_vit3_tiny_dense_hub'}", pretrained=True).eval()
    x = torch.randn(1, 1, 64, 96)
    with torch.no_grad():
        stages = model.eval().forward_intermediates(x, intermediates_only=True)
        maps = dense(x)
    for i, (mine, whole) in enumerate(zip(maps, stages)):
        assert torch.equal(mine, getattr(dense, f"norm{i}")(whole.movedim(1, -1)).movedim(-1, 1))


def written(path, **options):
    """A result as the formats give it."""
    path.write_bytes(b"1")
    check = dict(shape=(2, 1, 8, 8), what="batch 2", difference=2.4e-6, passed=True)
    return Result(options.pop("format", "pt2"), (path,), (Check(**check),), seconds=63.0, **options)


def test_options_reach_the_formats_and_an_interrupt_leaves_a_report(run, tmp_path, monkeypatch):
    given = []

    def export(subject, names, signature, folder, **how):
        given.append((names, signature.dynamic, how))
        yield written(folder / "net.pt2")
        raise KeyboardInterrupt

    monkeypatch.setattr(tool, "export", export)
    options = dict(dtype="float16", device="cuda", multiple=2, license="other", push="me/net")
    with pytest.raises(Interrupted, match="the formats that are there are whole") as caught:
        exported(
            run / "best_raw.pt", tmp_path, "format=[safetensors,onnx,aoti]", "dynamic=[batch]",
            *(f"{key}={value}" for key, value in options.items()),
        )  # fmt: skip
    assert given == [(["safetensors", "onnx", "aoti"], ("batch",), options)] and caught.value.code == 130
    assert json.loads((tmp_path / "export.json").read_text())["formats"][0]["passed"]


def test_lines_about_formats(tmp_path):
    good = written(tmp_path / "net.pt2")
    beside = replace(good, files=(*good.files, tmp_path / "net.pt2.data"), checks=(*good.checks, good.checks[0]))
    wrong = replace(good, checks=(replace(good.checks[0], passed=False, difference=0.5),))
    unopened, unwritten = replace(good, error="no runtime"), replace(good, error="no room", files=())
    assert [tool.describe(result) for result in (beside, wrong, unopened, unwritten)] == [
        "pt2          net.pt2: equal, 2 comparisons, largest difference 2e-06, written in 63 s",
        "pt2          net.pt2: NOT equal, 1 comparisons, largest difference 5e-01, written in 63 s",
        "pt2          not compared: no runtime",
        "pt2          not written: no room",
    ]


def test_where_files_go(tmp_path, monkeypatch):
    def folder_of(checkpoint, output=None):
        return tool._folder(SimpleNamespace(checkpoint=str(checkpoint), output=output))

    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "best.pt").touch()
    for checkpoint in ("run", "run/best.pt"):
        assert folder_of(tmp_path / checkpoint) == tmp_path / "run" / "export"
    for elsewhere in ("https://host/net.pth", "h_vit3_tiny"):  # nothing of these is on this machine
        assert folder_of(elsewhere) == Path("export")
    assert folder_of("run", "new/deep") == Path("new/deep") and (tmp_path / "new" / "deep").is_dir()
    with pytest.raises(UserError, match="output=run/best.pt/x is not writable .*; choose another"):
        folder_of("run", "run/best.pt/x")
    monkeypatch.setattr(tool.os, "access", lambda *args: False)
    with pytest.raises(UserError, match="output=run/export is not writable; choose another"):
        folder_of("run")


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["format=[onxx]"], "format=onxx is not allowed; did you mean onnx"),
        (["device=auto"], "device=auto is not allowed"),
        (["dtype=int8", "format=[onnx]"], "dtype=int8 is not allowed"),  # not after minutes of tracing
        (["multiple=5", "format=[aoti]"], r"multiple=5 does not divide img_size=\[8, 8\]"),
        (["multiple=0", "format=[aoti]"], "multiple=0 is not allowed; it must be at least 1"),
        (["push=a/b/c"], "push=a/b/c must be OWNER/NAME"),
        (["push=me/"], "push=me/ must be OWNER/NAME"),
        (["dynamic=[height]"], "dynamic=height is unknown"),
        (["push=me/mine", "format=[pt2]"], "push=me/mine uploads the hub folder; add safetensors"),
        (["model_name=h_vit3_tin"], "model_name=h_vit3_tin is no registered model; did you mean h_vit3_tiny"),
        (["model_name=h_vit3_tiny_dense"], "the checkpoint holds vit3_tiny"),
        (["format=[pt2,official,pt2]"], "format=\\[pt2,official,pt2\\] names one twice"),
        (["format=[]"], "format=\\[\\] writes nothing; name some of: safetensors"),
        (["dtype=float16"], "dtype=float16 is of onnx alone; add onnx to format"),
        (["device=cuda", "format=[onnx]"], "device=cuda is of aoti alone"),
        (["multiple=4", "format=[pt2]"], "multiple=4 is of aoti alone"),
        (["sha256=" + "0" * 64], "best_raw.pt has the SHA-256 .* was expected"),
    ],
)
def test_refusals(run, tmp_path, overrides, sentence):
    with pytest.raises(UserError, match=sentence):
        exported(run / "best_raw.pt", tmp_path, *overrides)


def test_places_that_are_not_there(tmp_path):
    with pytest.raises(UserError, match="nowhere: no such file"):
        exported(tmp_path / "nowhere", tmp_path)
    write_tensors(tmp_path / "w.safetensors", {"a": torch.zeros(2)})
    with pytest.raises(UserError, match="set model_name=NAME"):
        exported(tmp_path / "w.safetensors", tmp_path)
    with pytest.raises(UserError, match="fits 0.0 % of the model"):
        exported(tmp_path / "w.safetensors", tmp_path, "model_name=vit3_tiny")
