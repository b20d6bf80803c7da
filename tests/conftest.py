"""Triton runs in its interpreter where there is no GPU, which it decides when it is first imported."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def poisoned_memory():
    """`torch.empty` is full of NaN, so that a result nobody wrote cannot pass."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    # the filling is part of the deterministic mode; only warn where an operation has no such form
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(1000).isnan().all()
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
