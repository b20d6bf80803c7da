"""`_select_kernel` and `_scan_kernel`: the inner step of a Mamba block in two kernels.

A program of `_select_kernel` owns a block of channels: it convolves them, shifts their window and multiplies them with
its columns of W_x. Its product is a summand of (r, B, C), which it writes to its own row of `partial`. A program of
`_scan_kernel` adds these rows in a fixed order, computes the step sizes of its channels and updates their states.

With many rows the summands would be as much traffic as the states. Then the convolution and the product with W_x are
kernels of their own, and `partial` is the finished product.

Layout:  x, z [B, D] with contiguous channels; window [B, D, W - 1] and state [B, D, N] with any strides; partial
         [S, B, R + 2 N]; weights contiguous.
float32: everything but the operands of the product with W_x, which have its dtype as in `torch.nn.Linear`.
Limits:  W up to 4, N up to 64, R up to 512.
Cost:    reads W_x and W_dt, 2 D (2 R + 2 N) bytes in half precision, and log_A; reads and writes the window and the
         state, 2 B D (W - 1 + N) elements. 2 B D (2 R + 5 N) FLOPs, B D N exponentials.
"""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from kernels.causal_conv1d.triton import causal_conv1d_step_triton
from kernels.device import speaks_ptx
from kernels.launch import cdiv, launch, power_of_2
from kernels.layout import dense
from kernels.selective_scan.triton.arithmetic import LOG2E, exp_or_exp2, sigmoid, step_size
from kernels.skinny_linear import MAX_ROWS
from kernels.skinny_linear.triton import skinny_linear_triton

SELECT_ROWS = 16
"""Maximum number of rows of `_select_kernel`, one tile of matrix units."""


class Tuning(NamedTuple):
    """Tiles of both kernels."""

    select_d: int
    """Channels of a program of `_select_kernel`."""
    scan_d: int
    """Channels of a program of `_scan_kernel`."""
    scan_rows: int
    """Rows that a program of `_scan_kernel` takes one after the other, with the same W_dt and A."""
    select_warps: int = 8
    scan_warps: int = 4


