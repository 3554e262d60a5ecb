"""Write what is generated of the documentation: the README's model table and docs/parity.md.

``python tools/document.py`` writes both; ``--check`` only says whether the README's table is current.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

import timm

from vit3.analysis.flops import count_macs
from vit3.analysis.parity import check_all, to_markdown
from vit3.models import MODEL_NAMES
from vit3.models.published import PUBLISHED

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- model table: begin (tools/document.py) -->", "<!-- model table: end -->"


def model_table() -> str:
    """One line per registered model: counted size and cost at 224², published top-1."""
    lines = ["| model | parameters | multiply-adds at 224² | top-1, published |", "|---|---|---|---|"]
    for name in MODEL_NAMES:
        model = timm.create_model(name)
        params, macs = sum(p.numel() for p in model.parameters()), count_macs(model, (224, 224))
        figures = PUBLISHED[name]
        top1 = f"{figures['top1']}"
        if "top1_without_mesa" in figures:
            top1 = f"{figures['top1_without_mesa']}, with MESA {figures['top1']}"
        lines.append(f"| `{name}` | {params / 1e6:.2f} M | {macs / 1e9:.2f} G | {top1} |")
    return "\n".join(lines)


def with_table(readme: str) -> str:
    """The README with its table replaced by the current one."""
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{model_table()}\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the README's table is old")
    check = parser.parse_args().check
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    if check:
        sys.exit(with_table(text) != text)
    readme.write_text(with_table(text), encoding="utf-8")
    (ROOT / "docs" / "parity.md").write_text(to_markdown(check_all(ROOT / "tests" / "golden")), encoding="utf-8")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.info("wrote README.md and docs/parity.md")


if __name__ == "__main__":
    main()
