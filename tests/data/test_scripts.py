"""The scripts that make data: pictures to try things on, and shards from a folder."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.helpers import ROOT
from tests.toy import make_folder
from vit3.data import make_data


def script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(name, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    script(name).main()


def test_toy_images_are_a_folder_of_pictures_of_many_sizes(tmp_path, monkeypatch):
    for out in ("a", "b"):
        options = ("--classes", 3, "--train", 3, "--val", 1, "--size", 24)
        run("make_toy_images", monkeypatch, tmp_path / out, *options)
    data = make_data("folder", str(tmp_path / "a"), 3, "raise")
    assert data.classes == ("disc_plain", "square_plain", "triangle_plain")
    assert (len(data.train), len(data.val)) == (9, 3)
    files = sorted(path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*.*"))
    assert {path.suffix for path in files} == {".jpg", ".png"}
    assert all((tmp_path / "a" / path).read_bytes() == (tmp_path / "b" / path).read_bytes() for path in files)
    pixels = [np.asarray(Image.open(tmp_path / "a" / path)) for path in files]
    assert all(side % 2 for image in pixels for side in image.shape[:2])
    assert len({image.tobytes() for image in pixels}) == len(files) and len({image.shape for image in pixels}) > 6


def test_every_toy_class_can_be_drawn():
    toy = script("make_toy_images")
    assert len(toy.CLASSES) == 24
    for name in toy.CLASSES:
        assert np.asarray(toy.picture(name, 32, np.random.default_rng(0))).std() > 10


def test_toy_images_refuse_a_folder_that_is_in_use(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.txt").write_text("")
    with pytest.raises(SystemExit):
        run("make_toy_images", monkeypatch, tmp_path)
    assert "is not empty; choose another folder" in capsys.readouterr().err


def test_packing_says_what_it_did_and_goes_on(tmp_path, monkeypatch, capsys):
    root = make_folder(tmp_path / "folder")
    for expected in ("(5 written, 0 were there)", "(0 written, 5 were there)"):
        run("pack_shards", monkeypatch, root, tmp_path / "out", "--images", 4)
        line = capsys.readouterr().out
        assert line.startswith("18 images of 3 classes in 5 shards") and expected in line
    assert len(make_data("wds", str(tmp_path / "out"), 3, "raise").train) == 12


@pytest.mark.parametrize(
    "spoil, words",
    [
        (lambda root: (root / "train" / "empty").mkdir(), "class folders without an image"),
        (lambda root: (root / "val" / "class0" / "0.png").write_bytes(b""), "cannot be decoded"),
    ],
)
def test_packing_refuses_what_training_refuses(tmp_path, monkeypatch, capsys, spoil, words):
    spoil(make_folder(tmp_path / "folder"))
    with pytest.raises(SystemExit):
        run("pack_shards", monkeypatch, tmp_path / "folder", tmp_path / "out")
    assert words in capsys.readouterr().err and not Path(tmp_path / "out").exists()


def test_patterns_are_drawn_a_row_per_class(tmp_path, monkeypatch):
    run("draw_patterns", monkeypatch, tmp_path / "a.png", "--examples", 2, "--size", 40, "--in-chans", 1)
    page = np.asarray(Image.open(tmp_path / "a.png"))
    assert page.shape == (12 * 84, 120 + 2 * 84, 3)
    rows = page.reshape(12, 84, -1, 3)
    assert ((rows[:, :, :120] < 128).any((1, 2, 3))).all() and rows[:, :80, 120:200].std((1, 2, 3)).min() > 5
    with pytest.raises(SystemExit):
        run("draw_patterns", monkeypatch, tmp_path / "b.png", "--size", 20)
