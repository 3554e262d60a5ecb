"""Published networks as graphs: every declared shape of every file. Hours on two cores, most of it in the compiler."""

import pytest
import timm
import torch

from tests.export.subjects import enliven
from vit3.export import Subject
from vit3.export.aoti import open_package, write_package
from vit3.export.onnx import HALF_BOUND, open_onnx, write_onnx
from vit3.export.program import export_program, open_program, save_program
from vit3.export.signature import Signature
from vit3.export.verify import verify
from vit3.models.dense import DenseHViT3

CLASSIFIERS = ("vit3_tiny", "vit3_small", "vit3_base", "h_vit3_tiny", "h_vit3_small", "h_vit3_base")
DENSE = ("tiny", "small", "base")
GENERATORS = ("dit3_s_8",)

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("name", [*CLASSIFIERS, *DENSE, *GENERATORS])]


def build(name):
    torch.manual_seed(0)
    if name in DENSE:
        return Subject(DenseHViT3(name).eval(), "features", f"h_vit3_{name}_dense", {}, (224, 224))
    if name in GENERATORS:  # gates start at zero, so that no block would be seen
        return Subject(enliven(timm.create_model(name)), "generator", name, {}, (32, 32))
    return Subject(timm.create_model(name).eval(), "classifier", name, {}, (224, 224))


def check(source, run, signature, **options):
    checks = verify(source.model, run, signature, **options)
    assert all(check.passed for check in checks), checks


def test_graphs(name, tmp_path):
    source = build(name)
    signature = Signature.of(source)
    assert signature.dynamic == ("batch", "size")
    program = export_program(source, signature)
    save_program(program, signature, tmp_path / "net.pt2")
    check(source, open_program(tmp_path / "net.pt2"), signature)
    pytest.importorskip("onnxruntime", reason="the extra 'export' is not installed")
    write_onnx(program, signature, tmp_path / "net.onnx")
    check(source, open_onnx(tmp_path / "net.onnx"), signature)
    write_onnx(program, signature, tmp_path / "half.onnx", "float16")
    check(source, open_onnx(tmp_path / "half.onnx"), signature, bound=HALF_BOUND, relative=True)


def test_package(name, tmp_path):
    source = build(name)
    signature = Signature.of(source)
    write_package(export_program(source, signature), signature, tmp_path / "net.pt2")
    check(source, open_package(tmp_path / "net.pt2"), signature)
