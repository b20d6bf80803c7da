"""Backward over segments of time: r, the gradient that goes back through the decay, behind each segment.

With dv_t = dy_t silu(z_t) the gradient of the output before the gate,

    r_t[n] = exp(dt_t A[n]) (C_t[n] dv_t + r_{t+1}[n])

A kernel computes r at the first step of each segment from zero behind its last step; `ends_to_starts` makes from these
ends the true r behind each segment.
"""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import functools

import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.launch import LaunchPlan, launch
from subquad.kernels.selective_scan.triton.arithmetic import (
    LOG2E,
    add_each,
    exp_or_exp2,
    scale_each,
    sigmoid,
    step_size_each,
    zero_each,
)
from subquad.kernels.selective_scan.triton.inputs import Plan, ScanInputs, time_strides
from subquad.kernels.selective_scan.triton.lanes import (
    from_lane_each,
)
from subquad.kernels.selective_scan.triton.memory import (
    batch_row,
    channel_pointers,
    load_channels,
    load_states,
    load_steps,
    locate,
    store_channel_sums,
    store_states,
)
from subquad.kernels.selective_scan.triton.rows import load_words, row_at_step, word_pointers
from subquad.kernels.selective_scan.triton.segments import ends_to_starts


@triton.jit(
    do_not_specialize=[
        "T", "segment", "splits", "b_stride_b", "b_stride_t", "c_stride_b", "c_stride_t",
        "dt_stride_b", "dt_stride_t", "z_stride_b", "z_stride_t", "dy_stride_b", "dy_stride_t",
    ]
)  # fmt: skip
def _bwd_ends_kernel(
    dt, A, B, C, z, bias, dy, ends, total_dt,
    T, D, segment, splits, b_stride_b, b_stride_t, c_stride_b, c_stride_t,
    dt_stride_b, dt_stride_t, z_stride_b, z_stride_t, dy_stride_b, dy_stride_t,
    N: tl.constexpr, NT: tl.constexpr, LANES: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_D: tl.constexpr,
    STEPS: tl.constexpr, SOFTPLUS: tl.constexpr, PACKED: tl.constexpr, SHUFFLE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """r at the first step of a segment, from r = 0 behind its last step: ends [batch, splits, N, D].

    total_dt [batch, splits, D] is the sum of dt over the segment. The first segment is left out, since no segment comes
    before it. Inputs as in `_scan_fwd_kernel`; dy [batch, T, D] with contiguous channels.
    """
    E: tl.constexpr = BLOCK_D // CHANNELS * LANES
    PRECISE: tl.constexpr = PTX and dt.dtype.element_ty == tl.float32
    SCALE: tl.constexpr = 1.0 if PRECISE else LOG2E
    NP: tl.constexpr = NT * LANES
    B_WORDS: tl.constexpr = NP // (2 if PACKED else 1) * (b_stride_t is not None)
    C_WORDS: tl.constexpr = NP // (2 if PACKED else 1) * (c_stride_t is not None)
    WORDS: tl.constexpr = B_WORDS + C_WORDS
    HELD: tl.constexpr = SHUFFLE and WORDS > 0
    _, i_s, i_b, o_e, o_q, o_n, o_d, m_d = locate(D, splits, BLOCK_D, NT, LANES, CHANNELS)
    if i_s == 0:
        return
    t_first = i_s * segment
    t_last = tl.minimum(t_first + segment, T)
    p_dt = channel_pointers(dt + i_b * dt_stride_b, o_d)
    p_dy = channel_pointers(dy + i_b * dy_stride_b, o_d)
    p_z = p_dy
    if z is not None:
        p_z = channel_pointers(z + i_b * z_stride_b, o_d)
    p_b = batch_row(B, b_stride_b, b_stride_t, i_b)
    p_c = batch_row(C, c_stride_b, c_stride_t, i_b)
    p_held = word_pointers(p_b, p_c, o_e, B_WORDS, C_WORDS) if HELD else ()
    a = scale_each(load_states(A, N, 1, o_d, m_d, o_n, N, NT, PTX), SCALE)
    r = zero_each(CHANNELS * NT, E)
    row_c = a
    if c_stride_t is None:
        row_c = load_states(C, N, 1, o_d, m_d, o_n, N, NT, PTX)
    b_bias = load_channels(bias, o_d, E)
    b_total = zero_each(CHANNELS, E)

    t = t_first + (t_last - 1 - t_first) // STEPS * STEPS
    next_dt = load_steps(p_dt, dt_stride_t, t, t_last, o_q, STEPS, LANES, PTX)
    next_dy = load_steps(p_dy, dy_stride_t, t, t_last, o_q, STEPS, LANES, PTX)
    next_z = next_dy
    if z is not None:
        next_z = load_steps(p_z, z_stride_t, t, t_last, o_q, STEPS, LANES, PTX)
    next_held = next_dy
    if HELD:
        next_held = load_words(p_held, o_e, t, t_last, WORDS, STEPS, PTX)
    for _ in range(tl.cdiv(t_last - t_first, STEPS)):
        steps_dt, steps_dy, steps_z, held = next_dt, next_dy, next_z, next_held
        t_next = tl.maximum(t - STEPS, t_first)
        next_dt = load_steps(p_dt, dt_stride_t, t_next, t_last, o_q, STEPS, LANES, PTX)
        next_dy = load_steps(p_dy, dy_stride_t, t_next, t_last, o_q, STEPS, LANES, PTX)
        if z is not None:
            next_z = load_steps(p_z, z_stride_t, t_next, t_last, o_q, STEPS, LANES, PTX)
        if HELD:
            next_held = load_words(p_held, o_e, t_next, t_last, WORDS, STEPS, PTX)
        for k in tl.static_range(STEPS // LANES - 1, -1, -1):
            m_t = t + k * LANES + o_q < t_last
            b_dt = step_size_each(steps_dt[k * CHANNELS : (k + 1) * CHANNELS], b_bias, m_t, SOFTPLUS, PRECISE)
            b_total = add_each(b_total, b_dt)
            b_dv = ()
            for c in tl.static_range(CHANNELS):
                b_dv_c = tl.where(m_t, steps_dy[k * CHANNELS + c].to(tl.float32), 0.0)
                if z is not None:
                    b_z = steps_z[k * CHANNELS + c].to(tl.float32)
                    b_dv_c *= b_z * sigmoid(b_z, PRECISE)
                b_dv += (b_dv_c,)
            for q in tl.static_range(LANES - 1, -1, -1):
                if c_stride_t is not None:
                    row_c = row_at_step(
                        held, p_c, t, t_last, k * LANES + q, o_n, B_WORDS,
                        PACKED, WORDS, STEPS, NT, CHANNELS, HELD, PTX,
                    )  # fmt: skip
                dt_q, dv_q = from_lane_each(b_dt, q, LANES, PTX), from_lane_each(b_dv, q, LANES, PTX)
                new_r = ()
                for i in tl.static_range(CHANNELS * NT):
                    new_r += (exp_or_exp2(dt_q[i // NT] * a[i], PRECISE) * (row_c[i] * dv_q[i // NT] + r[i]),)
                r = new_r
        t = t_next

    store_states(ends + (i_b * splits + i_s) * N * D, 1, D, r, o_d, m_d, o_n, N, NT, PTX)
    store_channel_sums(total_dt + (i_b * splits + i_s) * D, b_total, o_d, m_d, o_q, LANES, PTX)


def gradients_behind_segments(
    inputs: ScanInputs, dy: Tensor, dfinal: Tensor | None, ends: Tensor, total_dt: Tensor
) -> None:
    """Fills `ends` with r behind each of several segments; `total_dt` is for the sums of dt over the segments."""
    plan, division = inputs.plan, inputs.plan.ends_division
    _, dt, A, B, C, _, z, bias, _ = inputs
    launch(
        _bwd_ends_kernel, _ends_plan(plan, time_strides(dy)), dt=dt, A=A, B=B, C=C, z=z, bias=bias, dy=dy, ends=ends,
        total_dt=total_dt,
    )  # fmt: skip
    ends_to_starts(plan, division.splits, A, total_dt, ends, dfinal, reverse=True)


@functools.lru_cache(512)
def _ends_plan(plan: Plan, dy_strides: tuple[int, int]) -> LaunchPlan:
    division = plan.ends_division
    sizes = plan.sizes(division, "dt", "z") | {"dy_stride_b": dy_strides[0], "dy_stride_t": dy_strides[1]}
    return LaunchPlan(division.programs, **sizes, **division.constants, **plan.map_constants, SOFTPLUS=plan.softplus)
