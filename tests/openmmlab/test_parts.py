"""Parts of the commands alone: files read safely, batch 1, absent classes, names of numbers."""

from __future__ import annotations

import logging
import math
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

pytest.importorskip("mmengine", reason="needs the extra mm")
pytest.importorskip("mmseg", reason="needs the extra mm")

from mmengine.hooks import EMAHook  # noqa: E402
from mmengine.logging import HistoryBuffer, MessageHub  # noqa: E402
from mmengine.runner.checkpoint import _load_checkpoint  # noqa: E402

from tests.helpers import same_dict  # noqa: E402
from vit3.errors import UserError  # noqa: E402
from vit3.models.weights import write_tensors  # noqa: E402
from vit3.openmmlab.batch_one import let_single_values_pass  # noqa: E402
from vit3.openmmlab.checkpoints import (  # noqa: E402
    RunCheckpoints,
    checkpoint_to_resume,
    checkpoint_to_use,
    last_checkpoint,
)
from vit3.openmmlab.files import download_safely, load_safely, use_safe_loader  # noqa: E402
from vit3.openmmlab.loops import EpochLoop  # noqa: E402
from vit3.openmmlab.metrics import PresentIoUMetric  # noqa: E402
from vit3.openmmlab.predict import _map_names  # noqa: E402
from vit3.openmmlab.runner import StartWeights, naming_parts  # noqa: E402
from vit3.openmmlab.runs import RunFiles, loss_name, our_scores  # noqa: E402


class Harmful:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_code_in_a_file_is_not_run(tmp_path):
    torch.save({"state_dict": {"w": torch.ones(2)}, "meta": Harmful(tmp_path / "done")}, tmp_path / "file.pth")
    use_safe_loader()
    for load in (load_safely, _load_checkpoint):  # the second is what MMEngine calls
        assert torch.equal(load(str(tmp_path / "file.pth"))["state_dict"]["w"], torch.ones(2))
    assert not (tmp_path / "done").exists()
    torch.load(tmp_path / "file.pth", weights_only=False)
    assert (tmp_path / "done").exists()  # so the file was harmful


@pytest.mark.parametrize("kind, name", [(HistoryBuffer, "__init__"), (np.ndarray, "tobytes")])
def test_a_file_that_asks_for_attributes(tmp_path, kind, name):
    """``getattr`` is needed for MMEngine's buffers, and gives nothing else."""

    class Asking:
        def __reduce__(self):
            return getattr, (kind, name)

    torch.save({"state_dict": {"w": torch.ones(2)}, "meta": Asking()}, tmp_path / "file.pth")
    assert not callable(load_safely(str(tmp_path / "file.pth"))["meta"])


def test_what_mmengine_saves_comes_back(tmp_path):
    hub = MessageHub("a run for this test")
    hub.update_scalar("train/loss", torch.tensor(2.5))
    hub.update_info("best_score", np.float64(0.25))
    torch.save({"message_hub": hub.state_dict(), "state_dict": {"w": torch.ones(1)}}, tmp_path / "run.pth")
    other = MessageHub("another run for this test")
    other.load_state_dict(load_safely(str(tmp_path / "run.pth"))["message_hub"])
    assert other.get_scalar("train/loss").mean() == 2.5 and other.get_info("best_score") == 0.25


def test_safetensors(tmp_path, monkeypatch):
    write_tensors(tmp_path / "w.safetensors", {"w": torch.arange(3.0)})
    assert same_dict(load_safely(str(tmp_path / "w.safetensors"))["state_dict"], {"w": torch.arange(3.0)})
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    address = (tmp_path / "w.safetensors").as_uri()
    for _ in range(2):
        assert same_dict(download_safely(address)["state_dict"], {"w": torch.arange(3.0)})
        (tmp_path / "w.safetensors").unlink(missing_ok=True)  # the second time it is there already
    with pytest.raises(FileNotFoundError):
        load_safely(str(tmp_path / "none.pth"))


