"""ONNX files: standard operators, named axes, and ONNX Runtime's results at every declared shape."""

import copy
import dataclasses
import functools
import logging
import re
import sys
from operator import attrgetter
from types import SimpleNamespace

import pytest
import torch

from tests.export.subjects import FAMILIES, exported, plain
from vit3.export.onnx import HALF_BOUND, _halved, _simplify, check_standard, open_onnx, read_signature, write_onnx
from vit3.export.signature import Signature
from vit3.export.verify import verify

onnx = pytest.importorskip("onnx", reason="the extra 'export' is not installed")
pytest.importorskip("onnxscript", reason="the extra 'export' is not installed")
pytest.importorskip("onnxruntime", reason="the extra 'export' is not installed")


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
    between = " ".join(dim.dim_param for v in model.graph.value_info for dim in v.type.tensor_type.shape.dim)
    assert set(re.findall(r"[a-z]\w*", between)) == {"batch", "height", "width"}


def test_nothing_is_computed_twice_or_for_nothing(written):
    graph = onnx.load(written("dit3")).graph
    kept = [(tuple(x.dims), x.data_type, x.raw_data) for x in graph.initializer]
    assert len(set(kept)) == len(kept)
    done = [(node.op_type, tuple(node.input), str(node.attribute)) for node in graph.node]
    assert len(set(done)) == len(done)
    stored, read = {x.name for x in graph.initializer}, {name for node in graph.node for name in node.input}
    assert stored <= read and not [node for node in graph.node if stored.issuperset(node.input)]
    assert all(read & {*node.output} or node.output[0] == "noise" for node in graph.node)


def test_undeclared_shapes_are_one_sentence(written):
    run = open_onnx(written("dit3"))
    times, labels = torch.zeros(1), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"inputs of shape \(1, 2, 8, 8\), .* are refused by net.onnx: .*Expected: 4"):
        run(torch.zeros(1, 2, 8, 8), times, labels)
    with pytest.raises(ValueError, match="2 inputs were given; net.onnx takes latents, times, labels"):
        run(torch.zeros(1, 4, 8, 8), times)
    with pytest.raises(ValueError, match="4 inputs were given"):
        run(torch.zeros(1, 4, 8, 8), times, labels, labels)
    assert run(torch.zeros(1, 4, 8, 8, requires_grad=True), times, labels)[0].shape == (1, 8, 8, 8)


def test_the_runtime_has_the_threads_of_pytorch_and_is_silent(monkeypatch, tmp_path):
    opened = []

    class Session:
        def __init__(self, path, options, providers):
            opened.append((options.intra_op_num_threads, options.log_severity_level, providers))

        def get_inputs(self):
            return []

    monkeypatch.setattr("onnxruntime.InferenceSession", Session)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    open_onnx(tmp_path / "net.onnx")
    assert opened == [(5, 3, ["CPUExecutionProvider"])]  # 3: errors alone


def test_half_precision(written, monkeypatch, capsys):
    seen = []
    monkeypatch.setattr("vit3.export.onnx.check_standard", lambda path: (seen.append(path), check_standard(path)))
    source, signature, _ = exported("vit3")
    path = written("vit3", "float16")
    assert seen == [path] and capsys.readouterr().out == ""  # looked at, and without a word of the exporter's
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


def test_what_is_left_of_functions_and_names():
    """Functions become their nodes, other domains go, nodes have names, and an input that is an output is a copy."""
    ir = pytest.importorskip("onnx_ir")
    helper = onnx.helper
    x, y = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2]) for name in "xy")
    opsets = [helper.make_opsetid(name, version) for name, version in (("", 18), ("own", 1), ("unused", 1))]
    twice = helper.make_function("own", "Twice", ["a"], ["b"], [helper.make_node("Add", ["a", "a"], ["b"])], opsets[:1])
    graph = helper.make_graph([helper.make_node("Twice", ["x"], ["y"], domain="own")], "g", [x], [y, x])
    model = ir.from_proto(helper.make_model(graph, functions=[twice], opset_imports=opsets))
    _simplify(model)
    model = ir.to_proto(model)
    assert sorted(node.op_type for node in model.graph.node) == ["Add", "Identity"] and not model.functions
    assert all(node.name for node in model.graph.node) and [entry.domain for entry in model.opset_import] == [""]


