"""Training tasks beside timm's own: a forward pass and its loss."""

from vit3.tasks.diffusion import DiffusionTask
from vit3.tasks.mesa import MESATask

__all__ = ["DiffusionTask", "MESATask"]
