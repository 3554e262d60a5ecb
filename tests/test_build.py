"""From a configuration to objects: arithmetic, parameter groups, schedule, every recipe's first step."""

from __future__ import annotations

import math

import pytest
import torch

from tests.test_config import RECIPES
from tests.toy import compose_config, make_folder
from vit3.build import build_data, build_model, build_optimizer, build_schedule, build_trainer, derive
from vit3.config import TrainConfig, typed
from vit3.engine.distributed import Processes
from vit3.errors import UserError
from vit3.mixers import TTT, SoftmaxAttention

CPU = Processes(torch.device("cpu"))


def configured(*overrides: str) -> TrainConfig:
    return typed(compose_config(*overrides), TrainConfig)


def model_of(cfg: TrainConfig, num_classes: int = 10):
    return build_model(
        cfg.model, cfg.mixer, cfg.inner, in_chans=cfg.data.in_chans, num_classes=num_classes, img_size=cfg.data.img_size
    )


def trainer_of(cfg: TrainConfig):
    data = build_data(cfg, CPU)
    return build_trainer(cfg, data, model_of(cfg, len(data.classes)), derive(cfg, data, CPU), {}, CPU)


class TwelveThousand:
    """A split of 12,000 images that are never read."""

    train = range(12_000)


def test_learning_rates_follow_the_global_batch():
    cfg = configured("recipe=vit3_tiny_in1k", "data.root=x")
    one = derive(cfg, TwelveThousand, CPU)
    eight = derive(cfg, TwelveThousand, Processes(torch.device("cpu"), 0, 8))
    assert one.lr == pytest.approx(4e-3) and one.warmup_lr == pytest.approx(4e-6) and one.min_lr == pytest.approx(4e-5)
    assert (eight.lr, eight.batch_per_process) == (one.lr, 512)
    assert one.updates_per_epoch == 12_000 // 4096


@pytest.mark.parametrize(("batch", "decay"), [(4096, 0.9996), (128, 0.9996 ** (128 / 4096))])
def test_ema_decay_follows_the_global_batch(batch, decay):
    cfg = configured("recipe=h_vit3_tiny_in1k", "data.root=x", f"engine.batch_size={batch}")
    assert derive(cfg, TwelveThousand, CPU).ema_decay == pytest.approx(decay, abs=1e-12)
    assert cfg.engine.ema_decay == 0.9996  # the configuration itself is left alone


def test_mixer_by_config():
    assert any(isinstance(m, TTT) for m in model_of(configured()).modules())
    softmax = list(model_of(configured("mixer=softmax")).modules())
    assert any(isinstance(m, SoftmaxAttention) for m in softmax) and not any(isinstance(m, TTT) for m in softmax)


def test_inner_settings_reach_the_mixer():
    mixers = [m for m in model_of(configured("inner.lr=0.5", "inner.scale=0.25")).modules() if isinstance(m, TTT)]
    assert len(mixers) == 4 and all((m.inner.lr, m.inner.scale) == (0.5, 0.25) for m in mixers)


def test_a_timm_model_takes_no_mixer():
    cfg = configured("model=any", "model.name=resnet18", "data.in_chans=1")
    assert model_of(cfg).get_classifier().out_features == 10


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("++model.kwargs.dept=3", "model.kwargs.dept is no argument of vit3_tiny; did you mean depth"),
        ("++model.kwargs.num_heads=3", "dim=64 must be a positive multiple of num_heads=3"),
        ("model.name=vit3_tinny", "model.name=vit3_tinny is no registered model; did you mean vit3_tiny"),
        ("mixer.name=sofmax", "mixer='sofmax' is unknown .did you mean 'softmax'"),
        ("mixer.backend=triton", "backend='triton' is not available"),
        ("model.checkpoint=nowhere.pt", "nowhere.pt: no such file"),
    ],
)
def test_what_a_model_refuses_is_a_sentence(override, sentence):
    with pytest.raises(UserError, match=sentence):
        model_of(configured(override))


@pytest.mark.parametrize("decay_inner", [True, False])
def test_weight_decay_groups(decay_inner):
    cfg = configured(f"optim.decay_inner={str(decay_inner).lower()}")
    model = model_of(cfg)
    optimizer = build_optimizer(cfg, model, derive(cfg, TwelveThousand, CPU))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert len(decay) == len(list(model.parameters()))  # every parameter, once
    for name, parameter in model.named_parameters():
        inner = name.split(".")[-1] in ("w1", "w2", "w3")
        decayed = parameter.ndim > 1 and (decay_inner or not inner)
        assert decay[id(parameter)] == (0.05 if decayed else 0.0), name


