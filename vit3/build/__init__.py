"""The only room where a configuration becomes objects."""

from vit3.build.data import (
    Derived,
    build_data,
    build_eval_loader,
    build_plan,
    build_train_loader,
    check_data_config,
    derive,
)
from vit3.build.generator import build_network
from vit3.build.model import build_model, frozen_modules
from vit3.build.outline import as_latents
from vit3.build.sampling import build_sheets, build_trained_generator
from vit3.build.subject import build_subject
from vit3.build.trained import Trained, build_trained
from vit3.build.training import (
    build_optimizer,
    build_schedule,
    build_task,
    build_tracker,
    build_trainer,
    build_updater,
)

__all__ = [
    "Derived",
    "Trained",
    "as_latents",
    "build_data",
    "build_eval_loader",
    "build_model",
    "build_network",
    "build_optimizer",
    "build_plan",
    "build_schedule",
    "build_sheets",
    "build_subject",
    "build_task",
    "build_tracker",
    "build_train_loader",
    "build_trained",
    "build_trained_generator",
    "build_trainer",
    "build_updater",
    "check_data_config",
    "derive",
    "frozen_modules",
]
