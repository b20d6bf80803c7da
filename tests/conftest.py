"""Setup of all tests: Triton's interpreter without a GPU, memory full of NaN, and a time limit for quick tests.

Triton decides when it is first imported whether kernels are compiled or interpreted, so this file decides before any
test is collected.
"""

import contextlib
import gc
import os

import pytest
import torch

from tests.interpreter import change_the_interpreter

# hooks of pytest
from tests.time_limit import pytest_addoption, pytest_configure

__all__ = ["poisoned_memory", "pytest_addoption", "pytest_configure"]


if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    with contextlib.suppress(ImportError):
        change_the_interpreter()


def pytest_collection_finish():
    """Hide modules and collected tests from the garbage collector, which would walk through them hundreds of times.

    They live to the end. A run that is timed collects garbage first, which takes half a second with them.
    """
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    # Triton's bindings report objects as leaked that are still hidden at the end of the process
    gc.unfreeze()


@pytest.fixture
def poisoned_memory():
    """Fill what `torch.empty` returns with NaN, so that a result which no kernel wrote cannot pass."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    # filling belongs to the deterministic mode; an operation without a deterministic implementation only warns
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(1000).isnan().all()
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
