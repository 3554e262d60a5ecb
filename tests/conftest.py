"""Every test starts from the same random numbers, on one thread."""

import os

# Triton reads this when it is imported, which torchvision does: kernels run in its interpreter, on any machine.
os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch

_LONG = ("engine", "sweeps", "tools")  # rooms whose tests wait for processes


def pytest_collection_modifyitems(items):
    """Long files first, so that no process is left with one at the end (scripts/test.sh runs two files at a time)."""
    items.sort(key=lambda item: item.path.parent.name not in _LONG)


def pytest_configure(config):
    torch.set_num_threads(1)  # tensors are small here: threads would cost more than they give


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
