"""tools/flops.py: tables of a network's costs."""

import pytest
from vit3.tools.flops import block_table, flops, size_table

from tests.helpers import light
from tests.toy import compose_config
from vit3.analysis.flops import count_macs
from vit3.errors import UserError


def printed(capsys, *overrides):
    flops(compose_config(*overrides, root="flops"))
    return capsys.readouterr().out


def test_tables(capsys):
    text = printed(capsys, "recipe=vit3_tiny_in1k", "++model.kwargs.depth=2", "sizes=[224,[64,96]]")
    lines = [line.split() for line in text.splitlines()]
    blocks = [line for line in lines if line and line[0].startswith("blocks.")]
    assert len(blocks) == 2 and blocks[0][1:] == blocks[1][1:] and len(blocks[0]) == 6
    sizes = {line[0]: line for line in lines if line and "x" in line[0]}
    assert sizes["224x224"][1] == sizes["224x224"][3] != sizes["224x224"][5]  # by formula, counted, with norms
    assert sizes["64x96"][1] == sizes["64x96"][3]


def test_parts_add_up():
    model = light("h_vit3_tiny", num_classes=10)
    table = block_table(model, (64, 64))
    params = [int(cell.replace(",", "")) for cell in table.columns[1].cells]
    assert params[-1] == sum(params[:-1]) == sum(p.numel() for p in model.parameters())
    macs = [float(cell.split()[0].replace(",", "")) for cell in table.columns[2].cells]
    assert macs[-1] == pytest.approx(count_macs(model, (64, 64)) / 1e6, abs=1e-3)
    assert macs[-1] == pytest.approx(sum(macs[:-1]), abs=0.01)
    assert len(size_table(model, [(64, 64)], count=False).columns) == 3


@pytest.mark.parametrize("sizes", ["[x]", "[[64,64,3]]", "[0]", "[1.5]"])
def test_sizes_are_checked(sizes):
    with pytest.raises(UserError, match="is no size; give sides in pixels"):
        flops(compose_config("recipe=vit3_tiny_in1k", f"sizes={sizes}", root="flops"))
