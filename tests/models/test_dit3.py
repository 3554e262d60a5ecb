"""DiT³: any latent size, classes and channels; what is fixed, what learns; the same in 16 bit and compiled."""

import copy
import json
import math

import pytest
import timm
import torch
from torch import nn
from torch.nn import functional as F

import vit3
from tests.helpers import GOLDEN
from vit3.analysis.parity import load_by_rule, relative_error
from vit3.diffusion import guided
from vit3.mixers import MIXERS
from vit3.models import GENERATOR_NAMES, DiT3

SHAPES = json.loads((GOLDEN / "dit_state_dict.json").read_text())
OFFICIAL = {f"dit3_{name.removeprefix('DiTTT-').lower().replace('/', '_')}": name for name in SHAPES}


def small(**kwargs) -> DiT3:
    """A few channels, by the rule's weights: no layer gives zeros."""
    given = dict(embed_dim=32, depth=2, num_heads=2, num_classes=10)
    return load_by_rule(vit3.create_model("dit3_s_2", **{**given, **kwargs})).eval()


def inputs(model, size=(8, 8), batch=2):
    torch.manual_seed(3)
    x = torch.randn(batch, model.in_chans, *size)
    return x, torch.linspace(17, 803, batch), torch.arange(batch) % (model.num_classes + 1)


# What it is


@pytest.mark.parametrize("name", OFFICIAL)
def test_names_and_shapes_are_the_authors(name):
    with torch.device("meta"):
        model = timm.create_model(name)
    theirs = {key: tuple(shape) for key, shape in SHAPES[OFFICIAL[name]].items() if key != "pos_embed"}
    assert {key: tuple(value.shape) for key, value in model.state_dict().items()} == theirs


def test_twelve_are_registered():
    assert len(GENERATOR_NAMES) == 12 and set(OFFICIAL) <= set(GENERATOR_NAMES)
    assert vit3.create_model is timm.create_model
    for name in GENERATOR_NAMES:
        with torch.device("meta"):
            model = vit3.create_model(name, depth=1)
        _, arch, patch = name.split("_")
        assert (model.patch_size, model.in_chans, model.num_classes, model.null_label) == (int(patch), 4, 1000, 1000)
        assert model.embed_dim == dict(s=384, b=768, l=1024, xl=1152)[arch]


@pytest.mark.parametrize(("name", "depth", "heads"), [("s", 12, 6), ("b", 12, 12), ("l", 24, 16), ("xl", 28, 16)])
def test_depth_and_heads(name, depth, heads):
    with torch.device("meta"):
        model = timm.create_model(f"dit3_{name}_8")
    assert (len(model.blocks), model.blocks[0].attn.num_heads) == (depth, heads)


def test_nothing_stored_depends_on_the_size():
    shapes = [{k: v.shape for k, v in small(img_size=size).state_dict().items()} for size in (8, (16, 4))]
    assert shapes[0] == shapes[1] and not list(small().buffers())


def test_device_and_dtype_of_a_new_model():
    model = vit3.create_model("dit3_s_8", depth=1, device="meta", dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("meta", torch.bfloat16)}


# Places


@pytest.mark.parametrize("name", OFFICIAL)
def test_place_table_has_the_authors_shape(name):
    _, tokens, dim = SHAPES[OFFICIAL[name]]["pos_embed"]
    with torch.device("meta"):
        position = timm.create_model(name, depth=1).position
    side = 32 // int(name.rsplit("_", 1)[1])
    assert position.table(side, side, torch.device("cpu")).shape == (tokens, dim) == (side * side, dim)


