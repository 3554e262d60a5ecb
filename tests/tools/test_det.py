"""tools/det.py: which backend a file chooses, what is said of mistakes, predictions and costs."""

from __future__ import annotations

import json
import logging
import sys
import types

import pytest
from PIL import Image
from vit3.tools import det

from tests.detection.toy import CONFIG, arguments, make_coco, no_pictures
from vit3.build import detection
from vit3.data.image_files import image_files


def run(monkeypatch, *command):
    """The tool in this process; returns its exit status."""
    monkeypatch.setattr(sys, "argv", ["tools/det.py", *map(str, command)])
    monkeypatch.setattr(logging, "basicConfig", lambda **options: None)  # pytest's own handlers stay
    try:
        det.main()
    except SystemExit as end:
        return end.code
    return 0


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    output = tmp_path_factory.mktemp("det")
    root = make_coco(output / "coco")
    with pytest.MonkeyPatch.context() as patch:
        no_pictures(patch.setattr)
        detection.train(
            CONFIG,
            arguments(
                root, output, "name=a", "engine.epochs=1", "optim.warmup_epochs=0", "model.options.box_score_thresh=0.0"
            ),
        )
    return output / "a"


@pytest.mark.parametrize("ending", ["yaml", "py"])
def test_the_ending_chooses_the_backend(monkeypatch, tmp_path, ending):
    called = []
    backend = types.SimpleNamespace(test=lambda config, rest: called.append((config, rest)))
    monkeypatch.setitem(sys.modules, det.BACKENDS[f".{ending}"], backend)
    config = tmp_path / f"a.{ending}"
    config.write_text("")
    assert run(monkeypatch, "test", config, "name=b") == 0
    assert called == [(config, ["name=b"])]


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (["tran", CONFIG], "error: tran is no command of tools/det.py; did you mean train?"),
        (["train"], "error: tools/det.py train needs a configuration file first"),
        (["train", "name=a"], "error: tools/det.py train needs a configuration file first"),
        (["train", "a.json"], "error: a.json must end in .py or .yaml"),
        (["train", "gone.yaml"], "error: gone.yaml: no such configuration file"),
        (["train", CONFIG, "engine.epoch=1"], "error: engine.epoch is no key of this program; did you mean engi"),
        (["test", CONFIG, "device=cpu"], "error: checkpoint has no value yet; give checkpoint=RUN_FOLDER"),
        (["predict", CONFIG, "device=cpu"], "error: images has no value yet; set it on the command line"),
        (["predict", CONFIG, "images=gone"], "error: images=gone: no image is there"),
    ],
)  # fmt: skip
def test_mistakes_are_one_sentence_and_status_2(monkeypatch, capsys, command, sentence):
    assert run(monkeypatch, *command) == 2
    said = capsys.readouterr().err
    assert said.startswith(sentence) and len(said.splitlines()) == 1


def test_help(monkeypatch, capsys):
    assert run(monkeypatch, "--help") == 0
    assert "train|test|predict|flops CONFIG" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("package", "extra"), [("mmengine", "mm"), ("mmcv.ops", "mm"), ("pycocotools.mask", "det"), ("other", None)]
)
def test_a_missing_package_is_named_with_its_extra(monkeypatch, capsys, tmp_path, package, extra):
    """Missing when the backend is imported, or later, in the midst of its work."""
    (tmp_path / "a.py").write_text("")

    def absent(*args):
        raise ModuleNotFoundError(f"No module named '{package}'", name=package)

    monkeypatch.setitem(sys.modules, det.BACKENDS[".py"], types.SimpleNamespace(train=absent))
    for missing in (None, absent):
        if missing:
            monkeypatch.setattr("vit3.commands.importlib.import_module", missing)
        if extra is None:
            with pytest.raises(ModuleNotFoundError):
                run(monkeypatch, "train", tmp_path / "a.py")
        else:
            assert run(monkeypatch, "train", tmp_path / "a.py") == 2
            assert f"needs {package}: pip install -e '.[{extra}]'" in capsys.readouterr().err


def test_predict_writes_pictures_and_detections(monkeypatch, trained):
    """Detections name their images and have the training file's category ids."""
    config, image = trained / "config.yaml", image_files(trained.parent / "coco" / "val2017")[0]
    assert run(monkeypatch, "predict", config, f"checkpoint={trained}", f"images={image}", "name=p", "threshold=0") == 0
    found = json.loads((trained.parent / "p" / "detections.json").read_text())
    assert {result["category_id"] for result in found} <= {3, 7}
    assert all(result["category"] == {3: "square", 7: "disc"}[result["category_id"]] for result in found)
    assert {result["file_name"] for result in found} == {str(image)}
    assert {"image_id", "category_id", "bbox", "score", "segmentation"} <= found[0].keys()
    with Image.open(trained.parent / "p" / "sheet-000.png") as sheet:
        assert min(sheet.size) > 100


def test_predictions_stay_out_of_the_run_folder_and_need_an_image(monkeypatch, capsys, trained):
    """A run's own config has the run's name, which is not that of the predictions."""
    before = set(trained.iterdir())
    images = trained.parent / "damaged"
    images.mkdir()
    (images / "a.jpg").write_bytes(b"no image")
    command = ("predict", trained / "config.yaml", f"checkpoint={trained}", f"images={images}")
    assert run(monkeypatch, *command) == 2
    assert "none of the 1 files can be decoded" in capsys.readouterr().err
    Image.new("L", (200, 8)).save(images / "b.png")
    assert run(monkeypatch, *command) == 0
    assert set(trained.iterdir()) == before
    assert len(list(trained.parent.glob("predictions-a-*/detections.json"))) == 1
    assert run(monkeypatch, *command, "name=a") == 2
    assert "holds a run already" in capsys.readouterr().err


def test_a_checkpoint_of_another_model_is_refused(monkeypatch, capsys, trained):
    config = trained / "config.yaml"
    assert run(monkeypatch, "test", config, f"checkpoint={trained}", "model.out_channels=8") == 2
    assert "model.out_channels is 8 here and 16 in it" in capsys.readouterr().err


def test_flops(monkeypatch, capsys):
    assert run(monkeypatch, "flops", CONFIG, "size=[64,96]") == 0
    said = capsys.readouterr().out
    assert "parameters " in said and "masks" in said and "at 64x96 (height x width), 1000 boxes and 100 masks" in said
