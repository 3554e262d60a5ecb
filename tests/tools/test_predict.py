"""tools/predict.py on a short run: what it prints and writes, bare words as images, images that cannot be decoded."""

import functools
import json
import logging

import pytest
from omegaconf import OmegaConf
from PIL import Image
from vit3.tools import predict as tool
from vit3.tools.predict import run_predict, with_images

from tests.toy import CONFIGS, compose_config, trained
from vit3.arguments import check_arguments
from vit3.config import PredictConfig
from vit3.data import open_split
from vit3.errors import UserError
from vit3.inference import predict

NAMES = ("plain.png", "with space.png", "a,b.png", "x=1.png", "br[b]{2}(3).png", 'it\'s "q".png', "${p}.png", "b\\.png")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run folder of two updates of a network of two blocks."""
    return trained(tmp_path_factory.mktemp("run"), "++model.kwargs.depth=2")


@pytest.fixture(scope="module", autouse=True)
def loaded_once():
    """Configurations take half a second to compose."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tool, "load_predictor", functools.cache(tool.load_predictor))
        yield


@pytest.fixture
def images(tmp_path, monkeypatch):
    """A folder of digits with names that shells and Hydra know how to misread; it is the working directory's."""
    split = open_split("digits", None, "val", 1, "raise")
    (tmp_path / "images").mkdir()
    for name, pixels in zip(NAMES, split.images):
        Image.fromarray(pixels).save(tmp_path / "images" / name)
    monkeypatch.chdir(tmp_path / "images")
    return tmp_path / "images"


def predicted(run, images, *overrides):
    out = images.parent / "out"
    arguments = [f"checkpoint={run}", "device=cpu", f"output={out}", *overrides]
    run_predict(compose_config(*check_arguments(with_images(arguments), PredictConfig, CONFIGS), root="predict"))
    return out


def test_bare_words_are_images_whatever_they_are_called(images, run):
    (images / "sub").mkdir()
    (images / "sub" / "more.png").write_bytes((images / "plain.png").read_bytes())
    arguments = ["checkpoint=x", *NAMES, "sub", "*.jpg", "topk=2", "nowhere.png"]
    overrides = with_images(arguments)
    assert overrides[:2] == ["checkpoint=x", "topk=2"] and len(overrides) == 3
    cfg = compose_config(*check_arguments(overrides, PredictConfig, CONFIGS), root="predict")
    assert OmegaConf.to_object(cfg)["images"] == [*NAMES, "sub", "*.jpg", "nowhere.png"]
    assert with_images(["checkpoint=x", "chekpoint=y", "-m"]) == ["checkpoint=x", "chekpoint=y", "-m"]  # none is a file
    (images / "topk=2").write_bytes(b"")  # a key is a key
    assert with_images(["topk=2"]) == ["topk=2"]
    with pytest.raises(UserError, match="a.png and images=.* both name images"):
        with_images(["images=[b.png]", "a.png"])


def test_what_is_printed_and_written(run, images, capsys):
    out = predicted(run, images, "*.png", "plain.png", "topk=2", "batch_size=3", "sheet=4")
    report = json.loads((out / "predictions.json").read_text())
    files = [entry["file"] for entry in report["predictions"]]
    assert files == sorted(NAMES) and report["unreadable"] == []  # each once
    wanted = predict([images / file for file in files], run, topk=2)
    for entry, prediction in zip(report["predictions"], wanted):
        assert tuple(entry["classes"]) == prediction.classes
        assert entry["probabilities"] == pytest.approx(prediction.probabilities, abs=1e-5)
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines() if "\t" in line]
    best = report["predictions"][0]
    assert lines[0] == [files[0], best["classes"][0], f"{best['probabilities'][0]:.4f}"] and len(lines) == 2 * len(
        NAMES
    )
    assert Image.open(out / "predictions.png").size[0] > 500


