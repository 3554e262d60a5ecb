"""Backbones for detection and segmentation: maps, frozen parts, weights, several processes."""

import copy

import pytest
import timm
import torch
from timm.layers import DropPath
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.helpers import max_error, same_dict
from tests.processes import run_processes
from vit3.engine.distributed import start_processes
from vit3.models.dense import DenseHViT3, DenseViT3, TimmMaps
from vit3.models.weights import WeightsError, load_weights

SMALL = dict(dims=(16, 32, 48, 64), depths=(1, 1, 2, 1), num_heads=(2, 2, 2, 4))
PLAIN = dict(embed_dim=48, depth=2, num_heads=3)


def grid(height, width, stride):
    return -(-height // stride), -(-width // stride)


@pytest.mark.parametrize("size", [(97, 131), (64, 200), (33, 31), (65, 97)])
def test_maps(size):
    """Grids of the authors' padding rule (65 x 97 gives 17 x 25, 9 x 13, 5 x 7, 3 x 4); one model for every size."""
    model = DenseHViT3(**SMALL).eval()
    x = torch.randn(2, 3, *size)
    with torch.no_grad():
        first, second = model(x), model(x)
    assert [tuple(y.shape) for y in first] == [(2, c, *grid(*size, s)) for c, s in zip(model.channels, model.strides)]
    assert all(torch.equal(a, b) and a.is_contiguous() for a, b in zip(first, second))
    if size == (65, 97):
        assert [tuple(y.shape[2:]) for y in first] == [(17, 25), (9, 13), (5, 7), (3, 4)]


def test_maps_are_those_of_the_classifier():
    classifier = timm.create_model("h_vit3_tiny", num_classes=7, **SMALL).eval()
    model = DenseHViT3(**SMALL).eval()
    model.load_state_dict({**model.state_dict(), **{
        k: v for k, v in classifier.state_dict().items() if not k.startswith(("norm", "head"))
    }})  # fmt: skip
    for i in range(4):
        nn.init.normal_(getattr(model, f"norm{i}").weight)
    x = torch.randn(1, 3, 65, 97)
    maps = classifier.forward_intermediates(x, intermediates_only=True)
    for i, (a, b) in enumerate(zip(model(x), maps)):
        norm = getattr(model, f"norm{i}")
        mean, var = b.mean(1, keepdim=True), b.var(1, unbiased=False, keepdim=True)
        expected = (b - mean) / (var + 1e-5).sqrt() * norm.weight[:, None, None]
        assert max_error(a, expected) < 1e-4


@pytest.mark.parametrize("out_indices", [(0,), (1, 3), (2, 3), (0, 1, 2)])
def test_some_maps(out_indices):
    """What is not needed is not there, and the wanted maps are the same."""
    whole, part = DenseHViT3(**SMALL).eval(), DenseHViT3(**SMALL, out_indices=out_indices).eval()
    assert part.channels == tuple(SMALL["dims"][i] for i in out_indices)
    assert part.strides == tuple(4 * 2**i for i in out_indices)
    part.load_state_dict({k: whole.state_dict()[k] for k in part.state_dict()})
    x = torch.randn(1, 3, 64, 96)
    assert all(torch.equal(a, whole(x)[i]) for a, i in zip(part(x), out_indices))
    sum(y.square().sum() for y in part(x)).backward()
    assert all(p.grad is not None for p in part.parameters())


@pytest.mark.parametrize("frozen", [-1, 0, 1, 2, 4])
@pytest.mark.parametrize("with_cp", [False, True])
def test_frozen_stages(frozen, with_cp):
    """Frozen tensors and statistics stay bit for bit, everything else learns."""
    torch.manual_seed(0)
    model = DenseHViT3(**SMALL, frozen_stages=frozen, with_cp=with_cp, drop_path_rate=0.2).train()
    parts = ("patch_embed.",) * (frozen >= 0) + tuple(f"{p}{i}." for i in range(frozen) for p in ("layers.", "norm"))
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad] or [torch.zeros(1)], 0.1)
    maps = model(torch.randn(2, 3, 97, 131))
    if frozen < 4:
        sum((y * torch.randn_like(y)).mean() for y in maps).backward()
        optimizer.step()
    after = model.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert not {name for name in changed if name.startswith(parts or ("nothing",))}
    learnt = {name for name, p in model.named_parameters() if not name.startswith(parts or ("nothing",))}
    assert learnt == {name for name, p in model.named_parameters() if p.grad is not None}
    assert ("patch_embed.conv.0.norm.running_mean" in changed) == (frozen < 0)
    dropping = [name for name, m in model.named_modules() if isinstance(m, DropPath) and m.training]
    assert not [name for name in dropping if name.startswith(parts or ("nothing",))]
    assert bool(dropping) == (frozen < 4)
    copied = copy.deepcopy(model).train()
    assert [m.training for m in copied.modules()] == [m.training for m in model.modules()]


