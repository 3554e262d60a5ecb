"""timm's model contract, held for every registered name."""

import copy
import io
import pickle

import pytest
import timm
import torch
from timm.data import resolve_model_data_config
from timm.models import get_model_input_config, group_parameters
from timm.optim import param_groups_layer_decay

from tests.helpers import light, max_error, narrow
from vit3.analysis.parity import relative_error
from vit3.models import MODEL_NAMES

each_model = pytest.mark.parametrize("name", MODEL_NAMES)
families = pytest.mark.parametrize("name", ["vit3_tiny", "h_vit3_tiny"])
PARAMETERS = {
    "vit3_tiny": 6.15,
    "vit3_small": 23.80,
    "vit3_base": 90.06,
    "h_vit3_tiny": 28.70,
    "h_vit3_small": 54.36,
    "h_vit3_base": 94.37,
}


def meta(name, **kwargs):
    with torch.device("meta"):
        return timm.create_model(name, **kwargs)


@each_model
def test_parameter_count(name):
    millions = sum(p.numel() for p in meta(name).parameters()) / 1e6
    assert millions == pytest.approx(PARAMETERS[name], abs=0.005)


@pytest.mark.parametrize(
    "name", [n if "base" not in n else pytest.param(n, marks=pytest.mark.slow) for n in MODEL_NAMES]
)
def test_forward_and_backward(name):
    """The published network, whole: every parameter gets a finite gradient."""
    model = timm.create_model(name)
    y = model(torch.randn(2, 3, 64, 64))
    assert y.shape == (2, 1000) and y.isfinite().all()
    y.square().mean().backward()
    without = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert without == []


@each_model
def test_features_and_head(name):
    model, x = light(name).eval(), torch.randn(2, 3, 64, 96)
    with torch.no_grad():
        features = model.forward_features(x)
        pooled = model.forward_head(features, pre_logits=True)
        assert torch.equal(model.forward_head(features), model(x))
    assert pooled.shape == (2, model.num_features) == (2, model.head_hidden_size)
    assert torch.equal(model.get_classifier()(pooled), model(x))


@each_model
@torch.no_grad()
def test_reset_classifier(name):
    model, x = light(name).eval(), torch.randn(1, 3, 64, 64)
    pooled = model.forward_head(model.forward_features(x), pre_logits=True)
    model.reset_classifier(7)
    assert model(x).shape == (1, 7) and model.num_classes == 7
    assert model.get_classifier().out_features == 7
    model.reset_classifier(0)
    assert torch.equal(model(x), pooled)
    model.reset_classifier(0, "")
    assert torch.equal(model(x), model.forward_features(x))


@each_model
@torch.no_grad()
def test_no_classifier(name):
    model = light(name, num_classes=0).eval()
    assert isinstance(model.get_classifier(), torch.nn.Identity)
    assert model(torch.randn(1, 3, 64, 64)).shape == (1, model.num_features)


@each_model
@torch.no_grad()
def test_unpooled(name):
    model, x = light(name, num_classes=0, global_pool="").eval(), torch.randn(1, 3, 64, 96)
    assert torch.equal(model(x), model.forward_features(x))


