"""Configurations: unknown keys, wrong types and values out of range end in one sentence."""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
from fnmatch import fnmatch

import pytest
import torch
import yaml
from omegaconf import OmegaConf

from tests.toy import CONFIGS, compose_config
from vit3.arguments import check_arguments
from vit3.build import build_schedule, derive
from vit3.config import (
    CacheConfig,
    EvalConfig,
    ExportConfig,
    FlopsConfig,
    GenerationScoreConfig,
    PredictConfig,
    SampleConfig,
    TrainConfig,
    known_keys,
    typed,
)
from vit3.config.limits import CHOICES, RANGES
from vit3.data import BatchPlan
from vit3.errors import UserError
from vit3.models.published import PUBLISHED_GENERATORS

PROGRAMS = {  # schema and what has no value yet, by the root of the configuration
    "train": (TrainConfig, ["task=diffusion", "diffusion=ddpm"]),
    "eval": (EvalConfig, ["checkpoint=x"]),
    "export": (ExportConfig, ["checkpoint=x"]),
    "flops": (FlopsConfig, []),
    "sample": (SampleConfig, ["checkpoint=x"]),
    "cache_latents": (CacheConfig, ["data.root=x", "autoencoder=x", "output=x"]),
    "eval_generation": (GenerationScoreConfig, ["samples=x"]),
    "predict": (PredictConfig, ["checkpoint=x", "images=[x]"]),
}
RECIPES = sorted(path.stem for path in (CONFIGS / "recipe").glob("*.yaml"))


def check(argument: str, schema: type = TrainConfig) -> str:
    return check_arguments([argument], schema, CONFIGS)[0]


def test_default_configuration_fits_the_schema():
    cfg = typed(compose_config(), TrainConfig)
    assert cfg.data.name == "digits" and cfg.inner.lr == 1.0 and cfg.inner.scale == pytest.approx(1 / 3)


def test_the_table_of_contents_names_every_choice():
    """Each file of a group fits one of the names beside it in configs/train.yaml, and each name a file."""
    lines = [line.strip() for line in (CONFIGS / "train.yaml").read_text().splitlines() if line.startswith("  - ")]
    for line in lines[:-1]:
        group, names = line.removeprefix("- ").split(":")[0], re.split(r"\s{2,}", line.split("# ")[1])[0].split(" | ")
        files = [path.stem for path in (CONFIGS / group).glob("*.yaml")]
        assert not [file for file in files if not any(fnmatch(file, name) for name in names)], group
        assert not [name for name in names if not any(fnmatch(file, name) for file in files)], group


def test_schema_and_files_name_the_same_keys():
    """A key that only the schema knows would never get a value."""
    plain = OmegaConf.to_container(compose_config("task=diffusion", "diffusion=ddpm"))

    def flat(tree, prefix=""):
        for key, value in tree.items():
            yield prefix + key
            if isinstance(value, dict) and prefix + key != "model.kwargs":
                yield from flat(value, f"{prefix}{key}.")

    assert set(flat(plain)) == set(known_keys(TrainConfig))


@pytest.mark.parametrize(
    ("argument", "near"),
    [
        ("optim.lrr=1", "optim.lr"),
        ("engine.lr=1", "inner.lr or optim.lr"),
        ("dta=folder", "data"),
        ("data=foldr", "folder"),
        ("recipe=vit3_tiny_in1", "vit3_tiny_in1k"),
        ("+engine.epoch=3", "engine.epochs"),
    ],
)
def test_misspelt_keys_name_the_nearest(argument, near):
    with pytest.raises(UserError, match=f"did you mean {near}\\?"):
        check(argument)


def test_eval_keys_are_those_of_eval():
    with pytest.raises(UserError, match="did you mean weights"):
        check("weigths=raw", EvalConfig)
    with pytest.raises(UserError, match="allowed: batch_size, checkpoint"):
        check("zzz=1", EvalConfig)


def test_text_that_is_no_override():
    with pytest.raises(UserError, match="no key=value"):
        check("hello")


