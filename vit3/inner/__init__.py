"""The inner problem: which model is trained on (k, v), by which loss and steps, and the loop that does it."""

from vit3.inner.losses import Loss
from vit3.inner.models import Cost, InnerModel, inner_model, register_inner_model
from vit3.inner.report import inner_report
from vit3.inner.spec import BranchSpec, InnerSpec, ModelSpec
from vit3.inner.train import inner_train

__all__ = [
    "BranchSpec",
    "Cost",
    "InnerModel",
    "InnerSpec",
    "Loss",
    "ModelSpec",
    "inner_model",
    "inner_report",
    "inner_train",
    "register_inner_model",
]
