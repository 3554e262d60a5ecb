"""Interventions: what each changes, and that nothing of it stays."""

import pytest
import torch
from torch import nn

from tests.helpers import narrow
from vit3 import TTT
from vit3.analysis.interventions import Intervention, Score, inner_of, intervened, interventions
from vit3.analysis.probe_report import plot_probe, probe_csv, probe_markdown
from vit3.inner import InnerSpec


def test_all_that_make_sense():
    plain = interventions(InnerSpec())
    assert plain[0] == Intervention("trained", "as trained")
    changes = [i.changes for i in plain]
    assert dict(epochs=0) in changes and dict(direction="ascent") in changes and dict(lr=4.0) in changes
    assert dict(control="swap_fast") in changes and dict(control="none") not in changes
    assert dict(control="mean_rate") not in changes and dict(epochs=1) not in changes
    gated = [i.changes for i in interventions(InnerSpec(rate="token", direction="ascent", lr=0.3, epochs=2))]
    assert dict(control="mean_rate") in gated and dict(direction="descent") in gated
    assert [c["lr"] for c in gated if "lr" in c] == pytest.approx([0.0, 0.075, 0.15, 0.6, 1.2])
    assert dict(epochs=1) in gated and dict(epochs=2) not in gated


def test_every_intervention_runs_and_leaves_no_trace():
    model = narrow("vit3_tiny", num_classes=5).eval()
    for p in model.parameters():
        p.data.add_(torch.randn_like(p) * 0.2)
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        before = model(images)
        for intervention in interventions(inner_of(model))[1:]:
            with intervened(model, intervention.changes):
                changed = model(images)
            assert changed.isfinite().all() and not torch.equal(changed, before), intervention
            assert torch.equal(model(images), before), intervention


def test_a_refused_change_leaves_no_trace():
    model = nn.Sequential(TTT(8, 2, backend="fused"), TTT(8, 2, backend="fused"))
    start = inner_of(model)
    with pytest.raises(ValueError, match="needs other parameters"), intervened(model, dict(model="fc")):
        pass
    assert inner_of(model) == start and all(mixer.backend == "fused" for mixer in model)


def test_networks_without_one_inner_training():
    with pytest.raises(ValueError, match="0 kinds of inner training"):
        inner_of(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="2 kinds of inner training"):
        inner_of(nn.Sequential(TTT(8, 2), TTT(8, 2, inner=InnerSpec(lr=0.5))))


def test_report(tmp_path):
    scores = [Score(i, 50.0 + n, 1.0) for n, i in enumerate(interventions(InnerSpec()))]
    scores.append(Score(Intervention("size", "64x64 pixels"), 12.5, 3.0))
    page = probe_markdown(scores, "a title")
    assert "| as trained | 50.00 |  | 1.0000 |" in page and "| 64x64 pixels | 12.50 | -37.50 | 3.0000 |" in page
    lines = probe_csv(scores).splitlines()
    assert lines[0] == "group,label,top1,loss" and lines[-1] == "size,64x64 pixels,12.5000,3.000000"
    assert len(lines) == len(scores) + 1
    plot_probe(scores, tmp_path / "probe.png", "a title")
    assert (tmp_path / "probe.png").stat().st_size > 10_000
