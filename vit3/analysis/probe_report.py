"""What a probe found, as a table and as a picture."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from vit3.analysis.interventions import Score
from vit3.analysis.plots import new_figure

_TITLES = {
    "control": "one part broken",
    "lr": "inner learning rate",
    "epochs": "inner epochs",
    "size": "image size",
}
_COLOR, _BASE = "#1f5fa8", "#999999"


def probe_markdown(scores: list[Score], title: str) -> str:
    """A table, the trained state first, with differences to it."""
    base = scores[0]
    lines = [f"# {title}", "", "| what | top-1 | difference | loss |", "|---|---|---|---|"]
    for score in scores:
        difference = "" if score is base else f"{score.top1 - base.top1:+.2f}"
        lines.append(f"| {score.intervention.label} | {score.top1:.2f} | {difference} | {score.loss:.4f} |")
    lines += ["", "Top-1 in per cent. Nothing was trained anew: a difference says what the trained network makes of a "
              "part, not what a network trained without it would do."]  # fmt: skip
    return "\n".join(lines) + "\n"


def probe_csv(scores: list[Score]) -> str:
    """One line per intervention."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("group", "label", "top1", "loss"))
    writer.writerows((s.intervention.group, s.intervention.label, f"{s.top1:.4f}", f"{s.loss:.6f}") for s in scores)
    return text.getvalue()


def plot_probe(scores: list[Score], target: Path, title: str) -> None:
    """Draw top-1 under every intervention, one panel a group, the trained state as a line through all."""
    base, groups = scores[0].top1, {}
    for score in scores[1:]:
        groups.setdefault(score.intervention.group, []).append(score)
    figure = new_figure(3.2 + 2.6 * len(groups), 5)
    panels = figure.subplots(1, len(groups), squeeze=False, width_ratios=[1.5 if g == "control" else 1 for g in groups])
    for axes, (group, members) in zip(panels.flat, groups.items()):
        places = range(len(members))
        axes.barh(places, [s.top1 for s in members], color=_COLOR, height=0.6)
        axes.axvline(base, color=_BASE, linewidth=1, linestyle="--")
        for place, s in zip(places, members):
            axes.annotate(f"{s.top1:.1f}", (s.top1, place), (3, 0), textcoords="offset points", va="center", fontsize=7)
        axes.set_yticks(places, [s.intervention.label for s in members], fontsize=8)
        axes.invert_yaxis()
        axes.set(xlim=(0, 112), xlabel="top-1 [%]", title=_TITLES.get(group, group))
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{title}\nas trained {base:.2f} % (dashed)", fontsize=9)
    figure.savefig(target)
