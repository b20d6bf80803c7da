"""The backward kernel. With the letters of `kernels.selective_scan.triton.backward`, and conj for complex conjugates:

    dv_t = dy_t silu(z_t)                           dz_t = dy_t silu'(z_t) v_t
    g_t[n] = conj(C_t[n]) dv_t + r_{t+1}[n]         r_t[n] = conj(exp(dt_t A[n])) g_t[n]
    dB_t[n] = sum_d u_t g_t[n]                      dC_t[n] = sum_d dv_t conj(h_t[n])
    du_t = Re sum_n conj(B_t[n]) g_t[n]             dx_t = dt_t du_t + skip dv_t
    dA[n] = sum_t dt_t r_t[n] conj(h_{t-1}[n])      dskip = sum_t x_t dv_t
    ddt_t = x_t du_t + Re sum_n conj(A[n]) r_t[n] conj(h_{t-1}[n]), times the derivative of softplus

Forward has kept the state before every group of STEPS steps. The groups of a segment are taken in reverse: the states
of a group are computed again into registers, and r goes back through them. Over segments a first run of the kernel
leaves r at the start of each segment from zero behind it, and the kernel of `forward.py` makes from these the true r.
"""

# Triton lets a name change its type while it traces
# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import triton
import triton.language as tl

from subquad.kernels.selective_scan.triton.arithmetic import sigmoid
from subquad.kernels.selective_scan.triton.complex.arithmetic import (
    add_scaled,
    conjugate,
    conjugate_product,
    decays,
    load_rows,
    load_states,
    load_steps,
    load_tiles,
    locate,
    masked_step_size,
    multiply_add,
    real_dot,
    scaled_by_log2e,
    step_of,
    store_states,
    store_steps,
    store_tiles,
    sum_channels,
    zeros,
)


