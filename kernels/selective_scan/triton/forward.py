"""Forward: the recurrence of the package's docstring, by one kernel in one pass over time, or in two over segments.

Over segments the kernel runs twice. The first pass leaves the end of each segment after a zero start, from which
`ends_to_starts` makes the true starts; the second pass computes y. Every exponential is computed twice then.
"""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.launch import LaunchPlan, cdiv, launch
from subquad.kernels.replay import Replayed
from subquad.kernels.selective_scan.triton.arithmetic import (
    LOG2E,
    add_each,
    and_each,
    dot_each,
    float32_each,
    multiply_each,
    next_state_each,
    scale_each,
    sigmoid,
    step_size_each,
    zero_each,
)
from subquad.kernels.selective_scan.triton.forward_matrix import _scan_fwd_matrix_kernel
from subquad.kernels.selective_scan.triton.inputs import Plan, ScanInputs, prepare_inputs
from subquad.kernels.selective_scan.triton.lanes import from_lane_each, sum_lanes_of_steps
from subquad.kernels.selective_scan.triton.memory import (
    at_step,
    batch_row,
    channel_pointers,
    load_channels,
    load_states,
    load_steps,
    locate,
    store,
    store_channel_sums,
    store_states,
)
from subquad.kernels.selective_scan.triton.plan import Tuning
from subquad.kernels.selective_scan.triton.rows import load_words, row_at_step, word_pointers
from subquad.kernels.selective_scan.triton.segments import ends_to_starts


