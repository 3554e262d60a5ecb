"""Checkpoint files: whole or absent, and read without running code."""

from __future__ import annotations

import os

import pytest
import torch

from vit3 import files
from vit3.engine import checkpoint
from vit3.engine.checkpoint import (
    checkpoint_to_resume,
    load_checkpoint,
    run_of,
    save_checkpoint,
    save_update,
    set_aside_later,
    update_checkpoints,
)
from vit3.errors import UserError


def test_round_trip_from_file_and_folder(tmp_path):
    state = {"updates": 7, "epoch": 3, "position": 0, "state_dict": {"a": torch.ones(2)}}
    file = save_update(state, tmp_path, keep=2)
    for path in (tmp_path, file):
        state = load_checkpoint(path)
        assert state["epoch"] == 3 and torch.equal(state["state_dict"]["a"], torch.ones(2))
    assert os.listdir(tmp_path / "checkpoints") == [file.name]


def save(run, updates, keep=2, size=1000):
    return save_update({"updates": updates, "epoch": 0, "position": 4 * updates, "w": torch.ones(size)}, run, keep)


def test_the_last_k_are_kept(tmp_path):
    paths = [save(tmp_path, updates) for updates in (9, 10, 11, 100)]
    assert update_checkpoints(tmp_path) == [paths[3], paths[2]]


@pytest.mark.parametrize("damage", ["cut", "flip", "empty"])
def test_a_damaged_newest_file_is_skipped_with_a_warning(tmp_path, caplog, damage):
    save(tmp_path, 1)
    newest = save(tmp_path, 2)
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes({"cut": content[:-100], "flip": bytes(content), "empty": b""}[damage])
    assert load_checkpoint(tmp_path)["updates"] == 1
    assert f"skipped: {newest} is damaged" in caplog.text
    with pytest.raises(UserError, match="damaged"):  # an explicit path is what it is
        load_checkpoint(checkpoint_to_resume(str(newest), "x", None))


def test_auto_resume_starts_new_and_continues_old(tmp_path):
    with pytest.raises(UserError, match="resume=auto needs name=NAME"):
        checkpoint_to_resume("auto", str(tmp_path), None)
    assert checkpoint_to_resume("auto", str(tmp_path), "run") is None
    (tmp_path / "run").mkdir()
    path = save(tmp_path / "run", 5)
    assert checkpoint_to_resume("auto", str(tmp_path), "run") == str(path)
    with pytest.raises(UserError, match="no such run folder or checkpoint; resume=auto name=NAME"):
        checkpoint_to_resume(str(tmp_path / "nowhere"), "x", None)


def test_an_explicit_older_file_sets_later_ones_aside(tmp_path):
    old, new = save(tmp_path, 1), save(tmp_path, 2)
    assert run_of(old) == tmp_path and checkpoint_to_resume(str(old), "x", "y") == str(old)
    set_aside_later(tmp_path, old)
    assert update_checkpoints(tmp_path) == [old]
    assert new.with_suffix(".pt.superseded").exists()


def test_older_checkpoints_make_room_on_a_full_disk(tmp_path, monkeypatch):
    kept = [save(tmp_path, updates, keep=9) for updates in (1, 2, 3)]
    write = torch.save

    def limited(state, file):
        if len(update_checkpoints(tmp_path)) > 1:
            raise OSError(28, "No space left on device")
        write(state, file)

    monkeypatch.setattr(checkpoint.torch, "save", limited)
    newest = save(tmp_path, 4, keep=9)
    assert update_checkpoints(tmp_path) == [newest, kept[2]]

    def full(state, file):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.torch, "save", full)
    with pytest.raises(UserError, match="No space left"):
        save(tmp_path, 5, keep=9)
    monkeypatch.undo()
    assert load_checkpoint(tmp_path)["updates"] == 4


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


def test_a_flipped_bit_anywhere_is_said_or_does_no_harm(tmp_path):
    """Bits of names, of the directory at the end and of headers too: zipfile and pickle have many ways to fail."""
    path, weights = tmp_path / "last.pt", {str(i): torch.randn(20) for i in range(5)}
    save_checkpoint({"w": weights}, path)
    content, said = path.read_bytes(), 0
    for place in range(0, len(content), 5):
        damaged = bytearray(content)
        damaged[place] ^= 128
        path.write_bytes(damaged)
        try:
            assert all(torch.equal(weights[name], value) for name, value in load_checkpoint(path)["w"].items())
        except UserError:
            said += 1
    assert said > 100
