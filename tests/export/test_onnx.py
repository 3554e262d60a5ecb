"""ONNX files: standard operators, named axes, and ONNX Runtime's results at every declared shape."""

import dataclasses
import functools
import logging
import sys

import numpy as np
import pytest
import torch

from tests.export.subjects import FAMILIES, exported
from vit3.export.onnx import HALF_BOUND, _halved, _simplify, check_standard, open_onnx, read_signature, write_onnx
from vit3.export.verify import verify

onnx = pytest.importorskip("onnx", reason="the extra 'export' is not installed")
pytest.importorskip("onnxscript", reason="the extra 'export' is not installed")
onnx_ir = pytest.importorskip("onnx_ir", reason="the extra 'export' is not installed")
onnxruntime = pytest.importorskip("onnxruntime", reason="the extra 'export' is not installed")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Path of a family's file, written once."""

    @functools.cache
    def write(family, dtype="float32"):
        _, signature, program = exported(family)
        path = tmp_path_factory.mktemp(family) / "net.onnx"
        write_onnx(program, signature, path, dtype)
        return path

    return write


# seconds each; what the classifiers of h_vit3 have beside its maps, the others have too
@pytest.mark.parametrize("family", [pytest.param(f, marks=pytest.mark.slow if f == "h_vit3" else ()) for f in FAMILIES])
def test_results(written, family):
    source, signature, _ = exported(family)
    checks = verify(source.model, open_onnx(written(family)), signature)
    assert all(check.passed for check in checks), checks
    assert max(check.difference for check in checks if check.declared) < 2e-5
    small, channels = (check for check in checks if not check.declared)
    assert small.what.endswith("runs, equal")  # below the smallest side, which ONNX does not need
    assert channels.what.endswith("refused")


def test_file(written):
    path = written("dit3")
    model = onnx.load(path)
    axes = {
        entry.name: [dim.dim_param or dim.dim_value for dim in entry.type.tensor_type.shape.dim]
        for entry in (*model.graph.input, *model.graph.output)
    }
    assert axes == {
        "latents": ["batch", 4, "height", "width"],
        "times": ["batch"],
        "labels": ["batch"],
        "noise": ["batch", 8, "height", "width"],
    }
    assert {entry.domain for entry in model.opset_import} == {""}
    assert read_signature(path) == exported("dit3")[1]
    assert b".py" not in path.read_bytes()  # no traces of the machine that wrote it


def test_undeclared_shapes_are_one_sentence(written):
    run = open_onnx(written("dit3"))
    times, labels = torch.zeros(1), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"inputs of shape \(1, 2, 8, 8\), .* are refused by net.onnx: .*Expected: 4"):
        run(torch.zeros(1, 2, 8, 8), times, labels)
    with pytest.raises(ValueError, match="2 inputs were given; net.onnx takes latents, times, labels"):
        run(torch.zeros(1, 4, 8, 8), times)


def test_half_precision(written):
    source, signature, _ = exported("vit3")
    path = written("vit3", "float16")
    checks = verify(source.model, open_onnx(path), signature, bound=HALF_BOUND, relative=True)
    assert all(check.passed for check in checks), checks
    model = onnx.load(path)
    types = {entry.name: entry.type.tensor_type.elem_type for entry in (*model.graph.input, *model.graph.output)}
    assert set(types.values()) == {onnx.TensorProto.FLOAT}
    assert {entry.key: entry.value for entry in model.metadata_props}["dtype"] == "float16"
    stored = {x.name: x.data_type for x in model.graph.initializer if ".attn." in x.name}
    inner = {name: kind for name, kind in stored.items() if name[-2:] in ("w1", "w2", "w3")}
    assert len(inner) == 3 and set(inner.values()) == {onnx.TensorProto.FLOAT}, stored
    assert {kind for name, kind in stored.items() if name.endswith("bias")} == {onnx.TensorProto.FLOAT16}, stored


GRAPH = """
<ir_version: 9, opset_import: ["": 18, "own": 1, "other": 1]>
net (float[n] x) => (float[n] y, float[n] z, float[n] same)
<float[1] a = {3.0}, float[1] b = {3.0}>
{
    two = Constant <value = float[1] {2.0}> ()
    four = Mul (two, two)
    u = own.twice (x)
    unused = Neg (u)
    s = Mul (u, a)
    t = Mul (u, b)
    y = Add (s, four)
    same = Add (t, four)
    z = Sub (t, two)
}
<domain: "own", opset_import: ["": 18]>
twice (x) => (y) { y = Add (x, x) }
"""


def test_nothing_is_computed_twice_or_for_nothing():
    """Also where the exporter left a function of its own, which few runtimes know."""
    model = onnx_ir.serde.deserialize_model(onnx.parser.parse_model(GRAPH))
    _simplify(model)
    model = onnx_ir.serde.serialize_model(model)
    kinds = sorted(node.op_type for node in model.graph.node)
    assert kinds == ["Add", "Add", "Identity", "Mul", "Sub"]  # 2x, 3u, + 4, - 2, and the output that is another
    assert not model.functions and [entry.domain for entry in model.opset_import] == [""]
    assert sorted(onnx.numpy_helper.to_array(x).item() for x in model.graph.initializer) == [2, 3, 4]
    y, z, same = onnx.reference.ReferenceEvaluator(model).run(None, {"x": np.float32([1, 2])})
    assert y.tolist() == same.tolist() == [10, 16] and z.tolist() == [4, 10]


