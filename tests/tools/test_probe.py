"""tools/probe.py on a short run: scores as evaluation gives them, files, refusals."""

import csv
import logging

import pytest
from vit3.tools.probe import probe
from vit3.tools.train import train

from tests.toy import compose_config, no_pictures, short_run
from vit3.errors import UserError


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run folder of two updates."""
    no_pictures(monkeypatch.setattr)

    def make(*overrides):
        train(short_run(tmp_path, "name=r", *overrides))
        return tmp_path / "r"

    return make


def probed(run, *overrides):
    return probe(compose_config(f"checkpoint={run}", *overrides, root="probe"))


def test_scores_and_files(run, tmp_path, caplog):
    folder = run()
    with caplog.at_level(logging.INFO):
        probed(folder, "sizes=[1,1.5]", "batch_size=180", f"output={tmp_path / 'out'}")
    rows = {row["label"]: row for row in csv.DictReader((tmp_path / "out" / "probe.csv").open())}
    assert rows["8x8 pixels"]["top1"] == rows["as trained"]["top1"]
    assert rows["rate x 0"]["loss"] == rows["no update"]["loss"] == rows["0 epochs"]["loss"]
    assert {"12x12 pixels", "swap fast", "ascent"} <= rows.keys()
    assert "360 images" in (tmp_path / "out" / "probe.md").read_text()
    assert (tmp_path / "out" / "probe.png").exists()


def test_refusals(run, tmp_path):
    folder = run("mixer=softmax")
    with pytest.raises(UserError, match="0 kinds of inner training"):
        probed(folder)
    with pytest.raises(UserError, match="no such checkpoint"):
        probed(tmp_path / "nowhere")
