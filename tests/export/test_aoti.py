"""Packages of machine code: results, and shapes that machine code does not check by itself."""

import pytest
import torch
from torch import nn

from vit3.export import Subject
from vit3.export.aoti import open_package, write_package
from vit3.export.program import export_program
from vit3.export.signature import Signature
from vit3.export.verify import verify


class Toy(nn.Module):
    """A compiler needs a tenth of a second an operator; published networks are compiled in test_published.py."""

    num_classes, feature_info = 2, [dict(reduction=4)]

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 2)

    def forward(self, images):
        return self.head(images.mean(dim=(2, 3)).tanh())


SIGNATURE = Signature("classifier", ("images",), ("logits",), 3, (8, 8), ("batch", "size"), 5)


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    torch.manual_seed(0)
    source = Subject(Toy().eval(), "classifier", "toy", {}, (8, 8))
    object.__setattr__(source.model, "in_chans", 3)
    signature = Signature.of(source)
    path = tmp_path_factory.mktemp("package") / "toy.pt2"
    write_package(export_program(source, signature), signature, path)
    return source, signature, path


def test_results(package):
    source, signature, path = package
    checks = verify(source.model, open_package(path), signature)
    assert all(check.passed for check in checks), checks
    assert all(check.what.endswith("refused") for check in checks if not check.declared)


def test_the_runner_checks_what_machine_code_does_not(package):
    source, signature, path = package
    with pytest.raises(ValueError, match=r"exported for \(batch, 3, height, width\) with sides of at least 5"):
        open_package(path)(torch.zeros(2, 3, 4, 9))
    bare = torch._inductor.aoti_load_package(str(path))
    found = verify(source.model, lambda *inputs: bare(*inputs), signature)
    assert not all(check.passed for check in found)  # it reads on without a word where there is a channel too much


def test_unknown_device(tmp_path):
    with pytest.raises(ValueError, match="device='auto' is unknown; use one of: cpu, cuda"):
        write_package(None, SIGNATURE, tmp_path / "net.pt2", device="auto")


def errors_of_compilers():
    from torch._inductor.exc import CppCompileError, InductorError, InvalidCxxCompiler

    return [InductorError(ValueError("no such type\nlong"), None), CppCompileError(["g++"], "no such type"),
            InvalidCxxCompiler("g++")]  # fmt: skip


@pytest.mark.parametrize("which", range(3))
def test_what_cannot_be_compiled_is_one_sentence(monkeypatch, tmp_path, which):
    def fail(*args, **options):
        raise error

    error = errors_of_compilers()[which]
    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", fail)
    with pytest.raises(ValueError, match=r"cannot compile this network \(.*install g\+\+.*format=\[pt2\]") as caught:
        write_package(None, SIGNATURE, tmp_path / "net.pt2")
    assert "\n" not in str(caught.value)


def test_a_package_for_a_gpu_is_compiled_and_fed_there(monkeypatch, tmp_path):
    """Without one: what the compiler is given, and where inputs go that come from elsewhere."""
    import torch.export.passes as passes

    given = {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(passes, "move_to_device_pass", lambda program, device: (program, device))
    monkeypatch.setattr(
        torch._inductor, "aoti_compile_and_package", lambda program, **options: given.update(options, program=program)
    )
    write_package("graph", SIGNATURE, tmp_path / "net.pt2", device="cuda")
    notes = given["inductor_configs"]["aot_inductor.metadata"]
    assert given["program"] == ("graph", "cuda") and notes["device"] == "cuda"
    assert given["package_path"] == str(tmp_path / "net.pt2")

    class Package:
        def get_metadata(self):
            return notes | {"device": "meta"}

        def __call__(self, images):
            assert images.device.type == "meta"
            return [2 * images]

    monkeypatch.setattr(torch._inductor, "aoti_load_package", lambda path: Package())
    (output,) = open_package(tmp_path / "net.pt2")(torch.zeros(2, 3, 8, 8, requires_grad=True))
    assert output.device.type == "meta" and not output.requires_grad


@pytest.mark.skipif(torch.cuda.is_available(), reason="only without a CUDA device is there none")
def test_no_such_device(tmp_path):
    with pytest.raises(ValueError, match="device='cuda' needs a CUDA device, and there is none; use device='cpu'"):
        write_package(None, SIGNATURE, tmp_path / "net.pt2", device="cuda")
