"""Tables of sweeps, from cells that are written by hand."""

from __future__ import annotations

import csv
import io
import json
import math

import pytest
from PIL import Image

from tests.sweeps.commands import TABLE
from tests.toy import CONFIGS
from vit3.analysis.sweep_plots import plot_table
from vit3.analysis.sweep_table import read_table
from vit3.analysis.sweep_text import _amount, cells_csv, score_text, to_csv, to_markdown
from vit3.sweeps.cell import Cell
from vit3.sweeps.sweep import Sweep


def write(sweep: Sweep, results: dict, **facts) -> Sweep:
    """A sweep whose cells have these top-1 of the last epoch, or a status without a number, by (row, column, seed)."""
    cells = [Cell(f"{i:04d}", *place, (f"row={place[0]}",)) for i, place in enumerate(results)]
    sweep.extend(cells, **{"command": ["python", "tools/train.py", "-m", "x=1,2"], "data": "digits", **facts})
    for cell, result in zip(cells, results.values()):
        folder = sweep.folder(cell)
        folder.path.mkdir(parents=True)
        status, top1 = result if isinstance(result, tuple) else ("finished", result)
        if status == "missing":
            continue
        folder.write_json("cell.json", {"status": status, "reason": "why", "seconds": 1.0, "code": "abc"})
        if top1 is not None:
            last = {"epoch": 2, "val/top1": top1 - 50, "val_ema/top1": top1, "train/loss": 0.25}
            facts = {"parameters": 2_500_000, "multiply_adds": 4_580_000_000, "epochs": 3}
            folder.write_json("summary.json", {"last": last, "best": {"top1": top1 + 1}, **facts})
            for rate in (10.0, 30.0, 1000.0):
                folder.append("metrics.jsonl", {"epoch": 0, "images_per_s": rate})
    return sweep


@pytest.fixture
def rows(tmp_path):
    results = {("dot", None, 0): 80.0, ("dot", None, 1): 81.0, ("mse", None, 0): 81.0, ("mse", None, 1): 82.2}
    results |= {("rmse", None, 0): 90.0, ("rmse", None, 1): ("killed", 70.0), ("mae", None, 0): ("diverged", 57.0)}
    results |= {("mae", None, 1): ("failed", None)}
    return write(Sweep.named(tmp_path, "table1_loss"), results, ablation="table1_loss", recipe="r")


def test_means_spreads_differences_and_noise(rows):
    table = read_table(rows, CONFIGS)
    dot, mse, rmse, mae = table.entries
    assert (dot.mean, dot.std) == (80.5, pytest.approx(math.sqrt(0.5)))
    assert mse.difference == pytest.approx(81.6 - 80.5)
    assert mse.noise == pytest.approx(2 * math.sqrt(0.5 / 2 + 0.72 / 2))
    assert mse.verdict == "+1.10 (within noise)" and dot.verdict == ""
    assert rmse.verdict == "+9.50 (spread unknown)"
    assert (rmse.mean, rmse.std) == (90.0, None)  # the killed cell's 70 is no result
    assert (mae.mean, mae.before_divergence, mae.difference) == (None, 58.0, None)
    assert dot.of("images_per_s") == 30.0 and dot.of("best") == 81.5


def test_a_difference_above_the_noise_is_not_called_noise(tmp_path):
    results = {("dot", None, s): 80.0 + 0.1 * s for s in (0, 1, 2)} | {
        ("mse", None, s): 82 + 0.1 * s for s in (0, 1, 2)
    }
    table = read_table(write(Sweep.named(tmp_path, "t"), results), CONFIGS)
    assert table.entries[1].verdict == "+2.00"


def test_noise_has_two_sides_and_its_bound_is_noise(tmp_path):
    results = {("a", None, 0): 80.0, ("a", None, 1): 80.0, ("b", None, 0): 80.0, ("b", None, 1): 80.0}
    results |= {("c", None, 0): 70.0, ("c", None, 1): 70.0}
    _, equal, worse = read_table(write(Sweep.named(tmp_path, "t"), results), CONFIGS).entries
    assert (equal.verdict, worse.verdict) == ("+0.00 (within noise)", "-10.00")


def test_differences_stay_in_their_column(tmp_path):
    results = {("a", "x", 0): 80.0, ("a", "y", 0): 50.0, ("b", "x", 0): 81.0, ("b", "y", 0): 53.0}
    table = read_table(write(Sweep.named(tmp_path, "t"), results), CONFIGS)
    assert [entry.difference for entry in table.entries] == [None, None, 1.0, 3.0]


def test_what_was_before_a_divergence_is_no_mean_beside_a_finish(tmp_path):
    results = {("a", None, 0): 80.0, ("a", None, 1): ("diverged", 20.0)}
    [entry] = read_table(write(Sweep.named(tmp_path, "t"), results), CONFIGS).entries
    assert (entry.mean, entry.before_divergence) == (80.0, None)


