"""Ablation files and the command lines that they stand for."""

from __future__ import annotations

import pytest

from tests.sweeps.commands import TABLE
from tests.toy import CONFIGS
from vit3.config import TrainConfig
from vit3.errors import UserError
from vit3.sweeps.ablation import expand_arguments, load_ablation, settled
from vit3.sweeps.cell import compose_cell

FILES = sorted((CONFIGS / "ablation").glob("*.yaml"))


def expand(*arguments: str) -> list[str]:
    return expand_arguments(list(arguments), TrainConfig, CONFIGS)


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "wrong.yaml"
    path.write_text(TABLE.format(checkpoint="x.pt"))
    return path


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_row_and_column_of_every_file_composes(path):
    """With the file's own recipe, or another one where that is not there."""
    ablation = load_ablation(path.stem, CONFIGS)
    known = (CONFIGS / "recipe" / f"{ablation.recipe}.yaml").exists()
    recipe = ablation.recipe if known else "vit3_small_in1k"
    assert path.read_text().startswith(f"# python tools/train.py -m ablation={path.stem}")
    rows, columns = list(ablation.rows), list(ablation.columns) or [None]
    places = [(row, columns[0]) for row in rows] + [(rows[0], column) for column in columns[1:]]
    ids = set()
    for row, column in places:
        place = [f"row={path.stem}/{row}"] + ([f"column={path.stem}/{column}"] if column else [])
        cell, _ = compose_cell([f"recipe={recipe}", "data=digits", *place], (), TrainConfig, CONFIGS)
        assert (cell.row, cell.column) == (row, column)
        ids.add(cell.id)
    assert len(ids) == len(places)  # no two places are the same run


def test_a_sweep_has_all_rows_and_seeds_and_the_recipe():
    every = "row=" + ",".join(f"table1_loss/{row}" for row in ("dot", "mse", "rmse", "mae", "smooth_l1"))
    assert expand("-m", "ablation=table1_loss", "data=digits") == [
        "-m", "recipe=ablation_patterns", "data=digits", every, "engine.seed=0,1"
    ]  # fmt: skip


def test_what_the_user_says_counts():
    mine = ("-m", "ablation=table1_loss", "row=mse,dot", "engine.seed=5", "recipe=vit3_tiny_in1k")
    assert expand(*mine) == ["-m", "engine.seed=5", "recipe=vit3_tiny_in1k", "row=table1_loss/mse,table1_loss/dot"]


@pytest.mark.parametrize(("folder", "good"), [("my own", True), ("mine(1)", False), ("mîne", False)])
def test_the_path_of_a_table_is_one_that_hydra_can_read(table, monkeypatch, folder, good):
    place = table.parent / folder
    place.mkdir()
    table.rename(place / "t.yaml")
    monkeypatch.chdir(place)
    if good:
        assert expand("-m", "ablation=t.yaml", "row=hot")[1] == f"row={place}/t.yaml/hot"
        escaped = str(place).replace(" ", r"\ ")
        assert settled([f"row={escaped}/t.yaml/hot"], TrainConfig, CONFIGS)[0] == "optim.lr=1e30"
    else:
        with pytest.raises(UserError, match="Hydra cannot read this path"):
            expand("-m", "ablation=t.yaml")


def test_no_recipe_where_the_user_says_so():
    assert "recipe=ablation_patterns" not in expand("-m", "ablation=table1_loss", "row=dot", "recipe=null")
    assert settled(["recipe=[]", "row=table1_loss/dot"], TrainConfig, CONFIGS)[0] == "recipe=[]"


def test_a_single_run_gets_the_settings_themselves(table):
    assert expand("ablation=table1_loss", "row=mse", "inner.loss=mae", "data=digits") == [
        "recipe=ablation_patterns", "inner.loss=mse", "data=digits", "inner=mlp", "row=table1_loss/mse"
    ]  # fmt: skip
    arguments = expand(f"ablation={table}", "row=hot", "--cfg=job", "column=started", "optim.lr=1")
    assert arguments[:3] == [
        "--cfg=job",
        "optim.lr=1e30",
        "model.checkpoint=x.pt",
    ]  # the row's, last, wins over the user's


def test_settings_come_in_the_order_user_column_row(table):
    text = table.read_text().replace("{set: []}", "{set: [optim.lr=2, engine.epochs=3]}")
    table.write_text(
        text.replace("set: [engine.epochs=4]", "set: [engine.epochs=4, mixer=softmax, model.kwargs.depth=1]")
    )
    place = [f"row={table}/long", f"column={table}/scratch"]
    cell, cfg = compose_cell(["optim.lr=1", "engine.epochs=1", *place], (), TrainConfig, CONFIGS)
    assert (cfg.optim.lr, cfg.engine.epochs, cfg.mixer.name, cfg.model.kwargs.depth) == (2, 4, "softmax", 1)
    assert settled(["optim.lr=1", *place], TrainConfig, CONFIGS)[0] == "optim.lr=2"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["-m", "ablation=table1_los"], "ablation=table1_los: no such file; did you mean table1_loss?"),
        (["-m", "ablation=table1_loss", "row=mes"], "row=mes is no row of ablation table1_loss; did you mean mse?"),
        (["-m", "ablation=table1_loss", "column=a"], "column=a: ablation table1_loss has no columns"),
        (["-m", "ablation=table1_loss,x"], "one table is one sweep"),
        (["ablation=table1_loss"], "is a table; add -m for all of it, or row= one of: dot, mse"),
        (["row=mse"], "row=mse needs the table that it belongs to: ablation=NAME"),
    ],
)
def test_unknown_names_are_said_in_one_sentence(arguments, sentence):
    with pytest.raises(UserError, match=sentence):
        expand(*arguments)


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("seeds: [0, 1]", "sedes: [0, 1]", "sedes is no key of an ablation file; did you mean seeds?"),
        ("baseline: plain", "baseline: plane", "baseline: plane is no row; did you mean plain?"),
        ("  plain:\n    set: []", "  plain:\n    sett: []", "rows.plain.sett is no key .* did you mean set?"),
        ("top1: 78.9", "top: 78.9", "rows.plain.published.top is no key .* did you mean top1?"),
        ("top1: 78.9", "top1: high", "rows.plain.published.top1: high must be a number"),
        ("  hot:", "  0.5:", "the label 0.5 must be letters"),
        ("  hot:", "  a,b:", "the label 'a,b' must be letters"),
        ("seeds: [0, 1]", "seeds: 2", "seeds: 2 must be a list of whole numbers"),
        ("rows:", "rows: [", "is no YAML file"),
    ],
)
def test_mistakes_in_a_file_are_said_in_one_sentence(table, old, new, sentence):
    text = table.read_text()
    assert old in text
    table.write_text(text.replace(old, new))
    with pytest.raises(UserError, match=sentence) as error:
        load_ablation(str(table), CONFIGS)
    assert str(table) in str(error.value) and "\n" not in str(error.value)


def test_an_unknown_key_in_a_row_names_the_row(table):
    table.write_text(table.read_text().replace("[engine.epochs=4]", "[engine.epoch=8]"))
    with pytest.raises(
        UserError, match="row long: engine.epoch is no key of this program; did you mean engine.epochs?"
    ):
        settled([f"row={table}/long"], TrainConfig, CONFIGS)
