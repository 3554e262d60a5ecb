"""The schema of training and what goes before and after it: each key once, with its type. Values stand in configs/."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, List, Optional

from vit3.inner.spec import InnerSpec

# OmegaConf reads these annotations at run time, hence typing's spelling.


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
class FlopsConfig(TrainConfig):
    """A network, and the image sizes at which its costs are counted."""

    sizes: Optional[List[Any]]  # sides, or [height, width]
    classes: int
    count: bool


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
