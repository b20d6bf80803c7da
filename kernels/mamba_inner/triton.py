"""`_select_kernel` and `_scan_kernel`: the inner step of a Mamba block.

    u = silu(conv(x)),   (r, B, C) = W_x u
    dt = softplus(W_dt r + b_dt),   h = exp(dt A) h + dt B u,   y = (C h + D u) * silu(z),   A = -exp(log_A)

`_select_kernel` takes one row: a program convolves BLOCK_D channels and multiplies them with their columns of W_x, and
`_scan_kernel` adds the products of all programs in their order. With several rows, or more channels than MAX_PARTS
programs take, the convolution and W_x are kernels of their own.

A program of `_scan_kernel` takes BLOCK_D channels of BLOCK_B rows. It computes their step sizes itself, by one product
with its rows of W_dt, because their number is small: step sizes are never written, and their product needs no kernel of
its own.

Layout:  u, z, y [B, D] with contiguous channels; selected [B, R + 2 N], that is r, B and C, or with one row a part of
         them for each program of `_select_kernel`; state [B, D, N] with any strides; weights contiguous.
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
from subquad.kernels.causal_conv1d.triton.steps import _sigmoid
from subquad.kernels.device import speaks_ptx
from subquad.kernels.launch import cdiv, launch, overlap_options, power_of_2
from subquad.kernels.layout import dense, dense_channels
from subquad.kernels.selective_scan.triton.arithmetic import LOG2E, exp_or_exp2, sigmoid, step_size
from subquad.kernels.skinny_linear.triton import prefetch, skinny_linear_triton


class Tuning(NamedTuple):
    """Tile of a program."""

    block_b: int
    """Rows: 1, or at least 16, the smallest product on matrix units."""
    block_d: int
    """Channels."""
    num_warps: int = 4


SELECT = Tuning(1, 128, 8)
"""The tile of `_select_kernel`."""
MAX_PARTS = 64
"""Maximum number of programs of `_select_kernel`: each program of `_scan_kernel` reads the products of all of them."""
MAX_SELECTED = 256
"""Maximum number of outputs of W_x of `_select_kernel`, which holds its weights in registers."""


@triton.jit
def _select_kernel(
    x, conv_weight, conv_bias, window, x_proj, u, parts,
    D, R, proj_stride, window_stride_d, window_stride_w,
    N: tl.constexpr, W: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """u, the next window and a part of W_x u [R + 2 N], of BLOCK_D channels of the only row."""
    i = tl.program_id(0)
    o_d = i * BLOCK_D + tl.arange(0, BLOCK_D)
    # r, and B and C together
    o_r, o_n = tl.arange(0, BLOCK_R), tl.arange(0, 2 * BLOCK_N)
    m_d, m_r, m_n = o_d < D, o_r < R, o_n < 2 * N
    p_w = x_proj + o_r.to(tl.int64)[:, None] * proj_stride + o_d[None, :]
    b_w = tl.load(p_w, mask=m_r[:, None] & m_d[None, :], other=0.0)
    p_w = x_proj + (R + o_n).to(tl.int64)[:, None] * proj_stride + o_d[None, :]
    b_v = tl.load(p_w, mask=m_n[:, None] & m_d[None, :], other=0.0)
    taps = ()
    for k in tl.static_range(W):
        taps += (tl.load(conv_weight + o_d.to(tl.int64) * W + k, mask=m_d, other=0.0).to(tl.float32),)
    b_p = tl.load(conv_bias + o_d, mask=m_d, other=0.0).to(tl.float32)
    p_window = window + o_d.to(tl.int64) * window_stride_d
    stride_w = tl.cast(window_stride_w, tl.int64)
    if OVERLAP:
        # an earlier step may still write the window, so it is fetched into the cache and not read
        p_fetched = window + tl.minimum(o_d, D - 1).to(tl.int64) * window_stride_d
        for k in tl.static_range(W - 1):
            prefetch(p_fetched + k * stride_w)
        gdc_launch_dependents()
        gdc_wait()
    # x is rounded to the dtype of the window, so that the product is the one that later steps see
    b_x = tl.load(x + o_d, mask=m_d, other=0.0).to(window.dtype.element_ty)
    b_p += taps[W - 1] * b_x.to(tl.float32)
    kept = ()
    for k in tl.static_range(W - 1):
        kept += (tl.load(p_window + k * stride_w, mask=m_d, other=0.0),)
        b_p += taps[k] * kept[k].to(tl.float32)
    kept += (b_x,)
    b_u = (b_p * _sigmoid(b_p)).to(u.dtype.element_ty)
    tl.store(u + o_d, b_u, mask=m_d)
    # the compiler may have made several threads load an element, and one of them would overwrite it before the others
    tl.debug_barrier()
    for k in tl.static_range(W - 1):
        tl.store(p_window + k * stride_w, kept[k + 1], mask=m_d)
    # masked channels have a bias of zero and therefore a u of zero
    b_wide = b_u.to(tl.float32)[None, :]
    p_parts = parts + i * (R + 2 * N)
    tl.store(p_parts + o_r, tl.sum(b_w.to(tl.float32) * b_wide, 1), mask=m_r)
    tl.store(p_parts + R + o_n, tl.sum(b_v.to(tl.float32) * b_wide, 1), mask=m_n)


@triton.jit
def _scan_kernel(
    u, z, selected, dt_proj, dt_bias, log_A, skip, state, y,
    B, D, R, num_parts, z_stride_b, selected_stride_b, s_stride_b, s_stride_d, s_stride_n,
    N: tl.constexpr, PARTS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK_D: tl.constexpr, PTX: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Step sizes, states and outputs of BLOCK_D channels of BLOCK_B rows.

    PARTS: where it is not 0, `selected` [num_parts, R + 2 N] has parts of those of the only row, at most PARTS.
    """
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
        # an earlier step may still write the state, so it is fetched into the cache and not read
        prefetch(state + tl.minimum(o_wide, D - 1) * s_stride_d)
        gdc_launch_dependents()
        gdc_wait()
    o_row = o_b.to(tl.int64)[:, None]
    if PARTS:
        o_p, m_p = tl.arange(0, PARTS)[:, None], (tl.arange(0, PARTS) < num_parts)[:, None]
    else:
        o_p, m_p = o_row, m_b[:, None]
    p_selected = selected + o_p * selected_stride_b
    b_r = tl.load(p_selected + o_r[None, :], mask=m_p & m_r[None, :], other=0.0)
    b_b = tl.load(p_selected + R + o_n[None, :], mask=m_p & m_n[None, :], other=0.0).to(tl.float32)
    b_c = tl.load(p_selected + R + N + o_n[None, :], mask=m_p & m_n[None, :], other=0.0).to(tl.float32)
    b_u = tl.load(u + o_row * D + o_d[None, :], mask=m_row, other=0.0).to(tl.float32)
    p_state = state + o_row[:, :, None] * s_stride_b + o_wide[None, :, None] * s_stride_d
    p_state += o_n.to(tl.int64)[None, None, :] * s_stride_n
    m_state = m_b[:, None, None] & m_a[None, :, :]
    b_h = tl.load(p_state, mask=m_state, other=0.0).to(tl.float32)
    p_z = z + o_row * z_stride_b + o_d[None, :] if z is not None else None
    if z is not None and BLOCK_B == 1:
        # before the first barrier, so that a program waits for the memory once; with more rows it takes registers
        b_z = tl.load(p_z, mask=m_row, other=0.0).to(tl.float32)
    if PARTS:
        b_r, b_b, b_c = tl.sum(b_r, 0)[None, :], tl.sum(b_b, 0)[None, :], tl.sum(b_c, 0)[None, :]
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
        if BLOCK_B > 1:
            b_z = tl.load(p_z, mask=m_row, other=0.0).to(tl.float32)
        b_y *= b_z * sigmoid(b_z, PTX)
    tl.store(y + o_row * D + o_d[None, :], b_y.to(y.dtype.element_ty), mask=m_row)


