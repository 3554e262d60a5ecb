"""The tools end to end, in this process: what a run leaves, resuming, evaluating."""

from __future__ import annotations

import json
import logging
import math
import shutil

import pytest
import torch
from PIL import Image
from vit3.tools import train as tool
from vit3.tools.eval import run_eval
from vit3.tools.train import train

from tests.toy import compose_config, make_folder, no_pictures, short_run
from vit3.engine.checkpoint import load_checkpoint, save_checkpoint, update_checkpoints
from vit3.engine.train import Trainer
from vit3.errors import UserError

RUN_FILES = {
    "best_raw.pt", "best_ema.pt", "checkpoints", "config.yaml", "environment.json", "metrics.jsonl", "summary.json",
    "curves.png", "predictions.png",
}  # fmt: skip


def records(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def evaluate(checkpoint, caplog, *overrides):
    """What ``tools/eval.py`` prints: its last line."""
    caplog.clear()
    with caplog.at_level(logging.INFO):
        run_eval(compose_config(f"checkpoint={checkpoint}", "device=cpu", *overrides, root="eval"))
    return caplog.records[-1].getMessage()


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch):
    """Only :func:`finished`, which is set up before, draws."""
    no_pictures(monkeypatch.setattr)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run of two epochs with a moving average."""
    output = tmp_path_factory.mktemp("runs")
    train(short_run(output, "name=a", "engine.ema_decay=0.5", "engine.ema_batch=16", epochs=2))
    return output / "a"


def test_a_run_leaves_everything(finished):
    assert {path.name for path in finished.iterdir()} == RUN_FILES
    assert [r["epoch"] for r in records(finished)] == [0, 1]
    assert [r["updates"] for r in records(finished)] == [2, 4]
    summary = json.loads((finished / "summary.json").read_text())
    assert summary["last"] == records(finished)[-1]
    assert summary["best"]["top1"] == max(r[k] for r in records(finished) for k in ("val/top1", "val_ema/top1"))
    assert (summary["lr"], summary["ema_decay"]) == (3e-3 * 16 / 64, 0.5)
    assert json.loads((finished / "environment.json").read_text())[0]["torch"] == torch.__version__
    for name in ("curves.png", "predictions.png"):
        width, height = Image.open(finished / name).size
        assert width > 500 and height > 300


def test_config_is_saved_as_composed(finished):
    """Nothing derived is written back, so the dump composes the same run again."""
    assert "lr: 0.003" in (finished / "config.yaml").read_text()
    assert load_checkpoint(finished)["config"]["optim"]["lr"] == 3e-3


def test_checkpoint_carries_classes(finished):
    assert load_checkpoint(finished)["classes"] == list("0123456789")


@pytest.mark.parametrize(("weights", "prefix"), [("raw", "val"), ("ema", "val_ema")])
def test_eval_gives_the_logged_numbers(finished, caplog, weights, prefix):
    line = evaluate(update_checkpoints(finished)[0], caplog, f"weights={weights}")
    record = records(finished)[-1]
    assert f"{weights} weights of epoch 2, 360 images" in line
    assert f"top-1 {record[prefix + '/top1']:.2f} %" in line and f"loss {record[prefix + '/loss']:.6f}" in line


def test_eval_of_a_folder_takes_its_best(finished, caplog):
    best = json.loads((finished / "summary.json").read_text())["best"]
    line = evaluate(finished, caplog)
    assert f"{best['weights']} weights of epoch {best['epoch'] + 1}" in line and f"top-1 {best['top1']:.2f} %" in line


def test_same_seed_same_run(tmp_path):
    for name in ("a", "b"):
        train(short_run(tmp_path, f"name={name}"))
    a, b = (load_checkpoint(tmp_path / name)["state_dict"] for name in ("a", "b"))
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_resume_at_an_epoch_is_the_same_run(tmp_path, monkeypatch):
    ema = ("engine.ema_decay=0.5", "engine.ema_batch=16")
    train(short_run(tmp_path, "name=b", *ema, epochs=3))
    whole = load_checkpoint(tmp_path / "b")
    folder = tmp_path / "c"
    stop_after_first_epoch(folder, ema, monkeypatch)
    train(short_run(tmp_path, f"resume={folder}", *ema, epochs=3))
    again = load_checkpoint(folder)
    for kind in ("state_dict", "state_dict_ema"):
        assert all(torch.equal(whole[kind][key], again[kind][key]) for key in whole[kind])
    assert len(json.loads((folder / "environment.json").read_text())) == 2
    logged = [{k: v for k, v in r.items() if k not in ("seconds", "images_per_s")} for r in records(folder)]
    wanted = [{k: v for k, v in r.items() if k not in ("seconds", "images_per_s")} for r in records(tmp_path / "b")]
    assert logged == wanted


def stop_after_first_epoch(folder, ema, monkeypatch):
    """A run of three epochs that breaks off in its second, with lines in its logs that no checkpoint stands for."""

    class Stop(Exception):
        pass

    original = Trainer._train_epoch

    def stopping(self, *args):
        if self.place.epoch == 1:
            raise Stop
        return original(self, *args)

    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(Trainer, "_train_epoch", stopping)
        train(short_run(folder.parent, f"name={folder.name}", *ema, epochs=3))
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"epoch": 1, "updates": 4}) + "\n" + '{"epoch": 2, "upd')


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("++model.kwargs.embed_dim=32", "model.kwargs is .*embed_dim.*; give the run's own value"),
        ("mixer=softmax", "mixer.name is softmax here and ttt in the run"),
        ("engine.epochs=2", "2 epochs are done already; set engine.epochs higher"),
        ("optim.opt=sgd", "optim.opt is sgd here and adamw in the run"),
        ("optim.decay_inner=false", "optim.decay_inner is False here and True in the run"),
        ("engine.amp=float16", "float16 has a loss scale"),
    ],
)
def test_resume_of_another_run_is_refused(finished, override, sentence):
    with pytest.raises(UserError, match=sentence):
        train(short_run(finished.parent, f"resume={finished}", override, epochs=3))


def test_an_existing_run_is_not_overwritten(finished):
    with pytest.raises(UserError, match="holds a run already; add resume="):
        train(short_run(finished.parent, "name=a"))


def test_name_is_one_folder(tmp_path):
    with pytest.raises(UserError, match="name=../x must be one folder name"):
        train(short_run(tmp_path / "runs", "name=../x"))
    assert list(tmp_path.iterdir()) == []


def test_sheet_that_cannot_be_written_is_said_first(finished, tmp_path):
    with pytest.raises(UserError, match="predictions=.*its folder is missing"):
        run_eval(compose_config(f"checkpoint={finished}", f"predictions={tmp_path}/no/x.png", root="eval"))


def test_unwritable_output(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="output=.*file is not writable"):
        train(short_run(tmp_path / "file"))


def test_a_failing_start_leaves_no_folder(tmp_path):
    with pytest.raises(UserError):
        train(short_run(tmp_path, "optim.warmup_epochs=1"))
    assert not list(tmp_path.iterdir())


def test_loss_that_is_not_finite_stops_with_a_sentence(tmp_path):
    explode = ("optim.lr=1e30", "optim.clip_grad=null", "optim.min_lr=1e30", "engine.max_bad_updates=3")
    with pytest.raises(UserError, match="was not finite in 3 updates in a row, .*the weights of before are saved"):
        train(short_run(tmp_path, "name=x", *explode, epochs=3))
    assert load_checkpoint(tmp_path / "x")["bad"] == 3


def test_folder_data_with_the_paper_augmentation(tmp_path, caplog):
    root = make_folder(tmp_path / "data", classes=3, train=6, val=3)
    cfg = short_run(
        tmp_path / "runs", "name=f", "data=folder", f"data.root={root}", "data.img_size=[16,24]", "data.workers=1",
        "augment=deit", "engine.batch_size=6", "engine.amp=bfloat16", "++model.kwargs.patch_size=4",
    )  # fmt: skip
    train(cfg)
    record = records(tmp_path / "runs" / "f")[-1]
    assert math.isfinite(record["val/loss"])
    line = evaluate(tmp_path / "runs" / "f", caplog)
    assert "9 images" in line and f"loss {record['val/loss']:.6f}" in line
    only_val = make_folder(tmp_path / "only_val", classes=3, train=0, val=1)
    assert "3 images" in evaluate(tmp_path / "runs" / "f", caplog, f"data_root={only_val}")
    shutil.rmtree(only_val / "val" / "class0")  # labels of the others must not shift
    fewer = evaluate(tmp_path / "runs" / "f", caplog, f"data_root={only_val}")
    assert "2 images" in fewer and "has no image of 1 of 3 classes (labels stay as they are): class0" in caplog.text
    other = make_folder(tmp_path / "other", classes=4)
    with pytest.raises(UserError, match="has classes that the network is not trained for: class3"):
        evaluate(tmp_path / "runs" / "f", caplog, f"data_root={other}")


def test_training_starts_from_a_checkpoint(finished, tmp_path):
    train(
        short_run(
            tmp_path, "name=s", f"model.checkpoint={update_checkpoints(finished)[0]}", "optim.lr=0", "optim.min_lr=0"
        )
    )
    start, end = load_checkpoint(finished)["state_dict"], load_checkpoint(tmp_path / "s")["state_dict"]
    assert all(torch.equal(start[key], end[key]) for key in start)


def test_predictions_sheet_of_eval(finished, caplog, tmp_path):
    evaluate(finished, caplog, f"predictions={tmp_path / 'sheet.png'}")
    assert Image.open(tmp_path / "sheet.png").size[0] > 500


def half(folder, *overrides, epochs=2):
    """A run as it is after the first of ``epochs`` epochs: the later checkpoint, best weights and lines are later's."""
    train(short_run(folder.parent, f"name={folder.name}", "engine.keep_last=9", *overrides, epochs=epochs))
    return update_checkpoints(folder)[-1]


