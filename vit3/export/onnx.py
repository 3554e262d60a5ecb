"""A network as an ONNX file of standard operators, which ONNX Runtime and others run without PyTorch.

A file in float16 keeps the inner step, angles and means in float32, as :mod:`vit3.ops.precision` does in training, and
takes and gives float32. It cannot be equal to 1e-4: see ``HALF_BOUND``.
"""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.export import ExportedProgram

from vit3.export.runner import Run
from vit3.export.signature import Signature

DTYPES = ("float32", "float16")
# Of float16 files, relative to the largest output; float16 has steps of 1e-3 of a value. Measured, batch 1 to 8, inputs
# as they are and times 100: 3e-4 to 7e-4 (ViT³) and 5e-3 to 1.8e-2 (one block of DiT³ with large weights).
HALF_BOUND = 2e-2
_LARGEST = 2**31 - 2**20  # bytes that one file of protocol buffers holds, with room for the graph
_OWN = "vit3"  # key of the signature among the file's metadata
_WIDE = ("ReduceL2", "ReduceMean", "ReduceSum")  # not in float16, where sums over tokens lose whole updates
_MODULE = "pkg.torch.onnx.class_hierarchy"  # what the exporter notes at each node


def write_onnx(program: ExportedProgram, signature: Signature, path: Path, dtype: str = "float32") -> None:
    """Write ``path``; beside it ``path``.data with the weights if they are more than 2 GB.

    Args:
        program: of :func:`vit3.export.program.export_program`. signature: of the same.
        dtype: of the weights and of all but the inner step, ``float32`` or ``float16``.

    Raises:
        ValueError: unknown dtype, or operators that are not standard.
        ModuleNotFoundError: an optional package is missing.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype='{dtype}' is unknown; use one of: {', '.join(DTYPES)}")
    onnx = _package("onnx")
    _package("onnxscript")
    path = Path(path)
    try:
        with torch.no_grad(), _quiet():
            written = torch.onnx.export(
                program,
                signature.example(),
                dynamo=True,
                input_names=list(signature.inputs),
                output_names=list(signature.outputs),
                verbose=False,
                optimize=False,
            )
            _simplify(written.model)
    except torch.onnx.errors.OnnxExporterError as error:
        reason = " ".join(str(error.__cause__ or error).split())[:200]
        raise ValueError(f"format=onnx: an operator of this network has no counterpart in ONNX ({reason}); inner "
                         "problems without an operator need dynamic=[]; else use format=[pt2]") from error  # fmt: skip
    weights = sum(x.numel() * x.element_size() for x in (*program.state_dict.values(), *program.constants.values()))
    if dtype == "float16":
        model = _halved(written.model_proto)
        onnx.save(model, path, save_as_external_data=weights / 2 > _LARGEST, location=f"{path.name}.data")
    else:
        written.save(path, external_data=weights > _LARGEST)
    model = onnx.load(path, load_external_data=False)
    _name_axes(model, signature)
    for node in model.graph.node:
        del node.metadata_props[:]  # lines and paths of the machine that wrote the file
    onnx.helper.set_model_props(model, {_OWN: signature.to_json(), "dtype": dtype})
    onnx.save(model, path)
    check_standard(path)


def _simplify(model) -> None:
    """Fold constants, and drop what is unused or there twice.

    The exporter's own optimisation does this and rewrites patterns, for which it looks at all nodes once for each
    node: with 18 blocks that is most of the time. ONNX Runtime rewrites them itself when it opens a file.
    """
    passes = _package("onnx_ir.passes.common")
    passes.InlinePass()(model)
    _package("onnxscript.optimizer").fold_constants(model)
    for work in (
        passes.RemoveUnusedNodesPass(),
        passes.RemoveUnusedOpsetsPass(),
        passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        passes.DeduplicateInitializersPass(),
        passes.CommonSubexpressionEliminationPass(),
        passes.OutputFixPass(),
    ):
        work(model)


@contextmanager
def _quiet() -> Iterator[None]:
    """Context in which the optimiser does not log a line for each node that it looks at."""
    loggers = [logging.getLogger(name) for name in ("onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.WARNING)
        yield
    finally:
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)


def open_onnx(path: Path) -> Run:
    """The network in an ONNX file, run by ONNX Runtime on the CPU with PyTorch's number of threads.

    Shapes that the file refuses are a ValueError. Sides below those that the signature declares are not refused: ONNX
    has no special case for axes of length 1, and what it gives there is right.

    Raises:
        ModuleNotFoundError: ONNX Runtime is missing.
    """
    runtime = _package("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = torch.get_num_threads(), 3
    session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_inputs()]

    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        if len(inputs) != len(names):
            raise ValueError(f"{len(inputs)} inputs were given; {Path(path).name} takes {', '.join(names)}")
        try:
            outputs = session.run(None, {name: x.detach().cpu().numpy() for name, x in zip(names, inputs)})
        except Exception as error:  # ONNX Runtime's errors have no common class of their own
            shapes = ", ".join(str(tuple(x.shape)) for x in inputs)
            reason = " ".join(str(error).split())
            raise ValueError(f"inputs of shape {shapes} are refused by {Path(path).name}: {reason}") from error
        return tuple(torch.from_numpy(y) for y in outputs)

    return run


def read_signature(path: Path) -> Signature:
    """What :func:`write_onnx` noted in the file."""
    model = _package("onnx").load(path, load_external_data=False)
    return Signature.from_json({entry.key: entry.value for entry in model.metadata_props}[_OWN])


def check_standard(path: Path) -> None:
    """Raise a ValueError if the file has operators beyond ONNX's own, or complex numbers, which few runtimes have."""
    onnx = _package("onnx")
    model = onnx.load(path, load_external_data=False)
    graphs = [model.graph, *model.functions]
    domains = {entry.domain for entry in model.opset_import} | {n.domain for graph in graphs for n in graph.node}
    if others := sorted(domains - {""}):
        raise ValueError(f"{Path(path).name} has operators of {', '.join(others)}, which only some runtimes know; "
                         "take a mixer of PyTorch's own operators, or another format")  # fmt: skip
    complex_types = {onnx.TensorProto.COMPLEX64, onnx.TensorProto.COMPLEX128}
    values = (*model.graph.value_info, *model.graph.input, *model.graph.output)
    kinds = {value.type.tensor_type.elem_type for value in values} | {x.data_type for x in model.graph.initializer}
    if kinds & complex_types:
        raise ValueError(f"{Path(path).name} has complex numbers, which few runtimes know; use another format")
    onnx.checker.check_model(str(path))


