"""Every Triton kernel, compiled ahead of time: nothing spills, everything fits; three GPU generations with -m slow."""

import json
import os
import subprocess
import sys
from collections import Counter

import pytest

from tests.helpers import ROOT

pytest.importorskip("triton", reason="Triton is not installed")
if not sys.platform.startswith("linux"):
    pytest.skip("Triton's compiler runs on Linux alone", allow_module_level=True)


ALL = (80, 90, 100)


@pytest.fixture(
    scope="module",
    params=[pytest.param((90,), id="sm_90"), pytest.param(ALL, id="all", marks=pytest.mark.slow)],
)
def architectures(request):
    return request.param


@pytest.fixture(scope="module")
def rows(tmp_path_factory, architectures):
    """Resources of everything; a process of its own, because Triton interprets kernels in this one."""
    script = tmp_path_factory.mktemp("kernels") / "compile.py"
    script.write_text(
        """
import dataclasses, json, sys
from vit3.analysis import kernels

if __name__ == "__main__":
    found = kernels.all_resources(tuple(json.loads(sys.argv[1])))
    bfloat16 = [c for c in kernels.configurations(("bf16",)) if c[1] == "gradient" and c[2] == 64]
    found += [kernels.resources(c, 90) for c in bfloat16]
    print(json.dumps([dataclasses.asdict(row) for row in found]))
"""
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    result = subprocess.run(
        [sys.executable, str(script), json.dumps(architectures)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout.splitlines()[-1])


def brief(row):
    launch = row["launch"]
    return (
        f"{row['op']} {row['kernel']} D={row['width']} {row['dtype']} sm_{row['architecture']} "
        f"{launch['block']}x{launch['columns']}, {launch['warps']} warps: {row['spills']} bytes spilled, "
        f"{row['shared']} of {launch['shared']} shared"
    )


def test_every_kernel_is_there(rows, architectures):
    found = Counter((row["op"], row["architecture"]) for row in rows if row["dtype"] != "bf16")
    assert set(found) == {(op, a) for op in ("glu_ttt", "dwconv_ttt") for a in architectures}
    for op in ("glu_ttt", "dwconv_ttt"):
        assert len({found[op, a] for a in architectures}) == 1
    widths = {(row["kernel"], row["width"]) for row in rows if row["op"] == "glu_ttt"}
    assert {(kernel, width) for kernel in ("gradient", "apply", "step") for width in (16, 32, 64, 128)} <= widths
    assert any(row["dtype"] == "bf16" for row in rows)


def test_nothing_spills(rows):
    assert [brief(row) for row in rows if row["spills"]] == []


def test_shared_memory_is_within_the_table(rows):
    """Launches are chosen by the table's bound, so it must hold on every architecture; 99 KiB fit all of them."""
    assert [brief(row) for row in rows if row["shared"] > row["launch"]["shared"]] == []
    assert max(row["shared"] for row in rows) <= 99 * 1024
    assert max(row["shared"] for row in rows if row["width"] <= 64) <= 48 * 1024
