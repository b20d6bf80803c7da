"""`_rotary_kernel`: rotates the heads of queries and keys by the angles of their positions, in one launch.

    y_i = x_i cos - x_{i+K/2} sin,   y_{i+K/2} = x_{i+K/2} cos + x_i sin;   backward the same with -sin in place of sin

Layout:  q, k [B, T, H, K] with contiguous channels; cos, sin [positions, K / 2] dense; time [T] or [B, T]; results
         [B, T, H, K] dense; gradients are slices of one [B, T, 2, H, K], because q and k often come from one product.
float32: everything between a load and a store.
Limits:  the values of time are not checked and must be positions of the tables; offsets are int64.
Cost:    reads and writes q and k once, and the tables from the second cache. 6 FLOPs for each element.
"""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.autograd import OnceDifferentiable, needs_gradient
from subquad.kernels.launch import cdiv, launch, power_of_2
from subquad.kernels.layout import dense, dense_channels

ELEMENTS = 2048
"""Pairs of channels of a program."""


@triton.jit
def _rotary_kernel(
    q, k, y_q, y_k, cos, sin, time,
    heads, H, T, q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_t, k_stride_h, y_stride_t, time_stride_b,
    HALF: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """ROWS heads of the queries or, on the second axis of the grid, of the keys; heads is B T H."""
    o_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    o_c = tl.arange(0, BLOCK)
    m_row = o_row < heads
    m = m_row[:, None] & (o_c < HALF)[None, :]
    i_h, i_t, i_b = o_row % H, o_row // H % T, o_row // H // T
    p_x, p_y = q + i_b * q_stride_b + i_t * q_stride_t + i_h * q_stride_h, y_q
    if tl.program_id(1) == 1:
        p_x, p_y = k + i_b * k_stride_b + i_t * k_stride_t + i_h * k_stride_h, y_k
    i_time = tl.load(time + i_b * time_stride_b + i_t, mask=m_row, other=0).to(tl.int64)
    o_table = i_time[:, None] * HALF + o_c[None, :]
    b_cos = tl.load(cos + o_table, mask=m, other=0.0).to(tl.float32)
    b_sin = tl.load(sin + o_table, mask=m, other=0.0).to(tl.float32)
    if BACKWARD:
        b_sin = -b_sin
    o_x = p_x[:, None] + o_c[None, :]
    b_first = tl.load(o_x, mask=m, other=0.0).to(tl.float32)
    b_second = tl.load(o_x + HALF, mask=m, other=0.0).to(tl.float32)
    o_y = p_y + (o_row // H * y_stride_t + i_h * (2 * HALF))[:, None] + o_c[None, :]
    tl.store(o_y, (b_first * b_cos - b_second * b_sin).to(p_y.dtype.element_ty), mask=m)
    tl.store(o_y + HALF, (b_second * b_cos + b_first * b_sin).to(p_y.dtype.element_ty), mask=m)


def _rotate(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, time: Tensor, *, backward: bool = False
) -> tuple[Tensor, Tensor]:
    batch, length, heads, size = q.shape
    # both in one dtype, because one pointer of the kernel is one or the other
    dtype = torch.promote_types(q.dtype, k.dtype)
    q, k = (dense_channels(x.to(dtype)) for x in (q, k))
    if backward:
        y_q, y_k = torch.empty(batch, length, 2, heads, size, dtype=dtype, device=q.device).unbind(2)
    else:
        y_q, y_k = (torch.empty(q.shape, dtype=dtype, device=q.device) for _ in "qk")
    time = dense_channels(time)
    block = power_of_2(size // 2)
    rows = max(1, min(ELEMENTS // block, power_of_2(batch * length * heads)))
    launch(
        _rotary_kernel, (cdiv(batch * length * heads, rows), 2), q=q, k=k, y_q=y_q, y_k=y_k, cos=dense(cos),
        sin=dense(sin), time=time, heads=batch * length * heads, H=heads, T=length, q_stride_b=q.stride(0),
        q_stride_t=q.stride(1), q_stride_h=q.stride(2), k_stride_b=k.stride(0), k_stride_t=k.stride(1),
        k_stride_h=k.stride(2), y_stride_t=y_q.stride(1), time_stride_b=time.stride(0) if time.ndim == 2 else 0,
        HALF=size // 2, BLOCK=block, ROWS=rows, BACKWARD=backward, num_warps=4,
    )  # fmt: skip
    return y_q, y_k


class Rotation(OnceDifferentiable):
    """(q, k, cos, sin, time) to the rotated q and k. Nothing of q and k is kept."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin, time)
        ctx.dtypes = q.dtype, k.dtype
        y_q, y_k = _rotate(q, k, cos, sin, time)
        return y_q.to(q.dtype), y_k.to(k.dtype)

    @staticmethod
    def backward(ctx: Any, dy_q: Tensor, dy_k: Tensor) -> tuple[Tensor | None, ...]:
        gradients = _rotate(dy_q, dy_k, *ctx.saved_tensors, backward=True)
        return *(g.to(dtype) for g, dtype in zip(gradients, ctx.dtypes, strict=True)), None, None, None


def rotary_triton(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
    """`rotary` for arguments that were checked."""
    if needs_gradient(q, k):
        return Rotation.apply(q, k, cos, sin, time)
    y_q, y_k = _rotate(q, k, cos, sin, time)
    return y_q.to(q.dtype), y_k.to(k.dtype)
