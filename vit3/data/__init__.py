"""Datasets, what is read when, loaders, and the checks before the first step."""

from vit3.data.latents import CachedLatents, make_latent_eval_loader, make_latent_train_loader
from vit3.data.loader import TrainLoader, make_eval_loader, make_train_loader
from vit3.data.plan import BatchPlan, accumulation_for
from vit3.data.preflight import preflight
from vit3.data.sets import Data, make_data, open_split

__all__ = [
    "BatchPlan",
    "CachedLatents",
    "Data",
    "TrainLoader",
    "accumulation_for",
    "make_data",
    "make_eval_loader",
    "make_latent_eval_loader",
    "make_latent_train_loader",
    "make_train_loader",
    "open_split",
    "preflight",
]
