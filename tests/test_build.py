"""From a configuration to objects: arithmetic, parameter groups, schedule, every recipe's first step."""

from __future__ import annotations

import hashlib
import inspect
import math
import re
from pathlib import Path

import pytest
import torch

import vit3.build.training
import vit3.data.loader
from tests.helpers import ROOT
from tests.processes import run_processes
from tests.test_config import RECIPES
from tests.toy import configured, make_folder, model_of, one_update, train_epoch, trainer_of
from vit3.build import build_data, build_optimizer, build_plan, build_schedule, derive
from vit3.engine.distributed import start_processes
from vit3.errors import UserError
from vit3.mixers import MIXERS, TTT, SoftmaxAttention
from vit3.models.places import WEIGHTS
from vit3.models.weights import write_tensors


def derived_of(cfg, images=12_000, world_size=1):
    return derive(cfg, build_plan(cfg, images, world_size, torch.nn.Identity()))


def test_learning_rates_follow_the_global_batch():
    cfg = configured("recipe=vit3_tiny_in1k", "data.root=x")
    one, eight = derived_of(cfg), derived_of(cfg, world_size=8)
    assert one.lr == pytest.approx(4e-3) and one.warmup_lr == pytest.approx(4e-6) and one.min_lr == pytest.approx(4e-5)
    assert (eight.lr, eight.batch_per_process) == (one.lr, 512)
    assert one.updates_per_epoch == 12_000 // 4096


def test_a_limit_per_process_changes_nothing_but_forward_passes():
    numbers = []
    for world_size, limit in ((1, "null"), (8, "null"), (4, "64"), (1, "64")):
        cfg = configured("recipe=h_vit3_tiny_mesa_in1k", "data.root=x", f"engine.max_per_process={limit}")
        d = derived_of(cfg, 1_281_167, world_size)
        assert d.batch_per_process <= (64 if limit == "64" else 4096)
        assert d.world_size * d.accumulation * d.batch_per_process == 4096
        numbers.append((d.lr, d.ema_decay, d.updates_per_epoch, d.updates))
    assert set(numbers) == {(4e-3, 0.9996, 312, 93_600)}


@pytest.mark.parametrize(("batch", "decay"), [(4096, 0.9996), (128, 0.9996 ** (128 / 4096))])
def test_ema_decay_follows_the_global_batch(batch, decay):
    cfg = configured("recipe=h_vit3_tiny_in1k", "data.root=x", f"engine.batch_size={batch}")
    assert derived_of(cfg).ema_decay == pytest.approx(decay, abs=1e-12)
    assert cfg.engine.ema_decay == 0.9996  # the configuration itself is left alone


def test_a_batch_larger_than_the_data():
    with pytest.raises(UserError, match="engine.batch_size=2000 is more than the 1437 training images"):
        derived_of(configured("engine.batch_size=2000"), 1437)
    assert derived_of(configured("engine.batch_size=1437"), 1437).updates_per_epoch == 1
    kept = derived_of(configured("engine.batch_size=2000", "engine.drop_last=false"), 1437)
    assert kept.updates_per_epoch == 1


def test_one_image_cannot_be_normalised_over_the_batch():
    cfg = configured("model=h_vit3_tiny", "engine.batch_size=4", "engine.max_per_process=1")
    with pytest.raises(UserError, match="leaves one image per process and forward pass, over which h_vit3_tiny"):
        build_plan(cfg, 100, 1, torch.nn.BatchNorm1d(3))


def test_mixer_by_config():
    assert any(isinstance(m, TTT) for m in model_of(configured()).modules())
    softmax = list(model_of(configured("mixer=softmax")).modules())
    assert any(isinstance(m, SoftmaxAttention) for m in softmax) and not any(isinstance(m, TTT) for m in softmax)


MIXER_CONFIGS = sorted(path.stem for path in (ROOT / "configs" / "mixer").glob("*.yaml"))


def test_every_mixer_has_a_config():
    assert {configured(f"mixer={name}").mixer.name for name in MIXER_CONFIGS} == set(MIXERS)


