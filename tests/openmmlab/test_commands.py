"""The commands over MMEngine on small data: what a run leaves, the same numbers again, going on, R19."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("mmengine", reason="needs the extra mm")
pytest.importorskip("mmdet", reason="needs the extra mm")
pytest.importorskip("mmseg", reason="needs the extra mm")

import torch  # noqa: E402
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop  # noqa: E402

from tests.helpers import same_dict  # noqa: E402
from tests.openmmlab.small import DETECTOR, SEGMENTOR, write_coco, write_config, write_masks  # noqa: E402
from vit3.engine.signals import REQUEUE_CODE  # noqa: E402
from vit3.errors import Interrupted, UserError  # noqa: E402
from vit3.openmmlab import commands  # noqa: E402
from vit3.openmmlab.files import load_safely  # noqa: E402

RUN_FILES = {"config.py", "environment.json", "metrics.jsonl", "steps.jsonl", "summary.json", "curves.png",
             "predictions.png", "checkpoints"}  # fmt: skip


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def weights(run, name):
    return load_safely(str(run / "checkpoints" / name))["state_dict"]


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    """They take seconds; the runs that tests share, which come before this, have them."""
    for name in ("pictures.plot_class_maps", "pictures.plot_detections", "runs.plot_scores"):
        monkeypatch.setattr(f"vit3.openmmlab.{name}", lambda *args, **kwargs: None)


@pytest.fixture(scope="module")
def segmented(tmp_path_factory):
    """R19: two classes, masks of 0, 1 and 255, class 1 absent in validation, 129x65, batch 1, one process on a CPU."""
    folder = tmp_path_factory.mktemp("segmented")
    config, data = write_config(folder, SEGMENTOR), write_masks(folder / "data")
    commands.train(config, [f"output={folder}", "name=run", f"data_root={data}", "device=cpu"])
    return folder


@pytest.fixture(scope="module")
def detected(tmp_path_factory):
    folder = tmp_path_factory.mktemp("detected")
    config, data = write_config(folder, DETECTOR), write_coco(folder / "data")
    commands.train(config, [f"output={folder}", "name=run", f"data_root={data}", "device=cpu"])
    return folder


def test_what_a_run_leaves(segmented, detected):
    for folder, score in ((segmented, "val/mIoU"), (detected, "val/bbox_AP")):
        run = folder / "run"
        assert RUN_FILES <= {path.name for path in run.iterdir()}
        assert {"mmengine", "mmcv"} <= json.loads((run / "environment.json").read_text())[0].keys()
        for picture in ("curves.png", "predictions.png"):
            assert Image.open(run / picture).width > 100
        summary, metrics = json.loads((run / "summary.json").read_text()), lines(run / "metrics.jsonl")
        assert summary["best"]["score"] == score and summary["last"] == metrics[-1]
        assert summary["best"]["value"] == max(line[score] for line in metrics)
        for line in metrics:
            assert {"epoch", "updates", "lr", "train/loss", "images_per_s", "seconds"} <= line.keys()
            assert sum(v for k, v in line.items() if k.startswith("train/loss_")) == pytest.approx(line["train/loss"])
    assert [line["updates"] for line in lines(segmented / "run" / "metrics.jsonl")] == [2, 4]
    assert [line["epoch"] for line in lines(segmented / "run" / "metrics.jsonl")] == [0, 1]
    assert [(line["epoch"], line["updates"]) for line in lines(detected / "run" / "metrics.jsonl")] == [(1, 6)]
    assert {"val/bbox_AP50", "val/segm_AP75"} <= lines(detected / "run" / "metrics.jsonl")[0].keys()


def test_an_absent_class_is_undefined_and_named(segmented):
    summary = json.loads((segmented / "run" / "summary.json").read_text())
    assert summary["absent_classes"] == ["thing"] and summary["IoU"].keys() == {"ground"}
    assert summary["last"]["val/mIoU"] == pytest.approx(summary["IoU"]["ground"], abs=1e-4)


def test_the_numbers_that_training_logged(segmented, detected, caplog):
    for folder in (segmented, detected):
        best = json.loads((folder / "run" / "summary.json").read_text())["best"]
        with caplog.at_level(logging.WARNING):
            scores = commands.test(folder / "run" / "config.py", [f"checkpoint={folder / 'run'}", "device=cpu"])
        assert scores[best["score"]] == best["value"]
        record = next(li for li in lines(folder / "run" / "metrics.jsonl") if li["updates"] == best["updates"])
        assert scores == {key: value for key, value in record.items() if key.startswith("val/")}
    assert any("left out of the mean: thing" in message for message in caplog.messages)


def test_class_maps_of_images_without_the_data(segmented, tmp_path):
    shutil.copytree(segmented / "run", tmp_path / "run")
    shutil.copy(segmented / "data" / "images" / "validation" / "1.jpg", tmp_path / "image.jpg")
    arguments = [f"checkpoint={tmp_path / 'run'}", f"images={tmp_path / 'image.jpg'}", "data_root=/gone", "device=cpu"]
    commands.predict(tmp_path / "run" / "config.py", [*arguments, f"output={tmp_path}", "name=out"])
    found = np.asarray(Image.open(tmp_path / "out" / "class_maps" / "image.png"))
    assert found.shape == (129, 65) and set(np.unique(found)) <= {0, 1}


def test_detections_of_images_in_coco_s_format(detected, tmp_path):
    coco = pytest.importorskip("pycocotools.coco").COCO
    images = detected / "data" / "val2017"
    arguments = [f"checkpoint={detected / 'run'}", f"images={images}", "threshold=0", "device=cpu"]
    commands.predict(detected / "run" / "config.py", [*arguments, f"output={tmp_path}", "name=out"])
    found = json.loads((tmp_path / "out" / "detections.json").read_text())
    assert {entry["file_name"] for entry in found} == {"0.jpg", "1.jpg", "2.jpg"}
    assert {(entry["category_id"], entry["category"]) for entry in found} <= {(1, "cat"), (2, "dog")}
    truth = coco()
    truth.dataset = dict(images=[dict(id=i, height=64 + 9 * i, width=97) for i in range(3)], annotations=[],
                         categories=[dict(id=1, name="cat"), dict(id=2, name="dog")])  # fmt: skip
    truth.createIndex()
    assert len(truth.loadRes(found).getAnnIds()) == len(found) > 0
    assert found[0]["segmentation"]["size"] in ([64, 97], [73, 97], [82, 97])


def test_a_stray_label_is_refused_before_training(tmp_path):
    config, data = write_config(tmp_path, SEGMENTOR), write_masks(tmp_path / "data")
    Image.fromarray(np.full((129, 65), 7, dtype=np.uint8)).save(data / "annotations" / "training" / "1.png")
    with pytest.raises(UserError, match=r"1\.png.* 7"):
        commands.train(config, [f"output={tmp_path}", "name=run", f"data_root={data}", "device=cpu"])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", ["train", "test"])
def test_what_the_libraries_print_while_the_data_are_looked_at_is_not_said(segmented, monkeypatch, capsys, command):
    def look(*_):
        print("Could not import OneDL")
        raise UserError("looked at")

    monkeypatch.setattr(commands, "before_first_step", look)
    arguments = dict(train=[f"output={segmented}", "name=other"], test=[f"checkpoint={segmented / 'run'}"])[command]
    with pytest.raises(UserError, match="looked at"):
        getattr(commands, command)(segmented / "run" / "config.py", [*arguments, "device=cpu"])
    assert capsys.readouterr().out == ""


def test_data_that_are_not_there(tmp_path):
    with pytest.raises(UserError, match="train_dataloader: .*nowhere does not exist; set data_root=FOLDER"):
        commands.train(write_config(tmp_path, SEGMENTOR), [f"output={tmp_path}", f"data_root={tmp_path}/nowhere"])


def test_a_checkpoint_of_another_network(segmented, tmp_path):
    other = {name: value for name, value in weights(segmented / "run", "iter_4.pth").items() if "norm0" not in name}
    torch.save({"state_dict": other}, tmp_path / "other.pth")
    with pytest.raises(UserError, match="is it a checkpoint of this config"):
        commands.test(segmented / "run" / "config.py", [f"checkpoint={tmp_path / 'other.pth'}", "device=cpu"])


def interrupt(monkeypatch, loop, at):
    """Send SIGTERM to this process before update ``at`` (from 0) is made."""
    before = loop.run_iter

    def run_iter(self, *args):
        if self._iter == at:
            os.kill(os.getpid(), signal.SIGTERM)
        before(self, *args)

    monkeypatch.setattr(loop, "run_iter", run_iter)


def test_a_signal_saves_and_the_run_goes_on_as_if_nothing_had_been(segmented, tmp_path, monkeypatch):
    config = segmented / "segmentor.py"
    arguments = [f"output={tmp_path}", "name=run", f"data_root={segmented / 'data'}", "device=cpu", "resume=auto"]
    with monkeypatch.context() as patch, pytest.raises(Interrupted, match="resume=.*run goes on") as stopped:
        interrupt(patch, IterBasedTrainLoop, at=2)
        commands.train(config, arguments)
    assert stopped.value.code == REQUEUE_CODE
    assert (tmp_path / "run" / "checkpoints" / "iter_3.pth").exists()
    commands.train(config, arguments)
    assert same_dict(weights(tmp_path / "run", "iter_4.pth"), weights(segmented / "run", "iter_4.pth"))
    there, here = (lines(folder / "run" / "metrics.jsonl") for folder in (segmented, tmp_path))
    assert [line["updates"] for line in here] == [2, 4] and here[-1]["val/mIoU"] == there[-1]["val/mIoU"]
    assert len(json.loads((tmp_path / "run" / "environment.json").read_text())) == 2


def test_a_run_that_stops_inside_an_epoch_goes_on_there(detected, tmp_path, monkeypatch):
    seen = []
    before = EpochBasedTrainLoop.run_iter

    def note(self, index, batch):
        seen.append((self._epoch, index, batch["data_samples"][0].img_id))
        before(self, index, batch)

    monkeypatch.setattr(EpochBasedTrainLoop, "run_iter", note)
    common = [f"data_root={detected / 'data'}", "device=cpu", f"output={tmp_path}", "val_cfg=null"]
    common += ["val_dataloader=null", "val_evaluator=null"]
    config = detected / "detector.py"
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        interrupt(patch, EpochBasedTrainLoop, at=4)
        commands.train(config, [*common, "name=parts"])
    commands.train(config, [*common, f"resume={tmp_path / 'parts'}"])
    assert [place[:2] for place in seen] == [(epoch, index) for epoch in (0, 1) for index in (0, 1, 2)]
    assert {image for epoch, _, image in seen if epoch == 1} == {10, 11, 12}  # each once, over both parts
    assert lines(tmp_path / "parts" / "metrics.jsonl")[-1]["updates"] == 6  # of training alone