def test_checkpointing_changes_nothing():
    torch.manual_seed(0)
    plain, checked = DenseHViT3(**SMALL), DenseHViT3(**SMALL, with_cp=True)
    checked.load_state_dict(plain.state_dict())
    x = torch.randn(2, 3, 64, 96)
    for model in (plain, checked):
        sum(y.square().mean() for y in model(x)).backward()
    pairs = list(zip(plain.parameters(), checked.parameters()))
    assert max(max_error(a.grad, b.grad) for a, b in pairs) == 0


def three_steps(out_indices, frozen_stages):
    """Train under DDP without looking for unused parameters; returns what was frozen or left out, before and after."""
    processes = start_processes("cpu")
    torch.manual_seed(0)
    model = DenseHViT3(**SMALL, out_indices=out_indices, frozen_stages=frozen_stages, with_cp=True)
    frozen = {
        k: v.clone() for k, v in model.state_dict().items() if k.startswith(("patch_embed.", "layers.0", "norm0"))
    }
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    for step in range(3):
        torch.manual_seed(10 * step + processes.rank)
        optimizer.zero_grad()
        sum(y.square().mean() for y in wrapped(torch.randn(1, 3, 97, 64))).backward()
        optimizer.step()
    state = model.state_dict()
    return all(torch.equal(v, state[k]) for k, v in frozen.items()), float(model.layers[-1].blocks[0].attn.w1.sum())


@pytest.mark.parametrize("out_indices, frozen_stages", [((2, 3), 2), ((0, 1), -1), ((3,), 1)])
def test_two_processes(out_indices, frozen_stages):
    (kept, first), (_, second) = run_processes(three_steps, 2, out_indices, frozen_stages)
    assert kept == (frozen_stages >= 1)
    assert first == second


def save(kind, tensors, path):
    """As a wrapper would: names and place of the weights in the file."""
    prefixed = lambda prefix: {f"{prefix}{k}": v for k, v in tensors.items()}  # noqa: E731
    neck = {"neck.conv.weight": torch.ones(2, 2)}
    contents = {
        "model": lambda: {"state_dict": prefixed("model.")},
        "ddp": lambda: {"model": prefixed("module.")},
        "compiled": lambda: prefixed("_orig_mod."),
        "ema": lambda: {"state_dict": {"a": torch.ones(1)}, "state_dict_ema": tensors},
        "backbone": lambda: {"state_dict": prefixed("backbone.")},
        "detector": lambda: {"state_dict": {**prefixed("backbone."), **neck}, "meta": {"epoch": 3}},
        # its EMAHook exchanges the two: weights to use are under "state_dict"
        "mmengine_ema": lambda: {
            "state_dict": {**prefixed("backbone."), **neck},
            "ema_state_dict": {**{f"module.{name}": value for name, value in neck.items()}, "steps": 1},
        },
        "torchvision": lambda: {"state_dict": {**prefixed("backbone.body."), "backbone.fpn.a": torch.ones(1), **neck}},
    }
    torch.save(contents[kind](), path)


@pytest.mark.parametrize(
    "kind", ["model", "ddp", "compiled", "ema", "backbone", "detector", "mmengine_ema", "torchvision"]
)
@pytest.mark.parametrize("source", ["classifier", "dense"])
def test_weights_of_any_wrapper(tmp_path, kind, source):
    torch.manual_seed(0)
    if source == "classifier":
        origin = timm.create_model("h_vit3_tiny", num_classes=7, **SMALL)
    else:
        origin = DenseHViT3(**SMALL)
        nn.init.normal_(origin.norm0.weight)
    save(kind, origin.state_dict(), tmp_path / "file.pth")
    model = DenseHViT3(**SMALL, out_indices=(0, 2))
    report = load_weights(model, tmp_path / "file.pth", ema="ema" in kind)
    fresh = {"norm0.weight", "norm0.bias", "norm2.weight", "norm2.bias"} if source == "classifier" else set()
    assert set(report.missing) == fresh and not report.reshaped
    theirs, ours = origin.state_dict(), model.state_dict()
    assert same_dict({k: v for k, v in ours.items() if k not in fresh}, {k: theirs[k] for k in ours if k not in fresh})
    assert sum(report.sizes.values()) == sum(v.numel() for v in ours.values())


def test_what_a_classifier_lacks_is_not_held_against_it(tmp_path):
    """The norms of the maps are 5.4 % of a shallow backbone's tensors, and no classifier has them."""
    shape = SMALL | dict(depths=(1, 1, 1, 1))
    state = timm.create_model("h_vit3_tiny", **shape).state_dict()
    torch.save(state, tmp_path / "file.pth")
    report = load_weights(DenseHViT3(**shape), tmp_path / "file.pth")
    assert len(report.missing) == 8 and report.fraction < 0.95
    torch.save({k: v for k, v in state.items() if not k.startswith("patch_embed")}, tmp_path / "file.pth")
    with pytest.raises(WeightsError, match="at least 95 % is needed"):
        load_weights(DenseHViT3(**shape), tmp_path / "file.pth")