@pytest.mark.parametrize("name", MIXER_CONFIGS)
def test_mixer_configs(name):
    """Each file names the constructor's own options, all of them, at their defaults unless the file is a variant.

    ``ttt`` has its options in configs/inner.
    """
    cfg = configured(f"mixer={name}").mixer
    assert any(isinstance(m, MIXERS[cfg.name]) for m in model_of(configured(f"mixer={name}")).modules())
    if cfg.name in ("ttt", "softmax"):
        return
    parameters = inspect.signature(MIXERS[cfg.name]).parameters
    defaults = {k: p.default for k, p in parameters.items() if k not in ("dim", "num_heads", "qkv_bias")}
    assert cfg.kwargs.keys() == defaults.keys()
    assert dict(cfg.kwargs) == defaults or name != cfg.name


def test_mixer_options_from_the_command_line():
    cfg = configured("mixer=delta", "mixer.kwargs.direction=causal", "mixer.kwargs.negative_eigenvalues=true")
    mixers = [m for m in model_of(cfg).modules() if isinstance(m, MIXERS["delta"])]
    assert mixers and all((m.direction, m.negative_eigenvalues) == ("causal", True) for m in mixers)
    with pytest.raises(UserError, match="mixer.kwargs.chunks is no argument of mixer delta; did you mean chunk"):
        model_of(configured("mixer=delta", "++mixer.kwargs.chunks=3"))
    with pytest.raises(UserError, match="direction='up' is unknown; use one of: bidirectional, causal"):
        model_of(configured("mixer=delta", "mixer.kwargs.direction=up"))


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
        ("mixer.backend=cuda", "backend=.cuda. is unknown"),
        ("model.checkpoint=nowhere.pt", "nowhere.pt: no such file"),
        ("model.checkpoint=tests", "tests holds no best_raw.pt or best_ema.pt; give a checkpoint file"),
        ("model.name=h_vit3_tiny_dense", "model.name=h_vit3_tiny_dense gives maps, no classes"),
        ("++model.kwargs.drop_rate=0.1", "model.kwargs.drop_rate is no argument of vit3_tiny"),
        ("++model.kwargs.patch_size=0", "patch_size=0 and depth=4 must be at least 1"),
        ("inner.lr=nan", "inner.lr=nan must be a finite number"),
    ],
)
def test_what_a_model_refuses_is_a_sentence(override, sentence):
    with pytest.raises(UserError, match=sentence):
        model_of(configured(override))


