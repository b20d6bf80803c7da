"""Initial values that several mixers share."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from subquad.models.parts.initial import reset_taps, step_bias


@torch.no_grad()
def test_taps_start_as_those_of_torch():
    torch.manual_seed(0)
    conv = nn.Conv1d(6, 6, 3, groups=6)
    weight, bias = torch.empty(6, 3), torch.empty(6)
    torch.manual_seed(0)
    reset_taps(weight, bias)
    torch.testing.assert_close(weight, conv.weight[:, 0])
    torch.testing.assert_close(bias, conv.bias)


def test_step_sizes_start_uniform_in_log_space_above_a_floor():
    torch.manual_seed(0)
    dt = F.softplus(step_bias(torch.empty(20000, dtype=torch.float64), 1e-4, 1e-1, floor=1e-3))
    assert dt.max() <= 1e-1
    # a third of the logarithms lies below the floor
    assert (dt < 1.0001e-3).double().mean().item() == pytest.approx(1 / 3, abs=0.02)
    assert (dt > 1e-2).double().mean().item() == pytest.approx(1 / 3, abs=0.02)
    assert dt.min().item() == pytest.approx(1e-3)