@each_model
@pytest.mark.parametrize("out_indices", [(0, 1), (1,)], ids=str)
@torch.no_grad()
def test_features_only(name, out_indices):
    """Maps in NCHW, of the announced channels and strides, equal to ``forward_intermediates``."""
    x = torch.randn(1, 3, 64, 96)
    torch.manual_seed(1)
    extractor = light(name, features_only=True, out_indices=out_indices).eval()
    torch.manual_seed(1)
    expected = light(name).eval().forward_intermediates(x, list(out_indices), intermediates_only=True)
    maps = extractor(x)
    assert len(maps) == len(out_indices)
    info = extractor.feature_info
    for y, z, chans, stride in zip(maps, expected, info.channels(), info.reduction()):
        assert torch.equal(y, z)
        assert y.shape == (1, chans, 64 // stride, 96 // stride)


@pytest.mark.parametrize("name,strides", [("vit3_tiny", [16, 16]), ("h_vit3_tiny", [8, 32])])
@torch.no_grad()
def test_features_of_published_network(name, strides):
    model = timm.create_model(name, features_only=True, out_indices=(1, 3)).eval()
    assert model.feature_info.reduction() == strides
    assert [64 // y.shape[-1] for y in model(torch.randn(1, 3, 64, 64))] == strides


@each_model
@torch.no_grad()
def test_default_features(name):
    model = meta(name, features_only=True)
    assert len(model.feature_info.channels()) == (4 if name.startswith("h_") else 3)


@each_model
@pytest.mark.parametrize("norm", [False, True])
@torch.no_grad()
def test_forward_intermediates(name, norm):
    model, x = light(name).eval(), torch.randn(1, 3, 64, 96)
    final, maps = model.forward_intermediates(x, norm=norm)
    assert torch.equal(final, model.forward_features(x))
    assert [y.shape[1] for y in maps] == [info["num_chs"] for info in model.feature_info]
    assert all(y.is_contiguous() for y in maps)
    last = final if final.ndim == 4 else final.transpose(1, 2).unflatten(-1, maps[-1].shape[-2:])
    assert torch.equal(maps[-1], last) == norm
    only = model.forward_intermediates(x, norm=norm, intermediates_only=True)
    assert all(map(torch.equal, only, maps))


@each_model
@torch.no_grad()
def test_stop_early(name):
    model, x = light(name).eval(), torch.randn(1, 3, 64, 64)
    expected = model.forward_intermediates(x, [0], intermediates_only=True)
    last = (model.layers if name.startswith("h_") else model.blocks)[-1]
    last.forward = None  # must not run
    if name.startswith("h_"):
        last.blocks[0].forward = None
    early = model.forward_intermediates(x, [0], stop_early=True, intermediates_only=True)
    assert torch.equal(early[0], expected[0])


@each_model
@torch.no_grad()
def test_prune(name):
    model, x = light(name).eval(), torch.randn(1, 3, 64, 64)
    expected = model.forward_intermediates(x, [0], intermediates_only=True)
    assert model.prune_intermediate_layers([0]) == [0]
    assert torch.equal(model.forward_intermediates(x, [0], intermediates_only=True)[0], expected[0])
    assert model(x).shape[0] == 1


@families
def test_wrong_arguments(name):
    with pytest.raises(ValueError, match="num_classes=-1"):
        narrow(name, num_classes=-1)
    with pytest.raises(ValueError, match="in_chans=0"):
        narrow(name, in_chans=0)
    with pytest.raises(ValueError, match="global_pool='max'"):
        narrow(name, global_pool="max")
    with pytest.raises(ValueError, match="mixer='tt' is unknown .did you mean 'ttt'"):
        narrow(name, mixer="tt")
    with pytest.raises(ValueError, match="in_chans=3; got"):
        narrow(name)(torch.randn(1, 4, 32, 32))
    with pytest.raises(ValueError, match="output_fmt='NHWC'"):
        narrow(name).forward_intermediates(torch.randn(1, 3, 32, 32), output_fmt="NHWC")


@families
@pytest.mark.parametrize("num_classes,in_chans", [(1, 1), (10, 4), (21841, 13), (0, 1)])
def test_classes_and_channels(name, num_classes, in_chans):
    model = narrow(name, num_classes=num_classes, in_chans=in_chans)
    y = model(torch.randn(2, in_chans, 64, 64))
    y.sum().backward()
    assert y.shape == (2, num_classes or model.num_features)


@each_model
@pytest.mark.parametrize("coarse", [False, True])
def test_groups_cover_every_parameter(name, coarse):
    model = meta(name)
    groups = group_parameters(model, model.group_matcher(coarse=coarse), reverse=True)
    assert groups.keys() == dict(model.named_parameters()).keys()
    assert sorted(set(groups.values())) == list(range(max(groups.values()) + 1))
    order = [groups[n] for n, _ in model.named_parameters() if not n.startswith("norm")]
    assert order == sorted(order)
    assert groups["head.weight"] > groups["norm.weight"]


@each_model
def test_layer_decay(name):
    model = meta(name)
    groups = param_groups_layer_decay(model, weight_decay=0.05, layer_decay=0.75)
    scale = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
    scales = [scale[id(p)] for n, p in model.named_parameters() if not n.startswith("norm")]
    assert scales == sorted(scales) and scales[-1] == 1 and scales[0] < 0.75**3
    decay = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    assert {decay[id(p)] for p in model.parameters() if p.ndim > 1} == {0.05}
    assert {decay[id(p)] for p in model.parameters() if p.ndim <= 1} == {0.0}


@families
def test_checkpointing_changes_nothing(name):
    model, x = narrow(name), torch.randn(2, 3, 64, 64)
    model(x)  # settles BatchNorm's number of batches for both runs alike
    results = []
    for enable in (False, True):
        run = copy.deepcopy(model)
        run.set_grad_checkpointing(enable)
        y = run(x)
        y.square().sum().backward()
        results.append([y, *(p.grad for p in run.parameters())])
    assert all(map(torch.equal, *results))


@families
def test_checkpointing_recomputes(name):
    model, calls = narrow(name), []
    first = model.layers[0].blocks[0] if name.startswith("h_") else model.blocks[0]
    first.cpe.register_forward_hook(lambda *_: calls.append(1))
    model.set_grad_checkpointing()
    model(torch.randn(2, 3, 64, 64)).sum().backward()
    assert len(calls) == 2


@families
@torch.no_grad()
def test_channels_last(name):
    model, x = narrow(name).eval(), torch.randn(2, 3, 64, 96)
    expected = model(x)
    y = model.to(memory_format=torch.channels_last)(x.to(memory_format=torch.channels_last))
    assert relative_error(y, expected) <= 1e-5


@families
@torch.no_grad()
def test_copies(name):
    model, x = narrow(name).eval(), torch.randn(1, 3, 64, 64)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)]
    assert all(torch.equal(other(x), model(x)) for other in copies)


