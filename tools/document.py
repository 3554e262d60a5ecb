"""Write what is generated of the documentation: tables of models, detectors and generators, docs/parity.md, costs.

``python tools/document.py`` writes all; ``--check`` only says whether the README's table is current. The table of
detectors and segmentors needs OpenMMLab (extra ``mm``) and stays as it is without.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import sys
from dataclasses import dataclass
from pathlib import Path

import timm
import torch

from vit3.analysis.flops import count_macs
from vit3.analysis.parity import check_all, to_markdown
from vit3.build import build_model
from vit3.config import TrainConfig, typed
from vit3.models import MODEL_NAMES
from vit3.models.published import PUBLISHED, PUBLISHED_GENERATORS
from vit3.sweeps.ablation import load_ablation
from vit3.sweeps.cell import compose_cell

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = ROOT / "configs"
COSTED = ("table1_loss", "table2_batch_epochs", "table4_inner_model", "table6_residual")  # the paper prints costs there
PARAMS_M, MACS_G = 0.05, 0.01  # how close, in 10^6 and 10^9; the paper prints two or three digits
DENSE_PAGE = ROOT / "docs" / "detection_and_segmentation.md"
GENERATION_PAGE = ROOT / "docs" / "generation.md"
LATENTS = (32, 32)  # of 256 x 256 pixels


def model_table() -> str:
    """One line per registered model: counted size and cost at 224², published top-1."""
    lines = ["| model | parameters | multiply-adds at 224² | top-1, published |", "|---|---|---|---|"]
    for name in MODEL_NAMES:
        with torch.device("meta"):
            model = timm.create_model(name)
        params, macs = sum(p.numel() for p in model.parameters()), count_macs(model, (224, 224))
        figures = PUBLISHED[name]
        top1 = f"{figures['top1']}"
        if "top1_without_mesa" in figures:
            top1 = f"{figures['top1_without_mesa']}, with MESA {figures['top1']}"
        lines.append(f"| `{name}` | {params / 1e6:.2f} M | {macs / 1e9:.2f} G | {top1} |")
    return "\n".join(lines)


def dense_table() -> str:
    """One line per recipe of detection and segmentation: counted costs, published costs and scores."""
    from vit3.openmmlab.cost import count, total_parameters  # needs the extra mm

    lines = ["| config | parameters, counted | published | multiply-adds, counted | published | published scores |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    for name, figures in json.loads((ROOT / "vit3" / "openmmlab" / "published.json").read_text()).items():
        found = count(CONFIGS / f"{name}.py")
        params, macs = total_parameters(found) / 1e6, sum(found["macs"].values()) / 1e9
        printed_params = f"{figures['params_m']} M" if figures else "–"
        printed_macs = f"{figures['macs_g']:,} G" if figures else "–"
        scores = figures.get("scores", "ours, no published number")
        lines.append(f"| [`{name}`](../configs/{name}.py) | {params:.1f} M | {printed_params} | {macs:,.0f} G | "
                     f"{printed_macs} | {scores} |")  # fmt: skip
    return "\n".join(lines)


def toy_table() -> str:
    """One line per run on the toy data whose summary is below docs/dense: scores of the last update, in per cent."""
    names = {"bbox_AP": "box AP", "bbox_AP50": "box AP50", "segm_AP": "mask AP", "segm_AP50": "mask AP50"}
    names["mIoU"] = "mIoU"
    lines = [f"| run | {' | '.join(names.values())} | updates | minutes |", "|---" * (len(names) + 3) + "|"]
    for path in sorted((ROOT / "docs" / "dense").glob("*/summary.json")):
        last = json.loads(path.read_text())["last"]
        scores = [f"{100 * last[f'val/{key}']:.1f}" if f"val/{key}" in last else "–" for key in names]
        name, minutes = path.parent.name, last["seconds"] / 60
        lines.append(f"| [`{name}`](dense/{name}) | {' | '.join(scores)} | {last['updates']:,} | {minutes:.0f} |")
    return "\n".join(lines)


def generation_table() -> str:
    """Two lines per published generator, DiT and DiT³: size and cost, counted and printed, and printed scores.

    A third where the authors trained again; its costs are those of the line above.
    """
    lines = ["| model | recipe | parameters, counted | published | multiply-adds, counted | published "
             "| FID, published | IS | precision | recall |", "|---" * 10 + "|"]  # fmt: skip
    for name, figures in PUBLISHED_GENERATORS.items():
        _, arch, patch = name.split("_")
        label, recipe = f"{arch.upper()}/{patch}", f"{name}_in256"
        link = f"[`{recipe}`](../configs/recipe/{recipe}.yaml)"
        twin = f"`recipe={recipe} mixer=softmax model.kwargs.cpe=false`"
        for title, how, printed, kwargs in (
            (f"DiT-{label}", twin, figures["dit"], dict(mixer="softmax", cpe=False)),
            (f"DiT³-{label}", link, figures, {}),
        ):
            with torch.device("meta"):
                model = timm.create_model(name, **kwargs)
            params, macs = sum(p.numel() for p in model.parameters()) / 1e6, count_macs(model, LATENTS) / 1e9
            lines.append(f"| {title} | {how} | {params:.1f} M | {printed['params_m']} M | {macs:.2f} G | "
                         f"{printed['macs_g']:.2f} G | {_scores(printed['scores'])} |")  # fmt: skip
        if "retrained" in figures:
            lines.append(f"| DiT³-{label}, trained again by the authors |  |  |  |  |  | "
                         f"{_scores(figures['retrained'])} |")  # fmt: skip
    return "\n".join(lines)


def _scores(scores: dict[str, float]) -> str:
    return " | ".join(f"{scores[key]:.2f}" if key in scores else "–" for key in ("fid", "is", "precision", "recall"))


DIGITS = {
    "trained": "DiT³, as in the recipe",
    "no_update": "without inner step (`inner.epochs=0`)",
    "softmax": "softmax attention (`mixer=softmax`)",
    "deep": "DiT³ of three blocks (`model.kwargs.depth=3`)",
    "deep_no_update": "the same without inner step",
}


def digits_table() -> str:
    """One line per network of the study on digits whose runs are below docs/generation: means over the seeds."""
    lines = ["| network | Fréchet distance, by seed | mean | agreement | precision | recall | test loss | parameters |",
             "|---" * 8 + "|"]  # fmt: skip
    for name, title in DIGITS.items():
        folders = sorted((ROOT / "docs" / "generation").glob(f"{name}-[0-9]*"))
        if not folders:
            continue
        reports = [json.loads((folder / "scores.json").read_text())["scores"] for folder in folders]
        runs = [json.loads((folder / "summary.json").read_text()) for folder in folders]
        mean = {key: sum(report[key] for report in reports) / len(reports) for key in reports[0]}
        loss = sum(run["last"]["val_ema/loss"] for run in runs) / len(runs)
        distances = ", ".join(f"{report['frechet_distance']:.2f}" for report in reports)
        lines.append(f"| {title} | {distances} | {mean['frechet_distance']:.2f} | {mean['agreement']:.1%} | "
                     f"{mean['precision']:.3f} | {mean['recall']:.3f} | {loss:.4f} | "
                     f"{runs[0]['parameters']:,} |")  # fmt: skip
    return "\n".join(lines)


# what stands between the marks of a page, by their words
TABLES = {
    "model table": model_table, "dense table": dense_table, "toy table": toy_table,
    "published generation": generation_table, "digits table": digits_table,
}  # fmt: skip


def with_table(text: str, what: str = "model table") -> str:
    """A page with its table replaced by the current one.

    Args:
        what: which of ``TABLES``.
    """
    begin, end = f"<!-- {what}: begin (tools/document.py) -->", f"<!-- {what}: end -->"
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n{TABLES[what]()}\n{end}{after}"


@dataclass(frozen=True)
class CostRow:
    """One row of a published table: title, and what is printed and computed, in 10^6 parameters and 10^9 products."""

    table: str
    title: str
    params_m: float
    macs_g: float
    published: dict[str, float]

    @property
    def close(self) -> bool:
        """Whether all that is printed is met."""
        params = self.published.get("params_m", self.params_m)
        return abs(self.params_m - params) <= PARAMS_M and abs(self.macs_g - self.published["macs_g"]) <= MACS_G


def cost_row(table: str, label: str) -> CostRow:
    """Costs of one row of an ablation at the paper's scale, LayerNorms counted as fvcore does."""
    line = load_ablation(table, CONFIGS).rows[label]
    overrides = ("recipe=ablation_in1k", "data.root=absent", f"row={table}/{label}")
    cfg = typed(compose_cell(overrides, (), TrainConfig, CONFIGS)[1], TrainConfig)
    with torch.device("meta"):
        model = build_model(cfg, [str(i) for i in range(1000)])
    params = sum(p.numel() for p in model.parameters())
    macs = count_macs(model, cfg.data.img_size, layer_norms=True)
    return CostRow(table, line.title, params / 1e6, macs / 1e9, line.published)