def test_layer_decay_grows_from_stem_to_head():
    cfg = configured("optim.layer_decay=0.75")
    model = model_of(cfg)
    optimizer = build_optimizer(cfg, model, derive(cfg, TwelveThousand, CPU))
    scale = {id(p): group["lr_scale"] for group in optimizer.param_groups for p in group["params"]}
    names = ["patch_embed.proj.weight", *(f"blocks.{i}.attn.w1" for i in range(4)), "head.weight"]
    scales = [scale[id(model.get_parameter(name))] for name in names]
    assert scales == sorted(scales) and len(set(scales)) == len(scales) and scales[-1] == 1.0


def test_schedule_is_linear_warm_up_then_cosine_one_update_late():
    """Update i runs at the value for i - 1, the first at the start of the warm-up (the authors' loop)."""
    cfg = configured("engine.epochs=10", "optim.warmup_epochs=2", "engine.batch_size=1000")
    derived = derive(cfg, TwelveThousand, CPU)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=derived.lr)
    schedule = build_schedule(cfg, optimizer, derived)
    seen = []
    for update in range(derived.updates):
        seen.append(optimizer.param_groups[0]["lr"])
        schedule.step_update(update)

    def value(t):
        if t < 24:
            return derived.warmup_lr + (derived.lr - derived.warmup_lr) * t / 24
        return derived.min_lr + 0.5 * (derived.lr - derived.min_lr) * (1 + math.cos(math.pi * t / 120))

    assert derived.updates == 120
    assert seen == pytest.approx([value(max(i - 1, 0)) for i in range(120)], rel=1e-9)


def test_warm_up_must_leave_an_epoch():
    cfg = configured("engine.epochs=3", "optim.warmup_epochs=3")
    with pytest.raises(UserError, match="optim.warmup_epochs=3 must be less than engine.epochs=3"):
        trainer_of(cfg)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [("data.mean=[0.5,0.5]", "data.mean=.* one entry for each of in_chans=1"), ("data.img_size=[8]", "data.img_size=.*height, width")],
)
def test_lists_of_the_wrong_length(override, sentence):
    with pytest.raises(UserError, match=sentence):
        build_data(configured(override), CPU)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_takes_a_step(recipe, tmp_path):
    """The recipe, clamped to CPU in float32, few small images and, for the larger models, one block a stage."""
    overrides = [
        f"recipe={recipe}",
        f"data.root={make_folder(tmp_path)}",
        "data.name=folder",
        "data.img_size=[32,32]",
        "data.workers=0",
        "engine.batch_size=4",
        "engine.steps_per_epoch=1",
        "engine.device=cpu",
        "engine.amp=null",
        "optim.warmup_lr=0.1",  # the recipe's first update is too small for norm scales of 1 to show it
    ]
    if "tiny" not in recipe:
        overrides.append("++model.kwargs.depths=[1,1,1,1]" if recipe.startswith("h_") else "++model.kwargs.depth=2")
    trainer = trainer_of(configured(*overrides))
    before = {name: p.detach().clone() for name, p in trainer.task.trainable_module.named_parameters()}
    record = trainer._train_epoch(0)
    assert math.isfinite(record["train/loss"]) and trainer.updates == 1
    moved = [name for name, p in trainer.task.trainable_module.named_parameters() if not torch.equal(p, before[name])]
    assert len(moved) > 0.9 * len(before)
    assert trainer.task.has_ema() == recipe.startswith("h_")
    assert (trainer.mix is not None) and trainer.clip_grad == 5.0


def test_float16_steps_with_loss_scaling():
    """An overflow skips the step and lowers the scale; steps after it move the weights."""
    trainer = trainer_of(configured("engine.amp=float16", "engine.steps_per_epoch=4", "++model.kwargs.depth=1"))
    before = {name: p.detach().clone() for name, p in trainer.task.trainable_module.named_parameters()}
    record = trainer._train_epoch(0)
    assert math.isfinite(record["train/loss"]) and trainer.scaler.get_scale() > 0
    assert all(p.dtype == torch.float32 for p in trainer.task.trainable_module.parameters())
    assert any(not torch.equal(p, before[name]) for name, p in trainer.task.trainable_module.named_parameters())