def test_another_batch_goes_on_at_the_same_place_of_the_schedule(tmp_path):
    """Four updates an epoch, then two: rates are those of the epoch at work; the first has the last's."""
    old = half(tmp_path / "a", "engine.steps_per_epoch=4", epochs=4)
    more = (
        "engine.batch_size=32", "optim.lr=1", "optim.lr_batch=32", "optim.min_lr=0", "optim.sched=cosine",
        "engine.max_bad_updates=99",
    )  # fmt: skip
    train(short_run(tmp_path, f"resume={old}", *more, epochs=3))
    train(short_run(tmp_path, f"resume={tmp_path / 'a'}", *more, epochs=4))  # the place is kept in checkpoints
    wanted = [math.cos(math.pi / 2 * step / updates) ** 2 for step, updates in ((1, 6), (3, 6), (5, 8))]
    assert [record["lr"] for record in records(tmp_path / "a")][1:] == pytest.approx(wanted)


def test_settings_of_the_optimiser_are_the_resuming_command_s(tmp_path):
    half(tmp_path / "a")
    train(short_run(tmp_path, f"resume={tmp_path / 'a'}", "optim.weight_decay=0.5", "optim.betas=[0.8,0.9]", epochs=3))
    groups = load_checkpoint(tmp_path / "a")["optimizer"]["param_groups"]
    assert {group["weight_decay"] for group in groups} == {0.0, 0.5}
    assert all(tuple(group["betas"]) == (0.8, 0.9) for group in groups)


