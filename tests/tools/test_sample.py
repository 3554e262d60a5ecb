"""tools/sample.py on a generator of a few updates: files, one or two processes, what is refused, Ctrl-C in a shell."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from vit3.tools import sample as tool
from vit3.tools.train import train

from tests.helpers import ROOT
from tests.processes import run_processes
from tests.toy import compose_config, no_pictures
from vit3.engine.checkpoint import load_checkpoint, save_checkpoint, update_checkpoints
from vit3.errors import UserError

TINY = ("model.kwargs.depth=1", "model.kwargs.embed_dim=24", "model.kwargs.num_heads=2", "model.kwargs.patch_size=4")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run folder, with weights that have an effect: a few updates of a network that starts at zero have none."""
    output = tmp_path_factory.mktemp("run")
    recipe = [f"output={output}", "name=r", "recipe=dit3_digits", "engine.epochs=1", "engine.steps_per_epoch=2"]
    tiny = ["engine.batch_size=16", "engine.device=cpu", "optim.warmup_epochs=0", "diffusion.sheet.every=0", *TINY]
    with pytest.MonkeyPatch.context() as patch:
        no_pictures(patch.setattr)
        train(compose_config(*recipe, *tiny, "diffusion.sheet.images=1", "diffusion.sheet.steps=2"))
    path = update_checkpoints(output / "r")[0]
    state = load_checkpoint(path)
    torch.manual_seed(0)
    for kind in ("state_dict", "state_dict_ema"):
        state[kind] = {name: 0.3 * torch.randn_like(weight) for name, weight in state[kind].items()}
    save_checkpoint(state, path)
    return output / "r"


def arguments(run, output, *overrides):
    steps = ("sampling.steps=4", "n=20", "batch_size=8", "device=cpu")
    return [f"checkpoint={run}", f"output={output}", "name=s", *steps, *overrides]


def draw(run, output, *overrides):
    tool.run_sample(compose_config(*arguments(run, output, *overrides), root="sample"))


def sample(run, output, *overrides):
    """Draw, and return all files but samples.json."""
    draw(run, output, *overrides)
    return content(output)


def content(output):
    files = (path for path in output.rglob("*.*") if path.suffix != ".json")
    return {path.name: path.read_bytes() for path in files}


def settings(output):
    return json.loads((output / "s" / "samples.json").read_text())["settings"]


@pytest.fixture(scope="module")
def twenty(run, tmp_path_factory):
    """Files and settings of 20 images, drawn by one process."""
    output = tmp_path_factory.mktemp("twenty")
    return sample(run, output, "sampling.guidance=1.5"), settings(output)


def test_files_and_settings(run, twenty, tmp_path):
    files, how = twenty
    assert sorted(files) == [*(f"{i:06d}.png" for i in range(20)), "samples.npz", "sheet.png"]
    (tmp_path / "a.npz").write_bytes(files["samples.npz"])
    archive = np.load(tmp_path / "a.npz")
    assert archive["arr_0"].shape == (20, 8, 8, 3) and archive["arr_1"].tolist() == [*range(10)] * 2
    assert len({image.tobytes() for image in archive["arr_0"]}) == 20
    assert len(how["checkpoint"]["sha256"]) == 64 and how["checkpoint"]["path"].startswith(str(run))
    expected = {"weights": "ema", "sampler": "ddim", "steps": 4, "guidance": 1.5, "seed": 0, "img_size": [8, 8],
                "batch_size": 8, "device": "cpu", "threads": 1}  # fmt: skip
    assert {key: how[key] for key in expected} == expected


def test_two_processes_write_the_same_files(run, twenty, tmp_path):
    run_processes(draw, 2, run, tmp_path, "sampling.guidance=1.5")  # one may end while the other still writes
    assert content(tmp_path) == twenty[0]


@pytest.mark.parametrize("name", ["seed=1", "sampling.guidance=4", "weights=raw"])
def test_what_decides_the_images(run, twenty, tmp_path, name):
    others = sample(run, tmp_path, "n=8", "npz=false", "sheet=0", "sampling.guidance=1.5", name)
    assert len(others) == 8 and all(others[file] != twenty[0][file] for file in others)


