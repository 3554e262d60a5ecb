"""What is generated of the documentation is current, and the README's own lines run."""

from __future__ import annotations

import re

import pytest
from vit3.tools.document import with_table

from tests.helpers import ROOT
from tests.test_config import RECIPES

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_model_table_is_current():
    assert with_table(README) == README


def test_parity_page_has_no_failure():
    page = (ROOT / "docs" / "parity.md").read_text(encoding="utf-8")
    assert "FAIL" not in page and page.count("| pass |") == int(re.search(r"of (\d+) comparisons", page)[1]) > 40


def test_six_lines_run():
    exec(re.search(r"## In six lines\n\n```python\n(.*?)```", README, re.S)[1], {})  # our own text, no user input


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\]\(((?:vit3|configs|docs)/[^)#]+)\)", README))))
def test_links_lead_somewhere(path):
    assert (ROOT / path).exists()


def test_recipes_are_named():
    assert "recipe=vit3_{tiny,small,base}_in1k" in README and len(RECIPES) == 14


def test_no_second_copy_of_requirements():
    """The extras and ranges stand in setup.py and requirements.txt alone."""
    assert "dependencies" not in (ROOT / "pyproject.toml").read_text()