def test_model_arguments_need_no_plus():
    assert check("model.kwargs.depth=2") == "++model.kwargs.depth=2"
    assert check("-m") == "-m"


def test_unknown_key_in_a_file_names_the_nearest():
    cfg = compose_config("+engine.epcohs=3")
    with pytest.raises(UserError, match="engine.epcohs is no key of this program; did you mean epochs"):
        typed(cfg, TrainConfig)


@functools.cache
def composed(root):
    """The configuration of a program, composed once for all keys."""
    return compose_config(*PROGRAMS[root][1], root=root)


def typed_with(key, value):
    """The configuration of the first program that has ``key``, with ``value`` for it."""
    root, schema = next((root, schema) for root, (schema, _) in PROGRAMS.items() if key in known_keys(schema))
    cfg = copy.deepcopy(composed(root))
    OmegaConf.update(cfg, key, value)
    return typed(cfg, schema)


@pytest.mark.parametrize("key", CHOICES)
def test_every_choice_is_held(key):
    with pytest.raises(UserError, match=f"{key}=zzz is not allowed; use one of: "):
        typed_with(key, "zzz")


@pytest.mark.parametrize("key", RANGES)
def test_every_range_is_held(key):
    low, high = RANGES[key]
    for value in [low - 1] + ([high + 1] if high is not None else []):
        with pytest.raises(UserError, match=f"{key}=.* is not allowed; it must be "):
            typed_with(key, value)


def test_several_values_need_the_flag():
    with pytest.raises(UserError, match="engine.seed=0,1 names several values; add -m"):
        check("engine.seed=0,1")


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("optim.betas=[0.9]", "optim.betas=.0.9. is not allowed; it must be a list of 2 positive numbers"),
        ("optim.lr=nan", "optim.lr=nan is not allowed"),
        ("engine.epochs=0", "engine.epochs=0 is not allowed; it must be at least 1"),
        ("engine.epochs=abc", "engine.epochs: .*abc"),
        ("engine.amp=fp16", "engine.amp=fp16 is not allowed; use one of: null, float16, bfloat16"),
        ("augment.mix_prob=1.5", "augment.mix_prob=1.5 is not allowed; it must be between 0 and 1"),
        ("model.drop_path_rate=1", "model.drop_path_rate=1.0 is not allowed"),
        ("data.on_bad_image=ignore", "use one of: raise, skip"),
        ("optim.lr=[1]", "optim.lr"),
    ],
)
def test_wrong_values(override, sentence):
    with pytest.raises(UserError, match=sentence):
        typed(compose_config(override), TrainConfig)


def test_missing_value_says_how_to_give_it():
    with pytest.raises(UserError, match="data.root has no value yet; set it on the command line: data.root=VALUE"):
        typed(compose_config("data=folder"), TrainConfig)


@pytest.mark.parametrize("text", ["1e-3", "0.001", ".001", "1.0E-3"])
def test_ways_to_write_a_float(text):
    assert typed(compose_config(f"optim.lr={text}"), TrainConfig).optim.lr == 1e-3


def test_float_as_yaml_reads_it():
    cfg = OmegaConf.merge(compose_config(), OmegaConf.create(yaml.safe_load("optim: {lr: 1e-3}")))
    assert typed(cfg, TrainConfig).optim.lr == 1e-3


def test_resolved_config_round_trips():
    cfg = typed(compose_config("recipe=vit3_tiny_in1k", "data.root=x"), TrainConfig)
    assert typed(OmegaConf.create(dataclasses.asdict(cfg)), TrainConfig) == cfg


# Settings of the published runs (paper sections 4 and 5, the authors' code): drop path and precision by model.
PUBLISHED = {
    "vit3_tiny_in1k": (0.0, "float16", None),
    "vit3_small_in1k": (0.1, "float16", None),
    "vit3_base_in1k": (0.4, "float16", None),
    "h_vit3_tiny_in1k": (0.2, "float16", 0.9996),
    "h_vit3_small_in1k": (0.4, None, 0.9996),
    "h_vit3_base_in1k": (0.6, None, 0.9996),
}


