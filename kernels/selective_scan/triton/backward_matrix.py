"""Backward for bfloat16 on the matrix units: the kernel of `backward.py` with the exchanges of `matrix.py`.

The gradient recurrence and the letters are those of `backward.py`. Limits: those of `forward_matrix.py`.
"""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import triton
import triton.language as tl

from subquad.kernels.selective_scan.triton.arithmetic import (
    LOG2E,
    multiply_add_each,
    multiply_each,
    scale_each,
    sigmoid,
    step_size_each,
    sum_channels_each,
    zero_each,
)
from subquad.kernels.selective_scan.triton.channel_sums import (
    add_channel_sums,
    column_of_sum,
    put_terms,
    shared_terms,
    step_of_sum,
    warp_barrier,
)
from subquad.kernels.selective_scan.triton.forward_matrix import locate_pairs
from subquad.kernels.selective_scan.triton.lanes import (
    from_lane_each,
    opaque_each,
    opaque_int32_each,
    sum_lanes_of_steps,
    sum_warps,
)
from subquad.kernels.selective_scan.triton.matrix import (
    ROW,
    dot_step,
    dot_steps,
    load_fours,
    load_outer_words,
    load_pairs,
    load_row_word,
    load_state_pairs,
    outer_each,
    remainder_each,
    shared_four,
    shared_rows,
    shared_two,
    store_fours,
    store_pair,
    store_row_word,
    unpack,
    words_of,
)
from subquad.kernels.selective_scan.triton.memory import (
    at_step,
    load_channels,
    load_states,
    store,
    store_channel_sums,
    store_or_add_states,
    store_states,
)