@triton.jit(
    do_not_specialize=[
        "T", "segment", "splits", "b_stride_b", "b_stride_t", "c_stride_b", "c_stride_t",
        "x_stride_b", "x_stride_t", "dt_stride_b", "dt_stride_t", "z_stride_b", "z_stride_t",
    ]
)  # fmt: skip
def _scan_fwd_kernel(
    x, dt, A, B, C, skip, z, bias, start, y, end, total_dt, chunks,
    T, D, segment, splits, b_stride_b, b_stride_t, c_stride_b, c_stride_t,
    x_stride_b, x_stride_t, dt_stride_b, dt_stride_t, z_stride_b, z_stride_t,
    N: tl.constexpr, NT: tl.constexpr, LANES: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_D: tl.constexpr,
    STEPS: tl.constexpr, CHUNK: tl.constexpr, SOFTPLUS: tl.constexpr, PACKED: tl.constexpr, SHUFFLE: tl.constexpr,
    PTX: tl.constexpr, NEGATIVE: tl.constexpr,
):  # fmt: skip
    """The recurrence over one segment of time, for BLOCK_D channels of one batch row.

    x, dt, z, y: [batch, T, D] with contiguous channels; z and y may be None.
    A, skip, bias: [D, N], [D] and [D], contiguous; skip and bias may be None.
    B, C:     [batch, T, NT LANES] with zeros from state N on, as words with strides in words (PACKED: a word is a pair
              of bfloat16, else a float32); or [D, N] with strides None.
    start:    the state before a segment [batch, splits, N, D], or with one segment the initial state [batch, D, N];
              None for zero.
    y:        None in the first pass over segments, which leaves the ends of all segments but the last.
    end:      if y is None, the ends [batch, splits, N, D], else the final state [batch, D, N] or None.
    total_dt: [batch, splits, D], the sum of dt over a segment, if y is None.
    chunks:   [batch, T / CHUNK, N, D], the state before every chunk, or None.
    NEGATIVE: whether the factor of the state is 2 exp(dt A) - 1; only over one segment.
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
    # no segment starts from the end of the last one
    if y is None:  # noqa: SIM102
        if i_s == splits - 1:
            return
    t_first = i_s * segment
    t_last = tl.minimum(t_first + segment, T)
    p_x = channel_pointers(x + i_b * x_stride_b, o_d)
    p_dt = channel_pointers(dt + i_b * dt_stride_b, o_d)
    # here and below, a variable that this variant does not use gets another one's value: Triton wants all defined
    p_y = p_x
    p_z = p_x
    if y is not None:
        p_y = channel_pointers(y + i_b * T * D, o_d)
        if z is not None:
            p_z = channel_pointers(z + i_b * z_stride_b, o_d)
    p_b = batch_row(B, b_stride_b, b_stride_t, i_b)
    p_c = batch_row(C, c_stride_b, c_stride_t, i_b)
    p_held = word_pointers(p_b, p_c, o_e, B_WORDS, C_WORDS) if HELD else ()
    o_segment = (i_b * splits + i_s) * N * D

    a = scale_each(load_states(A, N, 1, o_d, m_d, o_n, N, NT, PTX), SCALE)
    h = zero_each(CHANNELS * NT, E)
    if start is not None:
        if splits > 1:
            h = load_states(start + o_segment, 1, D, o_d, m_d, o_n, N, NT, PTX)
        else:
            h = load_states(start + i_b * D * N, N, 1, o_d, m_d, o_n, N, NT, PTX)
    row_b = a
    if b_stride_t is None:
        row_b = load_states(B, N, 1, o_d, m_d, o_n, N, NT, PTX)
    row_c = a
    if c_stride_t is None:
        row_c = load_states(C, N, 1, o_d, m_d, o_n, N, NT, PTX)
    b_bias = load_channels(bias, o_d, E)
    b_skip = load_channels(skip, o_d, E)
    b_total = zero_each(CHANNELS, E)

    next_x = load_steps(p_x, x_stride_t, t_first, t_last, o_q, STEPS, LANES, PTX)
    next_dt = load_steps(p_dt, dt_stride_t, t_first, t_last, o_q, STEPS, LANES, PTX)
    next_z = next_x
    if y is not None and z is not None:
        next_z = load_steps(p_z, z_stride_t, t_first, t_last, o_q, STEPS, LANES, PTX)
    next_held = next_x
    if HELD:
        next_held = load_words(p_held, o_e, t_first, t_last, WORDS, STEPS, PTX)
    for t in range(t_first, t_last, STEPS):
        if chunks is not None:  # noqa: SIM102
            if t % CHUNK == 0:
                p_chunk = chunks + (i_b * tl.cdiv(T, CHUNK) + t // CHUNK) * N * D
                store_states(p_chunk, 1, D, h, o_d, m_d, o_n, N, NT, PTX)
        steps_x, steps_dt, steps_z, held = next_x, next_dt, next_z, next_held
        # the next group is loaded while this one is computed
        next_x = load_steps(p_x, x_stride_t, t + STEPS, t_last, o_q, STEPS, LANES, PTX)
        next_dt = load_steps(p_dt, dt_stride_t, t + STEPS, t_last, o_q, STEPS, LANES, PTX)
        if y is not None and z is not None:
            next_z = load_steps(p_z, z_stride_t, t + STEPS, t_last, o_q, STEPS, LANES, PTX)
        if HELD:
            next_held = load_words(p_held, o_e, t + STEPS, t_last, WORDS, STEPS, PTX)
        for k in tl.static_range(STEPS // LANES):
            m_t = t + k * LANES + o_q < t_last
            b_x = float32_each(steps_x[k * CHANNELS : (k + 1) * CHANNELS])
            b_dt = step_size_each(steps_dt[k * CHANNELS : (k + 1) * CHANNELS], b_bias, m_t, SOFTPLUS, PRECISE)
            b_u = multiply_each(b_dt, b_x)
            b_total = add_each(b_total, b_dt)
            v_terms = ()
            for q in tl.static_range(LANES):
                if b_stride_t is not None:
                    row_b = row_at_step(
                        held, p_b, t, t_last, k * LANES + q, o_n, 0,
                        PACKED, WORDS, STEPS, NT, CHANNELS, HELD, PTX,
                    )  # fmt: skip
                dt_q, u_q = from_lane_each(b_dt, q, LANES, PTX), from_lane_each(b_u, q, LANES, PTX)
                h = next_state_each(h, a, dt_q, u_q, row_b, NT, PRECISE, NEGATIVE)
                if y is not None:
                    if c_stride_t is not None:
                        row_c = row_at_step(
                            held, p_c, t, t_last, k * LANES + q, o_n, B_WORDS,
                            PACKED, WORDS, STEPS, NT, CHANNELS, HELD, PTX,
                        )  # fmt: skip
                    v_terms += dot_each(row_c, h, NT)
            if y is not None:
                for c in tl.static_range(CHANNELS):
                    b_y = sum_lanes_of_steps(v_terms, c, CHANNELS, o_e, LANES, PTX) + b_skip[c] * b_x[c]
                    if z is not None:
                        b_z = steps_z[k * CHANNELS + c].to(tl.float32)
                        b_y *= b_z * sigmoid(b_z, PRECISE)
                    store(at_step(p_y[c], t + k * LANES + o_q, D, PTX), b_y, m_d[c] & m_t, PTX)

    if end is not None:
        if y is None:
            store_states(end + o_segment, 1, D, h, o_d, m_d, o_n, N, NT, PTX)
        else:
            m_last = and_each(m_d, i_s + 0 * o_e == splits - 1)
            store_states(end + i_b * D * N, N, 1, h, o_d, m_last, o_n, N, NT, PTX)
    if y is None:
        store_channel_sums(total_dt + (i_b * splits + i_s) * D, b_total, o_d, m_d, o_q, LANES, PTX)


@Replayed
def scan_forward(
    tensors: tuple[Any, ...],
    softplus: bool,
    negative: bool,
    return_final_state: bool,
    keep_chunks: bool,
    tuning: Tuning,
) -> tuple[Tensor, Tensor | None, Tensor | None, Plan]:
    """y [batch, T, D], the final state [batch, D, N], the states before every chunk [batch, T / chunk, N, D], the plan.

    The states are float32, and None where they are not asked for.
    tensors: x, dt, A, B, C, skip, z and bias for `prepare_inputs`, and the initial state [batch, D, N], contiguous.
    """
    x, dt, A, B, C, skip, z, bias, initial_state = tensors
    inputs = prepare_inputs(x, dt, A, B, C, skip, z, bias, softplus, negative, tuning)
    plan, device = inputs.plan, inputs.x.device
    (batch, length, width), num_states, splits = plan.shape, plan.num_states, plan.forward_division.splits
    y = torch.empty(batch, length, width, dtype=inputs.x.dtype, device=device)
    final_state = chunks = None
    if return_final_state:
        final_state = torch.empty(batch, width, num_states, dtype=torch.float32, device=device)
    if keep_chunks:
        num_chunks = cdiv(length, plan.tuning.chunk)
        chunks = torch.empty(batch, num_chunks, num_states, width, dtype=torch.float32, device=device)
    start = initial_state
    if splits > 1:
        start = torch.empty(batch, splits, num_states, width, dtype=torch.float32, device=device)
        total_dt = torch.empty(batch, splits, width, dtype=torch.float32, device=device)
        _scan(inputs, None, None, start, total_dt, None)
        ends_to_starts(plan, splits, inputs.A, total_dt, start, initial_state, reverse=False)
    _scan(inputs, start, y, final_state, None, chunks)
    return y, final_state, chunks, plan


def _scan(
    inputs: ScanInputs,
    start: Tensor | None,
    y: Tensor | None,
    end: Tensor | None,
    total_dt: Tensor | None,
    chunks: Tensor | None,
) -> None:
    """One pass of the forward kernel; arguments as in `_scan_fwd_kernel`."""
    kernel, launch_plan = _forward_plan(inputs.plan)
    x, dt, A, B, C, skip, z, bias, _ = inputs
    launch(
        kernel, launch_plan, x=x, dt=dt, A=A, B=B, C=C, skip=skip, z=z, bias=bias, start=start, y=y, end=end,
        total_dt=total_dt, chunks=chunks,
    )  # fmt: skip


@functools.lru_cache(256)
def _forward_plan(plan: Plan) -> tuple[Any, LaunchPlan]:
    division = plan.forward_division
    kernel: Any = _scan_fwd_kernel
    constants = division.constants | plan.map_constants | {"NEGATIVE": plan.negative}
    if plan.matrix and division.fits_matrix:
        kernel, constants = _scan_fwd_matrix_kernel, division.matrix_constants()
    constants |= {"CHUNK": plan.tuning.chunk, "SOFTPLUS": plan.softplus}
    return kernel, LaunchPlan(division.programs, **plan.sizes(division, "x", "dt", "z"), **constants)
