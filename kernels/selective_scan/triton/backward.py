"""Backward: the gradients, by one kernel that goes through time in reverse, and two kernels that add partial sums.

With u_t = dt_t x_t and v_t = sum_n C_t[n] h_t[n] + skip x_t the output before the gate, y_t = v_t silu(z_t). Let g_t be
the gradient of h_t, r_t that of h_{t-1} through the decay, and d... the gradient of whatever follows:

    dv_t = dy_t silu(z_t)                       dz_t = dy_t silu'(z_t) v_t
    g_t[n] = C_t[n] dv_t + r_{t+1}[n]           r_t[n] = exp(dt_t A[n]) g_t[n]
    dB_t[n] = sum_d u_t g_t[n]                  dC_t[n] = sum_d dv_t h_t[n]
    du_t = sum_n B_t[n] g_t[n]                  dx_t = dt_t du_t + skip dv_t
    dA[n] = sum_t dt_t r_t[n] h_{t-1}[n]        dskip = sum_t x_t dv_t
    ddt_t = x_t du_t + sum_n A[n] r_t[n] h_{t-1}[n], times the derivative of softplus;   dbias = sum_t ddt_t

Where the factor of the state is 2 exp(dt_t A[n]) - 1, r_t is that times g_t, and r_t + g_t replaces r_t in dA and ddt.

Where A, u, v, h, g and r have a value for each channel d, and sums over t include the batch. r starts behind the last
step with the gradient of the final state and ends as the gradient of the initial state.

Forward has kept the state before every chunk. The chunks of a segment are taken in reverse. A chunk is first computed
forward again, which leaves the states before all its groups of STEPS steps in scratch memory. Then its groups are
taken in reverse: the states of a group are computed again into registers, and r goes back through them.

Over segments a first kernel computes r at the start of each segment from zero behind it, and `ends_to_starts` makes
from these the true r behind each segment.

dB and dC are sums over channels: over those of a warp by a butterfly of shuffles, over the warps of a program through
shared memory, and over programs by `_add_sums_kernel`. dA, dbias and dskip are sums over time and batch: over a
segment in registers and memory, and over segments and batch rows by the same kernel. Every sum has a fixed order.
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
from subquad.kernels.layout import address
from subquad.kernels.replay import Replayed
from subquad.kernels.selective_scan.triton.arithmetic import (
    LOG2E,
    and_each,
    decay_of,
    dot_each,
    float32_each,
    multiply_add_each,
    multiply_each,
    next_state_each,
    scale_each,
    sigmoid,
    step_size_each,
    sum_channels_each,
    zero_each,
)
from subquad.kernels.selective_scan.triton.backward_matrix import _scan_bwd_matrix_kernel
from subquad.kernels.selective_scan.triton.backward_segments import gradients_behind_segments
from subquad.kernels.selective_scan.triton.backward_sums import add_sums
from subquad.kernels.selective_scan.triton.inputs import Plan, ScanInputs, time_strides, words
from subquad.kernels.selective_scan.triton.lanes import (
    column_of_sum,
    from_lane_each,
    join_steps,
    opaque_each,
    opaque_int32_each,
    sum_channels_of_warp,
    sum_lanes_of_steps,
    sum_warps,
)
from subquad.kernels.selective_scan.triton.memory import (
    at_step,
    batch_row,
    channel_pointers,
    load_channels,
    load_scratch,
    load_states,
    load_steps,
    locate,
    store,
    store_channel_sums,
    store_or_add_states,
    store_scratch,
    store_states,
)
from subquad.kernels.selective_scan.triton.rows import load_words, row_at_step, word_pointers


@triton.jit(
    do_not_specialize=[
        "T", "segment", "splits", "b_stride_b", "b_stride_t", "c_stride_b", "c_stride_t",
        "x_stride_b", "x_stride_t", "dt_stride_b", "dt_stride_t", "z_stride_b", "z_stride_t",
        "dy_stride_b", "dy_stride_t",
    ]
)  # fmt: skip
def _scan_bwd_kernel(
    x, dt, A, B, C, skip, z, bias, chunks, dy, after,
    dx, ddt, dz, totals, dB, dC, partial, dinitial, scratch,
    T, D, segment, splits, b_stride_b, b_stride_t, c_stride_b, c_stride_t,
    x_stride_b, x_stride_t, dt_stride_b, dt_stride_t, z_stride_b, z_stride_t, dy_stride_b, dy_stride_t,
    N: tl.constexpr, NT: tl.constexpr, LANES: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_D: tl.constexpr,
    STEPS: tl.constexpr, CHUNK: tl.constexpr, SOFTPLUS: tl.constexpr, PACKED: tl.constexpr, SHUFFLE: tl.constexpr,
    PTX: tl.constexpr, NEGATIVE: tl.constexpr,
):  # fmt: skip
    """The gradients over one segment of time, for BLOCK_D channels of one batch row.

    Inputs as in `_scan_fwd_kernel`; chunks are the states that it kept; dy [batch, T, D] with contiguous channels.
    after:       r behind a segment [batch, splits, N, D], or with one segment the gradient of the final state
                 [batch, D, N]; None for zero.
    dx, ddt, dz: [batch, T, D], contiguous; dz is None without a gate.
    totals:      [batch, splits, N + 2, D], the sums over a segment for dA[0 .. N - 1], dbias and dskip.
    dB, dC:      [batch, splits, N, D], the sums over a segment for maps that do not depend on time, else None.
    partial:     [D / BLOCK_D, batch T, WIDTH], the sums over BLOCK_D channels for dB_t and dC_t, with NP columns each.
    dinitial:    [batch, D, N], the gradient of the initial state, or None.
    scratch:     [programs, CHUNK / STEPS - 1, NT CHANNELS, E], the states before all groups of a chunk but the last.
    NEGATIVE:    whether the factor of the state is 2 exp(dt A) - 1; only over one segment.
    """
    E: tl.constexpr = BLOCK_D // CHANNELS * LANES
    PRECISE: tl.constexpr = PTX and dt.dtype.element_ty == tl.float32
    SCALE: tl.constexpr = 1.0 if PRECISE else LOG2E
    NP: tl.constexpr = NT * LANES
    B_WORDS: tl.constexpr = NP // (2 if PACKED else 1) * (b_stride_t is not None)
    C_WORDS: tl.constexpr = NP // (2 if PACKED else 1) * (c_stride_t is not None)
    WORDS: tl.constexpr = B_WORDS + C_WORDS
    HELD: tl.constexpr = SHUFFLE and WORDS > 0
    WIDTH: tl.constexpr = NP * ((b_stride_t is not None) + (c_stride_t is not None))
    STATES: tl.constexpr = CHANNELS * NT
    SLOTS: tl.constexpr = CHUNK // STEPS - 1
    # terms of a row [dB_t, dC_t] in a thread, and how many sums of these a thread holds after summing over a warp
    NUM: tl.constexpr = WIDTH // LANES
    LEFT: tl.constexpr = NUM * LANES // 32 if NUM * LANES > 32 else 1
    i_d, i_s, i_b, o_e, o_q, o_n, o_d, m_d = locate(D, splits, BLOCK_D, NT, LANES, CHANNELS)
    num_rows = tl.num_programs(0) // tl.cdiv(D, BLOCK_D)
    o_segment = (i_b * splits + i_s) * N * D
    t_first = i_s * segment
    t_last = tl.minimum(t_first + segment, T)
    p_x = channel_pointers(x + i_b * x_stride_b, o_d)
    p_dt = channel_pointers(dt + i_b * dt_stride_b, o_d)
    p_dy = channel_pointers(dy + i_b * dy_stride_b, o_d)
    p_z = p_dy
    if z is not None:
        p_z = channel_pointers(z + i_b * z_stride_b, o_d)
    p_b = batch_row(B, b_stride_b, b_stride_t, i_b)
    p_c = batch_row(C, c_stride_b, c_stride_t, i_b)
    p_held = word_pointers(p_b, p_c, o_e, B_WORDS, C_WORDS) if HELD else ()

    a = scale_each(load_states(A, N, 1, o_d, m_d, o_n, N, NT, PTX), SCALE)
    r = zero_each(STATES, E)
    if after is not None:
        if splits > 1:
            r = load_states(after + o_segment, 1, D, o_d, m_d, o_n, N, NT, PTX)
        else:
            r = load_states(after + i_b * D * N, N, 1, o_d, m_d, o_n, N, NT, PTX)
    row_b = a
    if b_stride_t is None:
        row_b = load_states(B, N, 1, o_d, m_d, o_n, N, NT, PTX)
    row_c = a
    if c_stride_t is None:
        row_c = load_states(C, N, 1, o_d, m_d, o_n, N, NT, PTX)
    b_bias = load_channels(bias, o_d, E)
    b_skip = load_channels(skip, o_d, E)

    # with PTX every thread reads back only what it wrote itself, so no barrier is needed
    p_scratch = scratch + tl.program_id(0).to(tl.int64) * (SLOTS * STATES * E) + o_e
    t_group = t_first + (t_last - 1 - t_first) // STEPS * STEPS
    sum_bias = zero_each(CHANNELS, E)
    sum_skip = zero_each(CHANNELS, E)
    next_dy = load_steps(p_dy, dy_stride_t, t_group, t_last, o_q, STEPS, LANES, PTX)
    next_z = next_dy
    if z is not None:
        next_z = load_steps(p_z, z_stride_t, t_group, t_last, o_q, STEPS, LANES, PTX)
    num_chunks = tl.cdiv(t_last - t_first, CHUNK)
    for i_c in range(num_chunks):
        t_chunk = t_first + (num_chunks - 1 - i_c) * CHUNK
        p_chunk = chunks + (i_b * tl.cdiv(T, CHUNK) + t_chunk // CHUNK) * N * D
        h = load_states(p_chunk, 1, D, opaque_int32_each(o_d, PTX), m_d, o_n, N, NT, PTX)
        num_groups = tl.cdiv(tl.minimum(t_last - t_chunk, CHUNK), STEPS)
        sum_a = zero_each(STATES, E)
        sum_b = zero_each(STATES if b_stride_t is None else 0, E)
        sum_c = zero_each(STATES if c_stride_t is None else 0, E)

        next_x = load_steps(p_x, x_stride_t, t_chunk, t_last, o_q, STEPS, LANES, PTX)
        next_dt = load_steps(p_dt, dt_stride_t, t_chunk, t_last, o_q, STEPS, LANES, PTX)
        next_held = next_x
        if HELD:
            next_held = load_words(p_held, o_e, t_chunk, t_last, WORDS, STEPS, PTX)
        for t in range(t_chunk, t_chunk + (num_groups - 1) * STEPS, STEPS):
            steps_x, steps_dt, held = next_x, next_dt, next_held
            next_x = load_steps(p_x, x_stride_t, t + STEPS, t_last, o_q, STEPS, LANES, PTX)
            next_dt = load_steps(p_dt, dt_stride_t, t + STEPS, t_last, o_q, STEPS, LANES, PTX)
            if HELD:
                next_held = load_words(p_held, o_e, t + STEPS, t_last, WORDS, STEPS, PTX)
            store_scratch(p_scratch + (t - t_chunk) // STEPS * (STATES * E), h, E, PTX)
            for k in tl.static_range(STEPS // LANES):
                b_x = float32_each(steps_x[k * CHANNELS : (k + 1) * CHANNELS])
                m_t = t + k * LANES + o_q < t_last
                b_dt = step_size_each(steps_dt[k * CHANNELS : (k + 1) * CHANNELS], b_bias, m_t, SOFTPLUS, PRECISE)
                b_u = multiply_each(b_dt, b_x)
                for q in tl.static_range(LANES):
                    if b_stride_t is not None:
                        row_b = row_at_step(
                            held, p_b, t, t_last, k * LANES + q, o_n, 0,
                            PACKED, WORDS, STEPS, NT, CHANNELS, HELD, PTX,
                        )  # fmt: skip
                    dt_q, u_q = from_lane_each(b_dt, q, LANES, PTX), from_lane_each(b_u, q, LANES, PTX)
                    h = next_state_each(h, a, dt_q, u_q, row_b, NT, PRECISE, NEGATIVE)

        if not PTX:
            # Triton may give loads another layout than stores, so that a thread reads what others wrote
            tl.debug_barrier()
        for i_g in range(num_groups):
            # the state before the next group in reversed time, loaded while this group is computed
            p_before = p_scratch + tl.maximum(num_groups - 2 - i_g, 0) * (STATES * E)
            next_h = load_scratch(p_before, STATES, E, PTX)
            steps_x = load_steps(p_x, x_stride_t, t_group, t_last, o_q, STEPS, LANES, PTX)
            steps_dt = load_steps(p_dt, dt_stride_t, t_group, t_last, o_q, STEPS, LANES, PTX)
            steps_dy, steps_z = next_dy, next_z
            t_next = tl.maximum(t_group - STEPS, t_first)
            next_dy = load_steps(p_dy, dy_stride_t, t_next, t_last, o_q, STEPS, LANES, PTX)
            if z is not None:
                next_z = load_steps(p_z, z_stride_t, t_next, t_last, o_q, STEPS, LANES, PTX)
            held = steps_x
            if HELD:
                held = load_words(p_held, o_e, t_group, t_last, WORDS, STEPS, PTX)
            states = h
            group_dt = ()
            for k in tl.static_range(STEPS // LANES):
                m_t = t_group + k * LANES + o_q < t_last
                b_dt = step_size_each(steps_dt[k * CHANNELS : (k + 1) * CHANNELS], b_bias, m_t, SOFTPLUS, PRECISE)
                b_u = multiply_each(b_dt, float32_each(steps_x[k * CHANNELS : (k + 1) * CHANNELS]))
                group_dt += b_dt
                for q in tl.static_range(LANES):
                    if b_stride_t is not None:
                        row_b = row_at_step(
                            held, p_b, t_group, t_last, k * LANES + q, o_n, 0,
                            PACKED, WORDS, STEPS, NT, CHANNELS, HELD, PTX,
                        )  # fmt: skip
                    dt_q, u_q = from_lane_each(b_dt, q, LANES, PTX), from_lane_each(b_u, q, LANES, PTX)
                    h = next_state_each(h, a, dt_q, u_q, row_b, NT, PRECISE, NEGATIVE)
                    states += h

            # below, the values of the pass above are computed again, because registers cannot hold them
            group_dt = opaque_each(group_dt, PTX)
            if HELD:
                held = opaque_each(held, PTX)
            map_sums = ()
            for k in tl.static_range(STEPS // LANES - 1, -1, -1):
                m_t = t_group + k * LANES + o_q < t_last
                b_dt = group_dt[k * CHANNELS : (k + 1) * CHANNELS]
                b_x = float32_each(steps_x[k * CHANNELS : (k + 1) * CHANNELS])
                b_u = multiply_each(b_dt, b_x)
                b_dv = ()
                b_dgate = ()
                for c in tl.static_range(CHANNELS):
                    b_dy = tl.where(m_d[c] & m_t, steps_dy[k * CHANNELS + c].to(tl.float32), 0.0)
                    if z is not None:
                        b_z = steps_z[k * CHANNELS + c].to(tl.float32)
                        b_sigmoid = sigmoid(b_z, PRECISE)
                        b_dgate += (b_dy * (b_sigmoid * (1.0 + b_z * (1.0 - b_sigmoid))),)
                        b_dy *= b_z * b_sigmoid
                    b_dv += (b_dy,)
                # time goes backward, so each step is put in front of the later ones
                v_terms = ()
                du_terms = ()
                ddt_terms = ()
                for q in tl.static_range(LANES - 1, -1, -1):
                    if b_stride_t is not None:
                        row_b = row_at_step(
                            held, p_b, t_group, t_last, k * LANES + q, o_n, 0,
                            PACKED, WORDS, STEPS, NT, CHANNELS, HELD, PTX,
                        )  # fmt: skip
                    if c_stride_t is not None:
                        row_c = row_at_step(
                            held, p_c, t_group, t_last, k * LANES + q, o_n, B_WORDS,
                            PACKED, WORDS, STEPS, NT, CHANNELS, HELD, PTX,
                        )  # fmt: skip
                    h_before = states[(k * LANES + q) * STATES : (k * LANES + q + 1) * STATES]
                    h = states[(k * LANES + q + 1) * STATES : (k * LANES + q + 2) * STATES]
                    dt_q = from_lane_each(b_dt, q, LANES, PTX)
                    u_q = from_lane_each(b_u, q, LANES, PTX)
                    dv_q = from_lane_each(b_dv, q, LANES, PTX)
                    g = ()
                    new_r = ()
                    rh = ()
                    for i in tl.static_range(STATES):
                        b_g = row_c[i] * dv_q[i // NT] + r[i]
                        b_r = decay_of(dt_q[i // NT] * a[i], PRECISE, NEGATIVE) * b_g
                        g += (b_g,)
                        new_r += (b_r,)
                        # the derivative of the decay is the decay, or one more than it if NEGATIVE
                        rh += ((b_r + b_g if NEGATIVE else b_r) * h_before[i],)
                    r = new_r
                    v_terms = dot_each(row_c, h, NT) + v_terms
                    du_terms = dot_each(row_b, g, NT) + du_terms
                    ddt_terms = dot_each(a, rh, NT) + ddt_terms
                    sum_a = multiply_add_each(sum_a, rh, dt_q, NT)
                    terms = ()
                    if b_stride_t is not None:
                        terms += sum_channels_each(g, u_q, NT)
                    else:
                        sum_b = multiply_add_each(sum_b, g, u_q, NT)
                    if c_stride_t is not None:
                        terms += sum_channels_each(h, dv_q, NT)
                    else:
                        sum_c = multiply_add_each(sum_c, h, dv_q, NT)
                    if NUM > 0:
                        map_sums += sum_channels_of_warp(terms, o_e, NUM, LANES, PTX)
                o_t = t_group + k * LANES + o_q
                new_bias = ()
                new_skip = ()
                for c in tl.static_range(CHANNELS):
                    o_out = i_b * T * D + o_d[c]
                    if z is not None:
                        b_v = sum_lanes_of_steps(v_terms, c, CHANNELS, o_e, LANES, PTX) + b_skip[c] * b_x[c]
                        store(at_step(dz + o_out, o_t, D, PTX), b_dgate[c] * b_v, m_d[c] & m_t, PTX)
                    b_du = sum_lanes_of_steps(du_terms, c, CHANNELS, o_e, LANES, PTX)
                    b_ddt = sum_lanes_of_steps(ddt_terms, c, CHANNELS, o_e, LANES, PTX) / SCALE + b_du * b_x[c]
                    if SOFTPLUS:
                        b_ddt *= sigmoid(steps_dt[k * CHANNELS + c].to(tl.float32) + b_bias[c], PRECISE)
                    b_ddt = tl.where(m_t, b_ddt, 0.0)
                    new_bias += (sum_bias[c] + b_ddt,)
                    new_skip += (sum_skip[c] + b_dv[c] * b_x[c],)
                    store(at_step(ddt + o_out, o_t, D, PTX), b_ddt, m_d[c] & m_t, PTX)
                    store(at_step(dx + o_out, o_t, D, PTX), b_du * b_dt[c] + b_skip[c] * b_dv[c], m_d[c] & m_t, PTX)
                sum_bias, sum_skip = new_bias, new_skip
            if NUM > 0 and PTX:
                p_sums = partial + ((i_d * (num_rows // splits) + i_b) * T + t_group) * WIDTH
                for i in tl.static_range(LEFT):
                    step_sums = ()
                    for j in tl.static_range(STEPS):
                        step_sums += (map_sums[(STEPS - 1 - j) * LEFT + i],)
                    # with several warps each warp stores other steps
                    step_sums = sum_warps(step_sums, o_e, t_group // STEPS % 2, E // 32)
                    o_w = o_e // 32 % (STEPS // len(step_sums)) * len(step_sums)
                    for j in tl.static_range(len(step_sums)):
                        p_sum = p_sums + (o_w + j) * WIDTH + column_of_sum(o_e % 32, i, NUM, LEFT, NT, LANES)
                        store(p_sum, step_sums[j], t_group + o_w + j < t_last, PTX)
            elif NUM > 0:
                p_sums = partial + ((i_d * (num_rows // splits) + i_b) * T + t_group) * WIDTH
                o_lane = tl.arange(0, 32)
                o_k = tl.arange(0, STEPS)
                for i in tl.static_range(LEFT):
                    step_sums = ()
                    for j in tl.static_range(STEPS):
                        step_sums += (map_sums[(STEPS - 1 - j) * LEFT + i],)
                    b_sums = tl.sum(tl.reshape(join_steps(step_sums, STEPS), [E // 32, 32, STEPS]), 0)
                    p_sum = p_sums + o_k[None, :] * WIDTH + column_of_sum(o_lane, i, NUM, LEFT, NT, LANES)[:, None]
                    tl.store(p_sum, b_sums, mask=(t_group + o_k < t_last)[None, :])
            h = next_h
            t_group = t_next

        # sums over chunks are added in memory: they take no registers, and sums of fewer terms lose less
        m_more = i_c + 0 * o_e > 0
        o_c = opaque_int32_each(o_d, PTX)
        p_totals = totals + (i_b * splits + i_s) * (N + 2) * D
        store_or_add_states(p_totals, D, sum_a, m_more, o_c, m_d, o_n, N, NT, PTX)
        if b_stride_t is None:
            store_or_add_states(dB + o_segment, D, sum_b, m_more, o_c, m_d, o_n, N, NT, PTX)
        if c_stride_t is None:
            store_or_add_states(dC + o_segment, D, sum_c, m_more, o_c, m_d, o_n, N, NT, PTX)

    p_sum = totals + (i_b * splits + i_s) * (N + 2) * D + N * D
    store_channel_sums(p_sum, sum_bias, o_d, m_d, o_q, LANES, PTX)
    store_channel_sums(p_sum + D, sum_skip, o_d, m_d, o_q, LANES, PTX)
    if dinitial is not None:
        m_first = and_each(m_d, i_s + 0 * o_e == 0)
        store_states(dinitial + i_b * D * N, N, 1, r, o_d, m_first, o_n, N, NT, PTX)


def _empty_dense(x: Tensor) -> Tensor:
    """An empty contiguous tensor like x."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@functools.lru_cache(512)
