"""The folder of a set: what it says of itself, whole files, and which starts it refuses."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
from PIL import Image

from tests.generation.stub import CLASSES, Stub
from vit3.errors import UserError
from vit3.generation.folder import SampleFolder, read_image

SETTINGS = {
    "checkpoint": {"path": "runs/x.pt", "sha256": "ab" * 32},
    "guidance": 1.5,
    "interval": (0.0, 1.0),
    "seed": 0,
}


def start(path, n=5, settings=SETTINGS, in_turn=(2, 0), about=None, **options):
    return SampleFolder.start(path, n, settings, in_turn, CLASSES, about or {"torch": "2"}, **options)


def image(channels=3, number=0):
    return Stub(channels).image(1, number).numpy()


def test_says_how_it_was_drawn(tmp_path):
    start(tmp_path / "deep" / "s")
    folder = SampleFolder(tmp_path / "deep" / "s")
    assert folder.n == 5 and folder.settings["guidance"] == 1.5 and folder.classes == CLASSES
    assert [folder.label(i) for i in range(4)] == [2, 0, 2, 0] and folder.files() == {}
    about = json.loads((folder.path / "samples.json").read_text())
    assert about["labels"] == {"in_turn": [2, 0], "classes": ["a", "b", "c"]}
    assert about["starts"] == [{"n": 5, "torch": "2"}]


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (3, "RGB")])
def test_pictures(tmp_path, channels, mode):
    folder = start(tmp_path)
    folder.write(3, image(channels))
    assert [path.name for path in folder.images.iterdir()] == ["000003.png"]
    with Image.open(folder.images / "000003.png") as picture:
        assert picture.mode == mode and picture.size == (7, 5)
    assert np.array_equal(read_image(folder.files()[3]), image(channels))


@pytest.mark.parametrize("channels", [2, 4, 13])
def test_other_channels_are_arrays(tmp_path, channels):
    folder = start(tmp_path)
    folder.write(3, image(channels))
    assert list(folder.files()) == [3] and np.array_equal(read_image(folder.files()[3]), image(channels))


def test_files_are_listed_by_number(tmp_path):
    folder = start(tmp_path)
    for name in ("1000000.png", "999999.png", "000007.png", ".000008.png.x1", "sheet.png", "12.png"):
        (folder.images / name).touch()
    assert list(folder.files()) == [7, 999999, 1000000]


def test_an_image_is_whole_or_not_there(tmp_path, monkeypatch):
    folder = start(tmp_path)

    def full(*args):
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        folder.write(0, image())
    assert list(folder.images.iterdir()) == []


def test_goes_on_and_grows(tmp_path):
    start(tmp_path).write(4, image())
    moved = {**SETTINGS, "checkpoint": {"path": "elsewhere/x.pt", "sha256": "ab" * 32}}
    folder = start(tmp_path, n=9, settings=moved, about={"torch": "3"})
    assert folder.n == 9 and list(folder.files()) == [4]
    starts = json.loads((tmp_path / "samples.json").read_text())["starts"]
    assert starts == [{"n": 5, "torch": "2"}, {"n": 9, "torch": "3"}]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"n": 4}, "n=4, but .* holds image 4; use a larger n"),
        ({"resume": False}, "holds 1 images; choose another name=NAME, or resume=true"),
        ({"in_turn": (0, 2)}, "classes are not those"),
        ({"settings": {**SETTINGS, "guidance": 4.0}}, r"guidance=4\.0, but .* guidance=1\.5; use that"),
        (
            {"settings": {**SETTINGS, "interval": (0.2, 1.0)}},
            r"interval=\[0\.2, 1\.0\], but .* interval=\[0\.0, 1\.0\]",
        ),
        ({"settings": {**SETTINGS, "eta": 1}}, "eta=1, but .* eta=None"),
        (
            {"settings": {**SETTINGS, "checkpoint": {"path": "y.pt", "sha256": "cd" * 32}}},
            r"checkpoint=y\.pt is not the file .*\(runs/x\.pt, SHA-256 abababababab…\)",
        ),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, change, sentence):
    start(tmp_path).write(4, image())
    before = (tmp_path / "samples.json").read_bytes()
    with pytest.raises(UserError, match=sentence):
        start(tmp_path, **change)
    assert (tmp_path / "samples.json").read_bytes() == before and len(list((tmp_path / "images").iterdir())) == 1


def test_settings_may_change_while_there_is_no_image(tmp_path):
    start(tmp_path)
    folder = start(tmp_path, n=1, settings={**SETTINGS, "guidance": 4.0}, in_turn=(1,), resume=False)
    assert folder.settings["guidance"] == 4.0 and folder.in_turn == (1,)
    assert len(json.loads((tmp_path / "samples.json").read_text())["starts"]) == 1


def test_other_folders_are_left_alone(tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "cat.jpg").touch()
    with pytest.raises(UserError, match="is not empty, but .* has no samples.json"):
        start(tmp_path)
    with pytest.raises(UserError, match=r"no folder of tools/sample.py"):
        SampleFolder(tmp_path)
    with pytest.raises(UserError, match="cannot be written .* output=FOLDER"):
        start(tmp_path / "images" / "cat.jpg")


def test_an_unreadable_image_is_named(tmp_path):
    folder = start(tmp_path)
    (folder.images / "000001.png").write_bytes(b"no picture")
    with pytest.raises(UserError, match=r"000001.png cannot be read .*; delete it"):
        read_image(folder.files()[1])
