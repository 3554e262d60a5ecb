"""A run that is killed anywhere and started again is the run that was not: to the last bit."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from vit3.tools import train as tool

from tests.processes import run_processes
from tests.toy import compose_config
from vit3.data import digits
from vit3.engine import checkpoint
from vit3.engine.checkpoint import load_checkpoint, update_checkpoints
from vit3.engine.signals import REQUEUE_CODE
from vit3.engine.update import Updater
from vit3.errors import Interrupted

UPDATES, PASSES = 5, 2  # of an epoch, of an update


def configuration(output: Path, name: str, *overrides: str):
    """Two epochs with everything that draws or remembers: mixing, erasing, loader processes, average, MESA, passes."""
    return compose_config(
        f"output={output}", f"name={name}", "resume=auto", "engine.device=cpu", "engine.epochs=2", "engine.threads=1",
        "engine.batch_size=16", "engine.max_per_process=8" if "x2" not in name else "engine.max_per_process=4",
        f"engine.steps_per_epoch={UPDATES}", "engine.ema_decay=0.9", "engine.ema_batch=16", "engine.save_minutes=0.005",
        "augment=deit", "augment.auto_augment=null", "augment.erase_prob=0.5", "data.workers=2", "task=mesa",
        "task.start=0.5", "optim.warmup_epochs=0", "logger.every=1", "model=h_vit3_tiny", "++model.kwargs.dims=[8,16]",
        "++model.kwargs.depths=[1,1]", "++model.kwargs.num_heads=[2,2]", "data.img_size=[16,16]",
        "model.drop_path_rate=0.2", *overrides,
    )  # fmt: skip


def run(output: Path, name: str, die: str | None = None, at: int = 0):
    """Train; the last process kills itself at forward pass ``at``, or is asked to stop, or dies in a save."""
    passes, original, save = [], Updater.run, torch.save
    last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1

    def counted(self, *args):
        passes.append(1)
        if len(passes) == at and last and die in ("SIGKILL", "SIGTERM", "SIGUSR1", "SIGINT"):
            loaders = [] if die == "SIGKILL" else multiprocessing.active_children()
            pids = [str(process.pid) for process in (*loaders, multiprocessing.current_process())]
            subprocess.run(["kill", f"-{die.removeprefix('SIG')}", *pids])  # SLURM's signals reach loader processes too
        return original(self, *args)

    def half_written(state, file):
        save(state, file)
        if len(passes) >= at:
            file.truncate(file.tell() // 2)
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)

    Updater.run = counted
    tool.plot_curves = tool.plot_predictions = lambda *args: None  # pictures take longer than the training
    digits.TEST_FRACTION = 0.05
    if die == "save":
        checkpoint.torch.save = half_written
    try:
        tool.train(configuration(output, name))
    except Interrupted as stop:
        return stop.code
    return 0


def content(folder: Path):
    state = load_checkpoint(folder)
    lines = [
        {key: value for key, value in json.loads(line).items() if key not in ("seconds", "images_per_s")}
        for name in ("metrics.jsonl", "steps.jsonl")
        for line in (folder / name).read_text().splitlines()
    ]
    return state, lines


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_killed_at_three_moments(tmp_path, world_size):
    """In the middle of the first epoch, inside a save in the second, and right after that, between two passes."""
    name = f"x{world_size}"
    (tmp_path / "straight").mkdir()
    run_processes(run, world_size, tmp_path / "straight", name)
    for die, at in (("SIGKILL", 6), ("save", 8), ("SIGKILL", 3)):
        with pytest.raises(AssertionError, match="died|Connection|closed|reset|failed"):
            run_processes(run, world_size, tmp_path, name, die, at)
    run_processes(run, world_size, tmp_path, name)
    assert len(update_checkpoints(tmp_path / name)) == 2
    assert {path.name for path in (tmp_path / name).glob("*.pt")} == {"best_raw.pt", "best_ema.pt"}
    (state, lines), (wanted, straight) = content(tmp_path / name), content(tmp_path / "straight" / name)
    assert lines == straight and len(lines) == 2 + 2 * UPDATES
    assert any("train/mesa" in line for line in lines)
    for kind in ("state_dict", "state_dict_ema"):
        assert all(torch.equal(state[kind][key], wanted[kind][key]) for key in wanted[kind])
    for moments, same in zip(wanted["optimizer"]["state"].values(), state["optimizer"]["state"].values()):
        assert all(torch.equal(value, same[key]) for key, value in moments.items())
    for key in ("updates", "bad", "scale_skips", "epoch", "position", "best", "scaler"):
        assert state[key] == wanted[key], key
    for best in ("best_raw.pt", "best_ema.pt"):
        a, b = (load_checkpoint(folder / name / best) for folder in (tmp_path, tmp_path / "straight"))
        key = "state_dict" if "state_dict" in a else "state_dict_ema"
        assert all(torch.equal(a[key][n], b[key][n]) for n in a[key])


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", REQUEUE_CODE), ("SIGUSR1", REQUEUE_CODE), ("SIGINT", 130)])
def test_a_signal_saves_and_leaves_with_a_code(tmp_path, name, code):
    assert run_processes(run, 1, tmp_path, "r", name, 7) == [code]
    state = load_checkpoint(tmp_path / "r")
    assert (state["updates"], state["epoch"], state["position"]) == (4, 0, 64)


def test_other_processes_go_on_with_the_images_that_are_left(tmp_path):
    """Preempted on two processes, resumed on one: announced; the same updates in number and images."""
    assert run_processes(run, 2, tmp_path, "x2", "SIGTERM", 5) == [REQUEUE_CODE] * 2
    before = load_checkpoint(tmp_path / "x2")
    assert before["world_size"] == 2 and before["position"] == 48
    assert run_processes(run, 1, tmp_path, "x2") == [0]
    state, lines = content(tmp_path / "x2")
    assert state["updates"] == 2 * UPDATES and state["world_size"] == 1
    assert [line["updates"] for line in lines[2:]] == list(range(1, 2 * UPDATES + 1))
