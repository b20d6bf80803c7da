"""Initial values that several mixers share."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


def reset_taps(weight: Tensor, bias: Tensor | None = None) -> None:
    """Draws the taps [D, W] of a depthwise convolution, and its bias [D], as torch.nn.Conv1d does."""
    bound = weight.shape[1] ** -0.5
    nn.init.uniform_(weight, -bound, bound)
    if bias is not None:
        nn.init.uniform_(bias, -bound, bound)


def step_bias(like: Tensor, dt_min: float, dt_max: float, floor: float = 1e-4) -> Tensor:
    """Returns a bias of the shape of `like` whose softplus is at least `floor`, and uniform in log space.

    dt_min, dt_max: the ends of the distribution, which the floor cuts off.
    """
    dt = torch.empty_like(like).uniform_(math.log(dt_min), math.log(dt_max)).exp().clamp(min=floor)
    # the inverse of softplus
    return dt + torch.log(-torch.expm1(-dt))