@pytest.mark.parametrize("grid", [(4, 4), (3, 5), (16, 2)])
def test_place_table(grid):
    """Entry by entry: columns in the first half, rows in the second; in each, sines before cosines."""
    h, w = grid
    dim, table = 16, small(embed_dim=16).position.table(h, w)
    for row in range(h):
        for column in range(w):
            halves = []
            for place in (column, row):
                angles = [place / 10000 ** (i / (dim / 4)) for i in range(dim // 4)]
                halves += [*map(math.sin, angles), *map(math.cos, angles)]
            assert table[row * w + column].tolist() == pytest.approx(halves, abs=1e-6)


# Sizes, classes, channels


@pytest.mark.parametrize("size", [(4, 16), (16, 4), (8, 8), (5, 7), (1, 3)])
@torch.no_grad()
def test_any_size(size):
    model, seen = small(), []
    model.blocks[0].attn.register_forward_pre_hook(lambda _, args: seen.append(args[1:3]))
    y = model(*inputs(model, size))
    assert y.shape == (2, 8, *size) and y.isfinite().all()
    assert seen == [(math.ceil(size[0] / 2), math.ceil(size[1] / 2))]


@torch.no_grad()
def test_padding_is_zeros_at_right_and_bottom():
    model = small()
    x, t, y = inputs(model, (5, 7))
    whole = model(F.pad(x, (0, 1, 0, 1)), t, y)
    torch.testing.assert_close(model(x, t, y), whole[..., :5, :7], rtol=0, atol=0)


@pytest.mark.parametrize("size", [(4, 16), (6, 10)])
@torch.no_grad()
def test_rows_and_columns_are_not_exchanged(size):
    """A network whose blocks do nothing puts each patch's prediction where the patch was."""
    model = small(learn_sigma=False)
    for block in model.blocks:
        block.adaLN_modulation[-1].weight.zero_()
        block.adaLN_modulation[-1].bias.zero_()
        block.cpe.weight.zero_()
        block.cpe.bias.zero_()
    weight = model.final_layer.linear.weight.view(2, 2, 4, -1)  # rows and columns of a patch, channels
    weight[0], weight[1, 1] = 0, 0  # only the pixel at the left of the second row answers
    x, t, y = inputs(model, size, batch=1)
    changed = x.clone()
    changed[..., 2, size[1] - 1] += 1.0  # in the second row of patches, the last column
    difference = (model(changed, t, y) - model(x, t, y)).abs().sum(1)[0] > 1e-6
    rows, columns = difference.nonzero(as_tuple=True)
    assert rows.tolist() == [3] and columns.tolist() == [size[1] - 2]


@pytest.mark.parametrize("mixer", ["ttt", "softmax"])
@torch.no_grad()
def test_images_of_a_batch_do_not_meet(mixer):
    model = small(mixer=mixer)
    x, t, y = inputs(model, batch=3)
    alone = torch.cat([model(x[i : i + 1], t[i : i + 1], y[i : i + 1]) for i in range(3)])
    assert relative_error(model(x, t, y), alone) <= 1e-6


@pytest.mark.parametrize("num_classes", [1, 10, 1000])
@torch.no_grad()
def test_classes(num_classes):
    """Every label from 0 to the null label says something of its own."""
    model = small(num_classes=num_classes)
    x, t, _ = inputs(model)
    first, none = (model(x, t, torch.full((2,), label)) for label in (0, model.null_label))
    assert model.null_label == num_classes and relative_error(first, none) > 1e-3
    with pytest.raises(IndexError):
        model(x, t, torch.full((2,), num_classes + 1))


@pytest.mark.parametrize("in_chans", [1, 3, 4, 13])
@pytest.mark.parametrize("learn_sigma", [True, False])
@torch.no_grad()
def test_channels(in_chans, learn_sigma):
    model = small(in_chans=in_chans, learn_sigma=learn_sigma)
    y = model(*inputs(model, (6, 4)))
    assert y.shape == (2, in_chans * (2 if learn_sigma else 1), 6, 4) and model.out_chans == y.shape[1]


@torch.no_grad()
def test_time_and_class_are_told():
    model = small()
    x, t, y = inputs(model)
    assert relative_error(model(x, t + 1, y), model(x, t, y)) > 1e-5
    assert relative_error(model(x, t.round(), y), model(x, t.round().long(), y)) <= 1e-7  # whole or not


@torch.no_grad()
def test_guidance_of_one_is_the_model():
    model = small()
    args = inputs(model)
    assert torch.equal(guided(model, *args, scale=1.0), model(*args))


@pytest.mark.parametrize("mixer", MIXERS)
def test_every_mixer(mixer):
    model = small(mixer=mixer)
    y = model(*inputs(model, (4, 6)))
    y.square().mean().backward()
    assert y.isfinite().all() and all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    assert all(p.grad is not None for p in model.blocks[0].attn.parameters())


# Training


def test_starts_as_zero_and_learns_from_the_second_step_on():
    """adaLN-Zero: at first the output alone learns; after one step all parameters have a gradient."""
    torch.manual_seed(0)
    model = vit3.create_model("dit3_s_2", embed_dim=32, depth=2, num_heads=2, num_classes=10)
    args = inputs(model, batch=4)
    target, step = torch.randn(4, 8, 8, 8), torch.optim.SGD(model.parameters(), 1.0)
    y = model(*args)
    assert torch.equal(y, torch.zeros_like(y))

    def gradients():
        model.zero_grad()
        F.mse_loss(model(*args), target).backward()
        return {name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}

    assert gradients() == {"final_layer.linear.weight", "final_layer.linear.bias"}
    for _ in range(3):
        step.step()
        found = gradients()
    assert found == {name for name, _ in model.named_parameters()}


def test_checkpointing_changes_nothing():
    results = []
    for enable in (False, True):
        model = small()
        model.set_grad_checkpointing(enable)
        calls = []
        model.blocks[0].cpe.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        y = model(*inputs(model))
        y.square().sum().backward()
        results.append([y, *(p.grad for p in model.parameters())])
        assert len(calls) == 1 + enable
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 5e-2), (torch.float16, 1e-2)], ids=["bf16", "fp16"])
def test_16_bit(dtype, bound):
    model = small()
    args = inputs(model, (8, 12))
    exact = copy.deepcopy(model).double()(args[0].double(), *args[1:])
    with torch.autocast("cpu", dtype):
        y = model(*args)
    y.float().square().mean().backward()
    assert y.dtype == dtype and relative_error(y, exact) <= bound
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters())
    with torch.no_grad():
        cast = copy.deepcopy(model).to(dtype)(args[0].to(dtype), *args[1:])
    assert cast.dtype == dtype and relative_error(cast, exact) <= bound


