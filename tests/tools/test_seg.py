"""tools/seg.py: exit codes and one sentence."""

from __future__ import annotations

import logging
import sys

import pytest
from vit3.tools.seg import main


@pytest.fixture
def seg(monkeypatch, capsys):
    """Runs the tool in this process; returns its exit status, and what it printed as (stdout, stderr)."""
    handlers, level = list(logging.root.handlers), logging.root.level

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["tools/seg.py", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        return end.value.code, *capsys.readouterr()

    yield run
    logging.basicConfig(handlers=handlers, level=level, force=True)


def test_mistakes_are_one_sentence(seg, tmp_path):
    for arguments, words in (
        (("trian", "config.py"), "did you mean train?"),
        (("train",), "needs a configuration file"),
        (("train", "config.yaml"), "must end in .py"),
        (("train", str(tmp_path / "none.py")), "no such configuration file"),
    ):
        code, said, error = seg(*arguments)
        assert (code, said) == (2, "") and words in error and len(error.splitlines()) == 1


def test_a_wrong_key_leaves_with_status_2(seg, tmp_path):
    pytest.importorskip("mmseg", reason="needs the extra mm")
    from tests.openmmlab.small import SEGMENTOR, write_config

    config = write_config(tmp_path, SEGMENTOR)
    code, said, error = seg("train", str(config), "train_cfg.max_iter=3", f"output={tmp_path}")
    assert (code, said) == (2, "")
    assert error.endswith("error: train_cfg.max_iter is no key of this config; did you mean train_cfg.max_iters?\n")
    assert [path.name for path in tmp_path.iterdir()] == [config.name]