def test_what_is_missing_is_marked_and_never_averaged_away(rows):
    table = read_table(rows, CONFIGS)
    assert [score_text(entry) for entry in table.entries] == [
        "80.50 ± 0.71", "81.60 ± 0.85", "90.00‡ (n = 1 of 2)", "58.00*† (n = 0 of 2)"
    ]  # fmt: skip
    text = to_markdown(table)
    assert "| dot (baseline) | 80.50 ± 0.71 |" in text and "*79.2*" in text and "quoted from paper, table 1" in text
    assert "* diverged" in text and "† failed" in text and "‡ stopped" in text and "- mae, seed 1: failed: why" in text
    assert "leaves out: Smooth-L1" in text and "averaged (EMA) weights" in text
    for fact in ("`python tools/train.py -m x=1,2`", "recipe r, data digits, epochs 3", "code abc", "seeds 0, 1"):
        assert fact in text


def test_a_seed_that_one_row_lacks(tmp_path):
    results = {("a", None, 0): 80.0, ("a", None, 1): 81.0, ("b", None, 0): 80.0}
    table = read_table(write(Sweep.named(tmp_path, "t"), results), CONFIGS)
    assert score_text(table.entries[1]) == "80.00? (n = 1 of 2)"


def test_the_table_of_a_file_that_is_gone_comes_from_the_copy(tmp_path):
    results = {("plain", "scratch", 0): 80.0, ("long", "scratch", 0): 81.0}
    path = tmp_path / "mine.yaml"
    path.write_text(TABLE.format(checkpoint="x.pt"))
    sweep = write(Sweep.named(tmp_path, "t"), results, ablation=str(path))
    sweep.keep_file(path)
    before = to_markdown(read_table(sweep, CONFIGS))
    path.unlink()
    assert to_markdown(read_table(sweep, CONFIGS)) == before and "many epochs" in before


@pytest.mark.parametrize("name", ["cell.json", "summary.json", "environment.json", "metrics.jsonl"])
@pytest.mark.parametrize("content", ["", "[]", "null", "{", "{}"])
def test_damaged_files_of_a_cell_leave_the_table_whole(tmp_path, name, content):
    sweep = write(Sweep.named(tmp_path, "t"), {("a", None, 0): 80.0, ("a", None, 1): 81.0})
    (sweep.folder(sweep.cells()[0]) / name).write_text(content)
    table = read_table(sweep, CONFIGS)
    lost = name in ("cell.json", "summary.json")
    assert score_text(table.entries[0]) == ("81.00? (n = 1 of 2)" if lost else "80.50 ± 0.71")
    to_markdown(table), to_csv(table), cells_csv(table)


def test_csv_has_numbers_alone(rows):
    table = read_table(rows, CONFIGS)
    lines = list(csv.DictReader(io.StringIO(to_csv(table))))
    assert [line["row"] for line in lines] == ["dot", "mse", "rmse", "mae"]
    assert float(lines[0]["top1_mean"]) == 80.5 and lines[0]["published_top1"] == "78.9" and lines[3]["failed"] == "1"
    cells = list(csv.DictReader(io.StringIO(cells_csv(table))))
    assert len(cells) == 8 and cells[5]["status"] == "killed" and cells[0]["weights"] == "ema"


def test_rows_and_columns(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(TABLE.format(checkpoint="x.pt"))
    results = {(r, c, s): 70.0 + len(r) + len(c) + s for r in ("plain", "long") for c in ("started", "scratch")
               for s in (0, 1)}  # fmt: skip
    sweep = write(Sweep.named(tmp_path, "mine"), results, ablation=str(path))
    table = read_table(sweep, CONFIGS)
    assert (table.rows, table.columns) == (["plain", "long"], ["scratch", "started"])  # as in the file
    assert table.entry("long", "started").difference == -1.0
    assert [bool(entry.published) for entry in table.entries] == [True, False, False, False]
    text = to_markdown(table)
    assert "| top-1 [%] | scratch | started |" in text and "| many epochs | 81.50 ± 0.71 | 81.50 ± 0.71 |" in text
    plot_table(table, tmp_path / "map.png")
    assert Image.open(tmp_path / "map.png").size[0] > 400


def test_the_picture_of_rows(rows, tmp_path):
    plot_table(read_table(rows, CONFIGS), tmp_path / "dots.png")
    assert Image.open(tmp_path / "dots.png").size[0] > 900  # two panels
    (rows.path.parent.parent / "cells" / "0000" / "cell.json").write_text(json.dumps({"status": "running"}))
    plot_table(read_table(rows, CONFIGS), tmp_path / "dots.png")


def test_amounts_have_three_digits():
    amounts = (48_700, 2_610_000, 23_468_000, 4_576_000_000, 999, None)
    assert [_amount(n) for n in amounts] == ["48.7 k", "2.61 M", "23.5 M", "4.58 G", "999", ""]


def test_training_loss_and_titles_of_columns(tmp_path):
    results = {("fc", "none", 0): 80.0, ("fc", "table", 0): 81.0}
    table = read_table(write(Sweep.named(tmp_path, "cpe_x_inner"), results, ablation="cpe_x_inner"), CONFIGS)
    assert table.entries[0].of("train_loss") == 0.25
    page = to_markdown(table)
    assert "| top-1 [%] | none | table per block |" in page and "| FC (baseline) | table per block |" in page
