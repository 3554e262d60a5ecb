"""Detectors through the one training loop: files, resuming to the last bit, two processes."""

from __future__ import annotations

import json
import logging
import os

import pytest
import torch

from tests.detection.toy import CONFIG, arguments, edit, make_coco, no_pictures
from vit3.build import detection
from vit3.build.detector import build_batches, build_detection_trainer, build_detector, build_images
from vit3.detection.config import checked, compose
from vit3.engine.checkpoint import load_checkpoint
from vit3.engine.distributed import Processes
from vit3.engine.update import Updater
from vit3.errors import UserError

PARTS = ("loss_classifier", "loss_box_reg", "loss_mask", "loss_objectness", "loss_rpn_box_reg")


# Everything that draws or remembers: flips, crops, scales, dropped paths, average, several passes
EVERYTHING = (
    "engine.ema_decay=0.5", "engine.ema_batch=2", "augment.crop_prob=0.3", "model.drop_path_rate=0.3",
    "model.min_size=[48,64]", "engine.max_per_process=1", "model.options.box_score_thresh=0.0",
)  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return make_coco(tmp_path_factory.mktemp("data") / "coco")


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch):
    no_pictures(monkeypatch.setattr)


@pytest.fixture(scope="module")
def finished(root, tmp_path_factory):
    """A run of two epochs with moving average; the scores are not those of nothing found."""
    output = tmp_path_factory.mktemp("runs")
    patch = pytest.MonkeyPatch()
    no_pictures(patch.setattr)
    detection.train(CONFIG, arguments(root, output, "name=a", *EVERYTHING))
    patch.undo()
    return output / "a"


