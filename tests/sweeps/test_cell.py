"""What makes two cells the same, what is left of each, and what stops a sweep before its first."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from tests.sweeps.commands import TINY
from tests.toy import CONFIGS
from vit3.arguments import check_arguments
from vit3.config import TrainConfig
from vit3.engine.update import NotFinite
from vit3.errors import Interrupted, UserError
from vit3.sweeps import launch as launching
from vit3.sweeps.cell import CellFolder, compose_cell
from vit3.sweeps.code import code_version
from vit3.sweeps.job import STOPPED, run_job
from vit3.sweeps.launch import Launch, stop_file, sweep_name
from vit3.sweeps.process import compute_apart
from vit3.sweeps.sweep import Sweep
from vit3.sweeps.work import ELSEWHERE, compute


def cell_of(*overrides: str, swept=()):
    return compose_cell(check_arguments(list(overrides), TrainConfig, CONFIGS), swept, TrainConfig, CONFIGS)[0]


def launch(*arguments: str) -> Launch:
    return Launch(check_arguments(["-m", *arguments], TrainConfig, CONFIGS)[1:], arguments, TrainConfig, CONFIGS)


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    """No server of processes, and no trace of a launch in the environment of other tests."""
    monkeypatch.setattr(launching, "start_server", lambda: None)
    monkeypatch.setenv(launching._LAUNCH, "nobody")


@pytest.mark.parametrize(
    "other", ["output=x", "name=x", "logger=tensorboard", "data.workers=3", "engine.threads=2", "engine.keep_last=5"]
)
def test_what_changes_no_number_is_the_same_cell(other):
    assert cell_of(other).id == cell_of().id


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (["inner.lr=2"], ["inner.lr=2.0"]),
        (["optim.lr=0.001"], ["optim.lr=1e-3"]),
        (["engine.seed=0", "data.mean=[0]"], ["data.mean=[0.0]"]),
        (["inner.lr=2", "optim.lr=1"], ["optim.lr=1", "inner.lr=2"]),
        (["recipe=ablation_digits", "inner.lr=2"], ["inner.lr=2", "recipe=ablation_digits"]),
        (["recipe=null"], []),
    ],
)
def test_other_words_for_the_same_run_are_the_same_cell(one, other):
    assert cell_of(*one).id == cell_of(*other).id


@pytest.mark.parametrize(
    "other", ["engine.seed=1", "inner.lr=2", "mixer.backend=reference", "data.root=x", "engine.epochs=3", "inner=mlp"]
)
def test_what_may_change_a_number_is_another_cell(other):
    assert cell_of(other).id != cell_of().id


def test_code_that_decides_numbers_decides_cells(tmp_path):
    """Comments, docstrings and other rooms do not."""
    for name in ("seeding.py", "config/a.py", "generation/evaluate.py", "ops/a.py", "analysis/b.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('"""Doc."""\n\ndef f():\n    """Doc."""\n    return 1\n')

    def version():
        code_version.cache_clear()
        return code_version(tmp_path)

    first = version()
    (tmp_path / "ops" / "a.py").write_text('"""Other."""\n\n\ndef f():\n    # why\n    return 1\n')
    (tmp_path / "analysis" / "b.py").write_text("x = 1\n")
    assert version() == first
    (tmp_path / "ops" / "a.py").write_text("def f():\n    return -1\n")
    assert version() != first
    code_version.cache_clear()


def test_labels_of_a_plain_grid():
    swept = ("inner.loss", "inner.lr", "engine.seed")
    cell = cell_of("inner.loss=mse", "inner.lr=2", "engine.seed=3", swept=swept)
    assert (cell.row, cell.column, cell.seed) == ("inner.loss=mse", "inner.lr=2", 3)
    cell = cell_of("inner.loss=mse", "inner.lr=2", "optim.lr=1", swept=(*swept, "optim.lr"))
    assert (cell.row, cell.column) == ("inner.loss=mse inner.lr=2 optim.lr=1", None)


def raising(error):
    def train(cfg):
        raise error

    return train


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (NotFinite("the loss was not finite"), "diverged", "the loss was not finite"),
        (UserError("data.root=x is missing"), "failed", "data.root=x is missing"),
        (RuntimeError("shapes\ndiffer"), "failed", "RuntimeError: shapes"),
        (Interrupted("stopped by SIGTERM", 75), "killed", "stopped by SIGTERM"),
        (SystemExit(3), "killed", "stopped at once; what it had saved is kept"),
    ],
)
def test_what_became_of_a_cell_is_on_record(tmp_path, error, status, reason):
    cell, cfg = compose_cell((), (), TrainConfig, CONFIGS)
    folder = CellFolder.of(tmp_path, cell.id)
    if status == "killed":
        with pytest.raises(type(error)):
            compute(raising(error), cfg, cell, folder, None)
    else:
        assert compute(raising(error), cfg, cell, folder, None) == status
    record = folder.state()
    assert (record["status"], record["reason"]) == (status, reason) and record["seed"] == 0
    assert not folder.held()
    if status != "diverged":
        folder.note(seconds=50.0)
    again = []
    assert compute(again.append, cfg, cell, folder, None) == ("diverged" if status == "diverged" else "failed")
    assert len(again) == (0 if status == "diverged" else 1)  # a result is not tried again, all else is
    if again:
        assert folder.record()["seconds"] >= 50.0  # of all its starts
        assert (again[0].output, again[0].name, again[0].resume) == (str(tmp_path / "cells"), cell.id, "auto")


@pytest.mark.parametrize(
    ("last", "status"),
    [
        ({"epoch": 0, "train/loss": 1.0, "val/loss": 2.0}, "finished"),
        ({"epoch": 0, "train/loss": 1.0, "val/loss": float("nan")}, "diverged"),
        ({"epoch": 0, "val/loss": 2.0}, "diverged"),  # no update was finite
    ],
)
def test_a_loss_that_is_not_finite_at_the_end_is_divergence(tmp_path, last, status):
    cell, cfg = compose_cell((), (), TrainConfig, CONFIGS)
    folder = CellFolder.of(tmp_path, cell.id)
    assert compute(lambda cfg: folder.write_json("summary.json", {"last": last}), cfg, cell, folder, None) == status


def test_a_run_that_was_whole_before_its_record_was_lost_is_finished(tmp_path):
    """Trained to its end and killed before it could say so: training again is refused, for nothing is left to do."""
    cell, cfg = compose_cell(("engine.epochs=2",), (), TrainConfig, CONFIGS)
    folder = CellFolder.of(tmp_path, cell.id)
    refuse = raising(UserError("2 epochs are done already"))
    for epoch, status in ((0, "failed"), (1, "finished")):
        folder.path.mkdir(parents=True, exist_ok=True)
        folder.write_json("summary.json", {"last": {"epoch": epoch, "train/loss": 1.0, "val/loss": 2.0}})
        assert compute(refuse, cfg, cell, folder, None) == status


@pytest.mark.parametrize("content", ["", "null", "[]", "{}", '{"status": "runn', '{"status": 3}'])
def test_a_damaged_record_is_none(tmp_path, content):
    folder = CellFolder(tmp_path)
    (folder / "cell.json").write_text(content)
    (folder / "summary.json").write_text(content)
    assert folder.state() == {"status": "missing"} and folder.summary() in ({}, {"status": 3})


def test_a_finish_without_its_numbers_is_none(tmp_path):
    folder = CellFolder(tmp_path)
    folder.write_json("cell.json", {"status": "finished"})
    assert folder.record()["status"] == "missing"
    folder.write_json("summary.json", {"last": {"epoch": 0}})
    assert folder.record()["status"] == "finished"


def test_a_stop_while_a_cell_was_starting_is_heeded(tmp_path):
    """Who stops a command looks for running cells; one that notes itself just after that looks for the stop."""
    cell, cfg = compose_cell((), (), TrainConfig, CONFIGS)
    folder = CellFolder.of(tmp_path, cell.id)
    stop, trained = tmp_path / "stop", []
    with pytest.raises(Interrupted, match="stopped before its first step"):
        stop.touch()
        compute(trained.append, cfg, cell, folder, "here-1", stop)
    assert not trained and folder.state()["status"] == "killed"
    stop.unlink()
    compute(trained.append, cfg, cell, folder, "here-1", stop)
    assert len(trained) == 1


def test_a_full_disk_costs_a_record_and_nothing_else(tmp_path, monkeypatch, caplog):
    from vit3.sweeps import process

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    folder = CellFolder.of(tmp_path, "x")
    folder.path.mkdir(parents=True)
    monkeypatch.setattr(CellFolder, "note", full)
    process._note_death(folder, 1, 7)
    assert "cell.json cannot be written ([Errno 28] No space left on device); free space" in caplog.text
    monkeypatch.setattr("pathlib.Path.mkdir", full)
    with pytest.raises(UserError, match="cannot be written .* free space, and give the command again"):
        compute_apart(None, None, None, folder, None)


def test_a_cell_that_another_process_computes_is_left_to_it(tmp_path):
    cell, cfg = compose_cell((), (), TrainConfig, CONFIGS)
    folder = CellFolder.of(tmp_path, cell.id)
    folder.path.mkdir(parents=True)
    with folder.lock().acquire():
        folder.note(status="running")
        assert compute(raising(AssertionError()), cfg, cell, folder, None) == ELSEWHERE
        assert folder.state()["status"] == "running"
    assert folder.state()["status"] == "killed"  # its process is gone


def _exit(cfg):
    os._exit(7)


def _wait(cfg):
    signal.signal(signal.SIGTERM, lambda *args: os._exit(8))
    time.sleep(120)


def _worker(folder, launch_name):
    """What a worker of joblib's launcher does: jobs one after the other, in a process that is not the command's."""
    os.environ["VIT3_LAUNCH"] = launch_name
    from vit3.sweeps import process

    process._METHOD = "fork"
    overrides = [*check_arguments([*TINY, f"output={folder}"], TrainConfig, CONFIGS), "name=w"]
    first = run_job(_exit, overrides, TrainConfig, CONFIGS, in_place=False, worker=True)
    ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    sweep = Sweep.named(folder, "w")
    stop_file(sweep, launch_name).touch()
    second = run_job(_exit, overrides, TrainConfig, CONFIGS, in_place=False, worker=True)
    return first, ignored, second


def test_a_worker_of_a_launcher_survives_its_cells(tmp_path):
    """In joblib's own worker processes (loky), as its launcher has them."""
    joblib = pytest.importorskip("joblib", reason="needs joblib, which comes with scikit-learn")
    [result] = joblib.Parallel(n_jobs=2, backend="loky")([joblib.delayed(_worker)(tmp_path, "here-1")])
    assert result == ("killed", True, STOPPED)
    [cell] = Sweep.named(tmp_path, "w").cells()
    assert "was ended with status 7" in CellFolder.of(tmp_path, cell.id).record()["reason"]


