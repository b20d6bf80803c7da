"""Forward for bfloat16 on the matrix units: the kernel of `forward.py` with the exchanges of `matrix.py`.

Limits besides those of `forward.py`: x, dt, z, B and C are bfloat16, B and C depend on time, 8 < N <= 16, D is even,
and pairs of channels lie at multiples of 4 bytes (`Plan.matrix`).
"""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import triton
import triton.language as tl

from subquad.kernels.selective_scan.triton.arithmetic import (
    LOG2E,
    add_each,
    multiply_each,
    scale_each,
    sigmoid,
    step_size_each,
    zero_each,
)
from subquad.kernels.selective_scan.triton.copies import copied_words, copy_word, end_copies, shared_slots, wait_copies
from subquad.kernels.selective_scan.triton.lanes import from_lane_each
from subquad.kernels.selective_scan.triton.matrix import (
    dot_step,
    dot_steps,
    load_state_pairs,
    outer_each,
    remainder_each,
    store_pair,
    store_state_pairs,
    unpack,
    words_of,
)
from subquad.kernels.selective_scan.triton.memory import (
    at_step,
    load_channels,
    load_states,
    store_channel_sums,
    store_states,
)

AHEAD = tl.constexpr(3)
"""Groups of eight steps that are copied to shared memory before they are computed."""
WORDS = tl.constexpr(10)
"""Words of a thread in a group: two each of x, dt, B, C and z."""


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


@triton.jit
def _copy_group(
    p_slot, p_x, p_dt, p_z, p_outer, p_dot, x_stride_t, dt_stride_t, z_stride_t, b_stride_t, c_stride_t,
    o_e, t, t_last, WITH_Y: tl.constexpr, WITH_Z: tl.constexpr,
):  # fmt: skip
    """Starts to copy the words of a thread for the eight steps from t on; steps from t_last on are the one before."""
    for k in tl.static_range(2):
        o_t = tl.minimum(t + k * 4 + o_e % 4, t_last - 1)
        copy_word(p_slot, k, at_step(p_x, o_t, x_stride_t // 2, True))
        copy_word(p_slot, 2 + k, at_step(p_dt, o_t, dt_stride_t // 2, True))
        copy_word(p_slot, 4 + k, at_step(p_outer, o_t, b_stride_t + 0 * o_e, True))
        if WITH_Y and WITH_Z:
            copy_word(p_slot, 8 + k, at_step(p_z, o_t, z_stride_t // 2, True))
    if WITH_Y:
        p_word = at_step(p_dot, tl.minimum(t + dot_step(o_e), t_last - 1), c_stride_t + 0 * o_e, True)
        copy_word(p_slot, 6, p_word)
        copy_word(p_slot, 7, p_word + 1)
    end_copies(o_e)


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
    N: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr, SOFTPLUS: tl.constexpr,
):  # fmt: skip
    """The recurrence over one segment of time, for BLOCK_D channels of one batch row; see `_scan_fwd_kernel`."""
    E: tl.constexpr = BLOCK_D * 2
    STEPS: tl.constexpr = 8
    SLOTS: tl.constexpr = AHEAD + 1
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
    # lane q of four adds the steps q and q + 4 to the states, and gives the rows of C that `dot_step` says
    p_outer = B + i_b * b_stride_b + o_e // 4 % 8
    p_dot = C + i_b * c_stride_b + o_e % 4 * 2
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

    p_slots = shared_slots(o_e, E // 32, SLOTS, WORDS)
    for i in tl.static_range(AHEAD):
        _copy_group(
            p_slots + i * (WORDS * 128), p_x, p_dt, p_z, p_outer, p_dot,
            x_stride_t, dt_stride_t, z_stride_t, b_stride_t, c_stride_t,
            o_e, t_first + i * STEPS, t_last, y is not None, z is not None,
        )  # fmt: skip
    i_slot = 0
    for t in range(t_first, t_last, STEPS):
        if chunks is not None:  # noqa: SIM102
            if t % CHUNK == 0:
                p_chunk = chunks + (i_b * tl.cdiv(T, CHUNK) + t // CHUNK) * N * D + o_d
                store_state_pairs(p_chunk, D, h, o_n, m_d, N)
        wait_copies(o_e, AHEAD - 1)
        p_slot = p_slots + i_slot * (WORDS * 128)
        words_x, words_dt, words_b = copied_words(p_slot, 0, 2), copied_words(p_slot, 2, 2), copied_words(p_slot, 4, 2)
        words_z = words_x
        words_c = words_x
        if y is not None:
            words_c = copied_words(p_slot, 6, 2)
            if z is not None:
                words_z = copied_words(p_slot, 8, 2)
        # the slot that the group before has read
        _copy_group(
            p_slots + (i_slot + AHEAD) % SLOTS * (WORDS * 128), p_x, p_dt, p_z, p_outer, p_dot,
            x_stride_t, dt_stride_t, z_stride_t, b_stride_t, c_stride_t,
            o_e, t + AHEAD * STEPS, t_last, y is not None, z is not None,
        )  # fmt: skip
        i_slot = (i_slot + 1) % SLOTS
        v_sums = zero_each(4, E)
        inputs = ()
        for k in tl.static_range(2):
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
                    row = unpack(words_c[0]) + unpack(words_c[1])
                    v_sums = dot_steps(h, row, v_sums, o_q, k * 4 + q)
        if y is not None:
            for k in tl.static_range(2):
                b_y = ()
                for c in tl.static_range(2):
                    b_v = v_sums[2 * k + c] + b_skip[c] * inputs[2 * k + c]
                    if z is not None:
                        b_z = unpack(words_z[k])[c]
                        b_v *= b_z * sigmoid(b_z, False)
                    b_y += (b_v,)
                o_y = t + k * 4 + o_q
                store_pair(at_step(p_y, o_y, D // 2, True), b_y[0], b_y[1], m_d & (o_y < t_last))

    if end is not None:
        if y is None:
            store_state_pairs(end + o_segment + o_d, D, h, o_n, m_d, N)
        else:
            m_last = m_d & (i_s + 0 * o_e == splits - 1)
            store_states(end + i_b * D * N, N, 1, h, both, (m_last, m_last), o_n, N, 4, True)
    if y is None:
        store_channel_sums(total_dt + (i_b * splits + i_s) * D, b_total, both, masks, o_q, 4, True)