def _halved(model):
    """The model, whose nodes all have names, in float16, but for what has to be wide."""
    _package("onnxruntime")
    convert = importlib.import_module("onnxruntime.transformers.float16")
    tools = importlib.import_module("onnxruntime.transformers.onnx_model")
    nodes = list(model.graph.node)
    makers = {name: node for node in nodes for name in node.output}
    wide = {node.name for node in nodes if _of_inner_step(node)}
    angles = [node for node in nodes if node.op_type in ("Sin", "Cos")]
    while angles:  # and all that they are computed from, as of an angle of 1000 nothing is left in float16
        node = angles.pop()
        if node.name not in wide or node.op_type in ("Sin", "Cos"):
            angles += [makers[name] for name in node.input if name in makers]
        wide.add(node.name)
    half = convert.convert_float_to_float16(
        model,
        keep_io_types=True,
        op_block_list=[*convert.DEFAULT_OP_BLOCK_LIST, *_WIDE],
        node_block_list=sorted(wide),
    )
    tools.OnnxModel(half).topological_sort()  # the converter adds its casts at the end
    return half


def _of_inner_step(node) -> bool:
    """Whether a mixer computes this node itself, not one of the linear layers in it."""
    notes = {entry.key: entry.value for entry in node.metadata_props}
    classes = re.findall(r"'([^']*)'", notes.get(_MODULE, ""))
    modules = [name for name in classes if not name.startswith("aten.")]
    return bool(modules) and modules[-1].startswith("vit3.mixers.")


def _name_axes(model, signature: Signature) -> None:
    """Call free axes ``batch``, ``height`` and ``width`` instead of the exporter's symbols, wherever they stand."""
    wanted = signature.axes()
    new = {}
    for entry in model.graph.input:
        for at, dim in enumerate(entry.type.tensor_type.shape.dim):
            if at in wanted.get(entry.name, {}):
                new[dim.dim_param] = wanted[entry.name][at]
    for entry in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        for dim in entry.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_param = re.sub(r"\w+", lambda match: new.get(match[0], match[0]), dim.dim_param)


def _package(name: str):
    """An optional package."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        cure = "pip install 'vit3[export]'"
        raise ModuleNotFoundError(f"format=onnx needs the package {name}: {cure}", name=name) from error