@families
def test_drop_path(name):
    model, x = narrow(name, drop_path_rate=0.5), torch.randn(8, 3, 32, 32)
    assert max_error(model(x), model(x)) > 0
    model.eval()
    assert torch.equal(model(x), model(x))


@families
def test_data_config(name):
    """The published preprocessing, and a nominal size that can be set; timm keeps the two apart."""
    model = narrow(name)
    config = resolve_model_data_config(model)
    assert config["input_size"] == (3, 224, 224) and config["crop_pct"] == 0.875
    model.set_input_size((160, 192))
    assert get_model_input_config(model)["input_size"] == (3, 160, 192)
    assert get_model_input_config(narrow(name, img_size=384))["input_size"] == (3, 384, 384)


@families
def test_softmax_control(name):
    model = narrow(name, mixer="softmax")
    y = model(torch.randn(2, 3, 64, 96))
    y.square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert not any(n.endswith(("w1", "w2", "w3")) for n, _ in model.named_parameters())


@families
def test_mixer_options(name):
    with pytest.raises(ValueError, match="backend='cuda' is unknown"):
        narrow(name, mixer_kwargs=dict(backend="cuda"))


@each_model
@torch.no_grad()
def test_empty_batch(name):
    assert light(name).eval()(torch.randn(0, 3, 64, 64)).shape == (0, 1000)


def test_stages_must_agree():
    with pytest.raises(ValueError, match="dims, depths and num_heads must name the same stages; got 4, 3 and 4"):
        timm.create_model("h_vit3_tiny", depths=(1, 1, 1))


@pytest.mark.parametrize("name", ["vit3_tiny", "h_vit3_tiny"])
def test_unpooled_logits(name):
    """With ``global_pool=""`` the classifier answers for every position; their mean is the pooled answer."""
    model, x = narrow(name, num_classes=5, global_pool="").eval(), torch.randn(2, 3, 64, 96)
    with torch.no_grad():
        logits = model(x)
        pooled = logits.flatten(2).mean(-1) if logits.ndim == 4 else logits.mean(1)
        model.global_pool = "avg"
        torch.testing.assert_close(pooled, model(x))


@pytest.mark.parametrize("name", ["vit3_tiny", "h_vit3_tiny"])
def test_device_and_dtype_of_a_new_model(name):
    model = narrow(name, device="meta", dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("meta", torch.bfloat16)}
