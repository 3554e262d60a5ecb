"""The typed schema of a run: every key once, its type and the values allowed. Values stand in configs/."""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Union, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from vit3.errors import UserError
from vit3.inner.spec import InnerSpec

# OmegaConf reads these annotations at run time, hence typing's spelling.


SAMPLERS = ("ddpm", "ddim", "dpmsolver", "euler", "heun")


@dataclass
class DataConfig:
    name: str
    root: Optional[str]
    img_size: List[int]
    in_chans: int
    mean: List[float]
    std: List[float]
    interpolation: str
    crop_pct: float
    workers: int
    on_bad_image: str
    train_split: Optional[str]
    val_split: Optional[str]
    input_key: Optional[str]
    target_key: Optional[str]
    stream: bool


@dataclass
class AugmentConfig:
    crop: str
    scale: List[float]
    ratio: List[float]
    hflip: float
    color_jitter: float
    auto_augment: Optional[str]
    erase_prob: float
    erase_mode: str
    mixup: float
    cutmix: float
    mix_prob: float
    switch_prob: float
    smoothing: float


@dataclass
class ModelConfig:
    name: str
    drop_path_rate: float
    drop_rate: float
    pretrained: bool
    checkpoint: Optional[str]
    grad_checkpointing: bool
    freeze: List[str]
    kwargs: Dict[str, Any]


@dataclass
class MixerConfig:
    name: str
    backend: str
    autotune: bool
    kwargs: Dict[str, Any]


@dataclass
class TaskConfig:
    name: str
    weight: float
    start: float


@dataclass
class SamplingConfig:
    """How images are drawn; of a tool that reads a checkpoint, null stands for what the checkpoint says."""

    sampler: Optional[str]
    steps: Optional[int]
    guidance: Optional[float]
    guidance_channels: Optional[int]
    guidance_interval: Optional[List[float]]


@dataclass
class SheetConfig(SamplingConfig):
    every: int
    images: int


@dataclass
class DiffusionConfig:
    process: str
    steps: int
    betas: str
    learn_sigma: bool
    time_sampling: str
    label_drop: float
    autoencoder: Optional[str]
    latent_scale: Optional[float]
    sheet: SheetConfig


@dataclass
class OptimConfig:
    opt: str
    lr: float
    lr_batch: int
    weight_decay: float
    decay_inner: bool
    betas: List[float]
    eps: float
    layer_decay: Optional[float]
    clip_grad: Optional[float]
    sched: str
    warmup_epochs: float
    warmup_lr: float
    min_lr: float


@dataclass
class EngineConfig:
    epochs: int
    batch_size: int
    recipe_batch: Optional[int]
    max_per_process: Optional[int]
    drop_last: bool
    seed: int
    device: str
    parallel: str
    amp: Optional[str]
    ema_decay: Optional[float]
    ema_batch: int
    ema_warmup: bool
    ema_buffers: str
    channels_last: bool
    compile: bool
    max_bad_updates: int
    save_minutes: Optional[float]
    keep_last: int
    steps_per_epoch: Optional[int]
    profile: int
    threads: Optional[int]


@dataclass
class LoggerConfig:
    every: int
    tensorboard: bool
    wandb: Optional[str]
    project: str
    entity: Optional[str]


@dataclass
class TrainConfig:
    data: DataConfig
    augment: AugmentConfig
    model: ModelConfig
    mixer: MixerConfig
    inner: InnerSpec
    task: TaskConfig
    diffusion: Optional[DiffusionConfig]
    optim: OptimConfig
    engine: EngineConfig
    logger: LoggerConfig
    output: str
    name: Optional[str]
    resume: Optional[str]
    print_groups: bool
    ablation: Optional[str]
    row: Optional[str]
    column: Optional[str]


@dataclass
class TrainedConfig:
    """A trained network, and how its test images are read."""

    checkpoint: str
    weights: str
    data_root: Optional[str]
    batch_size: Optional[int]
    workers: Optional[int]
    device: str


@dataclass
class EvalConfig(TrainedConfig):
    predictions: Optional[str]


@dataclass
class SummarizeConfig:
    """Which sweeps: one, several, or that of an ablation below an output folder."""

    sweep: Optional[str]
    sweeps: List[str]
    output: str
    ablation: Optional[str]
    to: Optional[str]


@dataclass
class PlanConfig(TrainConfig):
    """A run, and the hardware that it is planned for."""

    processes: Any  # a number or a list of numbers
    memory_gb: float
    reserve: float
    images: Optional[int]
    classes: Optional[int]
    images_per_s: Optional[float]


@dataclass
class ProbeConfig(TrainedConfig):
    sizes: List[float]
    output: Optional[str]


@dataclass
class FlopsConfig(TrainConfig):
    """A network, and the image sizes at which its costs are counted."""

    sizes: Optional[List[Any]]  # sides, or [height, width]
    classes: int
    count: bool


