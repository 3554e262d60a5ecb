"""Published networks with fresh weights in every format, at every declared shape. Hours on two cores."""

import pytest

from scripts.study_export import NAMES, exported, fresh
from vit3.export.formats import FORMATS

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", NAMES)
def test_every_format(name, tmp_path):
    pytest.importorskip("onnxruntime", reason="the extra 'export' is not installed")
    results = list(exported(fresh(name), FORMATS, tmp_path))
    assert [result.format for result in results] == list(FORMATS)
    for result in results:
        assert result.error is None and result.passed, result