def test_what_stays_wide_in_float16():
    """Sums, inner steps of any mixer without the layers in it, and angles with all that they are computed from."""
    mixer, layer = "vit3.mixers.linear.LinearAttention", "torch.nn.modules.linear.Linear"
    wanted = dict(mean=1, sum=1, norm=1, most=1, step=1, turned=1, place=1, angle=1, sine=1, shift=1, cosine=1)
    wanted |= dict(plain=0, layer=0, end=0)

    def node(kind, output, *inputs, modules=("vit3.models.block.Block",)):
        made = onnx.helper.make_node(kind, inputs, [output], output)
        entry = made.metadata_props.add()
        entry.key, entry.value = "pkg.torch.onnx.class_hierarchy", str([*modules, f"aten.{kind}"])
        return made

    nodes = [
        node("MatMul", "plain", "x", "w"),
        node("Add", "layer", "plain", "w", modules=(mixer, layer)),
        node("Add", "step", "layer", "w", modules=(mixer,)),
        node("ReduceMean", "mean", "step"),
        node("ReduceSum", "sum", "plain"),
        node("ReduceL2", "norm", "plain"),
        node("Max", "most", "plain", "w"),  # the converter keeps it
        node("Sub", "place", "x", "w"),
        node("Mul", "angle", "place", "w"),
        node("Sin", "sine", "angle"),
        node("Div", "shift", "x", "w"),
        node("Cos", "cosine", "shift", modules=(mixer,)),
        node("Mul", "turned", "sine", "cosine", modules=(mixer,)),
        node("Sum", "end", "mean", "sum", "norm", "most", "turned"),
    ]
    x, y = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [4, 4]) for name in ("x", "end"))
    w = onnx.helper.make_tensor("w", onnx.TensorProto.FLOAT, [4, 4], [0.5] * 16)
    model = onnx.helper.make_model(onnx.helper.make_graph(nodes, "g", [x], [y], [w]))
    half = onnx.shape_inference.infer_shapes(_halved(onnx.shape_inference.infer_shapes(model)))
    kinds = {entry.name: entry.type.tensor_type.elem_type for entry in (*half.graph.value_info, *half.graph.output)}
    found = {node.name: int(kinds[node.output[0]] == onnx.TensorProto.FLOAT) for node in half.graph.node}
    assert {name: found[name] for name in wanted} == wanted


def test_operators_of_other_domains_are_refused(written, tmp_path):
    whole = onnx.load(written("dit3"))
    foreign = onnx.helper.make_node("Foreign", ["x"], ["y"], domain="com.microsoft")
    opset = onnx.helper.make_opsetid("com.microsoft", 1)
    function = onnx.helper.make_function("", "Inner", ["x"], ["y"], [foreign], [opset])
    for place, entry in (("graph.node", foreign), ("functions", function), ("opset_import", opset)):
        model = copy.deepcopy(whole)
        attrgetter(place)(model).append(entry)
        onnx.save(model, tmp_path / "odd.onnx")
        with pytest.raises(ValueError, match="odd.onnx has operators of com.microsoft"):
            check_standard(tmp_path / "odd.onnx")
    whole.graph.node[0].op_type = "NoSuch"
    onnx.save(whole, tmp_path / "odd.onnx")
    with pytest.raises(onnx.checker.ValidationError, match="NoSuch"):
        check_standard(tmp_path / "odd.onnx")


def test_complex_numbers_are_refused(written, tmp_path):
    whole = onnx.load(written("dit3"))
    for kind in (onnx.TensorProto.COMPLEX64, onnx.TensorProto.COMPLEX128):
        value, stored = (
            onnx.helper.make_tensor_value_info("z", kind, [1]),
            onnx.helper.make_tensor("z", kind, [1], [1j]),
        )
        for place, entry in (("value_info", value), ("input", value), ("output", value), ("initializer", stored)):
            model = copy.deepcopy(whole)
            getattr(model.graph, place).append(entry)
            onnx.save(model, tmp_path / "odd.onnx")
            with pytest.raises(ValueError, match="odd.onnx has complex numbers"):
                check_standard(tmp_path / "odd.onnx")