def test_one_value_of_each_channel_passes_a_batch_norm():
    model = nn.Sequential(nn.Conv2d(2, 4, 1), nn.BatchNorm2d(4))
    single, several = torch.randn(1, 2, 1, 1), torch.randn(1, 2, 3, 1)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        model(single)
    let_single_values_pass(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    y = model(single)
    assert torch.equal(y, model.eval()(single)) and not model[1].training
    assert same_dict(before, model.state_dict())
    model.train()
    model(single).square().sum().backward()
    assert model[1].training and all(parameter.grad.abs().sum() > 0 for parameter in model.parameters())
    assert model(several).mean((0, 2, 3)).abs().max() < 1e-6  # statistics of the batch, as ever
    assert model[1].num_batches_tracked == before["1.num_batches_tracked"] + 1


def test_a_class_that_is_predicted_and_not_there_is_undefined():
    metric = PresentIoUMetric()
    metric.dataset_meta = dict(classes=("a", "b", "c"))
    true = torch.tensor([[0, 0, 0, 1, 1, 255]])
    predicted = torch.tensor([[0, 0, 2, 1, 0, 2]])
    metric.results.append(metric.intersect_and_union(predicted, true, 3, 255))
    scores = metric.compute_metrics(metric.results)
    assert metric.absent == ["c"] and metric.per_class == {"a": 0.5, "b": 0.5}
    assert scores["mIoU"] == 50.0  # mmseg says 33.33: one stray pixel makes the IoU of c zero
    assert scores["mAcc"] == pytest.approx(100 * (2 / 3 + 1 / 2) / 2, abs=0.01)
    assert scores["aAcc"] == pytest.approx(60.0)


def test_names_of_numbers():
    found = our_scores({"coco/bbox_mAP": 0.25, "coco/segm_mAP_50": 0.5, "coco/bbox_mAP_l": -1.0, "mIoU": 41.5,
                        "aAcc": np.float32(80.0), "mAcc": math.nan, "text": "no number"})  # fmt: skip
    assert found == {"val/bbox_AP": 0.25, "val/segm_AP50": 0.5, "val/bbox_APl": None, "val/mIoU": 0.415,
                     "val/aAcc": 0.8, "val/mAcc": None}  # fmt: skip
    assert [loss_name(name) for name in ("loss", "loss_rpn_cls", "decode.loss_ce", "s0.loss_cls")] == [
        "train/loss", "train/loss_rpn_cls", "train/loss_decode_ce", "train/loss_s0_cls",
    ]  # fmt: skip


def test_numbers_after_the_checkpoint_are_written_again(tmp_path):
    run = RunFiles(tmp_path)
    for updates in (2, 4, 6):
        run.append("metrics.jsonl", {"epoch": 0, "updates": updates})
        run.append("steps.jsonl", {"updates": updates})
    assert run.rewind_to(4) == [{"epoch": 0, "updates": 2}, {"epoch": 0, "updates": 4}]
    assert len((tmp_path / "steps.jsonl").read_text().splitlines()) == 2


def test_which_checkpoint_is_meant(tmp_path):
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    assert last_checkpoint(run) is None and checkpoint_to_resume("auto", str(tmp_path), "run") is None
    for call, words in (
        (lambda: checkpoint_to_use(None), "checkpoint has no value yet"),
        (lambda: checkpoint_to_use(str(run)), "holds no checkpoint"),
        (lambda: checkpoint_to_use("none.pth"), "no such file or run folder"),
        (lambda: checkpoint_to_resume("auto", "runs", None), "needs name=NAME"),
        (lambda: checkpoint_to_resume(str(run), "runs", None), "no such checkpoint"),
    ):
        with pytest.raises(UserError, match=words):
            call()
    torch.save({}, run / "checkpoints" / "iter_2.pth")
    (run / "last_checkpoint").write_text("/where/it/was/before/checkpoints/iter_2.pth")  # the folder was moved
    assert checkpoint_to_use(str(run)) == checkpoint_to_resume("auto", str(tmp_path), "run") == last_checkpoint(run)
    assert last_checkpoint(run) == run / "checkpoints" / "iter_2.pth"
    (run / "checkpoints" / "best_mIoU_iter_2.pth").touch()
    assert checkpoint_to_use(str(run)).name == "best_mIoU_iter_2.pth"


def test_a_damaged_checkpoint_is_passed_over(tmp_path, caplog):
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    for number in (2, 4):
        torch.save({"w": torch.ones(1000)}, folder / f"iter_{number}.pth")
        (folder.parent / "last_checkpoint").write_text(str(folder / f"iter_{number}.pth"))
    assert last_checkpoint(folder.parent) == folder / "iter_4.pth"
    content = (folder / "iter_4.pth").read_bytes()
    (folder / "iter_4.pth").write_bytes(content[: len(content) // 2])
    assert last_checkpoint(folder.parent) == folder / "iter_2.pth" and "iter_4.pth is damaged" in caplog.text
    (folder / "iter_2.pth").write_bytes(b"")
    with pytest.raises(UserError, match="holds no whole checkpoint"):
        last_checkpoint(folder.parent)


def test_a_checkpoint_outside_of_a_run_folder_is_not_gone_on_from(tmp_path):
    """Its folder's parent would become the run folder."""
    torch.save({}, tmp_path / "epoch_12.pth")
    with pytest.raises(UserError, match="load_from=.* starts a new run"):
        checkpoint_to_resume(str(tmp_path / "epoch_12.pth"), "runs", None)


def test_a_try_that_came_to_nothing_leaves_no_config(tmp_path):
    for text in ("a = 1", "a = 2"):
        RunFiles.create(str(tmp_path), "run", "run", again=True).write_start(text, [])
    assert (tmp_path / "run" / "config.py").read_text() == "a = 2"


def test_an_evaluation_that_is_cut_off_saves_the_weights_where_they_belong(tmp_path):
    """MMEngine's EMAHook puts the average in the place of the weights while it evaluates."""
    runner = SimpleNamespace(model=nn.Linear(1, 1, bias=False), epoch=0, iter=3)
    average = EMAHook()
    average.before_run(runner)
    runner.hooks = [average]
    nn.init.constant_(runner.model.weight, 1.0)
    nn.init.constant_(average.ema_model.module.weight, 5.0)
    average.before_val_epoch(runner)
    saved, checkpoints = [], RunCheckpoints()
    checkpoints.out_dir, checkpoints.filename_tmpl = str(tmp_path), "{}.pth"
    checkpoints._save_checkpoint_with_step = lambda *_, **__: saved.append(runner.model.weight.item())
    checkpoints.save_now(runner, within_update=False)
    assert saved == [1.0]


def test_a_run_that_stopped_in_the_last_update_of_an_epoch_does_not_repeat_it():
    made, called = [], []
    loop = EpochLoop.__new__(EpochLoop)
    loop._runner = SimpleNamespace(call_hook=called.append, model=nn.Identity())
    loop.dataloader, loop._epoch = DataLoader(range(4), batch_size=1), 1
    loop.run_iter = lambda index, batch: made.append(index)
    for done in (7, 8):
        loop._iter, loop._epoch = done, 1
        loop.run_epoch()
        assert loop._epoch == 2 and called[-1] == "after_train_epoch"
    assert made == [3]


def test_start_weights_that_do_not_fit_are_an_error(caplog):
    model = nn.ModuleDict(dict(backbone=nn.Linear(2, 2), bbox_head=nn.Linear(2, 3)))
    model.backbone, runner = model["backbone"], SimpleNamespace(model=model)
    hook = StartWeights("file.pth")
    with caplog.at_level(logging.INFO):
        other_head = {"module.bbox_head.weight": torch.ones(9, 2)}
        backbone = {f"module.backbone.{name}": value for name, value in model.backbone.state_dict().items()}
        hook.after_load_checkpoint(runner, {"state_dict": backbone | other_head})
    assert "load_from    file.pth: matched 2 tensors" in caplog.text and "reshaped 1" in caplog.text
    for tensors in ({"a.b": torch.ones(3)}, other_head, model.backbone.state_dict()):
        with pytest.raises(UserError, match="load_from=file.pth: its backbone fits 0.0 %"):
            hook.after_load_checkpoint(runner, {"state_dict": tensors})


def test_what_a_part_refuses_is_one_sentence():
    for error in (ValueError("arch='tinny' is unknown"), TypeError("arch='tinny' is unknown")):
        with pytest.raises(UserError, match="the config does not work: arch='tinny' is unknown"), naming_parts():
            raise error


def test_class_maps_are_called_as_their_images():
    """Folders are kept, and two images that differ in their endings alone do not get one name."""
    names = lambda *files: [str(n) for n in _map_names([Path(f) for f in files]).values()]  # noqa: E731
    assert names("in/a.jpg") == ["a.png"]
    assert names("in/x/a.jpg", "in/y/a.jpg") == ["x/a.png", "y/a.png"]
    assert names("in/a.jpg", "in/a.png") == ["a.jpg.png", "a.png.png"]
