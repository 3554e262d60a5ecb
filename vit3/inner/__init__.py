"""The inner problem: which model is trained on (k, v), by which loss and step, and a generic loop that does it."""

from vit3.inner.models import DWCONV, GLU, InnerModel
from vit3.inner.report import inner_report
from vit3.inner.spec import InnerSpec
from vit3.inner.train import inner_train

__all__ = ["DWCONV", "GLU", "InnerModel", "InnerSpec", "inner_report", "inner_train"]
