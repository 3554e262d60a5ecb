"""Checkpoint files: whole or absent, and read without running code."""

from __future__ import annotations

import os

import pytest
import torch

from vit3 import files
from vit3.engine import checkpoint
from vit3.engine.checkpoint import load_checkpoint, save_checkpoint
from vit3.errors import UserError


def test_round_trip_from_file_and_folder(tmp_path):
    save_checkpoint({"epoch": 3, "state_dict": {"a": torch.ones(2)}}, tmp_path / "last.pt")
    for path in (tmp_path, tmp_path / "last.pt"):
        state = load_checkpoint(path)
        assert state["epoch"] == 3 and torch.equal(state["state_dict"]["a"], torch.ones(2))
    assert os.listdir(tmp_path) == ["last.pt"]


@pytest.mark.parametrize("failing", ["save", "fsync", "replace"])
def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch, failing):
    path = tmp_path / "last.pt"
    save_checkpoint({"epoch": 1}, path)

    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(*{
        "save": (checkpoint.torch, "save"), "fsync": (files.os, "fsync"), "replace": (files.os, "replace"),
    }[failing], fail)  # fmt: skip
    with pytest.raises(UserError, match="cannot be written .*No space left"):
        save_checkpoint({"epoch": 2}, path)
    monkeypatch.undo()
    assert load_checkpoint(path)["epoch"] == 1
    assert os.listdir(tmp_path) == ["last.pt"]


def test_missing_truncated_and_foreign_files(tmp_path):
    with pytest.raises(UserError, match="no such checkpoint"):
        load_checkpoint(tmp_path / "nothing.pt")
    path = tmp_path / "last.pt"
    save_checkpoint({"epoch": 1, "state_dict": {"a": torch.ones(1000)}}, path)
    path.write_bytes(path.read_bytes()[:500])
    torch.save({"model": {}}, tmp_path / "foreign.pt")
    for name in ("last.pt", "foreign.pt"):
        with pytest.raises(UserError, match="damaged or no checkpoint of this program"):
            load_checkpoint(tmp_path / name)