@triton.jit
def _decays(a, b_dt):
    """2^(dt[c] a[c, n]) for two channels and four states."""
    decay = ()
    for i in tl.static_range(8):
        decay += (tl.exp2(b_dt[i // 4] * a[i]),)
    return decay


@triton.jit
def _dots(row, h):
    """sum_n row[c, n] h[c, n] for two channels and four states."""
    dots = ()
    for c in tl.static_range(2):
        b_dot = row[c * 4] * h[c * 4]
        for n in tl.static_range(1, 4):
            b_dot += row[c * 4 + n] * h[c * 4 + n]
        dots += (b_dot,)
    return dots


@triton.jit
def _next_states(h, decay, added):
    """The recurrence: decay h + added."""
    new_h = ()
    for i in tl.static_range(8):
        new_h += (decay[i] * h[i] + added[i],)
    return new_h


@triton.jit(
    do_not_specialize=[
        "T", "segment", "splits", "b_stride_b", "b_stride_t", "c_stride_b", "c_stride_t",
        "x_stride_b", "x_stride_t", "dt_stride_b", "dt_stride_t", "z_stride_b", "z_stride_t",
        "dy_stride_b", "dy_stride_t",
    ]
)  # fmt: skip
def _scan_bwd_matrix_kernel(
    x, dt, A, B, C, skip, z, bias, chunks, dy, after,
    dx, ddt, dz, totals, partial, dinitial, scratch,
    T, D, segment, splits, b_stride_b, b_stride_t, c_stride_b, c_stride_t,
    x_stride_b, x_stride_t, dt_stride_b, dt_stride_t, z_stride_b, z_stride_t, dy_stride_b, dy_stride_t,
    N: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr, SOFTPLUS: tl.constexpr,
    KEPT: tl.constexpr,
):  # fmt: skip
    """The gradients over one segment of time, for BLOCK_D channels of one batch row; see `_scan_bwd_kernel`.

    scratch: [programs, CHUNK / 8, 12, E], the states before the groups of a chunk (without the last) and step sizes.
    """
    E: tl.constexpr = BLOCK_D * 2
    STEPS: tl.constexpr = 8
    SLOTS: tl.constexpr = CHUNK // STEPS
    i_d, i_s, i_b, o_e, o_q, o_d, m_d = locate_pairs(D, splits, BLOCK_D)
    num_rows = tl.num_programs(0) // tl.cdiv(D, BLOCK_D)
    o_n = o_q * 4
    both = (o_d, o_d + 1)
    masks = (m_d, m_d)
    o_segment = (i_b * splits + i_s) * N * D
    t_first = i_s * segment
    t_last = tl.minimum(t_first + segment, T)
    p_x = words_of(x + i_b * x_stride_b + o_d)
    p_dt = words_of(dt + i_b * dt_stride_b + o_d)
    p_dy = words_of(dy + i_b * dy_stride_b + o_d)
    p_z = p_dy
    p_dz = p_dy
    if z is not None:
        p_z = words_of(z + i_b * z_stride_b + o_d)
        p_dz = words_of(dz + i_b * T * D + o_d)
    p_dx = words_of(dx + i_b * T * D + o_d)
    p_ddt = words_of(ddt + i_b * T * D + o_d)
    p_b = (B + i_b * b_stride_b, b_stride_t)
    p_c = (C + i_b * c_stride_b, c_stride_t)

    a = scale_each(load_states(A, N, 1, both, masks, o_n, N, 4, True), LOG2E)
    r = zero_each(8, E)
    if after is not None:
        if splits > 1:
            r = load_state_pairs(after + o_segment + o_d, D, o_n, m_d, N)
        else:
            r = load_states(after + i_b * D * N, N, 1, both, masks, o_n, N, 4, True)
    b_bias = load_channels(bias, both, E)
    b_skip = load_channels(skip, both, E)

    # every thread reads back only what it wrote itself, so no barrier is needed
    p_scratch = scratch + tl.program_id(0).to(tl.int64) * (SLOTS * 12 * E) + o_e * 4
    t_group = t_first + (t_last - 1 - t_first) // STEPS * STEPS
    sum_bias = zero_each(2, E)
    sum_skip = zero_each(2, E)
    next_dy = load_pairs(p_dy, dy_stride_t // 2, t_group + o_q, t_last, STEPS)
    next_z = next_dy
    if z is not None:
        next_z = load_pairs(p_z, z_stride_t // 2, t_group + o_q, t_last, STEPS)
    p_rows = shared_rows(o_e)
    p_put, p_terms = shared_terms(o_e, E // 32)
    store_row_word(p_rows + t_group // STEPS % 2 * (ROW * 32), o_e, load_row_word(p_b, p_c, o_e, t_group, t_last))
    tl.debug_barrier()
    num_chunks = tl.cdiv(t_last - t_first, CHUNK)
    for i_c in range(num_chunks):
        t_chunk = t_first + (num_chunks - 1 - i_c) * CHUNK
        p_chunk = chunks + (i_b * tl.cdiv(T, CHUNK) + t_chunk // CHUNK) * N * D
        h = load_state_pairs(p_chunk + opaque_int32_each((o_d,), True)[0], D, o_n, m_d, N)
        num_groups = tl.cdiv(tl.minimum(t_last - t_chunk, CHUNK), STEPS)
        sum_a = zero_each(8, E)

        words_x = load_pairs(p_x, x_stride_t // 2, t_chunk + o_q, t_last, STEPS)
        words_dt = load_pairs(p_dt, dt_stride_t // 2, t_chunk + o_q, t_last, STEPS)
        words_b = load_outer_words(p_b, o_e, t_chunk, t_last, STEPS)
        p_slot = p_scratch
        for t in range(t_chunk, t_chunk + (num_groups - 1) * STEPS, STEPS):
            next_x = load_pairs(p_x, x_stride_t // 2, t + STEPS + o_q, t_last, STEPS)
            next_dt = load_pairs(p_dt, dt_stride_t // 2, t + STEPS + o_q, t_last, STEPS)
            next_b = load_outer_words(p_b, o_e, t + STEPS, t_last, STEPS)
            sizes = ()
            states = h
            for k in tl.static_range(2):
                # only the last group may end behind the segment
                b_dt = step_size_each(unpack(words_dt[k]), b_bias, o_q >= 0, SOFTPLUS, False)
                b_u = multiply_each(b_dt, unpack(words_x[k]))
                b_rest = remainder_each(b_u)
                sizes += b_dt
                for q in tl.static_range(4):
                    added = outer_each(b_u, b_rest, unpack(words_b[k]), o_q, q)
                    h = _next_states(h, _decays(a, from_lane_each(b_dt, q, 4, True)), added)
            store_fours(p_slot, states + sizes, E)
            p_slot += 12 * E
            words_x, words_dt, words_b = next_x, next_dt, next_b
        group_dt = ()
        for k in tl.static_range(2):
            m_t = t_chunk + (num_groups - 1) * STEPS + k * 4 + o_q < t_last
            group_dt += step_size_each(unpack(words_dt[k]), b_bias, m_t, SOFTPLUS, False)

        for i_g in range(num_groups):
            # the inputs of the next group in reversed time are loaded while this group is computed
            p_before = p_scratch + tl.maximum(num_groups - 2 - i_g, 0) * (12 * E)
            next_h = load_fours(p_before, 12, E)
            words_dy, words_z = next_dy, next_z
            t_next = tl.maximum(t_group - STEPS, t_first)
            next_x = load_pairs(p_x, x_stride_t // 2, t_next + o_q, t_last, STEPS)
            next_dt = load_pairs(p_dt, dt_stride_t // 2, t_next + o_q, t_last, STEPS)
            next_dy = load_pairs(p_dy, dy_stride_t // 2, t_next + o_q, t_last, STEPS)
            if z is not None:
                next_z = load_pairs(p_z, z_stride_t // 2, t_next + o_q, t_last, STEPS)
            next_row = load_row_word(p_b, p_c, o_e, t_next, t_last)
            p_group = p_rows + t_group // STEPS % 2 * (ROW * 32)
            states = h
            decays = ()
            for k in tl.static_range(2):
                b_dt = (group_dt[2 * k], group_dt[2 * k + 1])
                b_u = multiply_each(b_dt, unpack(words_x[k]))
                b_rest = remainder_each(b_u)
                row = shared_two(p_group + (k * 4 + o_q) * (ROW * 4) + o_e // 4 % 8 * 8)
                for q in tl.static_range(4):
                    added = outer_each(b_u, b_rest, row, o_q, q)
                    decay = _decays(a, from_lane_each(b_dt, q, 4, True))
                    h = _next_states(h, decay, added)
                    states += h
                    if k * 4 + q >= 8 - KEPT:
                        decays += decay

            # below, the values of the pass above are computed again, because registers cannot hold them
            group_dt = opaque_each(group_dt, True)
            dot_row = shared_four(p_group + dot_step(o_e) * (ROW * 4) + 64 + o_q * 16)
            sums = zero_each(8, E)
            v_sums = zero_each(4, E)
            if z is not None:
                for j in tl.static_range(STEPS):
                    v_sums = dot_steps(states[(j + 1) * 8 : (j + 2) * 8], dot_row, v_sums, o_q, j)
            for k in tl.static_range(1, -1, -1):
                o_t = t_group + k * 4 + o_q
                m_t = o_t < t_last
                b_dt = (group_dt[2 * k], group_dt[2 * k + 1])
                b_x = unpack(words_x[k])
                b_u = multiply_each(b_dt, b_x)
                dy_pair = unpack(words_dy[k])
                z_pair = unpack(words_z[k])
                b_dv = ()
                b_dz = ()
                for c in tl.static_range(2):
                    b_dy = tl.where(m_d & m_t, dy_pair[c], 0.0)
                    if z is not None:
                        b_z = z_pair[c]
                        b_sigmoid = sigmoid(b_z, False)
                        b_v = v_sums[k * 2 + c] + b_skip[c] * b_x[c]
                        b_dz += (b_dy * (b_sigmoid * (1.0 + b_z * (1.0 - b_sigmoid))) * b_v,)
                        b_dy *= b_z * b_sigmoid
                    b_dv += (b_dy,)
                if z is not None:
                    store_pair(at_step(p_dz, o_t, D // 2, True), b_dz[0], b_dz[1], m_d & m_t)
                # no lane reads the terms of earlier steps any more
                warp_barrier(o_e)
                # time goes backward, so each step is put in front of the later ones
                du_terms = ()
                ddt_terms = ()
                for q in tl.static_range(3, -1, -1):
                    p_row = p_group + (k * 4 + q) * (ROW * 4) + o_q * 16
                    row_b = shared_four(p_row)
                    row_c = shared_four(p_row + 64)
                    row_b = row_b + row_b
                    row_c = row_c + row_c
                    dt_q = from_lane_each(b_dt, q, 4, True)
                    u_q = from_lane_each(b_u, q, 4, True)
                    dv_q = from_lane_each(b_dv, q, 4, True)
                    if k * 4 + q >= 8 - KEPT:
                        decay = decays[(k * 4 + q - 8 + KEPT) * 8 : (k * 4 + q - 7 + KEPT) * 8]
                    else:
                        decay = _decays(a, dt_q)
                    g = ()
                    new_r = ()
                    rh = ()
                    for n in tl.static_range(8):
                        b_g = row_c[n] * dv_q[n // 4] + r[n]
                        b_r = decay[n] * b_g
                        g += (b_g,)
                        new_r += (b_r,)
                        rh += (b_r * states[(k * 4 + q) * 8 + n],)
                    r = new_r
                    du_terms = _dots(row_b, g) + du_terms
                    ddt_terms = _dots(a, rh) + ddt_terms
                    sum_a = multiply_add_each(sum_a, rh, dt_q, 4)
                    b_terms = sum_channels_each(g, u_q, 4)
                    c_terms = sum_channels_each(states[(k * 4 + q + 1) * 8 : (k * 4 + q + 2) * 8], dv_q, 4)
                    put_terms(p_put, b_terms, c_terms, q)
                warp_barrier(o_e)
                for q in tl.static_range(4):
                    sums = add_channel_sums(p_terms, sums, o_e, k * 4 + q)
                new_bias = ()
                new_skip = ()
                b_dx = ()
                b_ddt = ()
                dt_pair = unpack(words_dt[k])
                for c in tl.static_range(2):
                    b_du = sum_lanes_of_steps(du_terms, c, 2, o_e, 4, True)
                    b_d = sum_lanes_of_steps(ddt_terms, c, 2, o_e, 4, True) / LOG2E + b_du * b_x[c]
                    if SOFTPLUS:
                        b_d *= sigmoid(dt_pair[c] + b_bias[c], False)
                    b_d = tl.where(m_t, b_d, 0.0)
                    new_bias += (sum_bias[c] + b_d,)
                    new_skip += (sum_skip[c] + b_dv[c] * b_x[c],)
                    b_ddt += (b_d,)
                    b_dx += (b_du * b_dt[c] + b_skip[c] * b_dv[c],)
                sum_bias, sum_skip = new_bias, new_skip
                store_pair(at_step(p_ddt, o_t, D // 2, True), b_ddt[0], b_ddt[1], m_d & m_t)
                store_pair(at_step(p_dx, o_t, D // 2, True), b_dx[0], b_dx[1], m_d & m_t)

            # the barrier of the sums also makes the rows of the next group visible
            store_row_word(p_rows + t_next // STEPS % 2 * (ROW * 32), o_e, next_row)
            # the eight sums of a lane, each added over the warps by one of them or by several
            if E > 32:
                sums = sum_warps(sums, o_e, t_group // STEPS % 2, E // 32)
            else:
                tl.debug_barrier()
            p_sums = partial + ((i_d * (num_rows // splits) + i_b) * T + t_group) * 32
            o_w = o_e // 32 % (8 // len(sums)) * len(sums)
            for i in tl.static_range(len(sums)):
                o_t = step_of_sum(o_e % 32, o_w + i)
                store(p_sums + o_t * 32 + column_of_sum(o_e % 32, o_w + i), sums[i], t_group + o_t < t_last, True)
            h = next_h[:8]
            group_dt = next_h[8:]
            words_x, words_dt = next_x, next_dt
            t_group = t_next

        # sums over chunks are added in memory: they take no registers, and sums of fewer terms lose less
        m_more = i_c + 0 * o_e > 0
        o_c = opaque_int32_each(both, True)
        p_totals = totals + (i_b * splits + i_s) * (N + 2) * D
        store_or_add_states(p_totals, D, sum_a, m_more, o_c, masks, o_n, N, 4, True)

    p_sum = totals + (i_b * splits + i_s) * (N + 2) * D + N * D
    store_channel_sums(p_sum, sum_bias, both, masks, o_q, 4, True)
    store_channel_sums(p_sum + D, sum_skip, both, masks, o_q, 4, True)
    if dinitial is not None:
        m_first = m_d & (i_s + 0 * o_e == 0)
        store_states(dinitial + i_b * D * N, N, 1, r, both, (m_first, m_first), o_n, N, 4, True)
