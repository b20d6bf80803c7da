"""`_plain_grads_kernel`: with `plain`, gradients of every chunk that is factored about its middle.

It is apart from `_grads_kernel` because one program with both orders of work would need the registers of both. What the
two have in common is a list of parameters and the addresses of a chunk, which Triton has no way to share: a function
would return some twenty pointers. Log-decays are never bfloat16 here (`delta_rule_triton`).
"""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import triton
import triton.language as tl

from subquad.kernels.delta_rule.triton.tiles import load_rows, load_state, store_rows
from subquad.kernels.gated_linear_attention.triton.decays import (
    at_least_lowest,
    exponential,
    from_middle,
    half_totals,
    masked_sums,
)
from subquad.kernels.gated_linear_attention.triton.tiles import as_operand, chunk_span


@triton.jit
def product_with_state(
    x, stride_t, state, start, end, end_v, o_c, o_k,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """x S^T in float32 for the rows start + o_c of x [end, V] and the columns o_k of a transposed state S [V, K].

    end_v: V rounded up to whole tiles. It is an argument, so that the loop remains where it has one iteration (see
           LOG.md of gated_linear_attention).
    """
    b_sum = tl.zeros([o_c.shape[0], o_k.shape[0]], tl.float32)
    for i_v in range(0, end_v, BV):
        o_v = i_v + tl.arange(0, BV)
        b_state = load_state(state, o_v, o_k, V, K, False)
        b_x = load_rows(x, stride_t, start, o_c, o_v, end, V, False).to(b_state.dtype)
        b_sum = tl.dot(b_x, b_state, b_sum, input_precision=PRECISION)
    return b_sum


@triton.jit
def _plain_grads_kernel(
    q, k, beta, g, write, plain, v, delta, do, dv, states, dstates, da, dl, da_plain, dl_plain, diagonals, dq, dk,
    dbeta, dg, dwrite, dplain, steep, table,
    T, num_t, end_v, scale,
    q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_t, k_stride_h, beta_stride_b, beta_stride_t, beta_stride_h,
    g_stride_b, g_stride_t, g_stride_h, write_stride_b, write_stride_t, write_stride_h,
    plain_stride_b, plain_stride_t, plain_stride_h, v_stride_b, v_stride_t, v_stride_h,
    do_stride_b, do_stride_t, do_stride_h,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dq, dk, dg, dwrite and dplain [C, BK] of a chunk that is factored about its middle; dbeta is a sum over channels.

    The launch is that of `_grads_kernel`, so the parameters of both must agree, in their names and their order.

    The equations are those of `_grads_kernel`, with e the keys of `plain`. Let c_i be the exponential of the sum of the
    log-decays from the middle of the chunk to position i. Then exp(D_ij) is c_i / c_j, and the sums over positions are
    products of dA and dL, which are read from `ChunkPairs`, with q_i c_i, r_i c_i, w_j / c_j and e_j / c_j.

    Queries, keys that are read, keys of `plain` and keys that are written are finished one after the other, each with a
    loop over values of its own, so that registers hold one of the four products with a state at a time. Each loads anew
    what it needs of the inputs, which would take registers in the loop before.
    """
    num_k = tl.cdiv(K, BK)
    i_k, i_c = tl.program_id(0) % num_k, (tl.program_id(0) // num_k).to(tl.int64)
    if tl.load(steep + i_c) != 0:
        return
    i_t, i_bh = i_c % num_t, i_c // num_t
    i_b, i_h = i_bh // H, i_bh % H
    dtype = states.dtype.element_ty
    o_c, o_k = tl.arange(0, C), i_k * BK + tl.arange(0, BK)
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
    da += o_head * C
    dl += o_head * C
    p_beta = beta + i_b * beta_stride_b + i_h * beta_stride_h + o_rows * beta_stride_t
    b_beta = tl.load(p_beta, mask=m_t, other=0.0).to(tl.float32)
    p_diagonals = diagonals + o_head + o_rows * H
    b_diagonal = tl.load(p_diagonals, mask=m_t, other=0.0)
    v += i_b * v_stride_b + i_h * v_stride_h
    plain += i_b * plain_stride_b + i_h * plain_stride_h
    da_plain += o_head * C
    dl_plain += o_head * C
    p_diagonals += (tl.num_programs(0) // (num_t * num_k)).to(tl.int64) * T
    b_diagonal_plain = tl.load(p_diagonals, mask=m_t, other=0.0)
    p_write, write_t = k, k_stride_t
    if write is not None:
        p_write, write_t = write + i_b * write_stride_b + i_h * write_stride_h, write_stride_t

    # queries
    b_dq = product_with_state(do, do_stride_t, states, start, end, end_v, o_c, o_k, K, V, BV, PRECISION)
    b_g = at_least_lowest(load_rows(g, g_stride_t, start, o_c, o_k, end, K, False))
    b_first, b_second = half_totals(b_g, o_c, C)
    b_exponent = masked_sums(from_middle(o_c, C), b_g, False, PRECISION)
    b_factor, b_inverse = exponential(b_exponent, PRECISION), exponential(-b_exponent, PRECISION)
    b_start = exponential(b_first, PRECISION)[None, :]
    b_w = load_rows(p_write, write_t, start, o_c, o_k, end, K, False).to(tl.float32) * b_beta[:, None]
    b_written = as_operand(b_w * b_inverse, dtype, PRECISION)
    b_e = load_rows(plain, plain_stride_t, start, o_c, o_k, end, K, False).to(tl.float32)
    b_plain = as_operand(b_e * b_inverse, dtype, PRECISION)
    b_dq *= scale * b_start
    b_q = load_rows(q, q_stride_t, start, o_c, o_k, end, K, False).to(tl.float32)
    b_read = as_operand(b_q * b_factor, dtype, PRECISION)
    b_pairs = load_rows(da, H * C, start, o_c, o_c, end, C, False)
    b_inside = tl.dot(b_pairs, b_written, input_precision=PRECISION)
    b_dw_inside = tl.dot(tl.trans(b_pairs), b_read, input_precision=PRECISION)
    b_pairs = load_rows(da_plain, H * C, start, o_c, o_c, end, C, False)
    b_inside = tl.dot(b_pairs, b_plain, b_inside, input_precision=PRECISION)
    b_de_inside = tl.dot(tl.trans(b_pairs), b_read, input_precision=PRECISION)
    if dg is not None:
        # for each position, the gradient that arrives at it minus the one that leaves from it, within the chunk
        b_net = b_read.to(tl.float32) * b_inside + b_q * b_factor * b_dq
    b_dq = (b_dq + b_inside) * b_factor + b_diagonal[:, None] * b_w
    b_dq += b_diagonal_plain[:, None] * b_e
    store_rows(dq + o_head * K, H * K, start, o_c, o_k, end, K, b_dq, False)

    # keys that are read
    b_dr = product_with_state(dv, H * V, states, start, end, end_v, o_c, o_k, K, V, BV, PRECISION)
    b_dr *= -b_start
    b_k = load_rows(k, k_stride_t, start, o_c, o_k, end, K, False).to(tl.float32)
    b_read = as_operand(b_k * b_factor, dtype, PRECISION)
    b_pairs = load_rows(dl, H * C, start, o_c, o_c, end, C, False)
    b_inside = tl.dot(b_pairs, b_written, input_precision=PRECISION)
    b_dw_inside = tl.dot(tl.trans(b_pairs), b_read, b_dw_inside, input_precision=PRECISION)
    b_pairs = load_rows(dl_plain, H * C, start, o_c, o_c, end, C, False)
    b_inside = tl.dot(b_pairs, b_plain, b_inside, input_precision=PRECISION)
    b_de_inside = tl.dot(tl.trans(b_pairs), b_read, b_de_inside, input_precision=PRECISION)
    if dg is not None:
        b_net += b_read.to(tl.float32) * b_inside + b_k * b_factor * b_dr
    b_dr = (b_dr + b_inside) * b_factor
    if write is not None:
        store_rows(dk + o_head * K, H * K, start, o_c, o_k, end, K, b_dr, False)

    # keys that are written
    # the part that leaves the chunk from j < l is all that leaves it, b_dg, minus that from j >= l, in b_net
    b_dg = tl.zeros([BK], tl.float32)
    b_end = exponential(b_second, PRECISION)[None, :]
    b_de = product_with_state(v, v_stride_t, dstates, start, end, end_v, o_c, o_k, K, V, BV, PRECISION)
    b_de *= b_end
    b_e = load_rows(plain, plain_stride_t, start, o_c, o_k, end, K, False).to(tl.float32)
    b_q = load_rows(q, q_stride_t, start, o_c, o_k, end, K, False).to(tl.float32)
    if dg is not None:
        b_out = b_e * b_inverse
        b_dg += tl.sum(b_out * b_de, 0)
        b_net -= as_operand(b_out, dtype, PRECISION).to(tl.float32) * b_de_inside + b_out * b_de
    b_de = (b_de + b_de_inside) * b_inverse + b_diagonal_plain[:, None] * b_q
    store_rows(dplain + o_head * K, H * K, start, o_c, o_k, end, K, b_de, False)
    b_dw = product_with_state(delta, H * V, dstates, start, end, end_v, o_c, o_k, K, V, BV, PRECISION)
    b_dw *= b_end
    b_q = load_rows(q, q_stride_t, start, o_c, o_k, end, K, False).to(tl.float32)
    b_write = load_rows(p_write, write_t, start, o_c, o_k, end, K, False).to(tl.float32)
    b_w = b_write * b_beta[:, None]
    if dg is not None:
        b_out = b_w * b_inverse
        b_dg += tl.sum(b_out * b_dw, 0)
        b_net -= as_operand(b_out, dtype, PRECISION).to(tl.float32) * b_dw_inside + b_out * b_dw
    b_dw = (b_dw + b_dw_inside) * b_inverse + b_diagonal[:, None] * b_q
    if write is not None:
        store_rows(dwrite + o_head * K, H * K, start, o_c, o_k, end, K, b_beta[:, None] * b_dw, False)
    else:
        store_rows(dk + o_head * K, H * K, start, o_c, o_k, end, K, b_dr + b_beta[:, None] * b_dw, False)
    tl.store(dbeta + (o_head + o_rows * H) * num_k + i_k, tl.sum(b_write * b_dw, 1), mask=m_t)
    if dg is not None:
        # a loop of its own, so that no product of matrices waits for these sums
        b_through = tl.zeros([BK], tl.float32)
        for i_v in range(0, end_v, BV):
            o_v = i_v + tl.arange(0, BV)
            b_state = load_state(states, o_v, o_k, V, K, False).to(tl.float32)
            b_through += tl.sum(b_state * load_state(dstates, o_v, o_k, V, K, False).to(tl.float32), 0)
        b_dg += b_through * exponential(b_first + b_second, PRECISION)
        b_net = masked_sums(o_c[None, :] >= o_c[:, None], b_net, False, PRECISION) + b_dg[None, :]
        store_rows(dg + o_head * K, H * K, start, o_c, o_k, end, K, b_net, False)