WIDE = """
<ir_version: 9, opset_import: ["": 18]>
net (float[n, 4] x, float[n, 4] t) => (float[n, 1] y)
<float[1] most = {1000.0}>
{
    double = Add (x, x)
    mean = ReduceMean <keepdims = 1> (double)
    angle = Mul (t, most)
    wave = Cos (angle)
    y = Mul (mean, wave)
}
"""


def test_means_and_angles_are_wide_in_half_precision():
    """A float16 of 1000 has steps of 0.5: nothing of an angle is left."""
    model = _halved(onnx.parser.parse_model(WIDE))
    model = onnx.shape_inference.infer_shapes(model)
    kinds = {x.name: x.type.tensor_type.elem_type for x in (*model.graph.value_info, *model.graph.input)}
    kinds |= {x.name: x.data_type for x in model.graph.initializer}
    of = {node.op_type: {kinds[name] for name in node.input} for node in model.graph.node if node.op_type != "Mul"}
    assert of["ReduceMean"] == of["Cos"] == {onnx.TensorProto.FLOAT} and of["Add"] == {onnx.TensorProto.FLOAT16}
    angle, y = ({kinds[name] for name in node.input} for node in model.graph.node if node.op_type == "Mul")
    assert angle == {onnx.TensorProto.FLOAT} and y == {onnx.TensorProto.FLOAT16}


def test_as_many_threads_as_pytorch_has(written, monkeypatch):
    made, real = [], onnxruntime.InferenceSession
    monkeypatch.setattr(onnxruntime, "InferenceSession", lambda *args, **kw: made.append(args[1]) or real(*args, **kw))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    open_onnx(written("dit3"))
    assert made[0].intra_op_num_threads == 3


def test_operators_of_other_domains_are_refused(written, tmp_path):
    model = onnx.load(written("dit3"))
    model.graph.node[3].domain = "com.microsoft"
    onnx.save(model, tmp_path / "odd.onnx")
    with pytest.raises(ValueError, match="odd.onnx has operators of com.microsoft"):
        check_standard(tmp_path / "odd.onnx")


def test_complex_numbers_are_refused(written, tmp_path):
    model = onnx.load(written("dit3"))
    model.graph.value_info.append(onnx.helper.make_tensor_value_info("z", onnx.TensorProto.COMPLEX64, [1]))
    onnx.save(model, tmp_path / "odd.onnx")
    with pytest.raises(ValueError, match="complex numbers"):
        check_standard(tmp_path / "odd.onnx")


def test_what_is_missing_or_unknown(monkeypatch, tmp_path):
    _, signature, program = exported("vit3")
    with pytest.raises(ValueError, match="dtype='int8' is unknown; use one of: float32, float16"):
        write_onnx(program, signature, tmp_path / "net.onnx", "int8")
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ModuleNotFoundError, match=r"format=onnx needs the package onnx: pip install 'vit3\[export\]'"):
        write_onnx(program, signature, tmp_path / "net.onnx")


def test_what_cannot_be_converted_is_one_sentence_and_the_optimiser_is_silent(monkeypatch, tmp_path, caplog):
    def fail(*args, **kwargs):
        logging.getLogger("onnx_ir.passes").info("one line for each node")
        raise torch.onnx.errors.OnnxExporterError("## Summary\n\nlong") from ValueError("No function\nfor aten.odd")

    _, signature, program = exported("vit3")
    monkeypatch.setattr(torch.onnx, "export", fail)
    with (
        caplog.at_level(logging.INFO),
        pytest.raises(ValueError, match=r"no counterpart in ONNX \(No function for aten.odd\); .*dynamic=\[\]"),
    ):
        write_onnx(program, signature, tmp_path / "net.onnx")
    assert "each node" not in caplog.text
    assert logging.getLogger("onnx_ir").level == logging.NOTSET


@pytest.mark.parametrize("dtype", ["float32", pytest.param("float16", marks=pytest.mark.slow)])
def test_weights_beside_large_files(monkeypatch, tmp_path, dtype):
    source, signature, program = exported("vit3")
    size = sum(x.numel() * x.element_size() for x in (*program.state_dict.values(), *program.constants.values()))
    monkeypatch.setattr("vit3.export.onnx._LARGEST", (size if dtype == "float32" else size / 2) - 1)
    checked = []
    monkeypatch.setattr("vit3.export.onnx.check_standard", checked.append)
    write_onnx(program, signature, tmp_path / "net.onnx", dtype)
    assert checked == [tmp_path / "net.onnx"]
    assert (tmp_path / "net.onnx.data").stat().st_size > 1000
    small = dataclasses.replace(signature, dynamic=("batch",))
    bound = 1e-4 if dtype == "float32" else HALF_BOUND
    checks = verify(source.model, open_onnx(tmp_path / "net.onnx"), small, bound=bound, relative=dtype == "float16")
    assert all(check.passed for check in checks), checks
