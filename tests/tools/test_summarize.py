"""The summarizing tool: files beside the sweep, mistakes in one sentence."""

from __future__ import annotations

import logging

import pytest
from vit3.tools.summarize import summarize, sweeps_of

from tests.analysis.test_sweep_table import write
from vit3.errors import UserError
from vit3.sweeps.sweep import Sweep


def test_it_writes_four_files_and_shows_the_table(tmp_path, caplog):
    sweep = write(Sweep.named(tmp_path, "t"), {("a", None, 0): 80.0, ("b", None, 0): 81.0})
    [found], _ = sweeps_of([f"output={tmp_path}", "ablation=t"])
    assert found.path == sweep.path
    with caplog.at_level(logging.INFO):
        summarize(found)
    assert {"table.md", "table.csv", "cells.csv", "table.png"} < {path.name for path in sweep.path.iterdir()}
    assert (
        sweep.path / "table.md"
    ).read_text() in caplog.text and "| b | 81.00 | +1.00 (spread unknown) |" in caplog.text


def test_several_sweeps():
    assert [str(s.path) for s in sweeps_of(["sweeps=[x,y]", "sweep=z"])[0]] == ["z", "x", "y"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "no sweep is named; give sweep=OUTPUT/sweeps/NAME"),
        (["runs/sweeps/x"], "'runs/sweeps/x' is no key=value"),
        (["swep=x"], "swep is no key of this program; did you mean sweep?"),
        (["sweeps=x"], "sweeps"),
    ],
)
def test_mistakes_are_said_in_one_sentence(arguments, sentence):
    with pytest.raises(UserError, match=sentence):
        sweeps_of(arguments)


def test_no_sweep_there(tmp_path):
    with pytest.raises(UserError, match="holds no sweep.json"):
        summarize(Sweep(tmp_path))
