"""Whole sweeps by the command: nothing is lost, nothing is computed twice, whatever happens to a cell."""

from __future__ import annotations

import json
import os
import signal
import time

from tests.sweeps.commands import TABLE, TINY, Command, files_of, starts, states
from vit3.engine.checkpoint import update_checkpoints
from vit3.sweeps.cell import DIVERGED, FAILED, FINISHED, KILLED, MISSING, RUNNING
from vit3.sweeps.sweep import Sweep


def wait_for(what, command: Command, timeout: float = 150.0):
    """The first true value of ``what()`` while a command runs."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        assert command.process.is_alive(), command.log.read_text()
        if value := what():
            return value
        time.sleep(0.05)
    raise AssertionError("waited in vain")


def at_work(sweep: Sweep, row: str, lines: int = 1):
    """A cell of a row that is running and has so many evaluated epochs behind it."""
    if not (sweep.path / "sweep.json").exists():
        return None
    for cell in sweep.cells():
        folder = sweep.folder(cell)
        if cell.row == row and folder.record()["status"] == RUNNING and len(update_checkpoints(folder.path)) >= lines:
            return cell
    return None


def test_a_sweep_in_which_everything_goes_wrong(tmp_path):
    """Of 3 x 2 x 2 cells some diverge, some fail, one is killed; the second start computes what is missing alone."""
    table = tmp_path / "wrong.yaml"
    start = tmp_path / "start.pt"
    start.write_bytes(b"no checkpoint")
    table.write_text(TABLE.format(checkpoint=start))
    sweep = Sweep.named(tmp_path / "out", "wrong")
    arguments = ("-m", f"ablation={table}", *TINY, f"output={tmp_path / 'out'}")

    first = Command(tmp_path, *arguments)
    victim = wait_for(lambda: at_work(sweep, "long"), first)
    os.kill(sweep.folder(victim).record()["pid"], signal.SIGKILL)
    code, said = first.end()
    assert code == 1, said
    place = (victim.row, victim.column, victim.seed)
    assert place == ("long", "scratch", 0)
    wanted = {(row, "started", seed): FAILED for row in ("plain", "hot", "long") for seed in (0, 1)}
    wanted |= {("plain", "scratch", seed): FINISHED for seed in (0, 1)} | {("long", "scratch", 1): FINISHED}
    wanted |= {("hot", "scratch", seed): DIVERGED for seed in (0, 1)} | {place: KILLED}
    assert states(sweep) == wanted
    assert "finished" in said and "its process was ended by SIGKILL" in said and "Traceback" not in said
    failed = next(cell for cell in sweep.cells() if cell.column == "started")
    assert "is not a readable PyTorch checkpoint" in sweep.folder(failed).record()["reason"]
    assert f"{failed.label}  failed: model.checkpoint={start}: " in said and "log.txt" in said
    assert "the loss was not finite" in said and "  killed      1" in said

    done = [cell for cell in sweep.cells() if states(sweep)[cell.row, cell.column, cell.seed] in (FINISHED, DIVERGED)]
    before = files_of(sweep, done)
    assert len(done) == 5 and len(before) == 15
    before_kill = (sweep.folder(victim) / "metrics.jsonl").read_text()
    good = next(cell for cell in done if cell.row == "plain")
    start.write_bytes((sweep.folder(good) / "best_raw.pt").read_bytes())
    code, said = Command(tmp_path, *arguments).end()
    assert code == 1, said  # some diverged, which is a result and no success
    assert files_of(sweep, done) == before
    assert all(starts(sweep, cell) == 1 for cell in done)
    assert starts(sweep, victim) == 2
    after_kill = (sweep.folder(victim) / "metrics.jsonl").read_text()
    assert after_kill.startswith(before_kill[: before_kill.rindex("\n") + 1].rsplit("\n", 2)[0])
    assert [json.loads(line)["epoch"] for line in after_kill.splitlines()] == list(range(4))
    assert set(states(sweep).values()) == {FINISHED, DIVERGED} and said.count("(before)") == 5


def test_two_commands_at_once_share_the_cells(tmp_path):
    """While one is at a cell, which is held up, the other computes the rest and waits for that one."""
    arguments = ("-m", *TINY[1:], "engine.epochs=4", "inner.lr=0.5,1", "engine.seed=0,1", "name=shared",
                 f"output={tmp_path / 'out'}")  # fmt: skip
    sweep = Sweep.named(tmp_path / "out", "shared")
    one = Command(tmp_path, *arguments)
    cell = wait_for(lambda: at_work(sweep, "inner.lr=0.5"), one)
    pid = sweep.folder(cell).record()["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        two = Command(tmp_path, *arguments)
        wait_for(lambda: "1 cells are at work elsewhere; waiting for them" in two.log.read_text(), two)
    finally:
        os.kill(pid, signal.SIGCONT)
    ends = [command.end() for command in (one, two)]
    assert [code for code, _ in ends] == [0, 0], ends
    assert list(states(sweep).values()) == [FINISHED] * 4
    assert [starts(sweep, cell) for cell in sweep.cells()] == [1] * 4
    lines = [(sweep.folder(cell) / "metrics.jsonl").read_text().count("\n") for cell in sweep.cells()]
    assert lines == [4] * 4
    launches = [sweep.folder(other).record()["launch"] for other in sweep.cells()]
    assert [launch == sweep.folder(cell).record()["launch"] for launch in launches] == [True, False, False, False]


def test_ctrl_c_of_the_command_reaches_the_cell_which_saves(tmp_path):
    arguments = ("-m", *TINY[1:], "engine.epochs=4000", "engine.seed=0,1", f"output={tmp_path / 'out'}")
    sweep = Sweep.named(tmp_path / "out", "sweep")
    command = Command(tmp_path, *arguments, server=True)
    cell = wait_for(lambda: at_work(sweep, "run"), command)
    os.kill(command.process.pid, signal.SIGINT)
    code, said = command.end(60)
    assert code == 130, said
    record = sweep.folder(cell).record()
    assert record["status"] == KILLED and "stopped by SIGINT; everything up to here is in" in record["reason"]
    assert states(sweep)["run", None, 1] == MISSING
    assert "Traceback" not in said and not list(sweep.path.glob(".stop-*"))