def test_what_is_missing_or_unknown(monkeypatch, tmp_path):
    _, signature, program = exported("vit3")
    with pytest.raises(ValueError, match="dtype='int8' is unknown; use one of: float32, float16"):
        write_onnx(program, signature, tmp_path / "net.onnx", "int8")
    monkeypatch.setattr(torch.onnx, "export", lambda *args, **options: pytest.fail("what is missing is found first"))
    for name, use in (
        ("onnxruntime", lambda: open_onnx(tmp_path / "net.onnx")),
        ("onnxscript", lambda: write_onnx(program, signature, tmp_path / "net.onnx")),
        ("onnx", lambda: write_onnx(program, signature, tmp_path / "net.onnx")),
    ):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(ModuleNotFoundError, match=rf"format=onnx needs the package {name}: .*'vit3\[export\]'"):
            use()


def test_what_cannot_be_converted_is_one_sentence_and_the_optimiser_is_silent(monkeypatch, tmp_path, caplog):
    def fail(*args, **kwargs):
        for name in ("onnx_ir.passes", "onnxscript.optimizer"):
            logging.getLogger(name).info("one line for each node")
        cause = ValueError("No function\nfor aten.odd" + " and more" * 99)
        raise torch.onnx.errors.OnnxExporterError("## Summary\n\nlong") from cause

    _, signature, program = exported("vit3")
    monkeypatch.setattr(torch.onnx, "export", fail)
    with (
        caplog.at_level(logging.INFO),
        pytest.raises(
            ValueError, match=r"no counterpart in ONNX \(No function for aten.odd and .*dynamic=\[\]"
        ) as error,
    ):
        write_onnx(program, signature, tmp_path / "net.onnx")
    assert len(str(error.value)) < 500
    assert "each node" not in caplog.text
    assert logging.getLogger("onnx_ir").level == logging.NOTSET


@pytest.mark.parametrize(("largest", "beside"), [(7_000, "float32 float16"), (9_000, "float32"), (17_000, "")])
def test_weights_lie_beside_a_file_that_is_too_large_with_them(monkeypatch, tmp_path, largest, beside):
    """16 kB in float32, 8 in float16; half of them are constants."""
    ir = pytest.importorskip("onnx_ir")
    x, y = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [64]) for name in ("images", "logits"))
    weights, images = torch.randn(64, 64), torch.randn(64)
    product = onnx.helper.make_node("MatMul", ["w", "images"], ["logits"])
    graph = onnx.helper.make_graph([product], "g", [x], [y], [onnx.numpy_helper.from_array(weights.numpy(), "w")])
    made = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=10)
    made = onnx.shape_inference.infer_shapes(made)
    monkeypatch.setattr(
        torch.onnx, "export", lambda *args, **options: torch.onnx.ONNXProgram(ir.from_proto(made), None)
    )
    monkeypatch.setattr("vit3.export.onnx._LARGEST", largest)
    program = SimpleNamespace(state_dict={"a": torch.zeros(2048)}, constants={"b": torch.zeros(2048)})
    for dtype in ("float32", "float16"):
        write_onnx(program, Signature.of(plain()), tmp_path / f"{dtype}.onnx", dtype)
        assert (tmp_path / f"{dtype}.onnx.data").is_file() == (dtype in beside)
        (output,) = open_onnx(tmp_path / f"{dtype}.onnx")(images)
        assert torch.allclose(output, weights @ images, atol=1e-4 if dtype == "float32" else 0.1)


@pytest.mark.slow
def test_weights_beside_large_files(monkeypatch, tmp_path):
    monkeypatch.setattr("vit3.export.onnx._LARGEST", 1000)
    source, signature, program = exported("vit3")
    write_onnx(program, signature, tmp_path / "net.onnx")
    assert (tmp_path / "net.onnx.data").stat().st_size > 1000
    small = dataclasses.replace(signature, dynamic=("batch",))
    assert all(check.passed for check in verify(source.model, open_onnx(tmp_path / "net.onnx"), small))