MESA = {"h_vit3_tiny_mesa_in1k": 1.0, "h_vit3_small_mesa_in1k": 1.5, "h_vit3_base_mesa_in1k": 2.0}  # weight
FINE_TUNING = {"finetune_384_in1k", "finetune_small"}
STUDIES = {"ablation_in1k", "ablation_patterns", "ablation_digits"}
GENERATORS = {f"{name}_in256": name for name in PUBLISHED_GENERATORS}
SMALL_GENERATORS = {"dit3_digits"}


def test_every_published_model_has_its_recipe():
    assert set(RECIPES) == {*PUBLISHED, *MESA, *FINE_TUNING, *STUDIES, *GENERATORS, *SMALL_GENERATORS}


@pytest.mark.parametrize("recipe", [*PUBLISHED, *MESA])
def test_recipes_hold_the_published_settings(recipe):
    cfg = typed(compose_config(f"recipe={recipe}", "data.root=x"), TrainConfig)
    drop_path, amp, ema = PUBLISHED[recipe.replace("_mesa", "")]
    assert cfg.model.name == recipe.removesuffix("_in1k").removesuffix("_mesa")
    task = ("mesa", MESA[recipe], 0.25) if recipe in MESA else ("classification", 0.0, 0.0)
    assert (cfg.task.name, cfg.task.weight, cfg.task.start) == task
    assert (cfg.engine.recipe_batch, cfg.engine.drop_last, cfg.engine.ema_buffers) == (4096, True, "average")
    assert (cfg.model.drop_path_rate, cfg.engine.amp, cfg.engine.ema_decay) == (drop_path, amp, ema)
    assert (cfg.engine.epochs, cfg.optim.warmup_epochs, cfg.engine.batch_size) == (300, 20, 4096)
    o, a, d = cfg.optim, cfg.augment, cfg.data
    assert (o.opt, o.weight_decay, o.betas, o.eps, o.clip_grad) == ("adamw", 0.05, [0.9, 0.999], 1e-8, 5.0)
    assert (o.lr, o.warmup_lr, o.min_lr, o.lr_batch, o.sched) == (5e-4, 5e-7, 5e-6, 512, "cosine")
    assert (a.auto_augment, a.color_jitter, a.erase_prob, a.erase_mode) == (
        "rand-m9-mstd0.5-inc1", 0.4, 0.25, "pixel",
    )  # fmt: skip
    assert (a.mixup, a.cutmix, a.mix_prob, a.switch_prob, a.smoothing) == (0.8, 1.0, 1.0, 0.5, 0.1)
    assert (d.img_size, d.interpolation, d.crop_pct, o.decay_inner) == ([224, 224], "bicubic", 0.875, True)


