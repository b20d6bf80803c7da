"""`_h3_step_kernel`: the shift model, the diagonal model and both gates of an H3 layer at one position.

    k~ = sum_m taps[m] k_{t-m} + shift_skip k,   h = Abar h + Bbar k~ v,   y = q (2 Re(C h) + D k~ v)

A program takes BLOCK_D channels of ROWS rows. It discretizes their system once, since the parameters are the same for
all rows.

Layout:  q, k, v [B, D] with contiguous channels; window [B, D, M - 1] and state [B, D, N, 2] with any strides;
         parameters contiguous.
float32: everything but the discretization, which is float64 as in `lti_ssm`: a state is multiplied by Abar at each of
         thousands of positions.
Cost:    reads and writes the window and the state, 2 B D (M - 1 + 2 N) elements, and reads D (M + 4 N) parameters for
         every ROWS rows.
"""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from subquad.kernels.launch import cdiv, launch, overlap_options, power_of_2
from subquad.kernels.layout import dense, dense_channels
from subquad.kernels.lti_ssm import DiagonalSystem
from subquad.kernels.ssm_kernel.system import load_system, times


class Tuning(NamedTuple):
    """Tile of a program."""

    rows: int
    block_d: int
    """Channels."""
    num_warps: int


@triton.jit
def _h3_step_kernel(
    q, k, v, window, state, taps, shift_skip, log_dt, log_A_real, A_imag, B, C, skip, y,
    rows, D, dt_scale, q_stride_b, k_stride_b, v_stride_b, w_stride_b, w_stride_d, w_stride_m,
    s_stride_b, s_stride_d, s_stride_n, A_stride_d,
    M: tl.constexpr, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr, RULE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """BLOCK_D channels of ROWS rows, one row after the other."""
    # rows are the first axis of the grid, because the others end at 65535
    o_d = (tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)).to(tl.int64)
    o_m, o_n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    m_d = o_d < D
    m_m, m_n = m_d[:, None] & (o_m < M)[None, :], m_d[:, None] & (o_n < N)[None, :]
    b_taps = tl.load(taps + o_d[:, None] * M + o_m[None, :], mask=m_m, other=0.0).to(tl.float32)
    b_shift_skip = tl.load(shift_skip + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_skip = tl.load(skip + o_d, mask=m_d, other=0.0).to(tl.float32)
    a_re, a_im, g_re, g_im, c_re, c_im = load_system(
        log_dt, log_A_real, A_imag, B, C, o_d, o_n, D, A_stride_d, dt_scale, N, 2.0, RULE
    )
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    first = tl.program_id(0).to(tl.int64) * ROWS
    for i_b in range(first, tl.minimum(first + ROWS, rows)):
        b_k = tl.load(k + i_b * k_stride_b + o_d, mask=m_d, other=0.0).to(tl.float32)
        p_w = window + i_b * w_stride_b + o_d[:, None] * w_stride_d + o_m[None, :] * w_stride_m
        b_w = tl.load(p_w - w_stride_m, mask=m_m & (o_m > 0)[None, :], other=0.0).to(tl.float32)
        b_w = tl.where(o_m[None, :] == 0, b_k[:, None], b_w)
        p_s = state + i_b * s_stride_b + o_d[:, None] * s_stride_d + o_n[None, :] * s_stride_n
        h_re, h_im = tl.load(p_s, mask=m_n, other=0.0), tl.load(p_s + 1, mask=m_n, other=0.0)
        # every thread has read its inputs before one of them is replaced by the next newer one
        tl.debug_barrier()
        tl.store(p_w, b_w.to(window.dtype.element_ty), mask=m_m & (o_m < M - 1)[None, :])
        b_v = tl.load(v + i_b * v_stride_b + o_d, mask=m_d, other=0.0).to(tl.float32)
        b_u = (tl.sum(b_w * b_taps, 1) + b_shift_skip * b_k) * b_v
        h_re, h_im = times(a_re, a_im, h_re, h_im)
        h_re, h_im = h_re + g_re * b_u[:, None], h_im + g_im * b_u[:, None]
        tl.store(p_s, h_re, mask=m_n)
        tl.store(p_s + 1, h_im, mask=m_n)
        b_q = tl.load(q + i_b * q_stride_b + o_d, mask=m_d, other=0.0).to(tl.float32)
        b_y = b_q * (tl.sum(c_re * h_re - c_im * h_im, 1) + b_skip * b_u)
        tl.store(y + i_b * D + o_d, b_y.to(y.dtype.element_ty), mask=m_d)


def tuning(rows: int) -> Tuning:
    """The tile for B rows. A single row has few channels for each multiprocessor."""
    return Tuning(1, 8, 4) if rows == 1 else Tuning(8, 8, 2)


def h3_inner_step_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: Tensor,
    state: Tensor,
    *,
    taps: Tensor,
    shift_skip: Tensor,
    system: DiagonalSystem,
    dt_scale: float,
    discretization: str,
) -> Tensor:
    """`h3_inner_step` for arguments whose shapes were checked."""
    (batch, width), num_taps, num_states = q.shape, taps.shape[1], state.shape[2]
    tile = tuning(batch)
    q, k, v = map(dense_channels, (q, k, v))
    # in real numbers
    s_stride_b, s_stride_d, s_stride_n = (2 * stride for stride in state.stride())
    log_A_real = dense(system.log_A_real)
    y = torch.empty(batch, width, dtype=q.dtype, device=q.device)
    launch(
        _h3_step_kernel, (cdiv(batch, tile.rows), cdiv(width, tile.block_d)), q=q, k=k, v=v, window=window, state=state,
        taps=dense(taps), shift_skip=dense(shift_skip), log_dt=dense(system.log_dt), log_A_real=log_A_real,
        A_imag=dense(system.A_imag), B=dense(system.B), C=dense(system.C), skip=dense(system.skip), y=y, rows=batch,
        D=width, dt_scale=dt_scale, q_stride_b=q.stride(0), k_stride_b=k.stride(0), v_stride_b=v.stride(0),
        w_stride_b=window.stride(0), w_stride_d=window.stride(1), w_stride_m=window.stride(2), s_stride_b=s_stride_b,
        s_stride_d=s_stride_d, s_stride_n=s_stride_n, A_stride_d=0 if len(log_A_real) == 1 else num_states, M=num_taps,
        N=num_states, BLOCK_M=power_of_2(num_taps), BLOCK_N=power_of_2(num_states), BLOCK_D=tile.block_d,
        ROWS=tile.rows, RULE=discretization, **overlap_options(batch), num_warps=tile.num_warps,
    )  # fmt: skip
    return y
