"""The forward kernel, and the kernel that passes states or their gradients from segment to segment."""

# Triton lets a name change its type while it traces
# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import triton
import triton.language as tl

from subquad.kernels.selective_scan.triton.arithmetic import sigmoid
from subquad.kernels.selective_scan.triton.complex.arithmetic import (
    add_scaled,
    conjugate_product,
    decays,
    load_rows,
    load_states,
    load_steps,
    load_tiles,
    locate,
    masked_step_size,
    multiply_add,
    product,
    real_dot,
    scaled_by_log2e,
    step_of,
    store_states,
    store_steps,
    store_tiles,
    zeros,
)


@triton.jit(
    do_not_specialize=[
        "T", "segment", "splits", "x_stride_b", "x_stride_t", "dt_stride_b", "dt_stride_t", "z_stride_b", "z_stride_t",
        "b_stride_b", "b_stride_t", "c_stride_b", "c_stride_t",
    ]
)  # fmt: skip
def _complex_fwd_kernel(
    x, dt, A, B, C, skip, z, bias, start, y, end, total_dt, groups,
    T, D, segment, splits, x_stride_b, x_stride_t, dt_stride_b, dt_stride_t, z_stride_b, z_stride_t,
    b_stride_b, b_stride_t, c_stride_b, c_stride_t,
    N: tl.constexpr, NT: tl.constexpr, LANES: tl.constexpr, BLOCK_D: tl.constexpr, STEPS: tl.constexpr,
    SOFTPLUS: tl.constexpr, PTX: tl.constexpr, B_IN_TIME: tl.constexpr, C_IN_TIME: tl.constexpr,
):  # fmt: skip
    """The recurrence over one segment of time, for BLOCK_D channels of one batch row.

    x, dt, z, y: [batch, T, D] with contiguous channels; z and y may be None.
    A, skip, bias: [D, N, 2], [D] and [D], contiguous; skip and bias may be None.
    B, C:     [batch, T, N, 2] where they depend on time, with strides in floats, else [D, N, 2], contiguous.
    start:    the state before a segment [batch, splits, 2 NT, D, LANES], or with one segment the initial state
              [batch, D, N, 2]; None for zero.
    y:        None in the first pass over segments, which leaves the ends of all segments but the last.
    end:      if y is None, the ends [batch, splits, 2 NT, D, LANES], else the final state [batch, D, N, 2] or None.
    total_dt: [batch, splits, D], the sum of dt over a segment, if y is None.
    groups:   [batch, T / STEPS, 2 NT, D, LANES], the state before every group, or None.
    """
    PRECISE: tl.constexpr = PTX and dt.dtype.element_ty == tl.float32
    STATE: tl.constexpr = 2 * NT
    _, i_s, i_b, o_d, m_d, o_q = locate(D, splits, BLOCK_D, LANES)
    # no segment starts from the end of the last one
    if y is None:  # noqa: SIM102
        if i_s == splits - 1:
            return
    t_first = i_s * segment
    t_last = tl.minimum(t_first + segment, T)
    row_size = STATE * LANES * D
    p_x, p_dt = x + i_b * x_stride_b, dt + i_b * dt_stride_b
    a = scaled_by_log2e(load_states(A, o_d, m_d, o_q, N, NT, LANES), NT, PRECISE)
    h = zeros(NT, BLOCK_D, LANES)
    if start is not None:
        if splits > 1:
            h = load_tiles(start + (i_b * splits + i_s) * row_size, D, o_d, m_d, o_q, STATE, LANES)
        else:
            h = load_states(start + i_b * D * N * 2, o_d, m_d, o_q, N, NT, LANES)
    if not B_IN_TIME:
        row_b = load_states(B, o_d, m_d, o_q, N, NT, LANES)
    if not C_IN_TIME:
        row_c = load_states(C, o_d, m_d, o_q, N, NT, LANES)
    b_bias = 0.0
    if bias is not None:
        b_bias = tl.load(bias + o_d, mask=m_d, other=0.0).to(tl.float32)
    if skip is not None:
        b_skip = tl.load(skip + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_total = tl.zeros([BLOCK_D], tl.float32)
    for t in range(t_first, t_last, STEPS):
        if groups is not None:
            p_group = groups + (i_b * tl.cdiv(T, STEPS) + t // STEPS) * row_size
            store_tiles(p_group, h, D, o_d, m_d, o_q, LANES)
        steps_x = load_steps(p_x, x_stride_t, t, t_last, o_d, m_d, STEPS)
        steps_dt = load_steps(p_dt, dt_stride_t, t, t_last, o_d, m_d, STEPS)
        if y is not None and z is not None:
            steps_z = load_steps(z + i_b * z_stride_b, z_stride_t, t, t_last, o_d, m_d, STEPS)
        if B_IN_TIME:
            rows_b = load_rows(B + i_b * b_stride_b, b_stride_t, t, t_last, o_q, N, NT, LANES, STEPS)
        if C_IN_TIME and y is not None:
            rows_c = load_rows(C + i_b * c_stride_b, c_stride_t, t, t_last, o_q, N, NT, LANES, STEPS)
        steps_y = ()
        for j in tl.static_range(STEPS):
            o_t = step_of(t, j, o_d)
            b_dt = masked_step_size(steps_dt[j], b_bias, o_t < t_last, SOFTPLUS, PRECISE)
            b_x = steps_x[j].to(tl.float32)
            b_total += b_dt
            if B_IN_TIME:
                row_b = rows_b[j * STATE : (j + 1) * STATE]
            h = multiply_add(decays(a, b_dt[:, None], NT, PRECISE), h, (b_dt * b_x)[:, None], row_b, NT)
            if y is not None:
                if C_IN_TIME:
                    row_c = rows_c[j * STATE : (j + 1) * STATE]
                b_y = real_dot(row_c, h, NT, -1)
                if skip is not None:
                    b_y += b_skip * b_x
                if z is not None:
                    b_z = steps_z[j].to(tl.float32)
                    b_y *= b_z * sigmoid(b_z, PRECISE)
                steps_y += (b_y,)
        if y is not None:
            store_steps(y + i_b * T * D, steps_y, t, t_last, D, o_d, m_d)
    if y is None:
        store_tiles(end + (i_b * splits + i_s) * row_size, h, D, o_d, m_d, o_q, LANES)
        tl.store(total_dt + (i_b * splits + i_s) * D + o_d, b_total, mask=m_d)
    elif end is not None:
        store_states(end + i_b * D * N * 2, h, o_d, m_d & (i_s + 0 * o_d == splits - 1), o_q, N, NT, LANES)


@triton.jit(do_not_specialize=["splits"])
def _complex_pass_kernel(
    A, total_dt, ends, first_state, D, splits,
    N: tl.constexpr, NT: tl.constexpr, LANES: tl.constexpr, BLOCK_D: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Replaces the ends of segments [batch, splits, 2 NT, D, LANES], each from zero, by their true starts in place.

    total_dt:    [batch, splits, D], the sum of dt over each segment.
    first_state: [batch, D, N, 2], the start of the first segment, or None for zero.
    REVERSE:     the recurrence of the gradients, whose decays are conjugate and which starts behind the last segment.
    """
    STATE: tl.constexpr = 2 * NT
    _, _, i_b, o_d, m_d, o_q = locate(D, 1, BLOCK_D, LANES)
    row_size = STATE * LANES * D
    a = scaled_by_log2e(load_states(A, o_d, m_d, o_q, N, NT, LANES), NT, False)
    h = zeros(NT, BLOCK_D, LANES)
    if first_state is not None:
        h = load_states(first_state + i_b * D * N * 2, o_d, m_d, o_q, N, NT, LANES)
    for i in range(splits - 1):
        i_s = i_b * splits + (splits - 1 - i if REVERSE else i)
        b_dt = tl.load(total_dt + i_s * D + o_d, mask=m_d, other=0.0)[:, None]
        after = load_tiles(ends + i_s * row_size, D, o_d, m_d, o_q, STATE, LANES)
        store_tiles(ends + i_s * row_size, h, D, o_d, m_d, o_q, LANES)
        decay = decays(a, b_dt, NT, False)
        h = add_scaled(conjugate_product(decay, h, NT) if REVERSE else product(decay, h, NT), after, 1.0)
    i_last = i_b * splits + (0 if REVERSE else splits - 1)
    store_tiles(ends + i_last * row_size, h, D, o_d, m_d, o_q, LANES)
