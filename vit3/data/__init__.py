"""Datasets, loaders and the checks before the first step."""

from vit3.data.preflight import preflight
from vit3.data.sets import Data, make_data, make_loader, open_split

__all__ = ["Data", "make_data", "make_loader", "open_split", "preflight"]