@triton.jit(
    do_not_specialize=[
        "T", "segment", "splits", "x_stride_b", "x_stride_t", "dt_stride_b", "dt_stride_t", "z_stride_b", "z_stride_t",
        "dy_stride_b", "dy_stride_t", "b_stride_b", "b_stride_t", "c_stride_b", "c_stride_t",
    ]
)  # fmt: skip
def _complex_bwd_kernel(
    x, dt, A, B, C, skip, z, bias, groups, dy, after,
    dx, ddt, dz, dA, dB, dC, dskip, dbias, partial, before, total_dt,
    T, D, segment, splits, x_stride_b, x_stride_t, dt_stride_b, dt_stride_t, z_stride_b, z_stride_t,
    dy_stride_b, dy_stride_t, b_stride_b, b_stride_t, c_stride_b, c_stride_t,
    N: tl.constexpr, NT: tl.constexpr, LANES: tl.constexpr, BLOCK_D: tl.constexpr, STEPS: tl.constexpr,
    SOFTPLUS: tl.constexpr, PTX: tl.constexpr, B_IN_TIME: tl.constexpr, C_IN_TIME: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """The gradients over one segment of time, for BLOCK_D channels of one batch row.

    Inputs as in `_complex_fwd_kernel`; groups are the states that it kept; dy [batch, T, D] with contiguous channels.
    after:       r behind a segment [batch, splits, 2 NT, D, LANES], or with one segment the gradient of the final state
                 [batch, D, N, 2]; None for zero.
    dx, ddt, dz: [batch, T, D], contiguous; dz is None without a gate. dx is None in the first run over segments.
    dA, dB, dC:  [batch, splits, 2 NT, D, LANES], sums over a segment; dB and dC are None for maps that depend on time.
    dskip, dbias: [batch, splits, D], sums over a segment, or None.
    partial:     [D / BLOCK_D, batch, T, terms, LANES], the sums over BLOCK_D channels for dB_t and dC_t, each NT real
                 and NT imaginary parts.
    before:      r before a segment: if dx is None [batch, splits, 2 NT, D, LANES], else the gradient of the initial
                 state [batch, D, N, 2] or None.
    total_dt:    [batch, splits, D], the sum of dt over a segment, if dx is None.
    """
    PRECISE: tl.constexpr = PTX and dt.dtype.element_ty == tl.float32
    STATE: tl.constexpr = 2 * NT
    TERMS: tl.constexpr = STATE * (B_IN_TIME + C_IN_TIME)
    i_d, i_s, i_b, o_d, m_d, o_q = locate(D, splits, BLOCK_D, LANES)
    # no segment ends where the first one starts
    if dx is None:  # noqa: SIM102
        if i_s == 0:
            return
    t_first = i_s * segment
    t_last = tl.minimum(t_first + segment, T)
    row_size = STATE * LANES * D
    o_segment = i_b * splits + i_s
    given = load_states(A, o_d, m_d, o_q, N, NT, LANES)
    a = scaled_by_log2e(given, NT, PRECISE)
    r = zeros(NT, BLOCK_D, LANES)
    if after is not None:
        if splits > 1:
            r = load_tiles(after + o_segment * row_size, D, o_d, m_d, o_q, STATE, LANES)
        else:
            r = load_states(after + i_b * D * N * 2, o_d, m_d, o_q, N, NT, LANES)
    if not B_IN_TIME:
        row_b = load_states(B, o_d, m_d, o_q, N, NT, LANES)
    if not C_IN_TIME:
        row_c = load_states(C, o_d, m_d, o_q, N, NT, LANES)
    b_bias = 0.0
    if bias is not None:
        b_bias = tl.load(bias + o_d, mask=m_d, other=0.0).to(tl.float32)
    if skip is not None:
        b_skip = tl.load(skip + o_d, mask=m_d, other=0.0).to(tl.float32)
    sum_a = zeros(NT, BLOCK_D, LANES)
    sum_b, sum_c = sum_a, sum_a
    sum_skip = tl.zeros([BLOCK_D], tl.float32)
    sum_bias, b_total = sum_skip, sum_skip
    num_groups = tl.cdiv(t_last - t_first, STEPS)
    for i_g in range(num_groups):
        t = t_first + (num_groups - 1 - i_g) * STEPS
        p_dt = dt + i_b * dt_stride_b
        if dx is not None:
            steps_dt = load_steps(p_dt, dt_stride_t, t, t_last, o_d, m_d, STEPS)
            steps_x = load_steps(x + i_b * x_stride_b, x_stride_t, t, t_last, o_d, m_d, STEPS)
            if B_IN_TIME:
                rows_b = load_rows(B + i_b * b_stride_b, b_stride_t, t, t_last, o_q, N, NT, LANES, STEPS)
            p_group = groups + (i_b * tl.cdiv(T, STEPS) + t // STEPS) * row_size
            states = load_tiles(p_group, D, o_d, m_d, o_q, STATE, LANES)
            for j in tl.static_range(STEPS):
                b_dt = masked_step_size(steps_dt[j], b_bias, step_of(t, j, o_d) < t_last, SOFTPLUS, PRECISE)
                if B_IN_TIME:
                    row_b = rows_b[j * STATE : (j + 1) * STATE]
                b_u = (b_dt * steps_x[j].to(tl.float32))[:, None]
                h = states[j * STATE : (j + 1) * STATE]
                states += multiply_add(decays(a, b_dt[:, None], NT, PRECISE), h, b_u, row_b, NT)
        # the group in parts, because registers cannot hold all that is computed from it
        for i_p in tl.static_range(STEPS // PART - 1, -1, -1):
            t_part = t + i_p * PART
            steps_dt = load_steps(p_dt, dt_stride_t, t_part, t_last, o_d, m_d, PART)
            steps_dy = load_steps(dy + i_b * dy_stride_b, dy_stride_t, t_part, t_last, o_d, m_d, PART)
            if z is not None:
                steps_z = load_steps(z + i_b * z_stride_b, z_stride_t, t_part, t_last, o_d, m_d, PART)
            if C_IN_TIME:
                rows_c = load_rows(C + i_b * c_stride_b, c_stride_t, t_part, t_last, o_q, N, NT, LANES, PART)
            if dx is not None:
                steps_x = load_steps(x + i_b * x_stride_b, x_stride_t, t_part, t_last, o_d, m_d, PART)
                if B_IN_TIME:
                    rows_b = load_rows(B + i_b * b_stride_b, b_stride_t, t_part, t_last, o_q, N, NT, LANES, PART)
            terms = ()
            steps_dx = ()
            steps_ddt = ()
            steps_dz = ()
            for j in tl.static_range(PART - 1, -1, -1):
                m_t = m_d & (step_of(t_part, j, o_d) < t_last)
                b_dt = masked_step_size(steps_dt[j], b_bias, m_t, SOFTPLUS, PRECISE)
                b_total += b_dt
                b_dv = steps_dy[j].to(tl.float32)
                if z is not None:
                    b_z = steps_z[j].to(tl.float32)
                    b_sigmoid = sigmoid(b_z, PRECISE)
                    b_dgate = b_dv * (b_sigmoid * (1.0 + b_z * (1.0 - b_sigmoid)))
                    b_dv *= b_z * b_sigmoid
                if C_IN_TIME:
                    row_c = rows_c[j * STATE : (j + 1) * STATE]
                # conj(C) dv + r
                g = add_scaled(r, conjugate(row_c, NT), b_dv[:, None])
                r = conjugate_product(decays(a, b_dt[:, None], NT, PRECISE), g, NT)
                if dx is not None:
                    if B_IN_TIME:
                        row_b = rows_b[j * STATE : (j + 1) * STATE]
                    h_before = states[(i_p * PART + j) * STATE : (i_p * PART + j + 1) * STATE]
                    h = states[(i_p * PART + j + 1) * STATE : (i_p * PART + j + 2) * STATE]
                    b_x = steps_x[j].to(tl.float32)
                    # r conj(h_{t-1}), the gradient of dt A
                    rh = conjugate_product(h_before, r, NT)
                    b_du = real_dot(row_b, g, NT, 1)
                    b_ddt = b_x * b_du + real_dot(given, rh, NT, 1)
                    if SOFTPLUS:
                        b_ddt *= sigmoid(steps_dt[j].to(tl.float32) + b_bias, PRECISE)
                    b_dx = b_dt * b_du
                    b_v = real_dot(row_c, h, NT, -1)
                    if skip is not None:
                        b_dx += b_skip * b_dv
                        b_v += b_skip * b_x
                    # time goes backward, so each step is put in front of the later ones
                    steps_dx = (b_dx,) + steps_dx  # noqa: RUF005
                    steps_ddt = (b_ddt,) + steps_ddt  # noqa: RUF005
                    if z is not None:
                        steps_dz = (b_dgate * b_v,) + steps_dz  # noqa: RUF005
                    sum_a = add_scaled(sum_a, rh, b_dt[:, None])
                    sum_skip += b_x * b_dv
                    sum_bias += tl.where(m_t, b_ddt, 0.0)
                    b_u = (b_dt * b_x)[:, None]
                    zero = zeros(NT, BLOCK_D, LANES)
                    db = add_scaled(zero, g, b_u)
                    dc = add_scaled(zero, conjugate(h, NT), b_dv[:, None])
                    if B_IN_TIME and C_IN_TIME:
                        terms = db + dc + terms
                    elif B_IN_TIME:
                        terms = db + terms
                    elif C_IN_TIME:
                        terms = dc + terms
                    if not B_IN_TIME:
                        sum_b = add_scaled(sum_b, db, 1.0)
                    if not C_IN_TIME:
                        sum_c = add_scaled(sum_c, dc, 1.0)
            if dx is not None:
                store_steps(dx + i_b * T * D, steps_dx, t_part, t_last, D, o_d, m_d)
                store_steps(ddt + i_b * T * D, steps_ddt, t_part, t_last, D, o_d, m_d)
                if z is not None:
                    store_steps(dz + i_b * T * D, steps_dz, t_part, t_last, D, o_d, m_d)
                if TERMS > 0:
                    num_rows = tl.num_programs(0) // (tl.cdiv(D, BLOCK_D) * splits)
                    o_k = tl.arange(0, PART * TERMS)
                    p_row = partial + ((i_d * num_rows + i_b) * T + t_part) * TERMS * LANES
                    m_k = step_of(t_part, o_k // TERMS, 0) < t_last
                    tl.store(p_row + o_k[None, :] * LANES + o_q[:, None], sum_channels(terms), mask=m_k[None, :])
    if dx is None:
        store_tiles(before + o_segment * row_size, r, D, o_d, m_d, o_q, LANES)
        tl.store(total_dt + o_segment * D + o_d, b_total, mask=m_d)
    else:
        if before is not None:
            store_states(before + i_b * D * N * 2, r, o_d, m_d & (i_s + 0 * o_d == 0), o_q, N, NT, LANES)
        store_tiles(dA + o_segment * row_size, sum_a, D, o_d, m_d, o_q, LANES)
        if not B_IN_TIME:
            store_tiles(dB + o_segment * row_size, sum_b, D, o_d, m_d, o_q, LANES)
        if not C_IN_TIME:
            store_tiles(dC + o_segment * row_size, sum_c, D, o_d, m_d, o_q, LANES)
        if dskip is not None:
            tl.store(dskip + o_segment * D + o_d, sum_skip, mask=m_d)
        if dbias is not None:
            tl.store(dbias + o_segment * D + o_d, sum_bias, mask=m_d)