@dataclass
class SampleConfig:
    """Images to draw from a checkpoint."""

    checkpoint: str
    weights: str
    n: int
    seed: int
    classes: Any  # null, or a list of names or labels
    sampling: SamplingConfig
    img_size: Optional[List[int]]
    autoencoder: Optional[str]
    batch_size: int
    device: str
    amp: Optional[str]
    threads: Optional[int]
    output: str
    name: Optional[str]
    resume: bool
    npz: bool
    sheet: int


@dataclass
class CacheConfig:
    """Images to encode once."""

    data: DataConfig
    autoencoder: str
    latent_scale: Optional[float]
    flips: bool
    batch_size: int
    shard_size: int
    dtype: str
    device: str
    amp: Optional[str]
    output: str


@dataclass
class GenerationScoreConfig:
    """Generated images and what they are compared with."""

    samples: str
    reference: Optional[str]
    metrics: List[str]
    inception: Optional[str]
    classifier: Optional[str]
    neighbours: int
    splits: int
    batch_size: int
    device: str
    threads: Optional[int]
    output: Optional[str]


_CHOICES = {
    "data.on_bad_image": ("raise", "skip"),
    "data.interpolation": ("bilinear", "bicubic", "lanczos", "nearest"),
    "augment.crop": ("rrc", "rkrc", "rkrr"),
    "optim.sched": ("cosine", "tanh", "step", "multistep", "poly", "wsd", "rsqrt", "constant"),
    "augment.erase_mode": ("const", "rand", "pixel"),
    "engine.amp": (None, "float16", "bfloat16"),
    "engine.device": ("auto", "cpu", "cuda"),
    "engine.parallel": ("ddp", "fsdp"),
    "engine.ema_buffers": ("average", "copy"),
    "task.name": ("classification", "mesa", "diffusion"),
    "diffusion.process": ("ddpm", "flow"),
    "diffusion.betas": ("linear", "cosine"),
    "diffusion.time_sampling": ("uniform", "logit_normal"),
    "diffusion.sheet.sampler": SAMPLERS,
    "sampling.sampler": (None, *SAMPLERS),
    "amp": (None, "float16", "bfloat16"),
    "dtype": ("float16", "float32"),
    "logger.wandb": (None, "offline", "online"),
    "weights": ("auto", "raw", "ema"),
    "device": ("auto", "cpu", "cuda"),
}

# Lists of positive numbers: how many
_LENGTHS = {"data.img_size": 2, "img_size": 2, "augment.scale": 2, "augment.ratio": 2, "optim.betas": 2}

# key: (lowest, highest) allowed, both included; None = no bound
_RANGES = {
    "diffusion.steps": (2, None),
    "diffusion.label_drop": (0, 1),
    "diffusion.latent_scale": (1e-12, None),
    "diffusion.sheet.every": (0, None),
    "diffusion.sheet.images": (1, None),
    "diffusion.sheet.steps": (1, None),
    "diffusion.sheet.guidance": (0, None),
    "diffusion.sheet.guidance_channels": (1, None),
    "sampling.steps": (1, None),
    "sampling.guidance": (0, None),
    "sampling.guidance_channels": (0, None),
    "n": (1, None),
    "seed": (0, None),
    "threads": (1, None),
    "sheet": (0, None),
    "latent_scale": (1e-12, None),
    "shard_size": (1, None),
    "neighbours": (1, None),
    "splits": (1, None),
    "data.in_chans": (1, None),
    "data.crop_pct": (0.01, 1),
    "data.workers": (0, None),
    "augment.hflip": (0, 1),
    "augment.erase_prob": (0, 1),
    "augment.mixup": (0, None),
    "augment.cutmix": (0, None),
    "augment.mix_prob": (0, 1),
    "augment.switch_prob": (0, 1),
    "augment.smoothing": (0, 0.999),
    "model.drop_path_rate": (0, 0.999),
    "model.drop_rate": (0, 0.999),
    "optim.lr": (0, None),
    "optim.lr_batch": (1, None),
    "optim.weight_decay": (0, None),
    "optim.clip_grad": (1e-12, None),
    "optim.warmup_epochs": (0, None),
    "optim.warmup_lr": (0, None),
    "optim.min_lr": (0, None),
    "optim.layer_decay": (1e-6, 1),
    "engine.seed": (0, None),
    "engine.epochs": (1, None),
    "engine.batch_size": (1, None),
    "engine.recipe_batch": (1, None),
    "engine.max_per_process": (1, None),
    "engine.max_bad_updates": (1, None),
    "engine.save_minutes": (0, None),
    "engine.keep_last": (1, None),
    "engine.profile": (0, None),
    "task.weight": (0, None),
    "task.start": (0, 1),
    "engine.ema_decay": (0, 1),
    "engine.ema_batch": (1, None),
    "engine.steps_per_epoch": (1, None),
    "engine.threads": (1, None),
    "logger.every": (1, None),
    "batch_size": (1, None),
    "classes": (1, None),
    "workers": (0, None),
}


