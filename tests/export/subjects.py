"""The smallest network of each family, exported once for all tests of a process."""

from __future__ import annotations

import functools

import timm
import torch
from torch import nn
from torch.export import ExportedProgram

from vit3.export import Subject
from vit3.export.program import export_program
from vit3.export.signature import Signature
from vit3.models.dense import DenseHViT3

NARROW = dict(embed_dim=16, depth=1, num_heads=2)
FAMILIES = ("vit3", "h_vit3", "dense", "dit3")


def enliven(model: nn.Module) -> nn.Module:
    """Give every parameter a random value, so that no branch starts at zero or as identity."""
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval()


def plain(name: str = "vit3_tiny", **kwargs) -> Subject:
    """A plain classifier of one block."""
    options = {**NARROW, "num_classes": 5, **kwargs}
    return Subject(enliven(timm.create_model(name, **options)), "classifier", name, options, (48, 48), tuple("abcde"))


def subject(family: str) -> Subject:
    """The smallest network of a family."""
    if family == "vit3":
        return plain()
    if family == "h_vit3":
        options = dict(dims=(16,), depths=(1,), num_heads=(2,), num_classes=5)
        return Subject(enliven(timm.create_model("h_vit3_tiny", **options)), "classifier", "h_vit3_tiny", {}, (32, 32))
    if family == "dense":
        model = DenseHViT3(dims=(16, 16), depths=(1, 0), num_heads=(2, 2), out_indices=(0, 1))
        return Subject(enliven(model), "features", "h_vit3_tiny_dense", {}, (40, 40))
    model = timm.create_model("dit3_s_4", num_classes=5, **NARROW)
    return Subject(enliven(model), "generator", "dit3_s_4", {}, (16, 16))


@functools.cache
def exported(family: str) -> tuple[Subject, Signature, ExportedProgram]:
    """The smallest network of a family, with batch and size free."""
    torch.manual_seed(0)
    source = subject(family)
    signature = Signature.of(source, dynamic=("batch", "size"))
    return source, signature, export_program(source, signature)
