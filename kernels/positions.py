"""Operators whose inputs are vectors at every position share a check, a cast, sums along time, and some positions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.kernels.autograd import Function
from subquad.kernels.checks import check_shapes

LARGEST_LOG = 80.0
"""e^80 has room in float32, and nothing is left of a state that decays at such a rate."""
BLOCK = 128
"""`running_sum` adds this many positions one after the other."""


def running_sum(x: Tensor) -> Tensor:
    """sum_{j <= t} x_j of x [B, T, ...].

    Blocks of positions are added at the same time. On a GPU torch.cumsum goes through time step by step, in one thread
    for each of the other elements, so it is slow for one long sequence.
    """
    steps = x.shape[1]
    size = max(1, min(BLOCK, steps))
    padding = (0, 0) * (x.ndim - 2)
    # padding by nothing is a copy
    whole = F.pad(x, (*padding, 0, -steps % size)) if steps % size else x
    blocks = whole.unflatten(1, (-1, size))
    within = blocks.cumsum(2)
    before = F.pad(within[:, :-1, -1:].cumsum(1), (*padding, 0, 0, 1, 0))
    return (within + before).flatten(1, 2)[:, :steps]


def take_positions(x: Tensor, positions: Tensor) -> Tensor:
    """x [B, T, D] at positions [B, P], of which no row has one twice: [B, P, D]."""
    return TakePositions.apply(x, positions)


class TakePositions(Function):
    """`take_positions`. The gradient of torch's indexing adds up rows, and so sorts all indices first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, positions: Tensor) -> Tensor:
        ctx.save_for_backward(positions)
        ctx.shape = x.shape
        return x[_rows(positions), positions]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (positions,) = ctx.saved_tensors
        dx = gradient.new_zeros(ctx.shape)
        return dx.index_put_((_rows(positions), positions), gradient), None


def _rows(positions: Tensor) -> Tensor:
    return torch.arange(positions.shape[0], device=positions.device)[:, None]


def at_least_float32(x: Tensor) -> Tensor:
    """x in float32 or wider. Under autocast, states, decays, step sizes and norms need this precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def bounded_exp(log: Tensor, most: float = LARGEST_LOG) -> Tensor:
    """e^log of a step size or rate, in float32 or wider, but at most e^most.

    A diagonal system has a limit for long steps, which it reaches far below, and infinity times zero is NaN.
    """
    # the same as a clamp, whose gradient takes three launches in place of one
    return F.hardtanh(at_least_float32(log), -math.inf, most).exp()


def check_positions(
    op: str, inputs: Mapping[str, Tensor], parameters: Mapping[str, Tensor], head_dim: int, *, sequence: bool
) -> None:
    """Raises ValueError unless all inputs are [.., D] as the first, all parameters [D], and head_dim divides D.

    sequence: whether the inputs must be [B, T, D].
    """
    name, first = next(iter(inputs.items()))
    wanted = "[B, T >= 1, D]" if sequence else "[..., D]"
    if first.ndim == 0 or (sequence and first.ndim != 3) or first.numel() == 0:
        raise ValueError(f"{op}: {name} must be {wanted} with at least one element, got {list(first.shape)}.")
    width = first.shape[-1]
    if head_dim < 1 or width % head_dim:
        raise ValueError(f"{op}: head_dim must divide D={width}, got {head_dim}.")
    check_shapes(op, {other: (x, tuple(first.shape)) for other, x in inputs.items()}, to_go_with=name)
    check_shapes(op, {parameter: (x, (width,)) for parameter, x in parameters.items()}, to_go_with=name)