def _backward_plan(plan: Plan, matrix: bool, dy_strides: tuple[int, int]) -> tuple[Any, LaunchPlan]:
    """The kernel and its launch. matrix: whether it is the one on the matrix units."""
    division = plan.backward_division
    kernel: Any = _scan_bwd_kernel
    constants = division.constants | plan.map_constants | {"NEGATIVE": plan.negative}
    if matrix:
        kernel, constants = _scan_bwd_matrix_kernel, division.matrix_constants() | {"KEPT": plan.tuning.kept_steps}
    constants |= {"CHUNK": plan.tuning.chunk, "SOFTPLUS": plan.softplus}
    sizes = plan.sizes(division, "x", "dt", "z") | {"dy_stride_b": dy_strides[0], "dy_stride_t": dy_strides[1]}
    return kernel, LaunchPlan(division.programs, **sizes, **constants)


@Replayed
def scan_backward(
    tensors: tuple[Any, ...],
    plan: Plan,
    b_dtype: torch.dtype,
    c_dtype: torch.dtype,
    initial_dtype: torch.dtype | None,
) -> tuple[Tensor | None, ...]:
    """Gradients of x, dt, A, B, C, skip, z, bias and initial state; None for what was not given.

    tensors: x, dt, A, B, C, skip, z and bias as they were given to `scan_forward`, the chunks that it kept, dy
             [batch, T, D] with contiguous channels, and the gradient of the final state [batch, D, N], contiguous.
    plan:    that of `scan_forward`.   b_dtype, c_dtype, initial_dtype: of the gradients of B, C and the initial state.
    """
    x, dt, A, B, C, skip, z, bias, chunks, dy, dfinal = tensors
    inputs = ScanInputs(x, dt, A, words(B), words(C), skip, z, bias, plan)
    (batch, length, width), num_states, division = plan.shape, plan.num_states, plan.backward_division
    dy_strides = time_strides(dy)
    matrix = plan.matrix and division.fits_matrix and not (address(dy) & 3 or (dy_strides[0] | dy_strides[1]) & 1)
    floats = functools.partial(torch.empty, dtype=torch.float32, device=x.device)
    segments = batch * division.splits
    totals = floats(segments, num_states + 2, width)
    columns = plan.padded * sum(plan.in_time)
    parts = floats(cdiv(width, division.block_d), batch * length, columns) if columns else None
    groups = plan.tuning.chunk // division.constants["STEPS"]
    # so many float32 elements are stored for each channel
    kept = groups * (plan.padded + 8) if matrix else (groups - 1) * plan.padded
    scratch = floats(division.programs * division.block_d * kept)
    after = dfinal
    if division.splits > 1:
        after, total_dt = floats(batch, division.splits, num_states, width), floats(batch, division.splits, width)
        gradients_behind_segments(inputs, dy, dfinal, after, total_dt)

    dx, ddt = _empty_dense(x), _empty_dense(dt)
    dz = None if z is None else _empty_dense(z)
    dB_totals, dC_totals = [
        None if in_time else floats(batch, division.splits, num_states, width) for in_time in plan.in_time
    ]
    dinitial = None
    if initial_dtype is not None:
        dinitial = torch.empty(batch, width, num_states, dtype=initial_dtype, device=x.device)

    kernel, launch_plan = _backward_plan(plan, matrix, dy_strides)
    of_maps = {} if matrix else {"dB": dB_totals, "dC": dC_totals}
    launch(
        kernel, launch_plan, x=x, dt=dt, A=A, B=inputs.B, C=inputs.C, skip=skip, z=z, bias=bias, chunks=chunks, dy=dy,
        after=after, dx=dx, ddt=ddt, dz=dz, totals=totals, **of_maps, partial=parts, dinitial=dinitial, scratch=scratch,
    )  # fmt: skip
    dA, dB, dC, dskip, dbias = add_sums(inputs, parts, totals, b_dtype, c_dtype)
    if dB_totals is not None:
        dB = dB_totals.sum((0, 1)).t().to(b_dtype)
    if dC_totals is not None:
        dC = dC_totals.sum((0, 1)).t().to(c_dtype)
    return dx, ddt, dA, dB, dC, dskip, dz, dbias, dinitial
