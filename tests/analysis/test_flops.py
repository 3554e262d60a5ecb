"""Multiply-adds: our counter against the published figures and against a counter of dispatched operations."""

from __future__ import annotations

import pytest
import timm
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.helpers import light
from vit3.analysis.flops import count_macs, counted_macs
from vit3.mixers import MIXERS, TTT
from vit3.models import MODEL_NAMES
from vit3.models.published import PUBLISHED_GENERATORS

# Figures computed from the paper's tables and printed in the authors' README, in 1e9; relative tolerance.
PUBLISHED = {
    "vit3_tiny": (1.22, 0.01),
    "vit3_small": (4.82, 0.01),
    "vit3_base": (17.96, 0.01),
    "h_vit3_tiny": (4.9, 0.02),
    "h_vit3_small": (8.8, 0.02),
    "h_vit3_base": (16.7, 0.02),
}


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_published_figures(name):
    with torch.device("meta"):
        model = timm.create_model(name)
    figure, tolerance = PUBLISHED[name]
    assert count_macs(model, (224, 224)) / 1e9 == pytest.approx(figure, rel=tolerance)


@pytest.mark.parametrize("published", ["DiT³", "DiT"])
@pytest.mark.parametrize("name", PUBLISHED_GENERATORS)
def test_published_figures_of_generators(name, published):
    """Table 10 prints both to two or three digits: parameters must round to them, products be within 1 %."""
    figures = PUBLISHED_GENERATORS[name] if published == "DiT³" else PUBLISHED_GENERATORS[name]["dit"]
    with torch.device("meta"):
        model = timm.create_model(name, **({} if published == "DiT³" else dict(mixer="softmax", cpe=False)))
    assert round(sum(p.numel() for p in model.parameters()) / 1e6) == figures["params_m"]
    assert count_macs(model, (32, 32)) / 1e9 == pytest.approx(figures["macs_g"], rel=0.01)


@pytest.mark.parametrize("mixer", ["ttt", "softmax"])
@pytest.mark.parametrize("size", [(8, 8), (5, 7)])
def test_generators_equal_a_counter_of_dispatched_operations(mixer, size):
    model = timm.create_model("dit3_s_2", depth=2, mixer=mixer, num_classes=10)
    assert count_macs(model, size) == counted_macs(model, size)


@pytest.mark.parametrize("mixer", ["ttt", "softmax"])
@pytest.mark.parametrize("name", ["vit3_tiny", "h_vit3_tiny"])
@pytest.mark.parametrize("size", [(64, 64), (65, 97)])
def test_equals_a_counter_of_dispatched_operations(name, mixer, size):
    """PyTorch's counter sees every product of matrices, convolution and fused operator."""
    model = light(name, mixer=mixer, num_classes=10).eval()
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        model(torch.zeros(1, 3, *size))
    assert count_macs(model, size) == counter.get_total_flops() // 2


@pytest.mark.parametrize("name", MIXERS)
def test_a_mixer_counts_by_its_own_formula(name):
    """Networks differ by their mixers alone."""
    counts, own = [], []
    for mixer in ("softmax", name):
        model = light("vit3_tiny", mixer=mixer, num_classes=10)
        counts.append(count_macs(model, (65, 97)))
        own.append(sum(block.attn.macs(5, 7) for block in model.blocks))
    assert counts[1] - counts[0] == own[1] - own[0]


@pytest.mark.parametrize("size", [(64, 64), (65, 97)])
def test_equals_a_counter_of_the_closed_form(size):
    """PyTorch's counter does not see the nine shifted products of the closed form."""
    model = light("vit3_tiny", mixer_kwargs=dict(backend="reference"), num_classes=10).eval()
    ours = count_macs(model, size)
    shifted = 0

    def add_shifted(module, inputs, output):
        nonlocal shifted
        shifted += 18 * module.head_dim * inputs[1] * inputs[2]

    for module in model.modules():
        if isinstance(module, TTT):
            module.register_forward_hook(add_shifted)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, 3, *size))
    assert ours == counter.get_total_flops() // 2 + shifted


def test_model_is_left_alone():
    model = light("vit3_tiny")
    before = [p.device.type for p in model.parameters()], len(list(model.modules()))
    count_macs(model, (32, 32))
    assert before == ([p.device.type for p in model.parameters()], len(list(model.modules())))
    assert not any(module._forward_hooks for module in model.modules())


def test_linear_in_tokens():
    model = light("vit3_tiny", num_classes=0)
    small, large = (count_macs(model, (side, side)) for side in (224, 448))
    assert large == 4 * small
    softmax = light("vit3_tiny", num_classes=0, mixer="softmax")
    assert count_macs(softmax, (448, 448)) > 4.1 * count_macs(softmax, (224, 224))
