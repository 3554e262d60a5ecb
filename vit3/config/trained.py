"""The schema of programs that read a trained network: each key once, with its type. Values stand in configs/."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, List, Optional

from vit3.config.schema import SamplingConfig

# OmegaConf reads these annotations at run time, hence typing's spelling.


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
class ProbeConfig(TrainedConfig):
    sizes: List[float]
    output: Optional[str]


@dataclass
class PredictConfig:
    """Images to tell the classes of."""

    checkpoint: str
    images: List[str]
    weights: str
    topk: int
    batch_size: int
    device: str
    blocks: int
    sheet: int
    output: str


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
class ExportConfig:
    """A network that leaves, and how."""

    checkpoint: str
    model_name: Optional[str]
    weights: str
    sha256: Optional[str]
    format: List[str]
    dynamic: List[str]
    multiple: int
    img_size: Optional[List[int]]
    dtype: str
    device: str
    license: str
    output: Optional[str]
    push: Optional[str]