def test_training_starts_from_any_place(tmp_path, monkeypatch):
    """A folder in timm's hub layout, and an address; class by class where the file names them."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    origin = model_of(configured(), classes=tuple("9876543210"))
    write_tensors(tmp_path / WEIGHTS, origin.state_dict(), classes=tuple("9876543210"))
    for place in (tmp_path, (tmp_path / WEIGHTS).as_uri()):
        model = model_of(configured(f"model.checkpoint='{place}'"))
        assert torch.equal(model.head.weight, origin.head.weight.flip(0))
        assert torch.equal(model.blocks[0].attn.w1, origin.blocks[0].attn.w1)


def test_a_timm_model_of_fixed_size_gets_the_size():
    model = model_of(configured("model=any", "model.name=vit_tiny_patch16_224", "data.img_size=[32,48]"))
    assert model(torch.zeros(1, 1, 32, 48)).shape == (1, 10)


def test_transforms_are_tried_before_the_first_step():
    with pytest.raises(UserError, match="images cannot be transformed as augment"):
        trainer_of(configured("augment.auto_augment=foo"))


def test_values_reach_timm(monkeypatch):
    """Every setting arrives at the argument of timm that it is meant for."""
    seen = {}

    def spy(name, original):
        def call(*args, **kwargs):
            seen.setdefault(name, []).append(kwargs)
            return original(*args, **kwargs)

        return call

    for module, name in (
        (vit3.data.loader, "create_transform"), (vit3.data.loader, "PrefetchLoader"), (vit3.build.training, "Mixup"),
        (vit3.build.training, "create_optimizer_v2"), (vit3.build.training, "ClassificationTask"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, spy(name, getattr(module, name)))
    trainer = trainer_of(
        configured(
            "data.interpolation=bicubic", "data.crop_pct=0.9", "augment.erase_prob=0.3", "augment.hflip=0.4",
            "augment.color_jitter=0.2", "augment.erase_mode=rand", "augment.ratio=[0.5,2.0]", "augment.mixup=0.7",
            "augment.cutmix=0.6", "augment.mix_prob=0.8", "augment.switch_prob=0.3", "augment.smoothing=0.2",
            "optim.betas=[0.8,0.9]", "optim.eps=1e-7",
        )
    )  # fmt: skip
    train, val = seen["create_transform"]
    for transform in (train, val):
        assert (transform["interpolation"], transform["mean"]) == ("bicubic", (0.3054,))
    wanted = dict(hflip=0.4, color_jitter=0.2, scale=(0.8, 1.0), ratio=(0.5, 2.0), is_training=True)
    assert {key: train[key] for key in wanted} == wanted and not wanted.keys() & val.keys() and val["crop_pct"] == 0.9
    assert trainer.val_loader.random_erasing is None and trainer.val_loader.mean.item() == pytest.approx(0.3054 * 255)
    next(trainer.batches.epoch(0))
    loader = seen["PrefetchLoader"][-1]
    assert (loader["re_prob"], loader["re_mode"], loader["mean"]) == (0.3, "rand", (0.3054,))
    wanted = dict(mixup_alpha=0.7, cutmix_alpha=0.6, prob=0.8, switch_prob=0.3, label_smoothing=0.2, num_classes=10)
    assert seen["Mixup"] == [wanted]
    assert seen["ClassificationTask"][0]["criterion_kwargs"] == dict(smoothing=0.0, soft_targets=True)
    assert (seen["create_optimizer_v2"][0]["betas"], seen["create_optimizer_v2"][0]["eps"]) == ((0.8, 0.9), 1e-7)


def test_label_smoothing_without_mixing():
    task = trainer_of(configured("augment.smoothing=0.2")).task
    logits = torch.randn(4, 10)
    target = torch.tensor([1, 2, 3, 4])
    wanted = torch.nn.functional.cross_entropy(logits, target, label_smoothing=0.2)
    torch.testing.assert_close(task.criterion(logits, target), wanted)


@pytest.mark.parametrize("amp", ["null", "float16"])
def test_gradients_are_clipped_after_unscaling(amp):
    """With a tiny limit, plain SGD of rate 1 moves the weights by exactly that much."""
    trainer = trainer_of(
        configured(
            f"engine.amp={amp}", "optim.clip_grad=1e-3", "optim.opt=sgd", "optim.weight_decay=0", "optim.lr=1",
            "optim.warmup_epochs=0", "engine.steps_per_epoch=1", "engine.ema_decay=null", "++model.kwargs.depth=1",
        )
    )  # fmt: skip
    trainer.updater.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, enabled=amp == "float16")
    parameters = list(trainer.task.trainable_module.parameters())
    before = [p.detach().clone() for p in parameters]
    for group in trainer.updater.optimizer.param_groups:
        group.update(momentum=0, nesterov=False)
    one_update(trainer)
    moved = torch.cat([(p.detach() - b).flatten() for p, b in zip(parameters, before)]).norm().item()
    assert moved == pytest.approx(1e-3, rel=1e-2)


def test_ema_follows_its_formula():
    """Warm-up takes the step number: decay 1 - (1 + t)^(-2/3) with t = step - 1, and 0 at the first step."""
    trainer = trainer_of(configured("engine.ema_decay=0.9", "engine.steps_per_epoch=1", "++model.kwargs.depth=1"))
    raw, ema = trainer.task.trainable_module, trainer.task.trainable_module_ema.module
    hand = None
    for step in range(1, 4):
        one_update(trainer)
        decay = min(0.9, 1 - step ** (-2 / 3)) if step > 1 else 0.0
        now = raw.head.weight.detach().clone()
        hand = now if hand is None else decay * hand + (1 - decay) * now
        torch.testing.assert_close(ema.head.weight, hand, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("decay_inner", [True, False])
@pytest.mark.parametrize("inner", [[], ["inner.model=swiglu"]], ids=["released", "w4"])
def test_weight_decay_groups(decay_inner, inner):
    cfg = configured(f"optim.decay_inner={str(decay_inner).lower()}", *inner)
    model = model_of(cfg)
    assert any(name.endswith(".w4") for name, _ in model.named_parameters()) == bool(inner)
    optimizer = build_optimizer(cfg, model, derived_of(cfg))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert len(decay) == len(list(model.parameters()))  # every parameter, once
    for name, parameter in model.named_parameters():
        inner = name.split(".")[-1] in ("w1", "w2", "w3", "w4")
        decayed = parameter.ndim > 1 and (decay_inner or not inner)
        assert decay[id(parameter)] == (0.05 if decayed else 0.0), name


def test_layer_decay_grows_from_stem_to_head():
    cfg = configured("optim.layer_decay=0.75")
    model = model_of(cfg)
    optimizer = build_optimizer(cfg, model, derived_of(cfg))
    scale = {id(p): group["lr_scale"] for group in optimizer.param_groups for p in group["params"]}
    names = ["patch_embed.proj.weight", *(f"blocks.{i}.attn.w1" for i in range(4)), "head.weight"]
    scales = [scale[id(model.get_parameter(name))] for name in names]
    assert scales == sorted(scales) and len(set(scales)) == len(scales) and scales[-1] == 1.0


def test_schedule_is_linear_warm_up_then_cosine_one_update_late():
    """Update i runs at the value for i - 1, the first at the start of the warm-up (the authors' loop)."""
    cfg = configured("engine.epochs=10", "optim.warmup_epochs=2", "engine.batch_size=1000")
    derived = derived_of(cfg)
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
    [
        ("data.mean=[0.5,0.5]", "data.mean=.* one entry for each of in_chans=1"),
        ("data.img_size=[8]", "data.img_size=.* a list of 2 positive numbers"),
        ("data.std=[0]", "must be positive"),
    ],
)
def test_lists_of_the_wrong_length(override, sentence):
    with pytest.raises(UserError, match=sentence):
        build_data(configured(override))


