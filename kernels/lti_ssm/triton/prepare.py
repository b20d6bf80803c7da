"""Kernels that compute the tables of a channel from the system's parameters, and their gradients in reverse.

A program is one warp and computes one channel in float64, with one state in each thread.
"""

from __future__ import annotations

import triton
import triton.language as tl

from subquad.kernels.lti_ssm.triton.products import interleave
from subquad.kernels.ssm_kernel.system import (
    abar,
    entry,
    entry_gradient,
    load_wide,
    power,
    power_table,
    store_narrow,
    times,
)


@triton.jit
def _store_rows(p, o_row, row, o_w, b_re, b_im, COMPLEX: tl.constexpr):
    """Stores rows of `row` elements each, interleaved, in float32."""
    b_x = interleave(b_re.to(tl.float32), b_im.to(tl.float32), COMPLEX)
    tl.store(p + (o_row * row + o_w), b_x, mask=(o_w < row) & (o_row >= 0))


@triton.jit
def _store_with_rest(p, row, o_w, b_re, b_im, COMPLEX: tl.constexpr):
    """Stores one row in float32, and its rounding error in the next row."""
    _store_rows(p, 0, row, o_w, b_re, b_im, COMPLEX)
    b_re, b_im = b_re - b_re.to(tl.float32).to(tl.float64), b_im - b_im.to(tl.float32).to(tl.float64)
    _store_rows(p, 1, row, o_w, b_re, b_im, COMPLEX)