def typed(cfg: DictConfig, schema: type) -> Any:
    """Turn a composed configuration into an instance of ``schema`` with every key known and every type right.

    Raises:
        UserError: unknown or missing key, wrong type, or a value outside of what is allowed.
    """
    plain = OmegaConf.to_container(cfg, resolve=False)
    _check_keys(plain, schema, prefix="")
    missing = sorted(OmegaConf.missing_keys(cfg))
    if missing:
        key = missing[0]
        raise UserError(f"{key} has no value yet; set it on the command line: {key}=VALUE")
    try:
        run = OmegaConf.to_object(OmegaConf.merge(_structured(schema), cfg))
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        if "is not a ListConfig" in reason:
            reason = "the value must be a list, in brackets: [1,2]"
        raise UserError(f"{getattr(error, 'full_key', None) or 'config'}: {reason}") from error
    except ValueError as error:  # what a frozen part says of its values
        raise UserError(str(error)) from error
    free = {name for name, kind in _types(schema).items() if kind is Any}  # checked where they are used
    ranges = {key: bounds for key, bounds in _RANGES.items() if key not in free}
    check_values(run, _CHOICES, ranges, _LENGTHS)
    return run


def _structured(schema: type) -> DictConfig:
    """``schema`` as OmegaConf takes it; its frozen parts, which OmegaConf would lock, can be filled."""
    structured = OmegaConf.structured(schema)
    for field in dataclasses.fields(schema):
        kind = _dataclass_of(field, schema)
        if kind and kind.__dataclass_params__.frozen:
            part = OmegaConf.structured(kind)
            OmegaConf.set_readonly(part, False)
            structured[field.name] = part
    return structured


def nearest(name: str, allowed) -> str:
    """``did you mean X?`` for the closest of ``allowed``, or those on the level of ``name`` where none is close."""
    group, _, leaf = name.rpartition(".")
    elsewhere = sorted(other for other in allowed if group and other.rpartition(".")[2] == leaf)
    near = elsewhere or difflib.get_close_matches(name, allowed, n=1)
    if near:
        return f"did you mean {' or '.join(near)}?"
    level = sorted(other for other in allowed if other.rpartition(".")[0] == group)
    level = level or sorted(other for other in allowed if "." not in other)
    return f"allowed: {', '.join(level[:20])}{', …' if level[20:] else ''}"


def known_keys(schema: type, prefix: str = "") -> list[str]:
    """All keys of a schema, dotted, groups included."""
    keys = []
    for field in dataclasses.fields(schema):
        key = prefix + field.name
        keys.append(key)
        kind = _dataclass_of(field, schema)
        if kind:
            keys += known_keys(kind, key + ".")
    return keys


def _dataclass_of(field, schema):
    """The part that a key stands for; also where null may stand in its place."""
    kind = _types(schema)[field.name]
    parts = get_args(kind) if get_origin(kind) is Union else (kind,)
    kinds = [part for part in parts if dataclasses.is_dataclass(part)]
    return kinds[0] if kinds else None


@functools.cache
def _types(schema: type) -> dict[str, Any]:
    """Types of the fields, their names looked up where the schema (or what it inherits from) is defined."""
    return get_type_hints(schema)


def _check_keys(plain: dict, schema: type, prefix: str) -> None:
    fields = {field.name: field for field in dataclasses.fields(schema)}
    for name, value in plain.items():
        if name not in fields:
            raise UserError(f"{prefix}{name} is no key of this program; {nearest(name, fields)}")
        kind = _dataclass_of(fields[name], schema)
        if kind and isinstance(value, dict):
            _check_keys(value, kind, f"{prefix}{name}.")
    for name in fields.keys() - plain.keys():
        raise UserError(f"{prefix}{name} is missing from the configuration")


def check_values(run, choices: Mapping[str, tuple], ranges: Mapping[str, tuple], lengths: Mapping[str, int]) -> None:
    """Raise a UserError where a value is not what its dotted key allows; keys that ``run`` lacks are passed over.

    Args:
        choices: the values allowed. ranges: lowest and highest, both included, None = no bound.
        lengths: how many numbers a list must have, all positive.
    """
    for key, allowed in choices.items():
        value = _look_up(run, key)
        if value is not _ABSENT and value not in allowed:
            names = ", ".join("null" if choice is None else str(choice) for choice in allowed)
            raise UserError(f"{key}={value} is not allowed; use one of: {names}")
    for key, (low, high) in ranges.items():
        value = _look_up(run, key)
        if value is _ABSENT or value is None:
            continue
        if not (value >= (low if low is not None else value)) or (high is not None and not value <= high):  # NaN too
            bounds = f"at least {low:g}" if high is None else f"between {low:g} and {high:g}"
            raise UserError(f"{key}={value} is not allowed; it must be {bounds}")

    for key, length in lengths.items():
        value = _look_up(run, key)
        if value is _ABSENT or value is None:
            continue
        if len(value) != length or not all(v > 0 for v in value):
            raise UserError(f"{key}={value} is not allowed; it must be a list of {length} positive numbers")


_ABSENT = object()


def _look_up(run, key: str):
    for name in key.split("."):
        run = getattr(run, name, _ABSENT)
        if run is _ABSENT:
            return _ABSENT
    return run