@pytest.mark.parametrize("training", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_compiled_whole_for_all_sizes(training):
    """One graph serves them, with eager's predictions and gradients."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = small(depth=1)
    twin = copy.deepcopy(model)
    compiled = torch.compile(twin, fullgraph=True, dynamic=True, backend="aot_eager")
    for parameter in (*model.parameters(), *twin.parameters()):
        parameter.requires_grad_(training)
    for batch, height, width in [(2, 8, 12), (3, 7, 9), (5, 16, 6)]:
        args = inputs(model, (height, width), batch)
        found = []
        for network, forward in ((model, model), (twin, compiled)):
            network.zero_grad()
            y = forward(*args)
            if training:
                y.square().sum().backward()
            found.append([y, *(p.grad for p in network.parameters() if training)])
        errors = [relative_error(ours, eager) for eager, ours in zip(*found)]
        assert max(errors) <= 1e-5, (batch, height, width)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
    torch._dynamo.reset()


def test_groups_cover_every_parameter():
    model = small()
    groups = timm.models.group_parameters(model, model.group_matcher(), reverse=True)
    assert groups.keys() == dict(model.named_parameters()).keys()
    assert groups["x_embedder.proj.weight"] < groups["blocks.0.attn.w1"] < groups["blocks.1.attn.w1"]
    assert groups["blocks.1.attn.w1"] == groups["final_layer.linear.weight"] == max(groups.values())


# What is refused


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (dict(num_classes=0), "num_classes=0 must be at least 1"),
        (dict(in_chans=0), "in_chans=0 must be at least 1"),
        (dict(patch_size=0), "patch_size=0 must be at least 1"),
        (dict(embed_dim=30), "embed_dim=30 must be a multiple of 4"),
        (dict(mixer="tt"), "mixer='tt' is unknown .did you mean 'ttt'"),
    ],
)
def test_wrong_options(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        small(**options)


def test_wrong_inputs():
    model = small()
    x, t, y = inputs(model)
    for args, sentence in (
        ((x[:, :3], t, y), r"x must be \(B, 4, H, W\): this model was built with in_chans=4; got \(2, 3, 8, 8\)"),
        ((x[0], t, y), "x must be"),
        ((x, t[:1], y), r"t must be \(2,\), one for each of x; got \(1,\)"),
        ((x, t, y[:, None]), r"y must be \(2,\), one for each of x; got \(2, 1\)"),
    ):
        with pytest.raises(ValueError, match=sentence):
            model(*args)


def test_a_mixer_class_will_do():
    class Nothing(nn.Module):
        def __init__(self, dim, num_heads):
            super().__init__()

        def forward(self, x, h, w, rope=None):
            return x

    assert small(mixer=Nothing)(*inputs(small())).shape == (2, 8, 8, 8)