def test_best_weights_of_later_updates_are_not_taken_for_those_of_the_resumed(tmp_path, caplog):
    """The best file is of epoch 2; resuming epoch 1, where rate 0 cannot improve anything, may not leave it there."""
    old = half(tmp_path / "a")
    best = load_checkpoint(tmp_path / "a" / "best_raw.pt")
    save_checkpoint({**best, "epoch": 1}, tmp_path / "a" / "best_raw.pt")
    state = load_checkpoint(old)
    save_checkpoint({**state, "best": {"raw": {"epoch": 0, "top1": 99.0}}}, old)
    train(short_run(tmp_path, f"resume={old}", "optim.lr=0", "optim.min_lr=0", epochs=2))
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    again = load_checkpoint(tmp_path / "a" / "best_raw.pt")
    assert summary["best"] == {"epoch": 1, "weights": "raw", "top1": again["record"]["val/top1"]}
    assert all(torch.equal(state["state_dict"][name], value) for name, value in again["state_dict"].items())
    assert "the best raw weights (epoch 1, top-1 99.00 %) are not in" in caplog.text


def test_a_checkpoint_alone_can_be_resumed(tmp_path):
    """Moved without its run folder, so without best weights."""
    old = half(tmp_path / "a")
    (tmp_path / "b").mkdir()
    moved = shutil.copy(old, tmp_path / "b")
    train(short_run(tmp_path, f"resume={moved}", "optim.lr=0", "optim.min_lr=0", epochs=2))
    assert (tmp_path / "b" / "best_raw.pt").exists()


@pytest.mark.parametrize("lost", [("metrics.jsonl", "summary.json", "predictions.png"), ("predictions.png",)])
def test_a_run_stopped_after_its_last_checkpoint_is_completed(tmp_path, lost):
    half(tmp_path / "a")
    before = records(tmp_path / "a"), json.loads((tmp_path / "a" / "summary.json").read_text())
    for name in lost:
        (tmp_path / "a" / name).unlink()
    train(short_run(tmp_path, "name=a", "resume=auto", epochs=2))
    assert records(tmp_path / "a") == before[0][-len(records(tmp_path / "a")) :]
    assert json.loads((tmp_path / "a" / "summary.json").read_text()) == before[1]
    assert {"curves.png", "predictions.png"} <= {path.name for path in (tmp_path / "a").iterdir()}
    with pytest.raises(UserError, match="2 epochs are done already"):
        train(short_run(tmp_path, "name=a", "resume=auto", epochs=2))


def test_a_moving_average_that_is_switched_off_was_the_best(tmp_path):
    half(tmp_path / "a", "engine.ema_decay=0.5", "engine.ema_batch=16")
    newest = update_checkpoints(tmp_path / "a")[0]
    state = load_checkpoint(newest)
    save_checkpoint({**state, "best": state["best"] | {"ema": {"epoch": 1, "top1": 100.0}}}, newest)
    ema = load_checkpoint(tmp_path / "a" / "best_ema.pt")
    save_checkpoint({**ema, "epoch": 1}, tmp_path / "a" / "best_ema.pt")
    train(short_run(tmp_path, f"resume={tmp_path / 'a'}", epochs=3))


def test_pictures_that_cannot_be_written_stop_nothing(tmp_path, monkeypatch, caplog):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tool, "plot_curves", full)
    train(short_run(tmp_path, "name=a", epochs=2))
    assert len(records(tmp_path / "a")) == 2 and "pictures of this epoch are lost" in caplog.text
    assert "pictures are lost (" in caplog.text and (tmp_path / "a" / "summary.json").exists()