GENERATORS = [recipe for recipe in RECIPES if recipe.startswith("dit3_")]
CLASSIFIERS = [recipe for recipe in RECIPES if recipe not in GENERATORS]


def clamped(recipe: str, root: Path) -> list[str]:
    """The recipe, clamped to CPU in float32, few small images and, for the larger models, one block a stage."""
    overrides = [
        f"recipe={recipe}",
        f"data.root={root}",
        "data.name=folder",
        "data.img_size=[32,32]",
        "data.workers=0",
        "engine.batch_size=4",
        "engine.steps_per_epoch=1",
        "engine.device=cpu",
        "engine.amp=null",
        "model.pretrained=false",
        "optim.warmup_lr=0.1",  # the recipe's first update is too small for norm scales of 1 to show it
    ]
    if recipe.startswith(("vit3_small", "vit3_base", "h_vit3_small", "h_vit3_base", "ablation_in1k")):
        overrides.append("++model.kwargs.depths=[1,1,1,1]" if recipe.startswith("h_") else "++model.kwargs.depth=2")
    return overrides


def step_with_each(root: Path) -> dict[str, tuple[float, str]]:
    """Of each recipe, as narrow as can be, the loss of one update on all processes, and a digest of the weights."""
    processes, results = start_processes("cpu"), {}
    for recipe in CLASSIFIERS:
        hierarchical = recipe.startswith(("h_", "finetune"))
        overrides = [key for key in clamped(recipe, root) if not key.startswith("++model.kwargs")]
        dims = ("dims=[8,16]", "depths=[1,1]", "num_heads=[2,2]") if hierarchical else ("embed_dim=16", "depth=1",
                                                                                        "num_heads=2")  # fmt: skip
        trainer = trainer_of(configured(*overrides, *(f"++model.kwargs.{key}" for key in dims)), processes)
        before = trainer.updater.model.head.weight.detach().clone()
        outcome = one_update(trainer)
        assert outcome.taken and not torch.equal(before, trainer.updater.model.head.weight), recipe
        state = trainer.updater.model.state_dict()
        weights = b"".join(state[name].numpy().tobytes() for name in sorted(state))
        results[recipe] = (outcome.losses["loss"], hashlib.sha256(weights).hexdigest())
    return results


def test_every_recipe_takes_a_step_on_two_processes(tmp_path):
    one, other = run_processes(step_with_each, 2, make_folder(tmp_path))
    assert list(one) == CLASSIFIERS and one == other
    assert all(math.isfinite(loss) for loss, _ in one.values())


