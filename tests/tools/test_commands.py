"""The commands as a shell runs them: exit codes, one sentence, two processes."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time

import pytest
from vit3.tools import convert
from vit3.tools.eval import run_eval

from tests.helpers import ROOT
from tests.sweeps.commands import Command
from tests.toy import compose_config
from vit3.engine.checkpoint import update_checkpoints

SHORT = (
    "engine.epochs=1", "engine.steps_per_epoch=3", "engine.batch_size=16", "optim.warmup_epochs=0",
    "model.kwargs.depth=1", "engine.device=cpu",
)  # fmt: skip


def run(*command: str, cwd=ROOT, **environment: str) -> subprocess.CompletedProcess:
    clean = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return subprocess.run(
        [sys.executable, *command], cwd=cwd, capture_output=True, text=True, timeout=240, env={**clean, **environment}
    )


def bare_environment(home) -> dict[str, str]:
    """As ``env -i`` leaves it; and a key of the tracker, so that it looks for a server, which is not there."""
    (home / "home").mkdir()
    return {"PATH": os.environ["PATH"], "HOME": str(home / "home"), "WANDB_API_KEY": "0" * 40,
            "WANDB_BASE_URL": "http://127.0.0.1:9"}  # fmt: skip


def test_bare_shell_no_network_tracker_online(tmp_path):
    """R12: no variables but PATH and HOME, no GPU, no network, tracker set to online: 0 within a minute."""
    started = time.monotonic()
    result = subprocess.run(
        [
            sys.executable, str(ROOT / "tools" / "train.py"), *SHORT, f"output={tmp_path}", "name=r", "logger=wandb",
            "logger.wandb=online",
        ],
        cwd=tmp_path, capture_output=True, text=True, timeout=240, env=bare_environment(tmp_path),
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert time.monotonic() - started < 60
    assert json.loads((tmp_path / "r" / "metrics.jsonl").read_text())["updates"] == 3
    assert (tmp_path / "r" / "summary.json").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"r", "home"}  # nothing besides the run folder


def test_errors_are_one_sentence_and_a_code(tmp_path):
    result = run("tools/train.py", "optim.lrr=1")
    assert result.returncode == 2
    assert result.stderr.strip() == "error: optim.lrr is no key of this program; did you mean optim.lr?"
    code, said = Command(tmp_path, "data=folder", "data.root=/nowhere/at/all").end()  # composed first, unlike the other
    assert code == 2 and said.startswith("error: ") and said.count("\n") == 1


def test_convert_says_what_is_wrong(tmp_path, monkeypatch, capsys):
    (tmp_path / "x.pth").write_bytes(b"not a checkpoint")
    monkeypatch.setattr(sys, "argv", ["tools/convert.py", str(tmp_path / "x.pth"), str(tmp_path / "y.safetensors")])
    with pytest.raises(SystemExit) as end:
        convert.main()
    said = capsys.readouterr().err
    assert end.value.code == 2 and said.startswith("error: ") and said.count("\n") == 1


def newest(run):
    return update_checkpoints(run)[0]


def test_two_processes_train_and_evaluate(tmp_path, caplog):
    """The same command under torchrun; raw and averaged weights with BatchNorm score as they do on one process."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    network = (
        "model=h_vit3_tiny", "model.kwargs.dims=[8,16]", "model.kwargs.depths=[1,1]", "model.kwargs.num_heads=[2,2]",
        "data.img_size=[16,16]", "engine.ema_decay=0.5", "engine.ema_warmup=false", "engine.ema_batch=16",
        "optim.lr=0.02",
    )  # fmt: skip
    short = [key for key in SHORT if not key.startswith(("model.", "engine.steps"))] + ["engine.steps_per_epoch=8"]
    result = run(*torchrun, "tools/train.py", *short, *network, f"output={tmp_path}", "name=r", OMP_NUM_THREADS="1")
    assert result.returncode == 0, result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["r"]  # one folder, decided by one process
    record = json.loads((tmp_path / "r" / "metrics.jsonl").read_text())
    assert record["updates"] == 8 and json.loads((tmp_path / "r" / "summary.json").read_text())["world_size"] == 2
    for weights, key in (("raw", "val"), ("ema", "val_ema")):
        last = f"checkpoint={newest(tmp_path / 'r')}"
        caplog.clear()
        with caplog.at_level(logging.INFO):
            run_eval(compose_config(last, f"weights={weights}", "device=cpu", "batch_size=64", root="eval"))
        line = caplog.records[-1].getMessage()
        assert f"360 images: top-1 {record[key + '/top1']:.2f} %" in line
        loss = float(line.rsplit("loss ", 1)[1])
        assert loss == pytest.approx(record[f"{key}/loss"], abs=1e-5)
