"""The tests of this folder need an accelerator; without one they are skipped with that reason."""

import pytest
import torch


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.path.parts:
            item.add_marker(skip)
