"""The convolution of channels that are heads of several results, of which the first ones have length one.

One launch a result in each direction: it reads its channels of x and writes a tensor of its own, whose gradient comes
back as one. All write one gradient of x.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from subquad.kernels.autograd import OnceDifferentiable, needs_gradient, save, saved
from subquad.kernels.causal_conv1d.triton.backward import launch_bwd
from subquad.kernels.causal_conv1d.triton.forward import conv_fwd
from subquad.kernels.causal_conv1d.triton.plan import TUNING, cover, is_channel_first
from subquad.kernels.layout import dense
from subquad.kernels.sums import parameter_gradients

Heads = Sequence[tuple[int, int]]
"""Number and channels of the heads of every result."""


def _places(heads: Heads, num_unit: int) -> Iterator[tuple[int, slice, int]]:
    """The place of every result among the results and the channels, and the channels of its heads of length one."""
    first = 0
    for i, (number, size) in enumerate(heads):
        yield i, slice(first, first + number * size), size if i < num_unit else 0
        first += number * size


def _forward(
    x: Tensor, weight: Tensor, heads: Heads, num_unit: int, activation: str | None, eps: float
) -> tuple[Tensor, ...]:
    results = (
        conv_fwd(x[..., at], weight[at], None, None, activation, False, unit=unit, eps=eps)[0]
        for _, at, unit in _places(heads, num_unit)
    )
    return tuple(y.unflatten(-1, shape) for y, shape in zip(results, heads, strict=True))


class CausalConv1dHeads(OnceDifferentiable):
    """(x, weight) and options to one tensor [B, T, H, K] for every result."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, heads: Heads, num_unit: int, activation: str | None, eps: float
    ) -> tuple[Tensor, ...]:
        save(ctx, x, weight)
        ctx.options = heads, num_unit, activation, eps
        return _forward(x, weight, *ctx.options)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = saved(ctx)
        heads, num_unit, activation, eps = ctx.options
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        # tiles that agree in time have equal numbers of programs
        tile = TUNING.backward[False, False, x.element_size()]
        partial = x.new_empty((cover(x, tile).rows, weight.numel() + len(weight)), dtype=torch.float32)
        for i, at, unit in _places(heads, num_unit):
            dy = dense(gradients[i]).flatten(-2)
            part = x[..., at], weight[at], None, None, activation, dy, None, dx[..., at], None, partial
            of_part = tile.for_heads(unit) if unit else tile
            launch_bwd(*part, time_last=False, tile=of_part, first=at.start, unit=unit, eps=eps)
        return dx, parameter_gradients(partial, weight, None)[0], None, None, None, None


def causal_conv1d_heads_triton(
    x: Tensor, weight: Tensor, heads: Heads, num_unit: int, activation: str | None, eps: float
) -> tuple[Tensor, ...]:
    """`causal_conv1d_heads` without the final state, for arguments that were checked."""
    x, weight = x.contiguous() if is_channel_first(x) or x.stride(2) != 1 else x, dense(weight)
    run = CausalConv1dHeads.apply if needs_gradient(x, weight) else _forward
    return tuple(run(x, weight, heads, num_unit, activation, eps))
