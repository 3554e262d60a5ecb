"""docs/use_the_block.md does what it says: every block of code on the page runs, in order within its section."""

import re

import pytest
import torch

from tests.helpers import ROOT

PAGE = ROOT / "docs" / "use_the_block.md"


def sections(text):
    """Heading -> blocks of code, each moved down to its lines on the page, so that a traceback names these."""
    found, heading = {}, None
    for match in re.finditer(r"^## (?P<heading>[^\n]+)$|^```(?P<language>\w*)\n(?P<code>.*?)^```$", text, re.M | re.S):
        if match["heading"]:
            heading = match["heading"]
        else:
            assert match["language"] == "python", f"a block of '{match['language']}' under '{heading}' never runs"
            found.setdefault(heading, []).append("\n" * text[: match.start("code")].count("\n") + match["code"])
    return found


def run(blocks):
    """Execute the blocks in one namespace."""
    namespace = {"__name__": "page"}
    for code in blocks:
        exec(compile(code, PAGE.name, "exec"), namespace)


SECTIONS = sections(PAGE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("heading", SECTIONS)
def test_section_runs(heading):
    torch.manual_seed(0)
    run(SECTIONS[heading])


def test_every_block_is_found():
    text = PAGE.read_text(encoding="utf-8")
    assert 2 * sum(map(len, SECTIONS.values())) == sum(line.startswith("```") for line in text.splitlines())
    assert {"A ViT from timm", "A stage of a U-Net", "Video and other grids with a third axis"} <= set(SECTIONS)
    assert set(re.findall(r"^## (.+)$", text, re.M)) == set(SECTIONS)


def test_a_broken_block_is_seen():
    broken = "## First\n```python\nx = 1\n```\ntext\n```python\nassert x == 2\n```\n"
    with pytest.raises(AssertionError) as caught:
        run(sections(broken)["First"])
    assert caught.traceback[-1].lineno + 1 == 7  # the line of the page


def test_links_lead_somewhere():
    for link in re.findall(r"\]\(([^)]+)\)", PAGE.read_text(encoding="utf-8")):
        assert (PAGE.parent / link).exists(), link
