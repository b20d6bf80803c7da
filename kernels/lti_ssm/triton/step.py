"""`_lti_ssm_step_kernel`: one position of a system that is given by its trained parameters, with both gates.

    v = gate_in u,   h = Abar h + Bbar v,   y = gate_out (s Re(sum_n C h) + D v)

A program takes BLOCK_D channels of ROWS rows. It discretizes their system once, since the parameters are the same for
all rows, and has the states of all its rows in registers at once, so that it waits for memory once and not row by row.

Layout:  u, gates, y [B, D] with contiguous channels; state [B, D, N] with any strides, each state an integer of 64
         bits that holds its real and its imaginary part; parameters contiguous.
float32: everything but the discretization, which is float64: a state is multiplied by Abar at each of thousands of
         positions.
Cost:    reads and writes the state, 4 B D N elements, and reads D (2 + 4 N) parameters for every ROWS rows.
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
from subquad.kernels.lti_ssm.systems import DiagonalSystem
from subquad.kernels.ssm_kernel.system import load_system, times

MAX_ROWS = 16
"""Maximum number of rows of a program."""
MAX_BLOCK_D = 8
"""Maximum number of channels of a program."""
MAX_STATES_OF_PROGRAM = 2048
"""Maximum number of complex states of a program; with four warps they take 32 of the 128 registers of a thread."""


class Tuning(NamedTuple):
    """Tile of a program."""

    rows: int
    block_d: int
    """Channels."""
    num_warps: int


@triton.jit
def _lti_ssm_step_kernel(
    u, gate_in, gate_out, state, log_dt, log_A_real, A_imag, B, C, skip, y,
    rows, D, dt_scale, u_stride_b, in_stride_b, out_stride_b, s_stride_b, s_stride_d, s_stride_n, A_stride_d,
    N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, FACTOR: tl.constexpr,
    RULE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """BLOCK_D channels of ROWS rows. The strides of the state count complex numbers."""
    o_d = (tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)).to(tl.int64)
    o_b = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    o_n = tl.arange(0, BLOCK_N)
    m_d = o_d < D
    m_bd = (o_b < rows)[:, None] & m_d[None, :]
    b_skip = tl.load(skip + o_d, mask=m_d, other=0.0).to(tl.float32)
    if OVERLAP:
        a_re, a_im, g_re, g_im, c_re, c_im = load_system(
            log_dt, log_A_real, A_imag, B, C, o_d, o_n, D, A_stride_d, dt_scale, N, FACTOR, RULE
        )
        gdc_launch_dependents()
        gdc_wait()
    b_v = tl.load(u + o_b[:, None] * u_stride_b + o_d[None, :], mask=m_bd, other=0.0).to(tl.float32)
    if gate_in is not None:
        p_in = gate_in + o_b[:, None] * in_stride_b + o_d[None, :]
        b_v *= tl.load(p_in, mask=m_bd, other=0.0).to(tl.float32)
    o_s = o_b[:, None, None] * s_stride_b + o_d[None, :, None] * s_stride_d + o_n[None, None, :] * s_stride_n
    m_s = m_bd[:, :, None] & (o_n < N)[None, None, :]
    # both parts of a complex number in one integer; with them on an axis of two, Triton 3.6 would let neighbouring
    # threads read neighbouring rows
    b_h = tl.load(state + o_s, mask=m_s, other=0)
    if not OVERLAP:
        # after the loads, so that the states arrive while the system is discretized
        a_re, a_im, g_re, g_im, c_re, c_im = load_system(
            log_dt, log_A_real, A_imag, B, C, o_d, o_n, D, A_stride_d, dt_scale, N, FACTOR, RULE
        )
    h_re, h_im = b_h.to(tl.int32).to(tl.float32, bitcast=True), (b_h >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    h_re, h_im = times(a_re[None, :, :], a_im[None, :, :], h_re, h_im)
    h_re += g_re[None, :, :] * b_v[:, :, None]
    h_im += g_im[None, :, :] * b_v[:, :, None]
    # several threads read the same state where a tile has fewer states than threads, and one of them would replace it
    # before the others have read it
    tl.debug_barrier()
    b_low = h_re.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    tl.store(state + o_s, (h_im.to(tl.int32, bitcast=True).to(tl.int64) << 32) | b_low, mask=m_s)
    b_y = tl.sum(c_re[None, :, :] * h_re - c_im[None, :, :] * h_im, 2) + b_skip[None, :] * b_v
    if gate_out is not None:
        p_out = gate_out + o_b[:, None] * out_stride_b + o_d[None, :]
        b_y *= tl.load(p_out, mask=m_bd, other=0.0).to(tl.float32)
    tl.store(y + o_b[:, None] * D + o_d[None, :], b_y.to(y.dtype.element_ty), mask=m_bd)


def tuning(rows: int, num_states: int) -> Tuning:
    """The tile for B rows of N states."""
    of_row = power_of_2(num_states)
    tile_rows = min(power_of_2(rows), MAX_ROWS, max(1, MAX_STATES_OF_PROGRAM // of_row))
    block_d = min(MAX_BLOCK_D, max(1, MAX_STATES_OF_PROGRAM // (tile_rows * of_row)))
    return Tuning(tile_rows, block_d, 4)


def lti_ssm_step_triton(
    u: Tensor,
    system: DiagonalSystem,
    state: Tensor,
    *,
    conj_pairs: bool,
    discretization: str,
    dt_scale: float,
    gate_in: Tensor | None,
    gate_out: Tensor | None,
    tile: Tuning | None = None,
) -> Tensor:
    """`lti_ssm_step` for arguments whose shapes were checked; tile replaces the chosen one."""
    (batch, width), num_states = u.shape, state.shape[2]
    tile = tile or tuning(batch, num_states)
    u, gate_in, gate_out = dense_channels(u), dense_channels(gate_in), dense_channels(gate_out)
    log_A_real = dense(system.log_A_real)
    y = torch.empty(batch, width, dtype=u.dtype, device=u.device)
    # dss-exp is another name of zoh
    launch(
        _lti_ssm_step_kernel, (cdiv(width, tile.block_d), cdiv(batch, tile.rows)), u=u, gate_in=gate_in,
        gate_out=gate_out, state=torch.view_as_real(state).view(torch.int64).squeeze(-1), log_dt=dense(system.log_dt),
        log_A_real=log_A_real, A_imag=dense(system.A_imag), B=dense(system.B), C=dense(system.C),
        skip=dense(system.skip), y=y, rows=batch, D=width, dt_scale=dt_scale, u_stride_b=u.stride(0),
        in_stride_b=0 if gate_in is None else gate_in.stride(0),
        out_stride_b=0 if gate_out is None else gate_out.stride(0), s_stride_b=state.stride(0),
        s_stride_d=state.stride(1), s_stride_n=state.stride(2), A_stride_d=0 if len(log_A_real) == 1 else num_states,
        N=num_states, BLOCK_N=power_of_2(num_states), BLOCK_D=tile.block_d, ROWS=tile.rows,
        FACTOR=2.0 if conj_pairs else 1.0, RULE="zoh" if discretization == "dss-exp" else discretization,
        **overlap_options(batch), num_warps=tile.num_warps,
    )  # fmt: skip
    return y
