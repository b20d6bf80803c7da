"""Tests what is peculiar to the squared rectified linear unit."""

from __future__ import annotations

import pytest
import torch

from subquad.kernels.squared_relu import squared_relu
from tests.kernels.gated import DEVICE


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_nan_stays_nan(backend):
    """A maximum of Triton would turn it into 0, and a diverged network would go on."""
    x = torch.tensor([float("nan"), -1.0, 2.0], device=DEVICE, requires_grad=True)
    y = squared_relu(x, backend=backend)
    y.sum().backward()
    expected = torch.tensor([[float("nan"), 0.0, 4.0], [float("nan"), 0.0, 4.0]], device=DEVICE)
    torch.testing.assert_close(torch.stack([y.detach(), x.grad]), expected, equal_nan=True)