def _orphan(folder):
    from vit3.sweeps import process

    process._METHOD = "fork"
    cell, cfg = compose_cell((), (), TrainConfig, CONFIGS)
    compute_apart(_wait, cfg, cell, CellFolder(folder), None)


def test_a_cell_ends_with_the_command_that_started_it(tmp_path):
    folder = CellFolder(tmp_path / "cell")
    command = multiprocessing.get_context("forkserver").Process(target=_orphan, args=(folder.path,))
    command.start()
    deadline = time.monotonic() + 60
    while not (folder.record()["status"] == "running" and folder.held()):
        assert time.monotonic() < deadline and command.is_alive()
        time.sleep(0.05)
    command.kill()
    while folder.held():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert folder.state()["status"] == "killed"


def test_a_mistake_anywhere_stops_the_sweep_before_its_first_cell(tmp_path):
    with pytest.raises(UserError, match="inner.lr=-1.0 is not allowed"):
        launch(f"output={tmp_path}", "inner.lr=1,-1", "engine.seed=0,1")
    with pytest.raises(UserError, match="inner.lrr is no key of this program; did you mean inner.lr?"):
        launch(f"output={tmp_path}", "inner.lrr=1,2")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [
        ("resume=runs/x", "every cell of a sweep goes on where it stopped"),
        ("print_groups=true", "leave -m out"),
        ("output=a,b", "output takes several values here"),
        ("name=a,b", "must be one folder name, that of the sweep"),
        ("name='x-${engine.seed}'", "must be one folder name, that of the sweep"),
    ],
)
def test_what_a_sweep_cannot_mean(argument, sentence):
    with pytest.raises(UserError, match=sentence):
        launch(argument, "engine.seed=0,1")


