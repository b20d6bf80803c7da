"""Sums along the time axis."""

import pytest
import torch

from subquad.kernels.positions import BLOCK, running_sum


@pytest.mark.parametrize("steps", [1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK, 1000])
def test_the_running_sum_in_blocks_is_a_cumulative_sum(steps):
    x = torch.randn(2, steps, 3, 4, dtype=torch.float64, requires_grad=True)
    weights = torch.randn_like(x)
    ours, exact = running_sum(x), x.cumsum(1)
    torch.testing.assert_close(ours, exact, rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad((y * weights).sum(), x)[0] for y in (ours, exact)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


def test_the_running_sum_in_blocks_is_exact_to_a_few_roundings_in_float32():
    x = torch.rand(1, 16_384, 2)
    exact = x.double().cumsum(1)
    # a sum within a block, the sum of the blocks before it, and the sum of both are rounded
    assert ((running_sum(x) - exact).abs() <= 3 * 2**-24 * exact).all()