def test_foreign_weights_are_an_error(tmp_path):
    torch.save({"state_dict": timm.create_model("resnet18").state_dict()}, tmp_path / "file.pth")
    model = DenseHViT3(**SMALL)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(WeightsError, match="fits 0.0 % of the model, at least 95 % is needed"):
        load_weights(model, tmp_path / "file.pth")
    assert same_dict(before, model.state_dict())


@pytest.mark.parametrize("frozen", [-1, 0, 1, 2])
def test_plain(frozen):
    model = DenseViT3(**PLAIN, frozen_stages=frozen, with_cp=True).train()
    (y,) = model(torch.randn(1, 3, 50, 70))
    assert y.shape == (1, 48, 4, 5) and (model.channels, model.strides) == ((48,), (16,))
    parts = (
        ("patch_embed.",) * (frozen >= 0) + tuple(f"blocks.{i}." for i in range(frozen)) + ("norm.",) * (frozen == 2)
    )
    if frozen < 2:
        y.square().sum().backward()
    assert all((p.grad is None) == name.startswith(parts or ("nothing",)) for name, p in model.named_parameters())
    classifier = timm.create_model("vit3_tiny", num_classes=0, global_pool="", **PLAIN)
    classifier.load_state_dict(model.state_dict())
    x = torch.randn(1, 3, 32, 48)
    assert max_error(model.eval()(x)[0].flatten(2).mT, classifier.eval().forward_features(x)) < 1e-6


@pytest.mark.parametrize(
    "name, options, shapes",
    [
        ("resnet10t", dict(out_indices=(1, 2), frozen_stages=1), [(64, 12, 16), (128, 6, 8)]),
        ("swin_tiny_patch4_window7_224", dict(out_indices=(0, 1), img_size=(48, 64), frozen_stages=1),
         [(96, 12, 16), (192, 6, 8)]),
        ("vit_tiny_patch16_224", dict(out_indices=(0,), img_size=(48, 64), frozen_stages=1), [(192, 3, 4)]),
    ],
)  # fmt: skip
def test_any_timm_model(name, options, shapes):
    model = TimmMaps(name, **options).train()
    before = copy.deepcopy(model.state_dict())
    maps = model(torch.randn(2, 3, 48, 64))
    assert [tuple(y.shape[1:]) for y in maps] == shapes
    assert model.channels == tuple(shape[0] for shape in shapes)
    if any(y.requires_grad for y in maps):
        sum(y.square().sum() for y in maps).backward()
    frozen = {n for n, p in model.named_parameters() if not p.requires_grad}
    assert 0 < len(frozen) <= len(before)
    assert all((p.grad is None) == (n in frozen) for n, p in model.named_parameters() if "norm" not in n)
    statistics = [n for n in before if "running" in n and not torch.equal(before[n], model.state_dict()[n])]
    assert not [n for n in statistics if n.replace("running_mean", "weight").replace("running_var", "weight") in frozen]


@pytest.mark.parametrize(
    "make, sentence",
    [
        (lambda: DenseHViT3("huge"), "arch='huge' of HViT3 is unknown; use one of: tiny, small, base"),
        (lambda: DenseHViT3(dims=(16, 32)), "HViT3 without arch needs depths, num_heads"),
        (lambda: DenseHViT3("tiny", out_indices=(0, 4)), r"out_indices=\[0, 4\] must be different stages"),
        (lambda: DenseHViT3("tiny", out_indices=(1, 0)), r"out_indices=\[1, 0\] must be different stages, ascending"),
        (lambda: DenseHViT3("tiny", frozen_stages=5), "frozen_stages=5 must be -1"),
        (lambda: DenseViT3("tiny", frozen_stages=13), "frozen_stages=13 must be -1"),
        (lambda: TimmMaps("resnet1"), "model_name='resnet1' is no model that timm knows"),
        (lambda: TimmMaps("resnet18", out_indices=(7,)), "model_name='resnet18' gives no maps"),
    ],
)
def test_errors(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()


def test_registered_with_timm():
    """By name with other sizes; it needs no features_only, and says so."""
    model = timm.create_model("h_vit3_small_dense", **SMALL, out_indices=[1, 3], frozen_stages=1)
    assert isinstance(model, DenseHViT3) and model.channels == (32, 64) and model.frozen_stages == 1
    with torch.device("meta"):
        own = {name: value.shape for name, value in timm.create_model("h_vit3_base_dense").state_dict().items()}
        assert own == {name: value.shape for name, value in DenseHViT3("base").state_dict().items()}
    with pytest.raises(ValueError, match="features_only=True: h_vit3_tiny_dense gives maps without it"):
        timm.create_model("h_vit3_tiny_dense", features_only=True)
