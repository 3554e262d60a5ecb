"""Sharded runs from the configuration to the files: as DDP's, stopped and gone on with by any processes."""

from __future__ import annotations

import json
import logging
import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from vit3.tools import train as tool
from vit3.tools.eval import run_eval

from tests.engine.test_combinations import MODELS
from tests.processes import run_processes
from tests.toy import compose_config
from vit3.data import digits
from vit3.engine.checkpoint import load_checkpoint, update_checkpoints
from vit3.engine.signals import REQUEUE_CODE
from vit3.engine.update import Updater
from vit3.errors import Interrupted


def run(output: Path, parallel: str, name: str, epochs: int, stop_at: int = 0, *overrides: str) -> int:
    """Epochs of three updates, or less: the last process is asked to stop at update ``stop_at``."""
    updates, original = [], Updater.run
    last = int(os.environ.get("RANK", 0)) == int(os.environ.get("WORLD_SIZE", 1)) - 1

    def counted(self, *args):
        updates.append(1)
        if len(updates) == stop_at and last:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, *args)

    Updater.run = counted
    cfg = compose_config(
        f"output={output}", f"name={name}", "resume=auto", f"engine.parallel={parallel}", f"engine.epochs={epochs}",
        "engine.steps_per_epoch=3", "engine.batch_size=16", "engine.device=cpu", "engine.threads=1",
        "engine.ema_decay=0.5", "engine.ema_batch=16", "engine.ema_warmup=false", "task=mesa", "task.start=0.3",
        "optim.warmup_epochs=0", "optim.sched=constant", "optim.eps=1e-4", "logger.every=1", *MODELS["h_vit3_tiny"],
        *overrides,
    )  # fmt: skip
    try:
        tool.train(cfg)
    except Interrupted as stopped:
        return stopped.code
    finally:
        Updater.run = original
    return 0


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def same_run(folder: Path, other: Path) -> None:
    one, two = load_checkpoint(folder), load_checkpoint(other)
    for kind in ("state_dict", "state_dict_ema"):
        assert one[kind].keys() == two[kind].keys()
        for name, value in two[kind].items():
            torch.testing.assert_close(one[kind][name], value, rtol=1e-3, atol=1e-5)
    for mine, theirs in zip(lines(folder), lines(other), strict=True):
        for key in theirs.keys() - {"seconds", "images_per_s"}:
            assert mine[key] == pytest.approx(theirs[key], rel=1e-3), key


def score(checkpoint: Path, weights: str, caplog) -> str:
    caplog.clear()
    with caplog.at_level(logging.INFO):
        run_eval(compose_config(f"checkpoint={checkpoint}", "device=cpu", f"weights={weights}", root="eval"))
    return caplog.records[-1].getMessage()


def be_quick(patch=setattr):
    """Fewer test images and no curves."""
    patch(digits, "TEST_FRACTION", 0.05)
    patch(tool, "plot_curves", lambda *args: None)


def start_all(output: Path):
    """DDP; sharded; and sharded, told to stop in the middle of the second epoch, gone on with."""
    be_quick()
    assert run(output, "ddp", "ddp", 2) == run(output, "fsdp", "fsdp", 2) == 0
    assert run(output, "fsdp", "stopped", 2, 4, "engine.save_minutes=0") == REQUEUE_CODE
    state = load_checkpoint(output / "stopped")
    dist.barrier()
    assert run(output, "fsdp", "stopped", 2) == 0
    return [state[key] for key in ("epoch", "position", "updates")]


def go_on(output: Path):
    be_quick()
    assert run(output, "ddp", "fsdp", 4) == run(output, "fsdp", "fsdp", 5) == 0


def test_a_sharded_run_is_that_of_ddp_and_goes_on_anywhere(tmp_path, caplog, monkeypatch):
    be_quick(monkeypatch.setattr)
    assert run_processes(start_all, 2, tmp_path) == [[1, 16, 4]] * 2
    folder = tmp_path / "fsdp"
    same_run(folder, tmp_path / "ddp")
    same_run(tmp_path / "stopped", folder)
    assert "train/mesa" in lines(folder)[-1] and (folder / "predictions.png").exists()
    record = lines(folder)[-1]
    for weights, prefix in (("raw", "val"), ("ema", "val_ema")):
        assert f"top-1 {record[prefix + '/top1']:.2f} %" in score(update_checkpoints(folder)[0], weights, caplog)
    assert run(tmp_path, "ddp", "fsdp", 3) == 0  # alone
    run_processes(go_on, 2, tmp_path)
    assert [line["updates"] for line in lines(folder)] == [3, 6, 9, 12, 15]
    assert load_checkpoint(folder)["updates"] == 15