@triton.jit
def _select_kernel(
    x, conv_weight, conv_bias, x_proj, window, convolved, partial,
    B, D, M, x_stride_b, window_stride_b, window_stride_d, window_stride_w,
    W: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, NUM_M: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """The convolution of BLOCK_D channels and their summand of the M = R + 2 N outputs of W_x, for all B rows."""
    i_s = tl.program_id(0)
    o_d = i_s * BLOCK_D + tl.arange(0, BLOCK_D)
    o_b = tl.arange(0, BLOCK_B)
    m_d, m_b = o_d < D, o_b < B
    m = m_b[:, None] & m_d[None, :]
    # the weights first: the compiler may not move these loads before the stores to the window
    tiles = ()
    for i in tl.static_range(NUM_M):
        o_m = i * BLOCK_M + tl.arange(0, BLOCK_M)
        # at most 640 rows: 32 bits suffice and take half the registers
        p_w = x_proj + o_m[None, :] * D + o_d[:, None]
        tiles += (tl.load(p_w, mask=m_d[:, None] & (o_m < M)[None, :], other=0.0),)
    p_s = window + o_b.to(tl.int64)[:, None] * window_stride_b + o_d.to(tl.int64)[None, :] * window_stride_d
    p_x = x + o_b.to(tl.int64)[:, None] * x_stride_b + o_d[None, :]
    # x is rounded to the dtype of the window, so that the product is the one that later steps see
    b_new = tl.load(p_x, mask=m, other=0.0).to(window.dtype.element_ty)
    b_u = tl.zeros([BLOCK_B, BLOCK_D], tl.float32)
    b_u += tl.load(conv_bias + o_d, mask=m_d, other=0.0).to(tl.float32)[None, :]
    for i in tl.static_range(W):
        b_w = tl.load(conv_weight + o_d * W + i, mask=m_d, other=0.0).to(tl.float32)
        b_s = b_new
        if i < W - 1:
            b_s = tl.load(p_s + i * window_stride_w, mask=m, other=0.0)
        if i > 0:
            tl.store(p_s + (i - 1) * window_stride_w, b_s, mask=m)
        b_u += b_w[None, :] * b_s.to(tl.float32)
    b_u = (b_u * sigmoid(b_u, PTX)).to(convolved.dtype.element_ty)
    tl.store(convolved + o_b.to(tl.int64)[:, None] * D + o_d[None, :], b_u, mask=m)
    b_u = b_u.to(x_proj.dtype.element_ty)
    p_partial = partial + (i_s * B + o_b).to(tl.int64)[:, None] * M
    for i in tl.static_range(NUM_M):
        o_m = i * BLOCK_M + tl.arange(0, BLOCK_M)
        tl.store(p_partial + o_m[None, :], tl.dot(b_u, tiles[i]), mask=m_b[:, None] & (o_m < M)[None, :])


@triton.jit
def _scan_kernel(
    convolved, z, partial, dt_proj, dt_bias, log_A, skip, state, y,
    B, D, S, R, z_stride_b, s_stride_d, s_stride_n, partial_stride_s, partial_stride_b, s_stride_b,
    N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Step sizes, states and outputs of BLOCK_D channels, for ROWS rows one after the other."""
    o_d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    o_n, o_r, o_s = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_S)
    m_d, m_n, m_s = o_d < D, o_n < N, o_s < S
    m_r = o_r < R
    m = m_d[:, None] & m_n[None, :]
    p_w = dt_proj + o_d.to(tl.int64)[:, None] * R + o_r[None, :]
    b_w = tl.load(p_w, mask=m_d[:, None] & m_r[None, :], other=0.0)
    b_a = tl.load(log_A + o_d.to(tl.int64)[:, None] * N + o_n[None, :], mask=m, other=0.0).to(tl.float32)
    # the time is that of the memory traffic, so precise exponentials cost nothing
    b_a = -exp_or_exp2(b_a if PTX else b_a * LOG2E, PTX)
    b_bias = tl.load(dt_bias + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_skip = tl.load(skip + o_d, mask=m_d, other=0.0).to(tl.float32)
    p_state = state + o_d.to(tl.int64)[:, None] * s_stride_d + o_n[None, :] * s_stride_n
    i_first = tl.program_id(1) * ROWS
    for i in range(i_first, tl.minimum(i_first + ROWS, B)):
        i_b = tl.cast(i, tl.int64)
        b_h = tl.load(p_state + i_b * s_stride_b, mask=m, other=0.0).to(tl.float32)
        p_row = partial + i_b * partial_stride_b + o_s.to(tl.int64)[:, None] * partial_stride_s
        b_r = tl.load(p_row + o_r[None, :], mask=m_s[:, None] & m_r[None, :], other=0.0).to(tl.float32)
        b_b = tl.load(p_row + R + o_n[None, :], mask=m_s[:, None] & m_n[None, :], other=0.0).to(tl.float32)
        b_c = tl.load(p_row + R + N + o_n[None, :], mask=m_s[:, None] & m_n[None, :], other=0.0).to(tl.float32)
        b_u = tl.load(convolved + i_b * D + o_d, mask=m_d, other=0.0).to(tl.float32)
        b_dt = tl.sum(b_w.to(tl.float32) * tl.sum(b_r, 0)[None, :], 1)
        b_dt = step_size(b_dt, b_bias, True, PTX)
        b_decay = exp_or_exp2(b_dt[:, None] * b_a * (1.0 if PTX else LOG2E), PTX)
        b_h = b_decay * b_h + (b_dt * b_u)[:, None] * tl.sum(b_b, 0)[None, :]
        tl.store(p_state + i_b * s_stride_b, b_h.to(state.dtype.element_ty), mask=m)
        b_y = tl.sum(b_h * tl.sum(b_c, 0)[None, :], 1) + b_skip * b_u
        if z is not None:
            b_z = tl.load(z + i_b * z_stride_b + o_d, mask=m_d, other=0.0).to(tl.float32)
            b_y *= b_z * sigmoid(b_z, PTX)
        tl.store(y + i_b * D + o_d, b_y.to(y.dtype.element_ty), mask=m_d)


def tuning(rows: int) -> Tuning:
    """The tiles for B rows. With one row there are few programs, so they are small; many rows share W_dt."""
    if rows <= 2:
        return Tuning(select_d=64, scan_d=32, scan_rows=1)
    return Tuning(select_d=64, scan_d=64, scan_rows=1 if rows <= 4 else 2 if rows <= 16 else 4)


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
    tile: Tuning | None = None,
) -> Tensor:
    """`mamba_inner_step` for arguments whose shapes were checked; tile replaces the chosen one."""
    batch, width = x.shape
    num_states, rank = log_A.shape[1], dt_proj.shape[1]
    outputs = rank + 2 * num_states
    tile = tile or tuning(batch)
    x, z = (m if m is None or m.stride(1) == 1 else m.contiguous() for m in (x, z))
    conv_weight, conv_bias, x_proj = dense(conv_weight), dense(conv_bias), dense(x_proj)
    if batch <= SELECT_ROWS:
        splits = cdiv(width, tile.select_d)
        convolved = torch.empty((batch, width), dtype=x.dtype, device=x.device)
        partial = torch.empty((splits, batch, outputs), dtype=torch.float32, device=x.device)
        block_m = 32 if outputs <= 32 else 64
        launch(
            _select_kernel,
            splits,
            x=x,
            conv_weight=conv_weight,
            conv_bias=conv_bias,
            x_proj=x_proj,
            window=window,
            convolved=convolved,
            partial=partial,
            B=batch,
            D=width,
            M=outputs,
            x_stride_b=x.stride(0),
            window_stride_b=window.stride(0),
            window_stride_d=window.stride(1),
            window_stride_w=window.stride(2),
            W=conv_weight.shape[1],
            BLOCK_B=16,
            BLOCK_D=tile.select_d,
            BLOCK_M=block_m,
            NUM_M=cdiv(outputs, block_m),
            PTX=speaks_ptx(),
            num_warps=tile.select_warps,
        )
    else:
        convolved = causal_conv1d_step_triton(x, conv_weight, conv_bias, window, "silu")
        if batch <= MAX_ROWS:
            partial = skinny_linear_triton(convolved, x_proj)
        else:
            partial = F.linear(convolved.to(x_proj.dtype), x_proj)
        splits, partial = 1, partial.unsqueeze(0)
    y = torch.empty((batch, width), dtype=x.dtype, device=x.device)
    launch(
        _scan_kernel,
        (cdiv(width, tile.scan_d), cdiv(batch, tile.scan_rows)),
        convolved=convolved,
        z=z,
        partial=partial,
        dt_proj=dense(dt_proj),
        dt_bias=dense(dt_bias),
        log_A=dense(log_A),
        skip=dense(D),
        state=state,
        y=y,
        B=batch,
        D=width,
        S=splits,
        R=rank,
        z_stride_b=0 if z is None else z.stride(0),
        s_stride_d=state.stride(1),
        s_stride_n=state.stride(2),
        partial_stride_s=partial.stride(0),
        partial_stride_b=partial.stride(1),
        s_stride_b=state.stride(0),
        N=num_states,
        BLOCK_N=power_of_2(num_states),
        BLOCK_R=power_of_2(rank),
        BLOCK_S=power_of_2(splits),
        BLOCK_D=tile.scan_d,
        ROWS=tile.scan_rows,
        PTX=speaks_ptx(),
        num_warps=tile.scan_warps,
    )
    return y