def test_options_reach_the_predictor_and_folders_are_made(run, images, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    predicted(run, images, "plain.png", "sheet=0", "output=new/deep")
    assert (images / "new" / "deep" / "predictions.json").is_file()
    said = [message for message in caplog.messages if "best_raw.pt: raw weights" in message]
    assert len(said) == 1 and "written      new/deep/predictions.json" in caplog.messages
    report = json.loads((images / "new" / "deep" / "predictions.json").read_text())
    assert report["checkpoint"] == str(run) and report["loaded"] == said[0]
    with pytest.raises(UserError, match="output=plain.png/x is not writable .*; choose another output=FOLDER"):
        predicted(run, images, "plain.png", "output=plain.png/x")
    given = []
    monkeypatch.setattr(tool, "load_predictor", lambda *args: given.append(args))
    with pytest.raises(AttributeError):  # None is no predictor
        predicted("place", images, "plain.png", "weights=ema", "device=cuda")
    assert given == [("place", "ema", "cuda")]


def test_in_a_terminal_there_is_a_table(run, images, capsys, monkeypatch):
    monkeypatch.setattr(tool.sys.stdout, "isatty", lambda: True, raising=False)
    out = predicted(run, images, "br[b]{2}(3).png", "topk=2", "sheet=0")
    (entry,) = json.loads((out / "predictions.json").read_text())["predictions"]
    said = capsys.readouterr().out
    assert "probability" in said and said.count("br[b]{2}(3).png") == 1  # which is no markup
    assert [line.split()[-3] for line in said.splitlines() if "%" in line] == entry["classes"]
    assert f"{100 * entry['probabilities'][0]:.2f} %" in said and not (out / "predictions.png").exists()


def test_images_that_cannot_be_decoded_are_named_and_the_rest_go_on(run, images, caplog):
    (images / "broken.png").write_bytes(b"no image")
    with pytest.raises(UserError, match="1 of 9 images cannot be decoded"):
        predicted(run, images, ".", "batch_size=2", "blocks=0", "sheet=1")
    assert sum("broken.png cannot be decoded" in record.getMessage() for record in caplog.records) == 1
    report = json.loads((images.parent / "out" / "predictions.json").read_text())
    assert report["unreadable"] == ["broken.png"] and len(report["predictions"]) == len(NAMES)
    with pytest.raises(UserError, match="none of the 1 images can be decoded; nothing is written"):
        predicted(run, images, "broken.png")
    for word, sentence in (("nowhere*", "no file, folder or match of nowhere"), ("images=[]", "names no image")):
        with pytest.raises(UserError, match=sentence):
            predicted(run, images, word)


@pytest.mark.parametrize(("overrides", "maps"), [((), [1, 2]), (("blocks=1",), [2]), (("blocks=0",), [])])
def test_blocks_of_the_sheet(run, images, monkeypatch, overrides, maps):
    drawn = []
    monkeypatch.setattr(tool, "draw_predictions", lambda sheet, target, title: drawn.extend([*sheet, title]))
    out = predicted(run, images, "plain.png", "x=1.png", "sheet=1", "batch_size=1", *overrides)
    sheet, title = drawn
    best = json.loads((out / "predictions.json").read_text())["predictions"][0]
    assert (sheet.label, sheet.probability) == (best["classes"][0], best["probabilities"][0])
    assert list(sheet.maps) == maps and all(m.shape == (8, 8) for m in sheet.maps.values())
    assert title.endswith(", 1 of 2 images") and sheet.pixels.shape == (8, 8, 1)
    predicted(run, images, "plain.png", "x=1.png", "sheet=2", *overrides)
    *_, first, second, whole = drawn
    assert f"{whole}, 1 of 2 images" == title and (first.pixels != second.pixels).any()
    assert all((first.maps[block] != second.maps[block]).any() for block in maps)


def test_networks_without_inner_step(tmp_path, images, caplog):
    softmax = trained(tmp_path, "mixer=softmax")
    with caplog.at_level(logging.INFO):
        out = predicted(softmax, images, "plain.png")
        for maps in ("blocks=0", "sheet=0"):  # none were wanted
            predicted(softmax, images, "plain.png", maps)
    assert caplog.text.count("no TTT mixer, so the sheet shows no maps") == 1 and (out / "predictions.png").exists()