def tuning(rows: int) -> Tuning:
    """The tile for B rows. A single row has few channels for each multiprocessor, and no use for matrix units."""
    return Tuning(1, 16, 2) if rows == 1 else Tuning(16, 8, 2)


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
    block_n, block_r = power_of_2(num_states), max(16, power_of_2(rank))
    tile = tuning(batch)
    z, conv_weight, conv_bias = dense_channels(z), dense(conv_weight), dense(conv_bias)
    parts = cdiv(width, SELECT.block_d)
    if batch != 1 or not 0 < parts <= MAX_PARTS or len(x_proj) > MAX_SELECTED:
        parts = 0
        u = causal_conv1d_step_triton(x, conv_weight, conv_bias, window, "silu")
        # several rows are as fast in cuBLAS
        selected = (
            skinny_linear_triton(u, dense_channels(x_proj)) if batch == 1 else F.linear(u.to(x_proj.dtype), x_proj)
        )
    else:
        x, x_proj = dense_channels(x), dense_channels(x_proj)
        u = torch.empty(batch, width, dtype=x.dtype, device=x.device)
        selected = torch.empty(parts, len(x_proj), dtype=torch.float32, device=x.device)
        launch(
            _select_kernel, parts, x=x, conv_weight=conv_weight, conv_bias=conv_bias, window=window, x_proj=x_proj, u=u,
            parts=selected, D=width, R=rank, proj_stride=x_proj.stride(0), window_stride_d=window.stride(1),
            window_stride_w=window.stride(2), N=num_states, W=conv_weight.shape[1], BLOCK_N=block_n, BLOCK_R=block_r,
            BLOCK_D=SELECT.block_d, **overlap_options(batch), num_warps=SELECT.num_warps,
        )  # fmt: skip
    y = torch.empty(batch, width, dtype=x.dtype, device=x.device)
    launch(
        _scan_kernel, (cdiv(batch, tile.block_b), cdiv(width, tile.block_d)), u=u, z=z, selected=selected,
        dt_proj=dense(dt_proj), dt_bias=dense(dt_bias), log_A=dense(log_A), skip=dense(D), state=state, y=y, B=batch,
        D=width, R=rank, num_parts=parts, z_stride_b=0 if z is None else z.stride(0),
        selected_stride_b=selected.stride(0), s_stride_b=state.stride(0), s_stride_d=state.stride(1),
        s_stride_n=state.stride(2), N=num_states, PARTS=power_of_2(parts) if parts else 0, BLOCK_N=block_n,
        BLOCK_R=block_r, BLOCK_B=tile.block_b, BLOCK_D=tile.block_d, PTX=speaks_ptx(), **overlap_options(batch),
        num_warps=tile.num_warps,
    )  # fmt: skip
    return y
