"""`_scan_kernel`, behind the convolution and the product with W_x: the inner step of a Mamba block in three kernels.

    dt = softplus(W_dt r + b_dt),   h = exp(dt A) h + dt B u,   y = (C h + D u) * silu(z),   A = -exp(log_A)

A program takes BLOCK_D channels of BLOCK_B rows. It computes their step sizes itself, by one product with its rows of
W_dt, because their number is small: step sizes are never written, and their product needs no kernel of its own.

Layout:  u, z, y [B, D] with contiguous channels; selected [B, R + 2 N], that is r, B and C; state [B, D, N] with any
         strides; weights contiguous.
float32: everything but the operands of the products of several rows, which have the dtype of their weights as in
         `torch.nn.Linear`.
Limits:  N up to 64, R up to 512.
Cost:    reads W_dt, 2 D R bytes in half precision, and log_A for every BLOCK_B rows; reads and writes the state,
         2 B D N elements. 2 B D (R + 3 N) FLOPs, B D N exponentials.
"""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from subquad.kernels.causal_conv1d.triton import causal_conv1d_step_triton
from subquad.kernels.device import speaks_ptx
from subquad.kernels.launch import cdiv, launch, overlap_options, power_of_2
from subquad.kernels.layout import dense, dense_channels
from subquad.kernels.selective_scan.triton.arithmetic import LOG2E, exp_or_exp2, sigmoid, step_size
from subquad.kernels.skinny_linear.triton import skinny_linear_triton


class Tuning(NamedTuple):
    """Tile of a program of `_scan_kernel`."""

    block_b: int
    """Rows: 1, or at least 16, the smallest product on matrix units."""
    block_d: int
    """Channels."""
    num_warps: int = 4


@triton.jit
def _scan_kernel(
    u, z, selected, dt_proj, dt_bias, log_A, skip, state, y,
    B, D, R, z_stride_b, selected_stride_b, s_stride_b, s_stride_d, s_stride_n,
    N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_D: tl.constexpr,
    PTX: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Step sizes, states and outputs of BLOCK_D channels of BLOCK_B rows."""
    # rows are the first axis of the grid, because the others end at 65535
    o_b = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    o_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    o_n, o_r = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_R)
    m_d, m_n, m_r, m_b = o_d < D, o_n < N, o_r < R, o_b < B
    m_a, m_row = m_d[:, None] & m_n[None, :], m_b[:, None] & m_d[None, :]
    o_wide = o_d.to(tl.int64)
    if BLOCK_B == 1:
        b_w = tl.load(dt_proj + o_wide[:, None] * R + o_r[None, :], mask=m_d[:, None] & m_r[None, :], other=0.0)
    else:
        b_w = tl.load(dt_proj + o_wide[None, :] * R + o_r[:, None], mask=m_d[None, :] & m_r[:, None], other=0.0)
    b_a = tl.load(log_A + o_wide[:, None] * N + o_n[None, :], mask=m_a, other=0.0).to(tl.float32)
    b_bias = tl.load(dt_bias + o_d, mask=m_d, other=0.0).to(tl.float32)[None, :]
    b_skip = tl.load(skip + o_d, mask=m_d, other=0.0).to(tl.float32)[None, :]
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    o_row = o_b.to(tl.int64)[:, None]
    p_selected = selected + o_row * selected_stride_b
    b_r = tl.load(p_selected + o_r[None, :], mask=m_b[:, None] & m_r[None, :], other=0.0)
    b_b = tl.load(p_selected + R + o_n[None, :], mask=m_b[:, None] & m_n[None, :], other=0.0).to(tl.float32)
    b_c = tl.load(p_selected + R + N + o_n[None, :], mask=m_b[:, None] & m_n[None, :], other=0.0).to(tl.float32)
    b_u = tl.load(u + o_row * D + o_d[None, :], mask=m_row, other=0.0).to(tl.float32)
    p_state = state + o_row[:, :, None] * s_stride_b + o_wide[None, :, None] * s_stride_d
    p_state += o_n.to(tl.int64)[None, None, :] * s_stride_n
    m_state = m_b[:, None, None] & m_a[None, :, :]
    b_h = tl.load(p_state, mask=m_state, other=0.0).to(tl.float32)
    if BLOCK_B == 1:
        b_dt = tl.sum(b_w.to(tl.float32) * b_r.to(tl.float32), 1)[None, :]
    else:
        b_dt = tl.dot(b_r.to(b_w.dtype), b_w)
    b_dt = step_size(b_dt, b_bias, True, PTX)
    # the time is that of the memory traffic, so precise exponentials cost nothing
    b_a = -exp_or_exp2(b_a if PTX else b_a * LOG2E, PTX)
    b_decay = exp_or_exp2(b_dt[:, :, None] * b_a[None, :, :] * (1.0 if PTX else LOG2E), PTX)
    b_h = b_decay * b_h + (b_dt * b_u)[:, :, None] * b_b[:, None, :]
    tl.store(p_state, b_h.to(state.dtype.element_ty), mask=m_state)
    b_y = tl.sum(b_h * b_c[:, None, :], 2) + b_skip * b_u
    if z is not None:
        b_z = tl.load(z + o_row * z_stride_b + o_d[None, :], mask=m_row, other=0.0).to(tl.float32)
        b_y *= b_z * sigmoid(b_z, PTX)
    tl.store(y + o_row * D + o_d[None, :], b_y.to(y.dtype.element_ty), mask=m_row)


def tuning(rows: int) -> Tuning:
    """The tile for B rows. A single row has few channels for each multiprocessor, and no use for matrix units."""
    return Tuning(1, 32) if rows == 1 else Tuning(16, 8, 2)


def mamba_inner_step_triton(
    x: Tensor,
    z: Tensor | None,
    window: Tensor,
    state: Tensor,
    *,
    conv_weight: Tensor,
    conv_bias: Tensor,
    x_proj: Tensor,
    dt_proj: Tensor,
    dt_bias: Tensor,
    log_A: Tensor,
    D: Tensor,
) -> Tensor:
    """`mamba_inner_step` for arguments whose shapes were checked."""
    batch, width = x.shape
    num_states, rank = log_A.shape[1], dt_proj.shape[1]
    tile = tuning(batch)
    z = dense_channels(z)
    u = causal_conv1d_step_triton(x, dense(conv_weight), dense(conv_bias), window, "silu")
    # several rows are as fast in cuBLAS
    selected = skinny_linear_triton(u, dense_channels(x_proj)) if batch == 1 else F.linear(u.to(x_proj.dtype), x_proj)
    y = torch.empty(batch, width, dtype=x.dtype, device=x.device)
    launch(
        _scan_kernel, (cdiv(batch, tile.block_b), cdiv(width, tile.block_d)), u=u, z=z, selected=selected,
        dt_proj=dense(dt_proj), dt_bias=dense(dt_bias), log_A=dense(log_A), skip=dense(D), state=state, y=y, B=batch,
        D=width, R=rank, z_stride_b=0 if z is None else z.stride(0), selected_stride_b=selected.stride(0),
        s_stride_b=state.stride(0), s_stride_d=state.stride(1), s_stride_n=state.stride(2), N=num_states,
        BLOCK_N=power_of_2(num_states), BLOCK_R=max(16, power_of_2(rank)), BLOCK_B=tile.block_b, BLOCK_D=tile.block_d,
        PTX=speaks_ptx(), **overlap_options(batch), num_warps=tile.num_warps,
    )  # fmt: skip
    return y
