"""The self-test finds what is wrong and says so."""

import pytest
import torch

from vit3.analysis import selftest

CPU = torch.device("cpu")
CASE = selftest.Case(1, 2, 3, 5, 8, True, "expanded")


@pytest.mark.parametrize("dtype", list(selftest.BOUNDS), ids=str)
def test_green(dtype):
    assert all(f.passed for f in selftest.check_case(CASE, "fused", dtype, CPU))


def test_wrong_backend_is_red(monkeypatch):
    right = selftest.packed_ttt

    def wrong(*args, backend, **options):
        y = right(*args, backend=backend, **options)
        return y * (1 + 1e-5) if backend == "fused" else y

    monkeypatch.setattr(selftest, "packed_ttt", wrong)
    findings = selftest.check_case(CASE, "fused", torch.float32, CPU)
    assert [f.what for f in findings if f.passed] == ["twice"]
    (row,) = selftest.table(findings)
    assert row["output"].endswith("WRONG") and row["twice"] == "equal"


def test_not_a_number_is_red():
    assert not selftest.Finding("fused", "float32", "output", "", float("nan"), 1.0).passed


def test_update_is_measured():
    finding = selftest.check_update(196, "fused", torch.bfloat16, CPU)
    assert finding.passed and finding.error < 1e-5


def test_what_cannot_run_is_said_once_per_dtype_or_raised():
    found = list(selftest.run(CPU, ("triton",), (torch.float64,), quick=True))
    assert len(found) == 1 and "float32, float16 and bfloat16, not float64" in found[0]
    with pytest.raises(ValueError, match="not float64"):
        list(selftest.run(CPU, ("triton",), (torch.float64,), quick=True, forced=True))


def test_head_error_is_of_the_worst_head():
    exact = torch.ones(1, 2, 6)  # two heads of three channels
    ours = exact.clone()
    ours[..., 3:] += 0.5
    assert selftest.head_error(ours, exact, 3) == pytest.approx(0.5)