def test_torchrun_cannot_start_a_sweep(monkeypatch):
    for name, value in dict(RANK="0", WORLD_SIZE="1").items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        UserError, match="-m inside torchrun or a step of several tasks would start the sweep once in each"
    ):
        launch("engine.seed=0,1")


def test_a_sweep_lists_each_place_once_and_shares_cells(tmp_path):
    launch(f"output={tmp_path}", "name=a", "inner.lr=1,2", "engine.seed=0,1")
    launch(f"output={tmp_path}", "name=a", "inner.lr=2,4", "engine.seed=0,1")
    launch(f"output={tmp_path}", "name=b", "inner.lr=1,3", "engine.seed=0")
    a, b = (Sweep.named(tmp_path, name).cells() for name in "ab")
    assert [(c.row, c.seed) for c in a] == [(f"inner.lr={lr}", seed) for lr in (1, 2, 4) for seed in (0, 1)]
    assert b[0].id == a[0].id and b[1].id not in {c.id for c in a}
    assert json.loads((tmp_path / "sweeps" / "a" / "sweep.json").read_text())["data"] == "digits"


def test_the_rows_of_a_sweep_keep_their_labels_whatever_its_name(tmp_path, monkeypatch):
    """A job finds its cell in the list, spaces and all; else it would list it again as another."""
    done = []
    monkeypatch.setattr("vit3.sweeps.job.compute_apart", lambda *args: done.append(args[2]) or "finished")
    monkeypatch.setattr("vit3.sweeps.job._say", lambda *args: None)
    started = launch(f"output={tmp_path / 'my runs'}", "name=my sweep", "inner.lr=1,2")
    for cell in started.cells:
        run_job(_exit, cell.overrides, TrainConfig, CONFIGS, in_place=False, worker=False)
    assert [cell.row for cell in done] == ["inner.lr=1", "inner.lr=2"] == [cell.row for cell in started.cells]
    assert [path.name for path in (tmp_path / "my runs" / "sweeps").iterdir()] == ["my sweep"]