def records(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def timeless(folder):
    return [{k: v for k, v in r.items() if k not in ("seconds", "images_per_s")} for r in records(folder)]


def test_a_run_leaves_everything(finished):
    assert {path.name for path in finished.iterdir()} == {
        "best_raw.pt", "best_ema.pt", "checkpoints", "config.yaml", "environment.json", "metrics.jsonl", "steps.jsonl",
        "summary.json", "curves.png", "predictions.png",
    }  # fmt: skip
    last = records(finished)[-1]
    assert [r["updates"] for r in records(finished)] == [2, 4]
    assert sum(last[f"train/{name}"] for name in PARTS) == pytest.approx(last["train/loss"], rel=1e-6)
    for weights in ("val", "val_ema"):
        for kind in ("bbox", "segm"):
            assert all(0 <= last[f"{weights}/{kind}_{name}"] <= 1 for name in ("AP", "AP50", "AP75"))
    summary = json.loads((finished / "summary.json").read_text())
    assert summary["last"] == last and summary["best"]["bbox_AP"] == max(
        r[k] for r in records(finished) for k in ("val/bbox_AP", "val_ema/bbox_AP")
    )
    state = load_checkpoint(finished)
    assert state["classes"] == ["square", "disc"] and state["category_ids"] == [3, 7]


def test_test_gives_the_numbers_that_training_logged(root, finished, caplog):
    best = json.loads((finished / "summary.json").read_text())["best"]
    record, prefix = records(finished)[best["epoch"]], {"raw": "val", "ema": "val_ema"}[best["weights"]]
    with caplog.at_level(logging.INFO):
        detection.test(finished / "config.yaml", [f"data_root={root}", f"checkpoint={finished}"])
    line = caplog.records[-1].getMessage()
    assert f"{best['weights']} weights of epoch {best['epoch'] + 1}, 4 images" in line
    for name in ("bbox_AP", "bbox_AP50", "segm_AP", "segm_AP75"):
        assert f"{name} {record[f'{prefix}/{name}']:.6f}" in line


def test_a_run_that_stops_goes_on_to_the_last_bit(root, finished, tmp_path, monkeypatch, caplog):
    passes, original = [], Updater.run

    def dying(self, *args):
        passes.append(1)
        if len(passes) == 6:  # in the second epoch, between the two passes of an update
            raise KeyboardInterrupt
        return original(self, *args)

    monkeypatch.setattr(Updater, "run", dying)
    command = arguments(root, tmp_path, "name=b", "resume=auto", "engine.save_minutes=0", *EVERYTHING)
    with pytest.raises(KeyboardInterrupt):
        detection.train(CONFIG, command)
    assert load_checkpoint(tmp_path / "b")["updates"] == 2
    with caplog.at_level(logging.WARNING):
        detection.train(CONFIG, [*command, f"data_root={os.path.relpath(root)}"])
    assert "changed since" not in caplog.text
    there, here = load_checkpoint(finished), load_checkpoint(tmp_path / "b")
    assert timeless(tmp_path / "b") == timeless(finished)
    for key in ("state_dict", "state_dict_ema"):
        assert here[key].keys() == there[key].keys()
        assert all(torch.equal(here[key][name], value) for name, value in there[key].items())
    with pytest.raises(UserError, match="2 epochs are done already"):
        detection.train(CONFIG, command)
    with pytest.raises(UserError, match="model.out_channels is 32 here and 16 in the run"):
        detection.train(CONFIG, [*command, "model.out_channels=32", "engine.epochs=3"])


def test_the_trainer_is_built_as_the_configuration_says(root):
    """Two updates an epoch: the rate falls after the milestones by the given factor."""
    more = (
        "optim.sched=multistep", "optim.milestones=[1,3]", "optim.decay_rate=0.5", "optim.warmup_epochs=0",
        "engine.epochs=4", "optim.lr=1", "optim.lr_batch=2", "optim.clip_grad=7", "augment.hflip=1",
        "engine.max_per_process=1", "augment.crop_prob=0",
    )  # fmt: skip
    cfg = checked(compose(CONFIG, arguments(root, root, *more)))
    train, val = (build_images(cfg, split) for split in ("train", "val"))
    plan = build_batches(cfg, len(train), 1)
    trainer = build_detection_trainer(cfg, train, val, build_detector(cfg, 2), plan, {}, Processes(torch.device("cpu")))
    rates = []
    for updates in range(1, 9):
        trainer.updater.counts.updates = updates
        trainer.updater.set_rates()
        rates.append(trainer.updater.optimizer.param_groups[0]["lr"])
    assert rates == [1, 0.5, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25]  # of the updates 2 to 9
    assert trainer.updater.clip_grad == 7 and trainer.val_loader.loader.batch_size == plan.accumulation // 2 == 1
    flipped, _ = train[0]
    assert torch.allclose(flipped, torch.from_numpy(train.pixels(0)).permute(2, 0, 1).flip(-1) / 255)


def test_data_that_cannot_be_learnt_from(root, tmp_path):
    def run(*more):
        detection.train(CONFIG, arguments(data, tmp_path, *more))

    data = make_coco(tmp_path / "coco")
    with pytest.raises(UserError, match="engine.batch_size=5 is more than the 4 training images"):
        run("engine.batch_size=5")
    with pytest.raises(UserError, match="model.backbone=resnet is unknown; use one of: h_vit3_tiny"):
        run("model.backbone=resnet")
    with pytest.raises(UserError, match="model cannot be built .* unexpected keyword argument 'dimz'"):
        run("model.backbone_kwargs.dimz=[8]")
    with pytest.raises(UserError, match="in_chans=1 is not possible: images are read in 3 channels"):
        run("model.backbone_kwargs.in_chans=1")
    edit(data, "val", lambda content: content.update(annotations=[]))
    with pytest.raises(UserError, match="has 4 images and no instance on them"):
        run()
    assert not (tmp_path / "runs").exists()


def test_a_run_starts_from_the_backbone_of_any_file(finished, tmp_path, caplog):
    """R16: a detector's run, its averaged weights, a classifier under prefixes; a foreign file is an error."""
    state = load_checkpoint(finished / "best_ema.pt")["state_dict_ema"]
    body = {name.removeprefix("backbone.body."): value for name, value in state.items() if ".body." in name}
    for name, prefix in (("a", "module.model."), ("b", "_orig_mod."), ("c", "backbone.")):
        torch.save({"state_dict": {prefix + key: value for key, value in body.items()}}, tmp_path / f"{name}.pth")
    torch.save(state["backbone.body.norm0.weight"], tmp_path / "d.pth")

    def start(path):
        cfg = checked(compose(finished / "config.yaml", [f"model.pretrained={path}"]))
        return build_detector(cfg, 5).backbone.body.state_dict()

    with caplog.at_level(logging.INFO):
        for path in (finished / "best_ema.pt", tmp_path / "a.pth", tmp_path / "b.pth", tmp_path / "c.pth"):
            assert all(torch.equal(value, body[name]) for name, value in start(path).items())
            assert f"model.pretrained={path}: matched {len(body)} tensors" in caplog.text
        start(finished)
        assert f"model.pretrained={finished / 'best_'}" in caplog.text
    torch.save({"state_dict_ema": body}, tmp_path / "f.pth")
    mistakes = (
        ("d", "holds no weights"),
        ("e", "no such file"),
        ("f", "a moving average alone .state_dict_ema.; take"),
    )
    for path, sentence in ((tmp_path / f"{name}.pth", sentence) for name, sentence in mistakes):
        with pytest.raises(UserError, match=f"model.pretrained={path}: .*{sentence}"):
            start(path)
