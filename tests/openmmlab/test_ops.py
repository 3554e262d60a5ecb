"""The module of operators that mmcv gets: which one, when, in which process, and what it does not have."""

import ast
import functools
import importlib
import importlib.machinery
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("mmengine", reason="needs the extra mm")

import vit3.openmmlab  # noqa: F401  before mmcv.ops
from tests.helpers import ROOT
from tests.openmmlab.slow_operators import some_boxes
from vit3.errors import UserError
from vit3.openmmlab import operators, ops
from vit3.openmmlab.operators import PROVIDED

import mmcv.ops  # isort: skip


def test_which_operators_are_loaded(record_property):
    who, module = ops.provider(), importlib.import_module("mmcv._ext")
    record_property("operators", who)
    if who == "torchvision":
        assert module.nms is operators.nms and not hasattr(module, "__file__")
    else:
        assert who == "compiled" and Path(module.__file__).suffix in (".so", ".pyd"), (who, module)


def test_install_twice_adds_one_finder_behind_the_others():
    ops.install()
    ops.install()
    assert sys.meta_path.count(ops.TorchvisionOperators) == 1
    assert sys.meta_path.index(ops.TorchvisionOperators) > sys.meta_path.index(importlib.machinery.PathFinder)


def test_only_one_name_is_answered():
    for name in ("mmcv", "mmcv._ext2", "mmcv.ops", "mmdet._ext", "_ext"):
        assert ops.TorchvisionOperators.find_spec(name) is None


def test_compiled_operators_win(monkeypatch, tmp_path):
    (tmp_path / "_ext.py").write_text("nms = 'compiled'\n")
    monkeypatch.setattr(mmcv, "__path__", [*mmcv.__path__, str(tmp_path)])
    monkeypatch.setattr(mmcv, "_ext", None, raising=False)
    monkeypatch.delitem(sys.modules, "mmcv._ext")
    if ops.provider() == "compiled" and importlib.import_module("mmcv._ext").nms != "compiled":
        pytest.skip("a truly compiled mmcv._ext is installed, and found before")
    assert importlib.import_module("mmcv._ext").nms == "compiled" and ops.provider() == "compiled"


def test_too_late_is_a_sentence(monkeypatch):
    monkeypatch.delitem(sys.modules, "mmcv._ext")
    with pytest.raises(UserError, match="before vit3.openmmlab.*import vit3.openmmlab first"):
        ops.install()


def test_after_mmcv_and_after_a_failed_import():
    """mmcv.ops fails by itself without operators, leaves nothing behind, and works once they are there."""
    code = """
import json, sys
import mmcv, mmengine
try:
    import mmcv.ops
    failed = ""
except ModuleNotFoundError as error:
    failed = str(error)
import vit3.openmmlab.ops as ops
import mmcv.ops
print(json.dumps([failed, ops.provider(), mmcv.ops.get_compiler_version()]))
"""
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    failed, who, version = json.loads(result.stdout.splitlines()[-1])
    assert who == ops.provider()
    assert (failed == "No module named 'mmcv._ext'" and "torchvision" in version) or who == "compiled"


def test_fresh_worker_processes():
    """The worker's first look at mmcv.ops is while it unpickles its work, as for mmdet's data sets."""
    boxes, scores = some_boxes(20)
    work = functools.partial(mmcv.ops.nms, scores=scores, iou_threshold=0.5)
    loader = torch.utils.data.DataLoader(
        [boxes], batch_size=None, collate_fn=work, num_workers=1, multiprocessing_context="spawn"
    )
    [(dets, kept)] = loader
    assert torch.equal(kept, work(boxes)[1]) and len(dets) < 20


def requested_names():
    """Every operator that mmcv's Python files ask the extension module for."""
    names = set()
    for path in Path(mmcv.ops.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "load_ext":
                names |= set(ast.literal_eval(node.args[1]))
    return names


def our_module():
    """The module that torchvision's operators make, also where a compiled one is loaded."""
    return importlib.util.module_from_spec(ops.TorchvisionOperators.find_spec("mmcv._ext"))


def test_every_other_operator_fails_with_a_sentence():
    module = our_module()
    module.__spec__.loader.exec_module(module)
    names, ours = requested_names(), {function.__name__ for function in PROVIDED}
    assert len(names) > 100 and ours <= names
    for name in names - ours:
        assert hasattr(module, name)
        with pytest.raises(NotImplementedError, match=rf"operator {name} needs.*compile mmcv, or use .+\.$"):
            getattr(module, name)(1, key=2)
    assert not hasattr(module, "__wrapped__") and not hasattr(module, "_private")
    with pytest.raises(NotImplementedError, match="type='SyncBN'"):
        module.sync_bn_forward_mean()
    with pytest.raises(NotImplementedError, match="without rotation"):
        module.roi_align_rotated_forward()
