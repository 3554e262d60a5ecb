"""What is generated of the documentation is current, and the README's own lines run."""

from __future__ import annotations

import json
import re

import pytest
from vit3.tools.document import CONFIGS, COSTED, DENSE_PAGE, GENERATION_PAGE, cost_row, with_table

from tests.helpers import ROOT
from tests.test_config import RECIPES
from vit3.models.published import PUBLISHED_GENERATORS
from vit3.sweeps.ablation import load_ablation

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_model_table_is_current():
    assert with_table(README) == README


def test_dense_tables_are_current():
    """Scores of the committed runs; every recipe that the paper has, with its printed figures, and those counted."""
    page = DENSE_PAGE.read_text(encoding="utf-8")
    assert with_table(page, "toy table") == page
    figures = json.loads((ROOT / "vit3" / "openmmlab" / "published.json").read_text())
    assert len([name for name in figures if figures[name]]) == 9
    for name, printed in figures.items():
        (line,) = [line for line in page.splitlines() if line.startswith(f"| [`{name}`]")]
        assert (CONFIGS / f"{name}.py").exists()
        if printed:
            params, _, macs, _, scores = (cell.strip() for cell in line.split("|")[2:-1])
            assert float(params.split()[0]) == pytest.approx(printed["params_m"], rel=0.005), name
            assert float(macs.split()[0].replace(",", "")) == pytest.approx(printed["macs_g"], rel=0.02), name
            assert scores == printed["scores"] in (CONFIGS / f"{name}.py").read_text(encoding="utf-8")


def test_generation_table_is_current():
    """Printed figures beside counted ones, which the tests of the costs hold; every recipe is linked and exists."""
    page = GENERATION_PAGE.read_text(encoding="utf-8")
    assert with_table(page, "published generation") == page
    recipes = re.findall(r"\]\(\.\./configs/recipe/(\w+)\.yaml\)", page)
    assert [name for name in recipes if name.endswith("_in256")] == [f"{name}_in256" for name in PUBLISHED_GENERATORS]
    assert all((CONFIGS / "recipe" / f"{name}.yaml").exists() for name in recipes)
    for line in ("DiT³-S/8 |", "| 35.0 M | 35 M | 0.40 G | 0.40 G | 143.49 | 8.34 | 0.15 | 0.13 |", "| 153.60 | – |",
                 "DiT³-B/2, trained again by the authors |  |  |  |  |  | 39.44 | 37.22 | 0.51 | 0.63 |"):  # fmt: skip
        assert line in page


def test_parity_page_has_no_failure():
    page = (ROOT / "docs" / "parity.md").read_text(encoding="utf-8")
    assert "FAIL" not in page and page.count("| pass |") == int(re.search(r"of (\d+) comparisons", page)[1]) > 40
    assert "| dit3_s_2: guided prediction |" in page


@pytest.mark.parametrize("table", COSTED)
def test_costs_are_those_that_the_paper_prints(table):
    """Every row of the page, computed anew: within 0.05 M parameters and 0.01 G products of the printed figures."""
    page = (ROOT / "docs" / "study" / "costs.md").read_text(encoding="utf-8")
    for label in load_ablation(table, CONFIGS).rows:
        row = cost_row(table, label)
        assert abs(row.params_m - row.published.get("params_m", row.params_m)) <= 0.05, label
        assert abs(row.macs_g - row.published["macs_g"]) <= 0.01, label
        assert f"| {row.title} | {row.params_m:.3f} M |" in page and f"| {row.macs_g:.3f} G |" in page


def test_all_printed_costs_are_there():
    assert sum(len(load_ablation(table, CONFIGS).rows) for table in COSTED) == 28


def test_six_lines_run():
    exec(re.search(r"## In six lines\n\n```python\n(.*?)```", README, re.S)[1], {})  # our own text, no user input


def test_scored_samples_were_drawn():
    """What the README scores has the name that it gives when it draws; without one the folder is named otherwise."""
    drawn = set(re.findall(r"tools/sample\.py [^#\n]*?(?:\\\n[^#\n]*?)?\bname=(\w+)", README))
    assert {"digits", "NAME"} <= drawn == set(re.findall(r"\bsamples=samples/(\w+)", README))


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\]\(((?:vit3|configs|docs)/[^)#]+)\)", README))))
def test_links_lead_somewhere(path):
    assert (ROOT / path).exists()


def test_recipes_are_named():
    assert "recipe=vit3_{tiny,small,base}_in1k" in README and len(RECIPES) == 21


def test_no_second_copy_of_requirements():
    """The extras and ranges stand in setup.py and requirements.txt alone."""
    assert "dependencies" not in (ROOT / "pyproject.toml").read_text()
