"""One graph of PyTorch's own operators for all declared shapes, and its file."""

import copy
from pathlib import Path

import pytest
import torch

from tests.export.subjects import FAMILIES, exported, plain, subject
from vit3.export import program as export
from vit3.export.program import export_program, open_program, plain_mixers, program_runner, save_program
from vit3.export.signature import Signature
from vit3.export.verify import verify
from vit3.inner import BranchSpec, InnerSpec

OTHERS = {
    "closed": dict(mixer_kwargs=dict(inner=InnerSpec(loss="mse", rate="token_head", epochs=2, optimizer="momentum"))),
    "softmax": dict(mixer="softmax"),
    "mlp": dict(mixer_kwargs=dict(inner=InnerSpec(model="mlp", beside=(BranchSpec(model="conv"),)))),
}
CHUNKS = {
    "batches": dict(mixer_kwargs=dict(inner=InnerSpec(batch="N/3", order="random"))),
    "shuffle": dict(mixer_kwargs=dict(inner=InnerSpec(control="shuffle_q_tokens"))),
    "ttt_linear": dict(mixer="ttt_linear", mixer_kwargs=dict(mini_batch=8)),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_file(family, tmp_path):
    source, signature, program = exported(family)
    save_program(program, signature, tmp_path / "net.pt2")
    checks = verify(source.model, open_program(tmp_path / "net.pt2"), signature)
    assert all(check.passed for check in checks), checks
    assert max(check.difference for check in checks if check.declared) < 1e-5
    assert all("refused" in check.what for check in checks if not check.declared)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's device that is always full")
def test_a_full_disk_is_an_error_and_not_the_end_of_the_process():
    _, signature, program = exported("vit3")
    with pytest.raises(OSError, match="No space left"):
        save_program(program, signature, Path("/dev/full"))


def test_graph_has_standard_operators_and_no_paths():
    for family in FAMILIES:
        _, _, program = exported(family)
        calls = [node for node in program.graph.nodes if node.op == "call_function"]
        assert not [node for node in calls if "vit3" in str(node.target)]
        assert not [node for node in calls if "stack_trace" in node.meta]


@pytest.mark.parametrize("name", OTHERS)
def test_other_mixers(name):
    source = plain(**OTHERS[name])
    signature = Signature.of(source)
    checks = verify(source.model, program_runner(export_program(source, signature)), signature)
    assert all(check.passed for check in checks), checks


@pytest.mark.parametrize("name", ["batches", "shuffle", pytest.param("ttt_linear", marks=pytest.mark.slow)])
def test_mixers_that_count_tokens_have_one_size(name):
    source = plain(**CHUNKS[name])
    before = copy.deepcopy(source.model)
    with pytest.raises(ValueError, match=r"vit3_tiny with dynamic=\['batch', 'size'\] .*use dynamic=\[batch\]"):
        export_program(source, Signature.of(source))
    signature = Signature.of(source, ("batch",))
    run = program_runner(export_program(source, signature))
    checks = verify(source.model, run, signature)
    assert all(check.passed for check in checks), checks
    (images,) = signature.probes()[1].inputs  # tracing leaves nothing behind in the network
    with torch.no_grad():
        assert torch.equal(source.model(images), before(images))
        assert torch.equal(run(images)[0], run(images)[0])  # orders and shuffles are constants


def test_network_is_left_as_it_was(monkeypatch):
    model = plain().model.train()
    model.head_drop.eval()
    mixer = model.blocks[0].attn
    with pytest.raises(RuntimeError), plain_mixers(model):
        assert mixer.backend == "reference" and not any(module.training for module in model.modules())
        raise RuntimeError
    assert mixer.backend == "auto" and model.training and mixer.training and not model.head_drop.training


def test_wrapped_networks():
    source = plain()
    signature = Signature.of(source, ())
    object.__setattr__(source, "model", torch.compile(source.model, backend="eager"))
    run = program_runner(export_program(source, signature))
    assert all(check.passed for check in verify(source.model, run, signature))


def test_what_cannot_be_traced(monkeypatch):
    def fail(*args, dynamic_shapes, strict, prefer_deferred_runtime_asserts_over_guards):
        raise TypeError("a matter of the exporter")

    def old(*args, dynamic_shapes, strict):
        raise AssertionError("called without what free sizes need")

    source = subject("vit3")
    for exporter, sentence in (
        (fail, r"TypeError: a matter of the exporter.*format=\[safetensors\]"),
        (old, "too old for graphs of free sizes .*install a newer one"),
    ):
        monkeypatch.setattr(export.torch.export, "export", exporter)
        with pytest.raises(ValueError, match=sentence):
            export_program(source, Signature.of(source, ()))
    assert source.model.blocks[0].attn.backend == "auto"
