"""Forward for bfloat16 on the matrix units: the kernel of `forward.py` with the exchanges of `matrix.py`.

Limits besides those of `forward.py`: x, dt, z, B and C are bfloat16, B and C depend on time, 8 < N <= 16, D is even,
and pairs of channels lie at multiples of 4 bytes (`ScanCall.matrix`).
"""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.selective_scan.triton.arithmetic import (
    LOG2E,
    add_each,
    multiply_each,
    scale_each,
    sigmoid,
    step_size_each,
    zero_each,
)
from kernels.selective_scan.triton.lanes import from_lane_each
from kernels.selective_scan.triton.matrix import (
    dot_steps,
    load_dot_words,
    load_outer_words,
    load_pairs,
    load_state_pairs,
    outer_each,
    remainder_each,
    store_pair,
    store_state_pairs,
    unpack,
    words_of,
)
from kernels.selective_scan.triton.memory import at_step, load_channels, load_states, store_channel_sums, store_states


@triton.jit
def locate_pairs(D, splits, BLOCK_D: tl.constexpr):
    """`locate` for pairs of neighbouring channels; o_d is the first of a pair, one mask is enough since D is even."""
    num_d = tl.cdiv(D, BLOCK_D)
    i_d = tl.program_id(0) % num_d
    i_s = tl.program_id(0) // num_d % splits
    i_b = (tl.program_id(0) // num_d // splits).to(tl.int64)
    o_e = tl.arange(0, BLOCK_D * 2)
    o_q = o_e % 4
    o_d = i_d * BLOCK_D + o_e // 4 * 2
    m_d = o_d < D
    o_d = tl.minimum(o_d, D - 2)
    return i_d, i_s, i_b, o_e, o_q, o_d, m_d


@triton.jit(
    do_not_specialize=[
        "T", "segment", "splits", "b_stride_b", "b_stride_t", "c_stride_b", "c_stride_t",
        "x_stride_b", "x_stride_t", "dt_stride_b", "dt_stride_t", "z_stride_b", "z_stride_t",
    ]
)  # fmt: skip
def _scan_fwd_matrix_kernel(
    x, dt, A, B, C, skip, z, bias, start, y, end, total_dt, chunks,
    T, D, segment, splits, b_stride_b, b_stride_t, c_stride_b, c_stride_t,
    x_stride_b, x_stride_t, dt_stride_b, dt_stride_t, z_stride_b, z_stride_t,
    N: tl.constexpr, BLOCK_D: tl.constexpr, STEPS: tl.constexpr, CHUNK: tl.constexpr, SOFTPLUS: tl.constexpr,
):  # fmt: skip
    """The recurrence over one segment of time, for BLOCK_D channels of one batch row; see `_scan_fwd_kernel`."""
    E: tl.constexpr = BLOCK_D * 2
    _, i_s, i_b, o_e, o_q, o_d, m_d = locate_pairs(D, splits, BLOCK_D)
    # no segment starts from the end of the last one
    if y is None:  # noqa: SIM102
        if i_s == splits - 1:
            return
    o_n = o_q * 4
    both = (o_d, o_d + 1)
    masks = (m_d, m_d)
    t_first = i_s * segment
    t_last = tl.minimum(t_first + segment, T)
    p_x = words_of(x + i_b * x_stride_b + o_d)
    p_dt = words_of(dt + i_b * dt_stride_b + o_d)
    # here and below, a variable that this variant does not use gets another one's value: Triton wants all defined
    p_y = p_x
    p_z = p_x
    if y is not None:
        p_y = words_of(y + i_b * T * D + o_d)
        if z is not None:
            p_z = words_of(z + i_b * z_stride_b + o_d)
    p_b = (B + i_b * b_stride_b, b_stride_t)
    p_c = (C + i_b * c_stride_b, c_stride_t)
    o_segment = (i_b * splits + i_s) * N * D

    a = scale_each(load_states(A, N, 1, both, masks, o_n, N, 4, True), LOG2E)
    h = zero_each(8, E)
    if start is not None:
        if splits > 1:
            h = load_state_pairs(start + o_segment + o_d, D, o_n, m_d, N)
        else:
            h = load_states(start + i_b * D * N, N, 1, both, masks, o_n, N, 4, True)
    b_bias = load_channels(bias, both, E)
    b_skip = load_channels(skip, both, E)
    b_total = zero_each(2, E)

    t = t_first + o_q
    next_x = load_pairs(p_x, x_stride_t // 2, t, t_last, STEPS)
    next_dt = load_pairs(p_dt, dt_stride_t // 2, t, t_last, STEPS)
    next_b = load_outer_words(p_b, o_e, t_first, t_last, STEPS)
    next_z = next_x
    next_c = next_x
    if y is not None:
        next_c = load_dot_words(p_c, o_e, t_first, t_last, STEPS)
        if z is not None:
            next_z = load_pairs(p_z, z_stride_t // 2, t, t_last, STEPS)
    for t in range(t_first, t_last, STEPS):
        if chunks is not None:  # noqa: SIM102
            if t % CHUNK == 0:
                p_chunk = chunks + (i_b * tl.cdiv(T, CHUNK) + t // CHUNK) * N * D + o_d
                store_state_pairs(p_chunk, D, h, o_n, m_d, N)
        words_x, words_dt, words_z, words_b, words_c = next_x, next_dt, next_z, next_b, next_c
        # the next group is loaded while this one is computed
        t_next = t + STEPS + o_q
        next_x = load_pairs(p_x, x_stride_t // 2, t_next, t_last, STEPS)
        next_dt = load_pairs(p_dt, dt_stride_t // 2, t_next, t_last, STEPS)
        next_b = load_outer_words(p_b, o_e, t + STEPS, t_last, STEPS)
        if y is not None:
            next_c = load_dot_words(p_c, o_e, t + STEPS, t_last, STEPS)
            if z is not None:
                next_z = load_pairs(p_z, z_stride_t // 2, t_next, t_last, STEPS)
        v_sums = zero_each(4, E)
        inputs = ()
        for k in tl.static_range(STEPS // 4):
            o_t = t + k * 4 + o_q
            m_t = o_t < t_last
            b_x = unpack(words_x[k])
            b_dt = step_size_each(unpack(words_dt[k]), b_bias, m_t, SOFTPLUS, False)
            b_u = multiply_each(b_dt, b_x)
            b_rest = remainder_each(b_u)
            b_total = add_each(b_total, b_dt)
            inputs += b_x
            for q in tl.static_range(4):
                added = outer_each(b_u, b_rest, unpack(words_b[k]), o_q, q)
                dt_q = from_lane_each(b_dt, q, 4, True)
                new_h = ()
                for i in tl.static_range(8):
                    new_h += (tl.exp2(dt_q[i // 4] * a[i]) * h[i] + added[i],)
                h = new_h
                if y is not None:
                    row = unpack(words_c[k // 2 * 2]) + unpack(words_c[k // 2 * 2 + 1])
                    v_sums = dot_steps(h, row, v_sums, o_q, k % 2 * 4 + q)
            if y is not None and k % 2 == 1:
                for i in tl.static_range(2):
                    b_y = ()
                    for c in tl.static_range(2):
                        b_v = v_sums[2 * i + c] + b_skip[c] * inputs[(k - 1 + i) * 2 + c]
                        if z is not None:
                            b_z = unpack(words_z[k - 1 + i])[c]
                            b_v *= b_z * sigmoid(b_z, False)
                        b_y += (b_v,)
                    o_y = t + (k - 1 + i) * 4 + o_q
                    store_pair(at_step(p_y, o_y, D // 2, True), b_y[0], b_y[1], m_d & (o_y < t_last))

    if end is not None:
        if y is None:
            store_state_pairs(end + o_segment + o_d, D, h, o_n, m_d, N)
        else:
            m_last = m_d & (i_s + 0 * o_e == splits - 1)
            store_states(end + i_b * D * N, N, 1, h, both, (m_last, m_last), o_n, N, 4, True)
    if y is None:
        store_channel_sums(total_dt + (i_b * splits + i_s) * D, b_total, both, masks, o_q, 4, True)
