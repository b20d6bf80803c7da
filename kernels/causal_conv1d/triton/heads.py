"""The convolution of channels that are heads of several results, of which the first ones have length one.

One launch a result in each direction: it reads its channels of x and writes a tensor of its own, whose gradient comes
back as one. All write one gradient of x, which has room for those of what stands behind x in its rows
(`empty_in_rows`). With p_t = sum_i w_i x_{t-(W-1)+i}, y_t = act(p_t), and for heads n = y r of length one with
r = 1 / sqrt(|y|^2 + eps):

    dy_t = r (dn_t - n_t sum n_t dn_t),    g_t = dy_t act'(p_t)
    dx_t = sum_i w_i g_{t+(W-1)-i},        dw_i = sum_t g_t x_{t-(W-1)+i}

The backward pass walks back through CHUNK steps and carries the W - 1 gradients g behind a step, and the inputs before
it, in registers: each g is computed once, but for the W - 1 behind a chunk, where the groups of steps of `backward.py`
compute 11 for 8 steps. Heads need two sums over their channels for every g, so that this counts here.
"""

# a tuple of tiles that grows in a loop has no type that mypy knows
# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.autograd import OnceDifferentiable, needs_gradient, save, saved
from subquad.kernels.causal_conv1d.triton.forward import conv_fwd
from subquad.kernels.causal_conv1d.triton.plan import is_channel_first
from subquad.kernels.causal_conv1d.triton.steps import _channels, _load_taps, _sigmoid
from subquad.kernels.launch import cdiv, launch, power_of_2
from subquad.kernels.layout import dense, empty_in_rows
from subquad.kernels.sums import parameter_gradients

CHUNK, GROUPS, UNROLLED = 32, 4, 4
"""Steps of a chunk, chunks of a program, and steps whose inputs are loaded at once."""
MAX_BLOCK = 128
"""Channels of a program where they are no heads of length one: four for each thread."""


@triton.jit
def _gradient(inputs, taps, b_dy, eps, W: tl.constexpr, SILU: tl.constexpr, UNIT: tl.constexpr):
    """g of one step from that of its result; inputs are x_t, x_{t-1} and so on."""
    b_p = taps[W - 1] * inputs[0]
    for j in tl.static_range(1, W):
        b_p += taps[W - 1 - j] * inputs[j]
    b_y, b_slope = b_p, 1.0
    if SILU:
        b_sigmoid = _sigmoid(b_p)
        b_y = b_p * b_sigmoid
        b_slope = b_sigmoid * (1.0 + b_p * (1.0 - b_sigmoid))
    if UNIT:
        b_scale = tl.rsqrt(tl.sum(b_y * b_y, 0) + eps)
        b_along = tl.sum(b_y * b_dy, 0) * b_scale * b_scale
        b_dy = (b_dy - b_y * b_along[None, :]) * b_scale[None, :]
    return b_dy * b_slope


@triton.jit
def _load_at(p, o_t, stride_t, m_d, T):
    """Step o_t of every group [BLOCK_D, GROUPS], zeros outside of 0 .. T - 1."""
    m = m_d[:, None] & (o_t >= 0)[None, :] & (o_t < T)[None, :]
    return tl.load(p + o_t.to(tl.int64)[None, :] * stride_t, mask=m, other=0.0).to(tl.float32)