def test_fewer_images_are_the_first_ones(run, twenty, tmp_path):
    """Image i does not depend on n, as long as its batch is the same; nor on other batches."""
    first = sample(run, tmp_path, "n=16", "npz=false", "sheet=0", "sampling.guidance=1.5")
    assert first == {file: twenty[0][file] for file in first} and len(first) == 16
    assert sample(run, tmp_path, "sampling.guidance=1.5") == twenty[0]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("sampling.guidance=2", r"guidance=2\.0, but the images in .* are drawn with guidance="),
        ("batch_size=4", "batch_size=4, but .* batch_size=8"),
        ("n=3", "n=3, but .* holds image 7"),
        ("resume=false", "holds 8 images"),
    ],
)
def test_another_set_of_that_name_is_refused(run, tmp_path, change, sentence):
    sample(run, tmp_path, "n=8", "npz=false", "sheet=0")
    with pytest.raises(UserError, match=sentence):
        sample(run, tmp_path, change)


def test_refusals(run, tmp_path):
    with pytest.raises(UserError, match="nowhere: no such checkpoint; give a run folder of tools/train.py"):
        sample(tmp_path / "nowhere", tmp_path)
    state = load_checkpoint(update_checkpoints(run)[0])
    state["config"] = OmegaConf.to_container(compose_config())
    save_checkpoint(state, tmp_path / "c.pt")
    with pytest.raises(UserError, match="c.pt holds the classifier vit3_.*; give one of task=diffusion"):
        sample(tmp_path / "c.pt", tmp_path)
    for change in ("sampling.sampler=euler", "sampling.steps=1001", "sampling.guidance_interval=[0.8,0.2]"):
        with pytest.raises(UserError, match=rf"^{change.split('=')[0]}="):  # the key by which it is changed
            sample(run, tmp_path, change)


def test_a_damaged_newest_checkpoint_is_passed_over(run, tmp_path, caplog):
    copied = Path(shutil.copytree(run, tmp_path / "copied"))
    (copied / "checkpoints" / "update-99999999-00001-000000000.pt").write_bytes(b"half")
    sample(copied, tmp_path, "n=1", "npz=false", "sheet=0")
    assert Path(settings(tmp_path)["checkpoint"]["path"]).name == update_checkpoints(run)[0].name
    assert "99999999" in caplog.text


@pytest.mark.parametrize(("change", "sentence"), [("[8]", "img_size="), ("[0,8]", "img_size=")])
def test_sizes_that_are_none(run, tmp_path, change, sentence):
    with pytest.raises(UserError, match=sentence):
        sample(run, tmp_path, f"img_size={change}")


def test_another_autoencoder_than_that_of_the_training_is_named(run, tmp_path, caplog):
    state = load_checkpoint(run)
    state["codec"]["autoencoder_sha256"] = "abc"
    save_checkpoint(state, tmp_path / "other.pt")
    sample(tmp_path / "other.pt", tmp_path, "n=1", "npz=false", "sheet=0")
    assert "has other weights" in caplog.text
    caplog.clear()
    sample(run, tmp_path, "n=1", "npz=false", "sheet=0", "name=same")
    assert "has other weights" not in caplog.text


def test_default_name(run, tmp_path):
    tool.run_sample(compose_config(*arguments(run, tmp_path, "name=null", "n=1", "sheet=0"), root="sample"))
    assert [path.name for path in tmp_path.iterdir()] == ["r-ddim4-guidance1.5-seed0"]


def test_threads_are_set(run, tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    sample(run, tmp_path, "n=1", "sheet=0", "threads=3")
    assert given == [3]


def test_ctrl_c_in_a_shell(run, tmp_path):
    """One sentence and code 130; the images are whole, and the next start goes on."""
    clean = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    command = [sys.executable, str(ROOT / "tools" / "sample.py"), *arguments(run, tmp_path, "n=5000", "sheet=0")]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=clean, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    deadline = time.monotonic() + 120
    while not (tmp_path / "s" / "images" / "000007.png").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 130, said
    assert "Traceback" not in said and "of 5,000 images are in" in said and "the same command goes on" in said
    there = sorted(path.name for path in (tmp_path / "s" / "images").iterdir())
    assert there == [f"{i:06d}.png" for i in range(len(there))] and len(there) % 8 == 0
