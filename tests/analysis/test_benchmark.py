"""What the benchmark counts and concludes."""

import pytest
import torch

from vit3.analysis import benchmark
from vit3.analysis.benchmark import Row, exponent, saved_elements
from vit3.analysis.plots import plot_growth

CPU = torch.device("cpu")


def row(tokens, ms, contender="fused", direction="forward", **kwargs):
    return Row("growth", "case", tokens, contender, direction, 2, "float32", ms, ms, ms, 1.0, **kwargs)


def test_exponent():
    assert exponent([row(n, 3e-4 * n**1.5) for n in (1024, 4096, 65536)]) == pytest.approx(1.5)


def test_saved_elements():
    x, w = torch.randn(10, 10, requires_grad=True), torch.randn(10, 10, requires_grad=True)
    assert saved_elements(lambda: x.exp(), ()) == 100
    assert saved_elements(lambda: x @ w, (x, w)) == 0
    assert saved_elements(lambda: x[:5] @ w, (w,)) == 100  # a view holds its whole storage


def test_contenders_take_turns():
    order = []
    times = benchmark.timed({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, CPU, 0.01)
    assert order[:2] == ["a", "b"] and order[2::2] == ["a"] * (len(order) // 2 - 1)
    assert times["a"] == sorted(times["a"])


def test_mixer_rows():
    rows = list(benchmark.mixer_rows((1, 16, 2, 4, 4), CPU, torch.float32, seconds=0.01))
    assert {r.contender for r in rows} == {"reference", "fused", "triton", "softmax (SDPA)", "linear attention"}
    saved = {r.contender: r.saved_elements for r in rows if r.direction == "forward+backward"}
    assert saved["fused"] < saved["reference"] / 2
    assert all(r.to_reference == 1 for r in rows if r.contender == "reference")


def test_linear_attention_is_its_definition():
    mixer, x = benchmark.LinearAttention(8, 2), torch.randn(1, 5, 8)
    q, k, v = (t.unflatten(-1, (2, 4)) for t in mixer.qkv(x).chunk(3, dim=-1))
    q, k = torch.nn.functional.elu(q) + 1, torch.nn.functional.elu(k) + 1
    weights = torch.einsum("bnmd,bkmd->bmnk", q, k)
    y = torch.einsum("bmnk,bkmd->bnmd", weights / weights.sum(dim=-1, keepdim=True), v).flatten(2)
    assert torch.allclose(mixer(x, 1, 5), mixer.proj(y), atol=1e-6)


def test_plot(tmp_path):
    rows = [
        row(n, n * f, name, direction, saved_elements=5.0)
        for n in (1024, 4096)
        for name, f in (("fused", 1e-3), ("softmax (SDPA)", 2e-3))
        for direction in ("forward", "forward+backward")
    ]
    plot_growth(rows, tmp_path / "growth.png")
    assert (tmp_path / "growth.png").stat().st_size > 10_000
