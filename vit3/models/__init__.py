"""The networks, registered with timm: classifiers (``MODEL_NAMES``), dense backbones and generators."""

from vit3.models.dense import DENSE_NAMES, DenseHViT3
from vit3.models.dit3 import GENERATOR_NAMES, DiT3
from vit3.models.h_vit3 import HViT3, h_vit3_base, h_vit3_small, h_vit3_tiny
from vit3.models.vit3 import ViT3, vit3_base, vit3_small, vit3_tiny

MODEL_NAMES = ("vit3_tiny", "vit3_small", "vit3_base", "h_vit3_tiny", "h_vit3_small", "h_vit3_base")

__all__ = [
    "DENSE_NAMES",
    "GENERATOR_NAMES",
    "MODEL_NAMES",
    "DenseHViT3",
    "DiT3",
    "HViT3",
    "ViT3",
    "h_vit3_base",
    "h_vit3_small",
    "h_vit3_tiny",
    "vit3_base",
    "vit3_small",
    "vit3_tiny",
]