@triton.jit
def _conv_heads_bwd_kernel(
    x, weight, dy, dx, partial, T, D, stride_b, stride_t, dx_stride_b, dx_stride_t, row, eps,
    W: tl.constexpr, SILU: tl.constexpr, UNIT: tl.constexpr, BLOCK_D: tl.constexpr, GROUPS: tl.constexpr,
    CHUNK: tl.constexpr, UNROLLED: tl.constexpr,
):  # fmt: skip
    """The formulas of this module for GROUPS chunks of one batch row; dy is dense.

    UNIT: channels of a head of length one, each of which has a program of its own; 0 where there are none.
    partial [programs in B and T, row]: dw [D, W], summed over the steps of each program.
    """
    num_d, num_t = tl.cdiv(D, UNIT if UNIT else BLOCK_D), tl.cdiv(T, GROUPS * CHUNK)
    i_d, i_bt = tl.program_id(0) % num_d, tl.program_id(0) // num_d
    i_b, i_t = (i_bt // num_t).to(tl.int64), i_bt % num_t
    o_d, m_d = _channels(i_d, D, UNIT, BLOCK_D)
    p_x = x + i_b * stride_b + o_d[:, None]
    p_dy = dy + i_b * T * D + o_d[:, None]
    p_dx = dx + i_b * dx_stride_b + o_d[:, None]
    taps = _load_taps(weight, o_d, m_d, W)
    o_last = (i_t * GROUPS + tl.arange(0, GROUPS) + 1) * CHUNK - 1
    # x_t .. x_{t-(W-2)} and g_{t+1} .. g_{t+W-1} of the step t at hand, which is the last one here
    inputs, behind, sums = (), (), ()
    for j in tl.static_range(W - 1):
        inputs += (_load_at(p_x, o_last + (W - 1 - j), stride_t, m_d, T),)
        behind += (tl.zeros([BLOCK_D, GROUPS], tl.float32),)
    for _ in tl.static_range(W):
        sums += (tl.zeros([BLOCK_D, GROUPS], tl.float32),)
    for j in tl.static_range(W - 1):
        o_t = o_last + (W - 1 - j)
        inputs += (_load_at(p_x, o_t - (W - 1), stride_t, m_d, T),)
        b_g = _gradient(inputs, taps, _load_at(p_dy, o_t, D, m_d, T), eps, W, SILU, UNIT)
        behind = ((b_g,) + behind)[: W - 1]  # noqa: RUF005
        inputs = inputs[1:]
    for i in range(CHUNK // UNROLLED):
        o_t = o_last - i * UNROLLED
        before, given = (), ()
        for k in tl.static_range(UNROLLED):
            before += (_load_at(p_x, o_t - k - (W - 1), stride_t, m_d, T),)
            given += (_load_at(p_dy, o_t - k, D, m_d, T),)
        for k in tl.static_range(UNROLLED):
            inputs += (before[k],)
            b_g = _gradient(inputs, taps, given[k], eps, W, SILU, UNIT)
            b_dx = taps[W - 1] * b_g
            added = ()
            for j in tl.static_range(W):
                added += (sums[j] + b_g * inputs[W - 1 - j],)
            for j in tl.static_range(1, W):
                b_dx += taps[W - 1 - j] * behind[j - 1]
            m = m_d[:, None] & (o_t - k < T)[None, :]
            p = p_dx + (o_t - k).to(tl.int64)[None, :] * dx_stride_t
            tl.store(p, b_dx.to(dx.dtype.element_ty), mask=m)
            behind = ((b_g,) + behind)[: W - 1]  # noqa: RUF005
            inputs = inputs[1:]
            sums = added
    p_partial = partial + i_bt.to(tl.int64) * row + o_d * W
    for j in tl.static_range(W):
        tl.store(p_partial + j, tl.sum(sums[j], 1), mask=m_d)


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
        dx = empty_in_rows(x)
        rows = x.shape[0] * cdiv(x.shape[1], GROUPS * CHUNK)
        partial = x.new_empty((rows, weight.numel()), dtype=torch.float32)
        for i, at, unit in _places(heads, num_unit):
            part = x[..., at]
            width = part.shape[2]
            block_d = power_of_2(unit) if unit else min(MAX_BLOCK, power_of_2(width))
            launch(
                _conv_heads_bwd_kernel, rows * cdiv(width, unit or block_d), x=part, weight=weight[at],
                dy=dense(gradients[i]), dx=dx[..., at], partial=partial[:, at.start * weight.shape[1] :], T=x.shape[1],
                D=width, stride_b=x.stride(0), stride_t=x.stride(1), dx_stride_b=dx.stride(0), dx_stride_t=dx.stride(1),
                row=weight.numel(), eps=eps, W=weight.shape[1], SILU=activation == "silu", UNIT=unit, BLOCK_D=block_d,
                GROUPS=GROUPS, CHUNK=CHUNK, UNROLLED=UNROLLED, num_warps=GROUPS,
            )  # fmt: skip
        return dx, parameter_gradients(partial, weight, None)[0], None, None, None, None


def causal_conv1d_heads_triton(
    x: Tensor, weight: Tensor, heads: Heads, num_unit: int, activation: str | None, eps: float
) -> tuple[Tensor, ...]:
    """`causal_conv1d_heads` without the final state, for arguments that were checked."""
    x, weight = x.contiguous() if is_channel_first(x) or x.stride(2) != 1 else x, dense(weight)
    run = CausalConv1dHeads.apply if needs_gradient(x, weight) else _forward
    return tuple(run(x, weight, heads, num_unit, activation, eps))
