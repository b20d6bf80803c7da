"""`_mild_grads_kernel`: with a decay of a key channel, gradients of every chunk that is factored about its middle.

It is apart from `_grads_kernel` because one program with both ways of factoring a chunk would need the registers of
both.
"""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import triton
import triton.language as tl

from subquad.kernels.delta_rule.triton.tiles import bounded_decays, load_rows, load_state, store_rows
from subquad.kernels.gated_linear_attention.triton.decays import (
    exponential,
    from_middle,
    half_totals,
    masked_sums,
)
from subquad.kernels.gated_linear_attention.triton.tiles import as_operand, chunk_span


@triton.jit
def product_with_state(
    b_x, b_state, x, stride_t, state, start, end, o_c, o_k,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """x S^T in float32 for the rows start + o_c of x [end, V] and the columns o_k of a transposed state S [V, K].

    b_x and b_state hold the first BV channels of values.
    """
    b_sum = tl.dot(b_x, b_state, input_precision=PRECISION)
    for i_v in tl.static_range(BV, V, BV):
        o_v = i_v + tl.arange(0, BV)
        b_more = load_rows(x, stride_t, start, o_c, o_v, end, V, WHOLE).to(b_x.dtype)
        b_sum = tl.dot(b_more, load_state(state, o_v, o_k, V, K, WHOLE), b_sum, input_precision=PRECISION)
    return b_sum


@triton.jit
def _mild_grads_kernel(
    q, k, beta, g, write, plain, v, delta, do, dv, states, dstates, da, dl, da_plain, dl_plain, dq, dk, dbeta, dg,
    dwrite, dplain, steep, table,
    T, num_t, scale,
    q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_t, k_stride_h, beta_stride_b, beta_stride_t, beta_stride_h,
    g_stride_b, g_stride_t, g_stride_h, write_stride_b, write_stride_t, write_stride_h,
    plain_stride_b, plain_stride_t, plain_stride_h, v_stride_b, v_stride_t, v_stride_h,
    do_stride_b, do_stride_t, do_stride_h,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PARTS: tl.constexpr, PRECISION: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """dq, dk, dg, dwrite and dplain [C, BK] of a chunk that is factored about its middle; dbeta is a sum over channels.

    The equations are those of `_grads_kernel`, with e the keys of `plain`. Let c_i be the exponential of the sum
    of the log-decays from the middle of the chunk to position i. Then exp(D_ij) is c_i / c_j, and the sums over
    positions are products of dA and dL, which are read from `ChunkPairs`, with the operands

        Q_i = q_i c_i,    R_i = r_i c_i,    W_j = w_j / c_j,    E_j = e_j / c_j

    Let dQ be the gradient of Q, from outside of the chunk and from within it. Then dq_i = c_i dQ_i, and so on, and
    dg_l is the sum of Q_i dQ_i + R_i dR_i over i >= l, minus that of W_j dW_j + E_j dE_j over j >= l, plus what leaves
    the chunk. What does not pass position l cancels, because both sides consist of the same rounded operands.

    All that a program needs is loaded before its first product, so that it waits for memory once; only the values that
    are written are loaded where they are used if they have more than 64 channels, for want of shared memory. Queries,
    keys that are read, keys that are written and keys of `plain` are finished one after the other, so that registers
    hold one gradient at a time. W and E are computed again where their own gradients are, with 1 / c.

    PARTS: number of programs of `_grads_kernel` for the keys of one of this kernel.
    """
    num_k = tl.cdiv(K, BK)
    i_k, i_c = tl.program_id(0) % num_k, (tl.program_id(0) // num_k).to(tl.int64)
    if tl.load(steep + i_c) != 0:
        return
    i_t, i_bh = i_c % num_t, i_c // num_t
    i_b, i_h = i_bh // H, i_bh % H
    dtype = states.dtype.element_ty
    LATE: tl.constexpr = BV > 64
    o_c, o_k, o_v = tl.arange(0, C), i_k * BK + tl.arange(0, BK), tl.arange(0, BV)
    o_head = i_b * T * H + i_h
    start, end = chunk_span(table, i_t, T, C)
    o_rows, m_t = (start + o_c).to(tl.int64), start + o_c < end
    q += i_b * q_stride_b + i_h * q_stride_h
    k += i_b * k_stride_b + i_h * k_stride_h
    g += i_b * g_stride_b + i_h * g_stride_h
    do += i_b * do_stride_b + i_h * do_stride_h
    delta += o_head * V
    dv += o_head * V
    states += i_c * K * V
    dstates += i_c * K * V
    p_write, write_t = k, k_stride_t
    if write is not None:
        p_write, write_t = write + i_b * write_stride_b + i_h * write_stride_h, write_stride_t

    b_g = load_rows(g, g_stride_t, start, o_c, o_k, end, K, WHOLE)
    b_state, b_dstate = load_state(states, o_v, o_k, V, K, WHOLE), load_state(dstates, o_v, o_k, V, K, WHOLE)
    b_do = load_rows(do, do_stride_t, start, o_c, o_v, end, V, WHOLE).to(dtype)
    b_dv = load_rows(dv, H * V, start, o_c, o_v, end, V, WHOLE)
    if not LATE:
        b_delta = load_rows(delta, H * V, start, o_c, o_v, end, V, WHOLE)
    if plain is not None:
        v += i_b * v_stride_b + i_h * v_stride_h
        plain += i_b * plain_stride_b + i_h * plain_stride_h
        if not LATE:
            b_v = load_rows(v, v_stride_t, start, o_c, o_v, end, V, WHOLE).to(dtype)
    b_da = load_rows(da + o_head * C, H * C, start, o_c, o_c, end, C, WHOLE)
    b_dl = load_rows(dl + o_head * C, H * C, start, o_c, o_c, end, C, WHOLE)
    if plain is not None:
        b_da_plain = load_rows(da_plain + o_head * C, H * C, start, o_c, o_c, end, C, WHOLE)
        b_dl_plain = load_rows(dl_plain + o_head * C, H * C, start, o_c, o_c, end, C, WHOLE)
    p_beta = beta + i_b * beta_stride_b + i_h * beta_stride_h + o_rows * beta_stride_t
    b_beta = tl.load(p_beta, mask=m_t, other=0.0)
    b_w = load_rows(p_write, write_t, start, o_c, o_k, end, K, WHOLE)
    if plain is not None:
        b_e = load_rows(plain, plain_stride_t, start, o_c, o_k, end, K, WHOLE)
    b_q = load_rows(q, q_stride_t, start, o_c, o_k, end, K, WHOLE)
    b_k = load_rows(k, k_stride_t, start, o_c, o_k, end, K, WHOLE)
    b_g, b_beta, b_w = bounded_decays(b_g, plain), b_beta.to(tl.float32), b_w.to(tl.float32)
    if dg is not None:
        b_dg = tl.sum(b_state.to(tl.float32) * b_dstate.to(tl.float32), 0)
        for i_v in tl.static_range(BV, V, BV):
            b_more = load_state(states, i_v + o_v, o_k, V, K, WHOLE).to(tl.float32)
            b_dg += tl.sum(b_more * load_state(dstates, i_v + o_v, o_k, V, K, WHOLE).to(tl.float32), 0)
    b_first, b_second = half_totals(b_g, o_c, C)
    b_exponent = masked_sums(from_middle(o_c, C), b_g, False, PRECISION)
    b_factor, b_inverse = exponential(b_exponent, PRECISION), exponential(-b_exponent, PRECISION)
    b_start, b_end = exponential(b_first, PRECISION)[None, :], exponential(b_second, PRECISION)[None, :]
    b_written = as_operand(b_w * b_beta[:, None] * b_inverse, dtype, PRECISION)
    if plain is not None:
        b_plain = as_operand(b_e.to(tl.float32) * b_inverse, dtype, PRECISION)
    b_query = as_operand(b_q.to(tl.float32) * b_factor, dtype, PRECISION)
    b_read = as_operand(b_k.to(tl.float32) * b_factor, dtype, PRECISION)

    # queries
    b_sum = product_with_state(b_do, b_state, do, do_stride_t, states, start, end, o_c, o_k, K, V, BV, PRECISION, WHOLE)
    b_sum *= scale * b_start
    b_sum = tl.dot(b_da, b_written, b_sum, input_precision=PRECISION)
    if plain is not None:
        b_sum = tl.dot(b_da_plain, b_plain, b_sum, input_precision=PRECISION)
    # for each position, the gradient that arrives at it minus the one that leaves from it
    b_net = b_query.to(tl.float32) * b_sum
    store_rows(dq + o_head * K, H * K, start, o_c, o_k, end, K, b_sum * b_factor, WHOLE)

    # keys that are read
    b_sum = product_with_state(b_dv, b_state, dv, H * V, states, start, end, o_c, o_k, K, V, BV, PRECISION, WHOLE)
    b_sum *= -b_start
    b_sum = tl.dot(b_dl, b_written, b_sum, input_precision=PRECISION)
    if plain is not None:
        b_sum = tl.dot(b_dl_plain, b_plain, b_sum, input_precision=PRECISION)
    b_net += b_read.to(tl.float32) * b_sum
    b_dr = b_sum * b_factor
    if write is not None:
        store_rows(dk + o_head * K, H * K, start, o_c, o_k, end, K, b_dr, WHOLE)

    # keys that are written
    if LATE:
        b_delta = load_rows(delta, H * V, start, o_c, o_v, end, V, WHOLE)
    b_sum = product_with_state(
        b_delta, b_dstate, delta, H * V, dstates, start, end, o_c, o_k, K, V, BV, PRECISION, WHOLE
    )
    b_sum *= b_end
    b_inverse = 1.0 / b_factor
    b_w = load_rows(p_write, write_t, start, o_c, o_k, end, K, WHOLE).to(tl.float32)
    b_written = as_operand(b_w * b_beta[:, None] * b_inverse, dtype, PRECISION).to(tl.float32)
    # the part that leaves the chunk from j < l is all that leaves it minus that from j >= l
    b_leaving = b_written * b_sum
    if dg is not None:
        b_dg = b_dg * exponential(b_first + b_second, PRECISION) + tl.sum(b_leaving, 0)
    b_sum = tl.dot(tl.trans(b_da), b_query, b_sum, input_precision=PRECISION)
    b_sum = tl.dot(tl.trans(b_dl), b_read, b_sum, input_precision=PRECISION)
    b_net -= b_written * b_sum
    b_dw = b_sum * b_inverse
    # the first of the sums of the other kernel's programs for these keys is that of this program; others are zero (or
    # NaN, where that is not finite), and behind the last keys there is none
    b_dbeta = tl.sum(b_w * b_dw, 1)
    for i in tl.static_range(PARTS):
        if K % BK == 0:
            p_dbeta, m_sum = dbeta + ((o_head + o_rows * H) * num_k + i_k) * PARTS + i, m_t
        else:
            num_sums, i_sum = tl.cdiv(K, BK // PARTS), i_k * PARTS + i
            p_dbeta = dbeta + (o_head + o_rows * H) * num_sums + i_sum
            m_sum = start + o_c < tl.where(i_sum < num_sums, end, 0)
        tl.store(p_dbeta, b_dbeta if i == 0 else b_dbeta * 0.0, mask=m_sum)
    if write is not None:
        store_rows(dwrite + o_head * K, H * K, start, o_c, o_k, end, K, b_beta[:, None] * b_dw, WHOLE)
    else:
        store_rows(dk + o_head * K, H * K, start, o_c, o_k, end, K, b_dr + b_beta[:, None] * b_dw, WHOLE)

    if plain is not None:
        if LATE:
            b_v = load_rows(v, v_stride_t, start, o_c, o_v, end, V, WHOLE).to(dtype)
        b_sum = product_with_state(
            b_v, b_dstate, v, v_stride_t, dstates, start, end, o_c, o_k, K, V, BV, PRECISION, WHOLE
        )
        b_sum *= b_end
        b_e = load_rows(plain, plain_stride_t, start, o_c, o_k, end, K, WHOLE).to(tl.float32)
        b_plain = as_operand(b_e * b_inverse, dtype, PRECISION).to(tl.float32)
        if dg is not None:
            b_dg += tl.sum(b_plain * b_sum, 0)
        b_sum = tl.dot(tl.trans(b_da_plain), b_query, b_sum, input_precision=PRECISION)
        b_sum = tl.dot(tl.trans(b_dl_plain), b_read, b_sum, input_precision=PRECISION)
        b_net -= b_plain * b_sum
        store_rows(dplain + o_head * K, H * K, start, o_c, o_k, end, K, b_sum * b_inverse, WHOLE)
    if dg is not None:
        b_net = masked_sums(o_c[None, :] >= o_c[:, None], b_net, False, PRECISION) + b_dg[None, :]
        store_rows(dg + o_head * K, H * K, start, o_c, o_k, end, K, b_net, WHOLE)