def cost_rows() -> list[CostRow]:
    """All rows of the tables that print costs."""
    return [cost_row(table, label) for table in COSTED for label in load_ablation(table, CONFIGS).rows]


def costs_page(rows: list[CostRow]) -> str:
    """Computed beside published costs."""
    met = sum(row.close for row in rows)
    lines = [
        "# Costs of the paper's ablations",
        "",
        f"Written by `python tools/document.py` from [`configs/ablation`](../../configs/ablation) at the paper's scale "
        f"(`recipe=ablation_in1k`): {met} of {len(rows)} rows meet what is printed, to {PARAMS_M} M parameters and "
        f"{MACS_G} G multiply-adds. Published values are quoted; computed ones count the inner training by formula and "
        "LayerNorms with five operations an element, as fvcore does, which is what the printed figures imply. Nothing "
        "is trained here.",
        "",
        "What these figures say of the paper's base: DeiT-S without class token and without convolutional position "
        "encoding, with 0.91 M parameters that cost no products. The paper does not say what they are. Here they are a "
        "table of positions in each block, with one row more than there are tokens, as DeiT's own table has.",
    ]
    for table in COSTED:
        ablation = load_ablation(table, CONFIGS)
        lines += ["", f"## {ablation.title} ({ablation.source})", "",
                  "| row | parameters, computed | published | multiply-adds, computed | published | met |",
                  "|---|---|---|---|---|---|"]  # fmt: skip
        for row in (row for row in rows if row.table == table):
            params = f"{row.published['params_m']:.1f} M" if "params_m" in row.published else "–"
            lines.append(f"| {row.title} | {row.params_m:.3f} M | {params} | {row.macs_g:.3f} G | "
                         f"{row.published['macs_g']:.2f} G | {'yes' if row.close else 'NO'} |")  # fmt: skip
    return "\n".join(lines) + "\n"


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
    (ROOT / "docs" / "study" / "costs.md").write_text(costs_page(cost_rows()), encoding="utf-8")
    logging.info("wrote README.md, docs/parity.md and docs/study/costs.md")
    page = with_table(DENSE_PAGE.read_text(encoding="utf-8"), "toy table")
    if importlib.util.find_spec("mmengine"):
        page = with_table(page, "dense table")
    DENSE_PAGE.write_text(page, encoding="utf-8")
    page = with_table(GENERATION_PAGE.read_text(encoding="utf-8"), "published generation")
    page = with_table(page, "digits table")
    GENERATION_PAGE.write_text(page, encoding="utf-8")
    logging.info("wrote docs/detection_and_segmentation.md and docs/generation.md")


if __name__ == "__main__":
    main()