@triton.jit(do_not_specialize=["steps", "half_steps", "step_bits", "segment_bits", "A_stride_d"])
def _prepare_kernel(
    A, B, C, dt, skip, tables,
    N, A_stride_d, steps, half_steps, step_bits, segment_bits, factor,
    RULE: tl.constexpr, A_COMPLEX: tl.constexpr, B_COMPLEX: tl.constexpr, C_COMPLEX: tl.constexpr,
    COMPLEX: tl.constexpr, NEAR_BITS: tl.constexpr, FAR_BITS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Writes the tables of one channel, a row of `tables`.

    With NEAR = 2^NEAR_BITS and CHUNK = NEAR 2^FAR_BITS a row holds

    - the taps with the skip added to the first [CHUNK];
    - Bbar [N] and w = factor C Abar [N];
    - the powers of Abar below NEAR [NEAR, N], and the multiples of NEAR below CHUNK [CHUNK / NEAR, N];
    - four decays, each with its rounding error in the next row [8, N]: of a chunk (Abar^CHUNK), of a segment (`steps`
      chunks), of half a segment (`half_steps` chunks) and of a piece (2^segment_bits segments).

    Complex numbers are interleaved.   factor: s of the package docstring of `kernels.lti_ssm`.
    step_bits: the number of bits of `steps`.
    """
    i_d = tl.program_id(0)
    pair: tl.constexpr = 2 if COMPLEX else 1
    NEAR: tl.constexpr = 2**NEAR_BITS
    FAR: tl.constexpr = 2**FAR_BITS
    row = N * pair
    tables += i_d * (NEAR * FAR + (2 + NEAR + FAR + 8) * row)
    o_n, o_w = tl.arange(0, BLOCK_N)[None, :], tl.arange(0, BLOCK_N * pair)[None, :]
    o_near, o_far = tl.arange(0, NEAR)[:, None], tl.arange(0, FAR)[:, None]
    m_n = o_n < N
    b_dt = tl.load(dt + i_d).to(tl.float64)
    lam_re, lam_im = load_wide(A, i_d * A_stride_d + o_n, m_n, A_COMPLEX)
    c_re, c_im = load_wide(C, i_d * N + o_n, m_n, C_COMPLEX)
    # all loads stand before the first use of one, so that the program waits once
    if B is not None:
        b_re, b_im = load_wide(B, i_d * N + o_n, m_n, B_COMPLEX)
    if skip is not None:
        b_skip = tl.load(skip + i_d).to(tl.float32)
    c_re, c_im = factor * c_re, factor * c_im
    z_re, z_im = b_dt * lam_re, b_dt * lam_im
    a_re, a_im = abar(z_re, z_im, RULE)
    g_re, g_im = entry(z_re, z_im, a_re, a_im, RULE)
    if RULE == "dss-exp-no-scale":
        bbar_re, bbar_im = 1.0 + 0 * g_re, 0 * g_im
    else:
        bbar_re, bbar_im = b_dt * g_re, b_dt * g_im
    if B is not None:
        bbar_re, bbar_im = times(bbar_re, bbar_im, b_re, b_im)
    w_re, w_im = times(c_re, c_im, a_re, a_im)
    p_re, p_im, far_re, far_im = power_table(a_re, a_im, NEAR_BITS)
    q_re, q_im, chunk_re, chunk_im = power_table(far_re, far_im, FAR_BITS)

    # taps: a power below CHUNK is a product of a near and a far one; C is zero beyond N
    x_re, x_im = times(c_re, c_im, bbar_re, bbar_im)
    f_re, f_im = times(x_re, x_im, q_re, q_im)
    f_re, f_im = f_re.to(tl.float32)[:, None, :], f_im.to(tl.float32)[:, None, :]
    b_taps = f_re * p_re.to(tl.float32)[None, :, :] - f_im * p_im.to(tl.float32)[None, :, :]
    # transposed, so that a thread holds all terms of a sum
    b_taps = tl.sum(tl.trans(tl.reshape(b_taps, [FAR * NEAR, BLOCK_N])), 0)
    o_k = tl.arange(0, FAR * NEAR)
    if skip is not None:
        b_taps += tl.where(o_k == 0, b_skip, 0.0)
    tl.store(tables + o_k, b_taps)

    tables += NEAR * FAR
    _store_rows(tables, 0, row, o_w, bbar_re, bbar_im, COMPLEX)
    _store_rows(tables, 1, row, o_w, w_re, w_im, COMPLEX)
    _store_rows(tables, 2 + o_near, row, o_w, p_re, p_im, COMPLEX)
    _store_rows(tables, 2 + NEAR + o_far, row, o_w, q_re, q_im, COMPLEX)
    tables += (2 + NEAR + FAR) * row
    _store_with_rest(tables, row, o_w, chunk_re, chunk_im, COMPLEX)
    x_re, x_im = power(chunk_re, chunk_im, half_steps, step_bits)
    _store_with_rest(tables + 4 * row, row, o_w, x_re, x_im, COMPLEX)
    x_re, x_im = power(chunk_re, chunk_im, steps, step_bits)
    _store_with_rest(tables + 2 * row, row, o_w, x_re, x_im, COMPLEX)
    for _ in range(segment_bits):
        x_re, x_im = times(x_re, x_im, x_re, x_im)
    _store_with_rest(tables + 6 * row, row, o_w, x_re, x_im, COMPLEX)


@triton.jit(do_not_specialize=["count", "A_stride_d"])
def _prepare_bwd_kernel(
    A, B, C, dt, partial, dA, dB, dC, ddt, dskip,
    D, N, A_stride_d, count, factor,
    RULE: tl.constexpr, A_COMPLEX: tl.constexpr, B_COMPLEX: tl.constexpr, C_COMPLEX: tl.constexpr,
    COMPLEX: tl.constexpr, NEAR_BITS: tl.constexpr, FAR_BITS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Gradients of A, B, C, dt and the skip of one channel, from those that `_lti_bwd_kernel` left in `count` rows.

    A row of `partial` [count, D, CHUNK + 3 N] holds the gradients of the taps, Bbar, w and l = log Abar. With
    c = factor C, w = c Abar and taps_k = Re(sum_n q Abar^k), q = c Bbar,

        dq += sum_k conj(Abar^k) dtaps_k;    dl += conj(q) sum_k k conj(Abar^k) dtaps_k + conj(w) dw

    and then through the discretization to A, B, C and dt.
    """
    i_d = tl.program_id(0)
    o_n = tl.arange(0, BLOCK_N)[None, :]
    m_n = o_n < N
    pair: tl.constexpr = 2 if COMPLEX else 1
    NEAR: tl.constexpr = 2**NEAR_BITS
    CHUNK: tl.constexpr = 2 ** (NEAR_BITS + FAR_BITS)
    b_dt = tl.load(dt + i_d).to(tl.float64)
    lam_re, lam_im = load_wide(A, i_d * A_stride_d + o_n, m_n, A_COMPLEX)
    c_re, c_im = load_wide(C, i_d * N + o_n, m_n, C_COMPLEX)
    b_re, b_im = 1.0 + 0 * c_re, 0 * c_re
    if B is not None:
        b_re, b_im = load_wide(B, i_d * N + o_n, m_n, B_COMPLEX)
    # all loads stand before the first use of one, so that the program waits once
    o_k = tl.arange(0, CHUNK)
    size = CHUNK + 3 * N * pair
    partial += i_d * size
    b_dtaps = tl.zeros([CHUNK], tl.float64)
    dbbar_re, dbbar_im = tl.zeros([1, BLOCK_N], tl.float64), tl.zeros([1, BLOCK_N], tl.float64)
    dw_re, dw_im, dl_re, dl_im = dbbar_re, dbbar_im, dbbar_re, dbbar_im
    for _ in range(count):
        p_sums = partial + CHUNK
        x_re, x_im = load_wide(p_sums, o_n, m_n, COMPLEX)
        y_re, y_im = load_wide(p_sums + N * pair, o_n, m_n, COMPLEX)
        s_re, s_im = load_wide(p_sums + 2 * N * pair, o_n, m_n, COMPLEX)
        b_dtaps += tl.load(partial + o_k).to(tl.float64)
        dbbar_re, dbbar_im = dbbar_re + x_re, dbbar_im + x_im
        dw_re, dw_im = dw_re + y_re, dw_im + y_im
        dl_re, dl_im = dl_re + s_re, dl_im + s_im
        partial += D * size
    c_re, c_im = factor * c_re, factor * c_im
    z_re, z_im = b_dt * lam_re, b_dt * lam_im
    a_re, a_im = abar(z_re, z_im, RULE)
    g_re, g_im = entry(z_re, z_im, a_re, a_im, RULE)
    dg_re, dg_im, dlog_re, dlog_im = entry_gradient(z_re, z_im, a_re, a_im, g_re, g_im, RULE)
    # Bbar = f B, f = dt g
    f_re, f_im = b_dt * g_re, b_dt * g_im
    if RULE == "dss-exp-no-scale":
        f_re, f_im = 1.0 + 0 * a_re, 0 * a_im
    bbar_re, bbar_im = times(f_re, f_im, b_re, b_im)
    q_re, q_im = times(c_re, c_im, bbar_re, bbar_im)

    if dskip is not None:
        tl.store(dskip + i_d, tl.sum(tl.where(o_k == 0, b_dtaps, 0.0), 0).to(dskip.dtype.element_ty))

    # the sums over k = i NEAR + j, first over j: x without and y with the factor k
    p_re, p_im, far_re, far_im = power_table(a_re, -a_im, NEAR_BITS)
    s_re, s_im, _, _ = power_table(far_re, far_im, FAR_BITS)
    b_dtaps = tl.reshape(b_dtaps, [2**FAR_BITS, NEAR])[:, :, None]
    x_re, x_im = b_dtaps * p_re[None, :, :], b_dtaps * p_im[None, :, :]
    b_k = tl.arange(0, NEAR)[None, :, None].to(tl.float64)
    y_re, y_im = tl.sum(b_k * x_re, 1), tl.sum(b_k * x_im, 1)
    x_re, x_im = times(s_re, s_im, tl.sum(x_re, 1), tl.sum(x_im, 1))
    dq_re, dq_im = tl.sum(x_re, 0)[None, :], tl.sum(x_im, 0)[None, :]
    y_re, y_im = times(s_re, s_im, y_re, y_im)
    b_k = NEAR * tl.arange(0, 2**FAR_BITS)[:, None].to(tl.float64)
    x_re, x_im = tl.sum(b_k * x_re + y_re, 0)[None, :], tl.sum(b_k * x_im + y_im, 0)[None, :]
    x_re, x_im = times(q_re, -q_im, x_re, x_im)
    dl_re, dl_im = dl_re + x_re, dl_im + x_im
    w_re, w_im = times(c_re, c_im, a_re, a_im)
    x_re, x_im = times(w_re, -w_im, dw_re, dw_im)
    dl_re, dl_im = dl_re + x_re, dl_im + x_im
    x_re, x_im = times(bbar_re, -bbar_im, dq_re, dq_im)
    y_re, y_im = times(a_re, -a_im, dw_re, dw_im)
    o_out = i_d * N + o_n
    dtype: tl.constexpr = dC.dtype.element_ty
    store_narrow(dC, o_out, (factor * (x_re + y_re)).to(dtype), (factor * (x_im + y_im)).to(dtype), m_n, C_COMPLEX)
    x_re, x_im = times(c_re, -c_im, dq_re, dq_im)
    dbbar_re, dbbar_im = dbbar_re + x_re, dbbar_im + x_im
    if dB is not None:
        x_re, x_im = times(f_re, -f_im, dbbar_re, dbbar_im)
        dtype_B: tl.constexpr = dB.dtype.element_ty
        store_narrow(dB, o_out, x_re.to(dtype_B), x_im.to(dtype_B), m_n, B_COMPLEX)

    dz_re, dz_im = times(dlog_re, -dlog_im, dl_re, dl_im)
    b_ddt = 0 * dz_re
    if RULE != "dss-exp-no-scale":
        x_re, x_im = times(dg_re, dg_im, b_re, b_im)
        x_re, x_im = times(b_dt * x_re, -b_dt * x_im, dbbar_re, dbbar_im)
        dz_re, dz_im = dz_re + x_re, dz_im + x_im
        x_re, x_im = times(g_re, g_im, b_re, b_im)
        b_ddt += x_re * dbbar_re + x_im * dbbar_im
    b_ddt += lam_re * dz_re + lam_im * dz_im
    tl.store(ddt + i_d, tl.sum(tl.sum(b_ddt, 1), 0).to(ddt.dtype.element_ty))
    dtype_A: tl.constexpr = dA.dtype.element_ty
    store_narrow(dA, o_out, (b_dt * dz_re).to(dtype_A), (b_dt * dz_im).to(dtype_A), m_n, A_COMPLEX)
