"""The backward kernels and their launcher."""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import cdiv, launch, speaks_ptx
from kernels.selective_scan.triton.arithmetic import (
    LOG2E,
    _add,
    _advance,
    _both,
    _decay,
    _dots,
    _in_float32,
    _over_channels,
    _products,
    _scaled,
    _sigmoid,
    _step_sizes,
    _sums,
    _zeros,
)
from kernels.selective_scan.triton.lanes import (
    _column,
    _hidden,
    _hidden_offsets,
    _of_step,
    _over_warps,
    _side_by_side,
    _sum_channels,
    _to_lanes,
)
from kernels.selective_scan.triton.memory import (
    _add_states,
    _at,
    _at_channels,
    _in_time,
    _keep,
    _kept,
    _load_channels,
    _load_states,
    _load_steps,
    _place,
    _store1,
    _store_states,
    _store_totals,
)
from kernels.selective_scan.triton.plan import Tuning, _padded, _plan, _strides
from kernels.selective_scan.triton.rows import Maps, _hold, _load_held, _row
from kernels.selective_scan.triton.segments import _pass
from kernels.sums import COLUMNS, ROWS, column_sums


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
    """ends [B, splits, N, D]: r_t = exp(dt_t A) (C_t dp_t + r_{t+1}) at the first step of a segment, from zero.

    Of all segments but the first, behind which nothing comes.
    total_dt [B, splits, D].
    """
    E: tl.constexpr = BLOCK_D // CHANNELS * LANES
    PRECISE: tl.constexpr = PTX and dt.dtype.element_ty == tl.float32
    SCALE: tl.constexpr = 1.0 if PRECISE else LOG2E
    NP: tl.constexpr = NT * LANES
    B_WORDS: tl.constexpr = NP // (2 if PACKED else 1) * (b_stride_t is not None)
    C_WORDS: tl.constexpr = NP // (2 if PACKED else 1) * (c_stride_t is not None)
    WORDS: tl.constexpr = B_WORDS + C_WORDS
    HELD: tl.constexpr = SHUFFLE and WORDS > 0
    _, i_s, i_b, o_e, o_q, o_n, o_d, m_d = _place(D, splits, BLOCK_D, NT, LANES, CHANNELS)
    if i_s == 0:
        return
    t_first = i_s * segment
    t_last = tl.minimum(t_first + segment, T)
    p_dt = _at_channels(dt + i_b * dt_stride_b, o_d)
    p_dy = _at_channels(dy + i_b * dy_stride_b, o_d)
    p_z = p_dy
    if z is not None:
        p_z = _at_channels(z + i_b * z_stride_b, o_d)
    p_b = _in_time(B, b_stride_b, b_stride_t, i_b)
    p_c = _in_time(C, c_stride_b, c_stride_t, i_b)
    p_held = _hold(p_b, p_c, o_e, B_WORDS, C_WORDS) if HELD else ()
    a = _scaled(_load_states(A, N, 1, o_d, m_d, o_n, N, NT, PTX), SCALE)
    r = _zeros(CHANNELS * NT, E)
    row_c = a
    if c_stride_t is None:
        row_c = _load_states(C, N, 1, o_d, m_d, o_n, N, NT, PTX)
    b_bias = _load_channels(bias, o_d, E)
    b_total = _zeros(CHANNELS, E)

    t = t_first + (t_last - 1 - t_first) // STEPS * STEPS
    next_dt = _load_steps(p_dt, dt_stride_t, t, t_last, o_q, STEPS, LANES, PTX)
    next_dy = _load_steps(p_dy, dy_stride_t, t, t_last, o_q, STEPS, LANES, PTX)
    next_z = next_dy
    if z is not None:
        next_z = _load_steps(p_z, z_stride_t, t, t_last, o_q, STEPS, LANES, PTX)
    next_held = next_dy
    if HELD:
        next_held = _load_held(p_held, o_e, t, t_last, WORDS, STEPS, PTX)
    for _ in range(tl.cdiv(t_last - t_first, STEPS)):
        steps_dt, steps_dy, steps_z, held = next_dt, next_dy, next_z, next_held
        t_next = tl.maximum(t - STEPS, t_first)
        next_dt = _load_steps(p_dt, dt_stride_t, t_next, t_last, o_q, STEPS, LANES, PTX)
        next_dy = _load_steps(p_dy, dy_stride_t, t_next, t_last, o_q, STEPS, LANES, PTX)
        if z is not None:
            next_z = _load_steps(p_z, z_stride_t, t_next, t_last, o_q, STEPS, LANES, PTX)
        if HELD:
            next_held = _load_held(p_held, o_e, t_next, t_last, WORDS, STEPS, PTX)
        for k in tl.static_range(STEPS // LANES - 1, -1, -1):
            m_t = t + k * LANES + o_q < t_last
            b_dt = _step_sizes(steps_dt[k * CHANNELS : (k + 1) * CHANNELS], b_bias, m_t, SOFTPLUS, PRECISE)
            b_total = _sums(b_total, b_dt)
            b_dp = ()
            for c in tl.static_range(CHANNELS):
                b_dp_c = tl.where(m_t, steps_dy[k * CHANNELS + c].to(tl.float32), 0.0)
                if z is not None:
                    b_z = steps_z[k * CHANNELS + c].to(tl.float32)
                    b_dp_c *= b_z * _sigmoid(b_z, PRECISE)
                b_dp += (b_dp_c,)
            for q in tl.static_range(LANES - 1, -1, -1):
                if c_stride_t is not None:
                    row_c = _row(
                        held, p_c, t, t_last, k * LANES + q, o_n, B_WORDS,
                        PACKED, WORDS, STEPS, NT, CHANNELS, HELD, PTX,
                    )  # fmt: skip
                dt_q, dp_q = _of_step(b_dt, q, LANES, PTX), _of_step(b_dp, q, LANES, PTX)
                new_r = ()
                for i in tl.static_range(CHANNELS * NT):
                    new_r += (_decay(dt_q[i // NT] * a[i], PRECISE) * (row_c[i] * dp_q[i // NT] + r[i]),)
                r = new_r
        t = t_next

    _store_states(ends + (i_b * splits + i_s) * N * D, 1, D, r, o_d, m_d, o_n, N, NT, PTX)
    _store_totals(total_dt + (i_b * splits + i_s) * D, b_total, o_d, m_d, o_q, LANES, PTX)


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
    PTX: tl.constexpr,
):  # fmt: skip
    """Gradients over one segment, in reverse, with g_t and r_t as in the module's docstring:

        dB_t[n] = sum_d dt_t x_t g_t[n];   dC_t[n] = sum_d dp_t h_t[n];   du_t = sum_n B_t[n] g_t[n],   u = dt x
        dx_t = dt_t du_t + D dp_t;   dz_t = dy_t silu'(z_t) y_t;   dA[n] = sum_t dt_t r_t[n] h_{t-1}[n]
        ddt_t = x_t du_t + sum_n A[n] r_t[n] h_{t-1}[n], through softplus

    after:      r behind the segment; with several segments [B, splits, N, D], with one [B, D, N]; None is zero.
    totals:     [B, splits, N + 2, D], dA and the gradients of bias and skip.
    dB, dC:     [B, splits, N, D] where B and C do not depend on time, else None.
    partial:    [D / BLOCK_D, B T, NP or 2 NP], sums over BLOCK_D channels of dB_t and dC_t.
    scratch:    [programs, CHUNK / STEPS - 1, NT CHANNELS, E].
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
    NUM: tl.constexpr = WIDTH // LANES
    LEFT: tl.constexpr = NUM * LANES // 32 if NUM * LANES > 32 else 1
    i_d, i_s, i_b, o_e, o_q, o_n, o_d, m_d = _place(D, splits, BLOCK_D, NT, LANES, CHANNELS)
    num_rows = tl.num_programs(0) // tl.cdiv(D, BLOCK_D)
    o_segment = (i_b * splits + i_s) * N * D
    t_first = i_s * segment
    t_last = tl.minimum(t_first + segment, T)
    p_x = _at_channels(x + i_b * x_stride_b, o_d)
    p_dt = _at_channels(dt + i_b * dt_stride_b, o_d)
    p_dy = _at_channels(dy + i_b * dy_stride_b, o_d)
    p_z = p_dy
    if z is not None:
        p_z = _at_channels(z + i_b * z_stride_b, o_d)
    p_b = _in_time(B, b_stride_b, b_stride_t, i_b)
    p_c = _in_time(C, c_stride_b, c_stride_t, i_b)
    p_held = _hold(p_b, p_c, o_e, B_WORDS, C_WORDS) if HELD else ()

    a = _scaled(_load_states(A, N, 1, o_d, m_d, o_n, N, NT, PTX), SCALE)
    r = _zeros(STATES, E)
    if after is not None:
        if splits > 1:
            r = _load_states(after + o_segment, 1, D, o_d, m_d, o_n, N, NT, PTX)
        else:
            r = _load_states(after + i_b * D * N, N, 1, o_d, m_d, o_n, N, NT, PTX)
    row_b = a
    if b_stride_t is None:
        row_b = _load_states(B, N, 1, o_d, m_d, o_n, N, NT, PTX)
    row_c = a
    if c_stride_t is None:
        row_c = _load_states(C, N, 1, o_d, m_d, o_n, N, NT, PTX)
    b_bias = _load_channels(bias, o_d, E)
    b_skip = _load_channels(skip, o_d, E)

    # the states before the groups of a chunk, but for the last; each lane reads what it wrote
    p_scratch = scratch + tl.program_id(0).to(tl.int64) * (SLOTS * STATES * E) + o_e
    t_group = t_first + (t_last - 1 - t_first) // STEPS * STEPS
    sum_bias = _zeros(CHANNELS, E)
    sum_skip = _zeros(CHANNELS, E)
    next_dy = _load_steps(p_dy, dy_stride_t, t_group, t_last, o_q, STEPS, LANES, PTX)
    next_z = next_dy
    if z is not None:
        next_z = _load_steps(p_z, z_stride_t, t_group, t_last, o_q, STEPS, LANES, PTX)
    num_chunks = tl.cdiv(t_last - t_first, CHUNK)
    for i_c in range(num_chunks):
        t_chunk = t_first + (num_chunks - 1 - i_c) * CHUNK
        p_chunk = chunks + (i_b * tl.cdiv(T, CHUNK) + t_chunk // CHUNK) * N * D
        h = _load_states(p_chunk, 1, D, _hidden_offsets(o_d, PTX), m_d, o_n, N, NT, PTX)
        num_groups = tl.cdiv(tl.minimum(t_last - t_chunk, CHUNK), STEPS)
        sum_a = _zeros(STATES, E)
        sum_b = _zeros(STATES if b_stride_t is None else 0, E)
        sum_c = _zeros(STATES if c_stride_t is None else 0, E)

        next_x = _load_steps(p_x, x_stride_t, t_chunk, t_last, o_q, STEPS, LANES, PTX)
        next_dt = _load_steps(p_dt, dt_stride_t, t_chunk, t_last, o_q, STEPS, LANES, PTX)
        next_held = next_x
        if HELD:
            next_held = _load_held(p_held, o_e, t_chunk, t_last, WORDS, STEPS, PTX)
        for t in range(t_chunk, t_chunk + (num_groups - 1) * STEPS, STEPS):
            steps_x, steps_dt, held = next_x, next_dt, next_held
            next_x = _load_steps(p_x, x_stride_t, t + STEPS, t_last, o_q, STEPS, LANES, PTX)
            next_dt = _load_steps(p_dt, dt_stride_t, t + STEPS, t_last, o_q, STEPS, LANES, PTX)
            if HELD:
                next_held = _load_held(p_held, o_e, t + STEPS, t_last, WORDS, STEPS, PTX)
            _keep(p_scratch + (t - t_chunk) // STEPS * (STATES * E), h, E, PTX)
            for k in tl.static_range(STEPS // LANES):
                b_x = _in_float32(steps_x[k * CHANNELS : (k + 1) * CHANNELS])
                m_t = t + k * LANES + o_q < t_last
                b_dt = _step_sizes(steps_dt[k * CHANNELS : (k + 1) * CHANNELS], b_bias, m_t, SOFTPLUS, PRECISE)
                b_u = _products(b_dt, b_x)
                for q in tl.static_range(LANES):
                    if b_stride_t is not None:
                        row_b = _row(
                            held, p_b, t, t_last, k * LANES + q, o_n, 0,
                            PACKED, WORDS, STEPS, NT, CHANNELS, HELD, PTX,
                        )  # fmt: skip
                    h = _advance(h, a, _of_step(b_dt, q, LANES, PTX), _of_step(b_u, q, LANES, PTX), row_b, NT, PRECISE)

        if not PTX:
            tl.debug_barrier()
        for i_g in range(num_groups):
            # the state before the next group, wanted after this one
            p_before = p_scratch + tl.maximum(num_groups - 2 - i_g, 0) * (STATES * E)
            next_h = _kept(p_before, STATES, E, PTX)
            steps_x = _load_steps(p_x, x_stride_t, t_group, t_last, o_q, STEPS, LANES, PTX)
            steps_dt = _load_steps(p_dt, dt_stride_t, t_group, t_last, o_q, STEPS, LANES, PTX)
            steps_dy, steps_z = next_dy, next_z
            t_next = tl.maximum(t_group - STEPS, t_first)
            next_dy = _load_steps(p_dy, dy_stride_t, t_next, t_last, o_q, STEPS, LANES, PTX)
            if z is not None:
                next_z = _load_steps(p_z, z_stride_t, t_next, t_last, o_q, STEPS, LANES, PTX)
            held = steps_x
            if HELD:
                held = _load_held(p_held, o_e, t_group, t_last, WORDS, STEPS, PTX)
            states = h
            sizes = ()
            for k in tl.static_range(STEPS // LANES):
                m_t = t_group + k * LANES + o_q < t_last
                b_dt = _step_sizes(steps_dt[k * CHANNELS : (k + 1) * CHANNELS], b_bias, m_t, SOFTPLUS, PRECISE)
                b_u = _products(b_dt, _in_float32(steps_x[k * CHANNELS : (k + 1) * CHANNELS]))
                sizes += b_dt
                for q in tl.static_range(LANES):
                    if b_stride_t is not None:
                        row_b = _row(
                            held, p_b, t_group, t_last, k * LANES + q, o_n, 0,
                            PACKED, WORDS, STEPS, NT, CHANNELS, HELD, PTX,
                        )  # fmt: skip
                    h = _advance(h, a, _of_step(b_dt, q, LANES, PTX), _of_step(b_u, q, LANES, PTX), row_b, NT, PRECISE)
                    states += h

            sizes = _hidden(sizes, PTX)
            if HELD:
                held = _hidden(held, PTX)
            reversed_sums = ()
            for k in tl.static_range(STEPS // LANES - 1, -1, -1):
                m_t = t_group + k * LANES + o_q < t_last
                b_dt = sizes[k * CHANNELS : (k + 1) * CHANNELS]
                b_x = _in_float32(steps_x[k * CHANNELS : (k + 1) * CHANNELS])
                b_u = _products(b_dt, b_x)
                b_dp = ()
                b_gate = ()
                for c in tl.static_range(CHANNELS):
                    b_dy = tl.where(m_d[c] & m_t, steps_dy[k * CHANNELS + c].to(tl.float32), 0.0)
                    if z is not None:
                        b_z = steps_z[k * CHANNELS + c].to(tl.float32)
                        b_sigmoid = _sigmoid(b_z, PRECISE)
                        b_gate += (b_dy * (b_sigmoid * (1.0 + b_z * (1.0 - b_sigmoid))),)
                        b_dy *= b_z * b_sigmoid
                    b_dp += (b_dy,)
                # the latest step is added in front; Triton knows no unpacking
                outputs = ()
                of_u = ()
                of_dt = ()
                for q in tl.static_range(LANES - 1, -1, -1):
                    if b_stride_t is not None:
                        row_b = _row(
                            held, p_b, t_group, t_last, k * LANES + q, o_n, 0,
                            PACKED, WORDS, STEPS, NT, CHANNELS, HELD, PTX,
                        )  # fmt: skip
                    if c_stride_t is not None:
                        row_c = _row(
                            held, p_c, t_group, t_last, k * LANES + q, o_n, B_WORDS,
                            PACKED, WORDS, STEPS, NT, CHANNELS, HELD, PTX,
                        )  # fmt: skip
                    before = states[(k * LANES + q) * STATES : (k * LANES + q + 1) * STATES]
                    h = states[(k * LANES + q + 1) * STATES : (k * LANES + q + 2) * STATES]
                    dt_q = _of_step(b_dt, q, LANES, PTX)
                    u_q = _of_step(b_u, q, LANES, PTX)
                    dp_q = _of_step(b_dp, q, LANES, PTX)
                    g = ()
                    new_r = ()
                    products = ()
                    for i in tl.static_range(STATES):
                        b_g = row_c[i] * dp_q[i // NT] + r[i]
                        b_r = _decay(dt_q[i // NT] * a[i], PRECISE) * b_g
                        g += (b_g,)
                        new_r += (b_r,)
                        products += (b_r * before[i],)
                    r = new_r
                    outputs = _dots(row_c, h, NT) + outputs
                    of_u = _dots(row_b, g, NT) + of_u
                    of_dt = _dots(a, products, NT) + of_dt
                    sum_a = _add(sum_a, products, dt_q, NT)
                    values = ()
                    if b_stride_t is not None:
                        values += _over_channels(g, u_q, NT)
                    else:
                        sum_b = _add(sum_b, g, u_q, NT)
                    if c_stride_t is not None:
                        values += _over_channels(h, dp_q, NT)
                    else:
                        sum_c = _add(sum_c, h, dp_q, NT)
                    if NUM > 0:
                        reversed_sums += _sum_channels(values, o_e, NUM, LANES, PTX)
                o_t = t_group + k * LANES + o_q
                new_bias = ()
                new_skip = ()
                for c in tl.static_range(CHANNELS):
                    o_out = i_b * T * D + o_d[c]
                    if z is not None:
                        b_y = _to_lanes(outputs, c, CHANNELS, o_e, LANES, PTX) + b_skip[c] * b_x[c]
                        _store1(_at(dz + o_out, o_t, D, PTX), b_gate[c] * b_y, m_d[c] & m_t, PTX)
                    b_du = _to_lanes(of_u, c, CHANNELS, o_e, LANES, PTX)
                    b_ddt = _to_lanes(of_dt, c, CHANNELS, o_e, LANES, PTX) / SCALE + b_du * b_x[c]
                    if SOFTPLUS:
                        b_ddt *= _sigmoid(steps_dt[k * CHANNELS + c].to(tl.float32) + b_bias[c], PRECISE)
                    b_ddt = tl.where(m_t, b_ddt, 0.0)
                    new_bias += (sum_bias[c] + b_ddt,)
                    new_skip += (sum_skip[c] + b_dp[c] * b_x[c],)
                    _store1(_at(ddt + o_out, o_t, D, PTX), b_ddt, m_d[c] & m_t, PTX)
                    _store1(_at(dx + o_out, o_t, D, PTX), b_du * b_dt[c] + b_skip[c] * b_dp[c], m_d[c] & m_t, PTX)
                sum_bias, sum_skip = new_bias, new_skip
            if NUM > 0 and PTX:
                p_sums = partial + ((i_d * (num_rows // splits) + i_b) * T + t_group) * WIDTH
                for i in tl.static_range(LEFT):
                    of_steps = ()
                    for j in tl.static_range(STEPS):
                        of_steps += (reversed_sums[(STEPS - 1 - j) * LEFT + i],)
                    # of one warp all steps, of several each another
                    of_steps = _over_warps(of_steps, o_e, t_group // STEPS % 2, E // 32)
                    o_w = o_e // 32 % (STEPS // len(of_steps)) * len(of_steps)
                    for j in tl.static_range(len(of_steps)):
                        p_sum = p_sums + (o_w + j) * WIDTH + _column(o_e % 32, i, NUM, LEFT, NT, LANES)
                        _store1(p_sum, of_steps[j], t_group + o_w + j < t_last, PTX)
            elif NUM > 0:
                p_sums = partial + ((i_d * (num_rows // splits) + i_b) * T + t_group) * WIDTH
                o_l = tl.arange(0, 32)
                o_k = tl.arange(0, STEPS)
                for i in tl.static_range(LEFT):
                    of_steps = ()
                    for j in tl.static_range(STEPS):
                        of_steps += (reversed_sums[(STEPS - 1 - j) * LEFT + i],)
                    b_sums = tl.sum(tl.reshape(_side_by_side(of_steps, STEPS), [E // 32, 32, STEPS]), 0)
                    p_sum = p_sums + o_k[None, :] * WIDTH + _column(o_l, i, NUM, LEFT, NT, LANES)[:, None]
                    tl.store(p_sum, b_sums, mask=(t_group + o_k < t_last)[None, :])
            h = next_h
            t_group = t_next

        # sums of chunks are added in memory: fewer terms in a row, and no registers
        m_more = i_c + 0 * o_e > 0
        o_c = _hidden_offsets(o_d, PTX)
        p_totals = totals + (i_b * splits + i_s) * (N + 2) * D
        _add_states(p_totals, D, sum_a, m_more, o_c, m_d, o_n, N, NT, PTX)
        if b_stride_t is None:
            _add_states(dB + o_segment, D, sum_b, m_more, o_c, m_d, o_n, N, NT, PTX)
        if c_stride_t is None:
            _add_states(dC + o_segment, D, sum_c, m_more, o_c, m_d, o_n, N, NT, PTX)

    p_sum = totals + (i_b * splits + i_s) * (N + 2) * D + N * D
    _store_totals(p_sum, sum_bias, o_d, m_d, o_q, LANES, PTX)
    _store_totals(p_sum + D, sum_skip, o_d, m_d, o_q, LANES, PTX)
    if dinitial is not None:
        m_first = _both(m_d, i_s + 0 * o_e == 0)
        _store_states(dinitial + i_b * D * N, N, 1, r, o_d, m_first, o_n, N, NT, PTX)


@triton.jit(do_not_specialize=["rows", "num_d"])
def _add_parts_kernel(
    partial, dB, dC, rows, num_d, N: tl.constexpr, NP: tl.constexpr, BLOCK: tl.constexpr, TOGETHER: tl.constexpr
):
    """dB, dC [rows, N] from the num_d parts of their sums, TOGETHER of them in flight; None is left out."""
    o_r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    o_n = tl.arange(0, NP)
    m = (o_r < rows)[:, None] & (o_n < N)[None, :]
    WIDTH: tl.constexpr = NP * ((dB is not None) + (dC is not None))
    p = partial + o_r[:, None] * WIDTH + o_n[None, :]
    b_first = tl.zeros([BLOCK, NP], tl.float32)
    b_second = tl.zeros([BLOCK, NP], tl.float32)
    for i in range(0, num_d, TOGETHER):
        for j in tl.static_range(TOGETHER):
            m_j = m & (i + j + 0 * o_n < num_d)[None, :]
            b_first += tl.load(p, mask=m_j, other=0.0)
            if WIDTH > NP:
                b_second += tl.load(p + NP, mask=m_j, other=0.0)
            p += rows.to(tl.int64) * WIDTH
    o_out = o_r[:, None] * N + o_n[None, :]
    if dB is not None:
        tl.store(dB + o_out, b_first.to(dB.dtype.element_ty), mask=m)
    if dC is not None:
        b_last = b_second if WIDTH > NP else b_first
        tl.store(dC + o_out, b_last.to(dC.dtype.element_ty), mask=m)


@triton.jit
def _add_totals_kernel(
    totals, dA, dbias, dskip, rows, D, N: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """dA [D, N], dbias and dskip [D] from totals [rows, N + 2, D]."""
    i_n = tl.program_id(0) % (N + 2)
    o_d = tl.program_id(0) // (N + 2) * BLOCK_D + tl.arange(0, BLOCK_D)
    m_d = o_d < D
    b_sum = column_sums(totals, i_n * D + o_d, m_d, rows, (N + 2) * D, ROWS)
    if i_n < N:
        tl.store(dA + o_d * N + i_n, b_sum.to(dA.dtype.element_ty), mask=m_d)
    elif i_n == N:
        if dbias is not None:
            tl.store(dbias + o_d, b_sum.to(dbias.dtype.element_ty), mask=m_d)
    else:
        if dskip is not None:
            tl.store(dskip + o_d, b_sum.to(dskip.dtype.element_ty), mask=m_d)


def scan_bwd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    maps: Maps,
    skip: Tensor | None,
    z: Tensor | None,
    bias: Tensor | None,
    softplus: bool,
    chunks: Tensor,
    dy: Tensor,
    dfinal: Tensor | None,
    initial_dtype: torch.dtype | None,
    tuning: Tuning,
) -> tuple[Tensor | None, ...]:
    """Gradients of x, dt, A, B, C, skip, z, bias and initial state."""
    batch, length, width = x.shape
    state, padded = A.shape[1], _padded(A.shape[1])
    plan = _plan(x, state, tuning.backward if speaks_ptx() else tuning.backward_portable, tuning=tuning)
    new = partial(torch.empty, dtype=torch.float32, device=x.device)

    after = dfinal
    if plan.splits > 1:
        after = new((batch, plan.splits, state, width))
        total_dt = new((batch, plan.splits, width))
        ends = _plan(x, state, tuning.backward_ends, tuning=tuning, splits=plan.splits)
        launch(
            _bwd_ends_kernel, ends.programs,
            dt, A, maps.B, maps.C, z, bias, dy, after, total_dt,
            length, width, ends.segment, ends.splits, *maps.strides, *_strides(dt), *_strides(z), *_strides(dy),
            **ends.constants, **maps.constants, SOFTPLUS=softplus,
        )  # fmt: skip
        _pass(A, total_dt, after, dfinal, reverse=True)
        del total_dt

    dx = torch.empty((batch, length, width), dtype=x.dtype, device=x.device)
    ddt = torch.empty((batch, length, width), dtype=dt.dtype, device=x.device)
    dz = None if z is None else torch.empty((batch, length, width), dtype=z.dtype, device=x.device)
    totals = new((batch * plan.splits, state + 2, width))
    dB, dC = (None if in_time else new((batch, plan.splits, state, width)) for in_time in maps.in_time)
    dinitial = (
        None if initial_dtype is None else torch.empty((batch, width, state), dtype=initial_dtype, device=x.device)
    )
    num_d = cdiv(width, plan.block_d)
    new_b, new_c = (
        torch.empty((batch, length, state), dtype=dtype, device=x.device) if in_time else None
        for dtype, in_time in zip(maps.dtypes, maps.in_time, strict=True)
    )
    parts = new((num_d, batch * length, padded * sum(maps.in_time))) if any(maps.in_time) else None
    scratch = new((plan.programs, tuning.chunk // plan.constants["STEPS"] - 1, padded * plan.block_d))
    launch(
        _scan_bwd_kernel, plan.programs,
        x, dt, A, maps.B, maps.C, skip, z, bias, chunks, dy, after,
        dx, ddt, dz, totals, dB, dC, parts, dinitial, scratch,
        length, width, plan.segment, plan.splits, *maps.strides,
        *_strides(x), *_strides(dt), *_strides(z), *_strides(dy),
        **plan.constants, **maps.constants, CHUNK=tuning.chunk, SOFTPLUS=softplus,
    )  # fmt: skip
    del scratch

    if parts is not None:
        block = max(4, 512 // padded)
        launch(
            _add_parts_kernel, cdiv(batch * length, block),
            parts, new_b, new_c, batch * length, num_d,
            N=state, NP=padded, BLOCK=block, TOGETHER=4, num_warps=4,
        )  # fmt: skip
    if dB is not None:
        new_b = dB.sum((0, 1)).t().to(maps.dtypes[0])
    if dC is not None:
        new_c = dC.sum((0, 1)).t().to(maps.dtypes[1])
    dA, dskip, dbias = (None if m is None else torch.empty_like(m) for m in (A, skip, bias))
    launch(
        _add_totals_kernel, (state + 2) * cdiv(width, COLUMNS),
        totals, dA, dbias, dskip, batch * plan.splits, width, N=state, ROWS=ROWS, BLOCK_D=COLUMNS, num_warps=4,
    )  # fmt: skip
    return dx, ddt, dA, new_b, new_c, dskip, dz, dbias, dinitial