@pytest.mark.parametrize("recipe", GENERATORS)
def test_every_generator_takes_a_step(recipe, tmp_path):
    """In pixels, narrow; of a new network the output alone moves, as its gates are zero."""
    narrow = ("embed_dim=16", "depth=1", "num_heads=2")
    pixels = ("diffusion.autoencoder=null", "data.in_chans=3", "data.mean=[0.5,0.5,0.5]", "data.std=[0.5,0.5,0.5]")
    overrides = (*clamped(recipe, make_folder(tmp_path)), *pixels, *(f"++model.kwargs.{key}" for key in narrow))
    trainer = trainer_of(configured(*overrides))
    before = {name: p.detach().clone() for name, p in trainer.task.trainable_module.named_parameters()}
    record = train_epoch(trainer)
    moved = {name for name, p in trainer.task.trainable_module.named_parameters() if not torch.equal(p, before[name])}
    assert math.isfinite(record["loss"]) and moved == {"final_layer.linear.weight", "final_layer.linear.bias"}
    assert record["loss"] == pytest.approx(record["mse"] + record["vb"]) and trainer.task.has_ema()


@pytest.mark.parametrize("recipe", CLASSIFIERS)
def test_every_recipe_takes_a_step(recipe, tmp_path):
    """One process, the networks of the recipes, tiny ones as they are."""
    overrides = clamped(recipe, make_folder(tmp_path))
    trainer = trainer_of(configured(*overrides))
    before = {name: p.detach().clone() for name, p in trainer.task.trainable_module.named_parameters()}
    record = train_epoch(trainer)
    assert math.isfinite(record["loss"]) and trainer.updater.counts.updates == 1
    moved = [name for name, p in trainer.task.trainable_module.named_parameters() if not torch.equal(p, before[name])]
    assert len(moved) > 0.9 * len(before)
    assert trainer.task.has_ema() == (recipe.startswith("h_") or recipe == "finetune_small")
    assert (trainer.updater.mix is None) == (
        not recipe.endswith("in1k") or recipe.startswith("finetune")
    ) and trainer.updater.clip_grad == 5.0
    assert getattr(trainer.task, "active", False) is False and hasattr(trainer.task, "active") == ("mesa" in recipe)


def test_float16_steps_with_loss_scaling():
    """An overflow skips the step and lowers the scale; steps after it move the weights."""
    trainer = trainer_of(configured("engine.amp=float16", "engine.steps_per_epoch=4", "++model.kwargs.depth=1"))
    before = {name: p.detach().clone() for name, p in trainer.task.trainable_module.named_parameters()}
    record = train_epoch(trainer)
    assert math.isfinite(record["loss"]) and trainer.updater.scaler.get_scale() > 0
    assert all(p.dtype == torch.float32 for p in trainer.task.trainable_module.parameters())
    assert any(not torch.equal(p, before[name]) for name, p in trainer.task.trainable_module.named_parameters())


@pytest.mark.parametrize(
    "inner", ["inner=mlp", "inner.batch=N/2", "inner.beside=[{model: fc, heads: 1}, {model: conv, extra: true}]"]
)
def test_the_hierarchical_network_takes_any_inner_problem(inner):
    """Rotated queries and keys, grids that a batch does not divide, branches typed on the command line."""
    narrow = ("++model.kwargs.dims=[16,32]", "++model.kwargs.depths=[1,1]", "++model.kwargs.num_heads=[2,2]")
    model = model_of(configured("model=h_vit3_tiny", "data.img_size=[32,32]", *narrow, inner))
    y = model(torch.randn(2, 1, 36, 52))
    y.square().sum().backward()
    assert y.shape == (2, 10) and all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_what_a_branch_refuses_is_a_sentence():
    for value, sentence in (
        ("[{model: fc, ratio: 2}]", "inner.ratio=2.0 means nothing of inner model 'fc'"),
        ("[{modell: fc}]", "modell"),
        ("[{model: fc, heads: 2}]", "inner.beside takes all of the num_heads=2 heads"),
        ("[fc]", "inner.beside"),
    ):
        with pytest.raises(UserError, match=re.escape(sentence)):
            model_of(configured(f"inner.beside={value}"))
