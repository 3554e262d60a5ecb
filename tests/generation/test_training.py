"""Generators through the one training loop: runs, pictures, resuming, what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vit3.tools import train as tool

from tests.engine.test_resume import content
from tests.processes import run_processes
from tests.toy import CPU, compose_config, configured
from vit3.build import build_network, build_sheets
from vit3.build.generator import build_process
from vit3.engine.checkpoint import load_checkpoint
from vit3.engine.update import Updater
from vit3.errors import UserError
from vit3.tasks import DiffusionTask

CLASSES = tuple("0123456789")
TINY = "++model.kwargs={patch_size: 2, embed_dim: 16, depth: 1, num_heads: 2}"


def configuration(output: Path, *overrides: str):
    """Two epochs of three updates of two passes each, with an average and sheets."""
    share = 8 // int(os.environ.get("WORLD_SIZE", 1))
    return compose_config(
        "recipe=dit3_digits", f"output={output}", "name=run", "resume=auto", "engine.device=cpu", "engine.epochs=2",
        "engine.batch_size=16", f"engine.max_per_process={share}", "engine.steps_per_epoch=3", "engine.ema_decay=0.9",
        "engine.save_minutes=0.005", "optim.warmup_epochs=0", "logger.every=1", "engine.threads=1",
        TINY, "diffusion.sheet.every=1",
        "diffusion.sheet.images=10", "diffusion.sheet.steps=2", *overrides,
    )  # fmt: skip


def run(output: Path, *overrides: str, die_at: int = 0):
    """Train; the last process kills itself at forward pass ``die_at``."""
    passes, original = [], Updater.run
    last = int(os.environ.get("RANK", 0)) == int(os.environ.get("WORLD_SIZE", 1)) - 1

    def counted(self, *args):
        passes.append(1)
        if len(passes) == die_at and last:
            os.kill(os.getpid(), 9)
        return original(self, *args)

    Updater.run = counted
    tool.train(configuration(output, *overrides))


def quick(output: Path, die_at: int = 0):
    """Without curves, which take longer than the training."""
    tool.plot_losses = lambda *args: None
    run(output, die_at=die_at)


def test_killed_and_resumed_is_bit_equal(tmp_path, world_size=2):
    """In the second epoch, in the middle of an update; one process is the case of tests/engine/test_resume.py."""
    (tmp_path / "straight").mkdir()
    run_processes(quick, world_size, tmp_path / "straight")
    with pytest.raises(AssertionError, match="died|Connection|closed|reset|failed"):
        run_processes(quick, world_size, tmp_path, 8)
    run_processes(quick, world_size, tmp_path)
    (state, lines), (wanted, straight) = content(tmp_path / "run"), content(tmp_path / "straight" / "run")
    assert lines == straight and len(lines) == 2 + 6
    assert {"loss", "mse", "vb"} <= lines[-1].keys() and "val_ema/vb" in lines[1]
    for kind in ("state_dict", "state_dict_ema"):
        assert all(torch.equal(state[kind][key], wanted[kind][key]) for key in wanted[kind])
    for moments, same in zip(wanted["optimizer"]["state"].values(), state["optimizer"]["state"].values()):
        assert all(torch.equal(value, same[key]) for key, value in moments.items())
    sheets = [folder / "sheets" / "epoch-0002.png" for folder in (tmp_path / "run", tmp_path / "straight" / "run")]
    assert sheets[0].read_bytes() == sheets[1].read_bytes()


def test_a_sharded_network_has_no_sheets(tmp_path, monkeypatch):
    """The main process draws alone, and would wait for the other processes' shares of the weights for ever."""
    cfg = configured("recipe=dit3_digits", TINY)
    model, codec = build_network(cfg, CLASSES, CPU.device)
    task = DiffusionTask(model, build_process(cfg.diffusion), codec, device=CPU.device, verbose=False)
    trainer = SimpleNamespace(task=task, processes=CPU)
    assert build_sheets(cfg, trainer, CLASSES, tmp_path) is not None
    monkeypatch.setattr("vit3.build.sampling.is_sharded", lambda network: network is model)
    assert build_sheets(cfg, trainer, CLASSES, tmp_path) is None


def test_a_run_leaves(tmp_path):
    """By flow, in one process: everything that the README names."""
    run_processes(run, 1, tmp_path, "diffusion=flow", "diffusion.sheet.steps=2", "diffusion.sheet.images=4")
    folder = tmp_path / "run"
    for name in ("config.yaml", "metrics.jsonl", "summary.json", "curves.png", "samples.png", "best_ema.pt"):
        assert (folder / name).stat().st_size > 0, name
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["best"]["loss"] == min(
        json.loads(line)[key]
        for line in (folder / "metrics.jsonl").read_text().splitlines()
        for key in ("val/loss", "val_ema/loss")
    )
    assert summary["multiply_adds"] > 0
    assert load_checkpoint(folder)["config"]["diffusion"]["process"] == "flow"
    assert not any("vb" in key for key in summary["last"])


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["task=classification"], "task=classification with diffusion=ddpm: a generator needs"),
        (["model.name=vit3_tiny"], "vit3_tiny is no generator; "),
        (["augment.mixup=0.8"], "augment.mixup, cutmix and smoothing mix labels"),
        (["model.drop_path_rate=0.1"], "model.drop_path_rate=0.1 means nothing to dit3_s_2"),
        (["diffusion.process=flow"], "diffusion.learn_sigma=true means nothing to diffusion.process=flow"),
        (["diffusion.sheet.sampler=euler"], r"^diffusion\.sheet\.sampler='euler' does not draw from"),
        (["++model.kwargs.depht=1"], "model.kwargs.depht is no argument of dit3_s_2; did you mean depth"),
        (["++model.kwargs.num_heads=5"], "model dit3_s_2 cannot be built"),
    ],
)
def test_refused(tmp_path, overrides, sentence):
    with pytest.raises(UserError, match=sentence):
        tool.train(configuration(tmp_path, *overrides))
    assert not list(tmp_path.iterdir())  # a folder that is left would refuse the command once it is right


def test_a_generator_needs_its_task():
    with pytest.raises(UserError, match="task=diffusion with diffusion=none: a generator needs"):
        build_network(configured("task=diffusion"), CLASSES, CPU.device)
    with pytest.raises(UserError, match="dit3_s_2 is a generator; train it with task=diffusion"):
        build_network(configured("model=any", "model.name=dit3_s_2"), CLASSES, CPU.device)


@pytest.mark.parametrize(
    ("overrides", "place"),
    [
        ((), "pixels"),
        (("data=latents", "data.root=x"), "cached latents"),
        (("data=latents", "data.root=x", "diffusion.autoencoder=vae"), "latents of vae"),
        (("diffusion.autoencoder=vae",), "latents of vae"),
    ],
)
def test_what_is_learnt_is_said(overrides, place):
    said = tool.describe_diffusion(configured("recipe=dit3_digits", *overrides))
    assert said.endswith(f"ddpm, 1000 steps, linear schedule, learned variance, in {place}; 10% of the labels dropped")


@pytest.mark.parametrize("classes", [1, 10, 1000])
def test_null_label(classes):
    """The label for no class comes after all classes (R20)."""
    cfg = configured("recipe=dit3_digits", TINY)
    model, codec = build_network(cfg, [str(i) for i in range(classes)], CPU.device)
    assert model.null_label == classes and model.y_embedder.embedding_table.num_embeddings == classes + 1
    assert model.img_size == codec.grid((8, 8)) == (8, 8)