@pytest.mark.parametrize("recipe", GENERATORS)
def test_recipes_of_generators_hold_the_published_settings(recipe):
    """DiT's, as the authors' code has them; and the header quotes the figures that are stored."""
    cfg = typed(compose_config(f"recipe={recipe}", "data.root=x"), TrainConfig)
    name = GENERATORS[recipe]
    o, e, d, g = cfg.optim, cfg.engine, cfg.data, cfg.diffusion
    assert (cfg.model.name, cfg.model.kwargs, cfg.mixer.name, cfg.task.name) == (name, {}, "ttt", "diffusion")
    assert (o.opt, o.lr, o.lr_batch, o.weight_decay, o.betas) == ("adamw", 1e-4, 256, 0.0, [0.9, 0.999])
    assert (o.sched, o.warmup_epochs, o.clip_grad) == ("constant", 0, None)
    assert (e.batch_size, e.recipe_batch, e.ema_decay, e.ema_batch, e.ema_warmup) == (256, 256, 0.9999, 256, False)
    assert 400_000 <= e.epochs * (1_281_167 // e.batch_size) < 405_000
    assert (d.name, d.img_size, d.mean, d.std, d.crop_pct) == ("imagenet", [256, 256], [0.5] * 3, [0.5] * 3, 1.0)
    a = typed(compose_config("augment=none"), TrainConfig).augment
    assert dataclasses.replace(cfg.augment, hflip=0.0) == a and cfg.augment.hflip == 0.5
    assert (g.process, g.steps, g.betas, g.learn_sigma, g.label_drop) == ("ddpm", 1000, "linear", True, 0.1)
    assert (g.autoencoder, g.latent_scale) == ("stabilityai/sd-vae-ft-ema", None)
    text, figures = (CONFIGS / "recipe" / f"{recipe}.yaml").read_text(), PUBLISHED_GENERATORS[name]
    for scores in (figures["scores"], figures.get("retrained", figures["scores"])):
        rest = f"IS {scores['is']:.2f}, precision {scores['precision']:.2f}, recall {scores['recall']:.2f}"
        assert f"FID {scores['fid']:.2f} ({rest})" in text
    assert f", DiT-{name[5].upper()}/{name[7]} {figures['dit']['scores']['fid']:.2f} (published" in text
    assert text.count("FID ") == 1 + ("retrained" in figures) and f"recipe={recipe} " in text


def test_generators_take_cached_latents_with_the_same_recipe():
    cfg = typed(compose_config("recipe=dit3_b_2_in256", "data=latents", "data.root=x"), TrainConfig)
    assert (cfg.data.name, cfg.data.img_size, cfg.data.in_chans, cfg.data.std) == ("latents", [32, 32], 4, [1.0] * 4)


def test_the_learning_rate_of_generators_never_changes():
    cfg = typed(compose_config("recipe=dit3_s_8_in256", "data.root=x", "engine.epochs=3"), TrainConfig)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=1e-4)
    derived = derive(cfg, BatchPlan(1024, 256))
    schedule = build_schedule(cfg, optimizer, derived)
    rates = set()
    for update in range(12):
        rates.add(optimizer.param_groups[0]["lr"])
        schedule.step_update(update + 1)
    assert rates == {derived.lr} == {1e-4}


@pytest.mark.parametrize("recipe", sorted(set(RECIPES) - GENERATORS.keys() - SMALL_GENERATORS))
def test_recipe_headers_say_what_to_expect(recipe):
    text = (CONFIGS / "recipe" / f"{recipe}.yaml").read_text()
    small = recipe in FINE_TUNING | STUDIES - {"ablation_in1k"}
    expected = ("expected",) if small else ("expected   top-1", "not rerun here")
    for word in ("command", "hardware", *expected):
        assert word in text


@pytest.mark.parametrize("recipe", GENERATORS)
def test_recipe_headers_of_generators_say_what_to_expect(recipe):
    text = (CONFIGS / "recipe" / f"{recipe}.yaml").read_text()
    for word in ("command", "expected   FID", "not rerun here", "scored", "iterations", "hardware", "data=latents"):
        assert word in text


def test_ablations_share_the_published_training():
    """The paper's base differs from the plain recipes in its network and inner model alone."""
    base, plain = (
        typed(compose_config(f"recipe={recipe}", "data.root=x"), TrainConfig)
        for recipe in ("ablation_in1k", "vit3_small_in1k")
    )
    assert (base.model.name, base.model.kwargs, base.inner.model) == ("vit3_small", {"pos": "table"}, "mlp")
    for group in ("data", "augment", "task", "optim", "engine"):
        assert getattr(base, group) == getattr(plain, group)


@pytest.mark.parametrize("recipe", ["ablation_patterns", "ablation_digits"])
def test_small_studies_leave_labels_alone_and_average_nothing(recipe):
    cfg = typed(compose_config(f"recipe={recipe}"), TrainConfig)
    assert (cfg.inner.model, len(cfg.inner.beside), cfg.model.kwargs["pos"]) == ("mlp", 0, "table")
    assert (cfg.augment.hflip, cfg.augment.mixup, cfg.augment.cutmix, cfg.augment.auto_augment) == (0, 0, 0, None)
    assert (cfg.engine.ema_decay, cfg.engine.threads, cfg.engine.seed) == (None, 1, 0)
    sides = [side // cfg.model.kwargs["patch_size"] for side in cfg.data.img_size]
    assert sides == [8, 8] and cfg.model.kwargs["embed_dim"] // cfg.model.kwargs["num_heads"] == 16