def test_a_sweep_is_found_from_anywhere(tmp_path, monkeypatch):
    [cell] = launch(f"output={tmp_path}", "name=a", "engine.seed=0").cells
    for cwd, path in ((".", "sweeps/a"), ("sweeps", "a"), ("sweeps/a", "."), ("cells", "../sweeps/a/")):
        (tmp_path / "cells").mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / cwd)
        sweep = Sweep(Path(path))
        assert sweep.folder(cell).path.resolve() == tmp_path / "cells" / cell.id and sweep.name == "a"


@pytest.mark.parametrize("content", ['{"cells": [', "[]", '{"cells": [{"id": "x"}]}', "{}"])
def test_a_damaged_list_is_said_in_one_sentence(tmp_path, content):
    (tmp_path / "sweep.json").write_text(content)
    for use in (Sweep(tmp_path).cells, Sweep(tmp_path).content, lambda: Sweep(tmp_path).extend([])):
        with pytest.raises(UserError, match="sweep.json is damaged; remove it"):
            use()


def test_the_name_of_a_sweep():
    assert sweep_name([r"name=my\ sweep"]) == sweep_name(["name=my sweep"]) == sweep_name(["++name='my sweep'"])
    assert sweep_name([r"row=/a\ b/my\ own.yaml/x,/a\ b/my\ own.yaml/y"]) == "my own" == sweep_name(["name='my own'"])
    assert sweep_name(["name=x", "row=table1_loss/mse"]) == "x"
    assert sweep_name(["row=table1_loss/mse,table1_loss/dot"]) == "table1_loss"
    assert sweep_name(["row=/a/b/mine.yaml/mse"]) == "mine" and sweep_name(["inner.lr=1"]) == "sweep"
