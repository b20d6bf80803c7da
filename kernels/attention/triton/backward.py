"""`_keys_kernel` and `_queries_kernel`: the gradients of causal attention in float32, by products of float16 parts.

With p_ij = exp(s_ij - lse_i), delta_i = do_i o_i and dp_ij = do_i v_j:

    ds_ij = p_ij (dp_ij - delta_i)
    dq_i = scale sum_j ds_ij k_j,   dk_j = scale sum_i ds_ij q_i,   dv_j = sum_i p_ij do_i

Dropout multiplies p_ij in dv and dp_ij in ds by 0 or 1 / (1 - rate). `_keys_kernel` takes BLOCK_N keys of a head and
walks over the queries that see them, `_queries_kernel` BLOCK_M queries over the keys that they see. Both compute s and
dp: seven products instead of five, but no sum of another program is added, so two calls give the same bits. Each row of
ds is scaled by a power of two before it is split, because its size is not known before.

Layout:  as in the forward pass; do in parts like q; delta [B H, tiles TILE]; dq [B, P, H, K], dk and dv
         [B, T, H, K] with contiguous channels.
float32: sums, and what is not in parts.
Cost:    42 K FLOPs of float16 parts and two exponentials for each pair.
"""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import triton
import triton.language as tl

from subquad.kernels.attention.triton.dropout import kept, query_keys
from subquad.kernels.attention.triton.forward import LOG2E, load_parts, query_positions
from subquad.kernels.float16_parts import TOP, UNSCALE, halves, power_scale, split_dot


@triton.jit
def _keys_kernel(
    q, k, v, do, q_scales, k_scales, v_scales, do_scales, positions, seed, lse, delta, dk, dv,
    scale, threshold, keep, P, T, H, q_tiles, k_tiles, stride_b, stride_t, stride_h,
    K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dk and dv of a tile of keys. Matrices of pairs have a row for each key, a column for each query."""
    num_n = tl.cdiv(T, BLOCK_N)
    i_bh, i_n = tl.program_id(0).to(tl.int64) // num_n, tl.program_id(0) % num_n
    i_b, i_h = i_bh // H, i_bh % H
    o_j, o_k = i_n * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    b_k1, b_k2 = load_parts(k, i_bh, i_n * BLOCK_N, k_tiles * TILE, BLOCK_N, BLOCK_K)
    b_v1, b_v2 = load_parts(v, i_bh, i_n * BLOCK_N, k_tiles * TILE, BLOCK_N, BLOCK_K)
    i_scale = i_bh * k_tiles + i_n * BLOCK_N // TILE
    k_scale, v_scale = tl.load(k_scales + i_scale) * (scale * LOG2E), tl.load(v_scales + i_scale)
    b_dk = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    b_dv = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    # without positions, a query stands at its own index
    first = 0 if positions is not None else i_n * BLOCK_N // BLOCK_M * BLOCK_M
    for i in tl.range(first, P, BLOCK_M, num_stages=STAGES):
        o_q = i + tl.arange(0, BLOCK_M)
        b_at = query_positions(positions, i_b, o_q, P)
        m_s = o_j[:, None] <= b_at[None, :]
        i_tile = i_bh * q_tiles + i // TILE
        q_scale, do_scale = tl.load(q_scales + i_tile), tl.load(do_scales + i_tile)
        b_q1, b_q2 = load_parts(q, i_bh, i, q_tiles * TILE, BLOCK_M, BLOCK_K)
        b_lse = tl.load(lse + i_bh * q_tiles * TILE + o_q) - TOP
        b_s = split_dot(b_k1, b_k2, tl.trans(b_q1), tl.trans(b_q2)) * (k_scale * q_scale)
        b_p = tl.where(m_s, tl.exp2(b_s - b_lse[None, :]), 0.0)
        b_do1, b_do2 = load_parts(do, i_bh, i, q_tiles * TILE, BLOCK_M, BLOCK_K)
        b_kept = b_p
        if seed is not None:
            b_key_1, b_key_2 = query_keys(seed, i_bh, o_q, P)
            m_kept = kept(b_key_1[None, :], b_key_2[None, :], o_j[:, None], threshold)
            b_kept = tl.where(m_kept, b_p, 0.0)
        b_p1, b_p2 = halves(b_kept)
        b_dv += split_dot(b_p1, b_p2, b_do1, b_do2) * do_scale
        b_dp = split_dot(b_v1, b_v2, tl.trans(b_do1), tl.trans(b_do2)) * (v_scale * do_scale)
        if seed is not None:
            b_dp = tl.where(m_kept, b_dp * keep, 0.0)
        b_ds = b_p * (b_dp - tl.load(delta + i_bh * q_tiles * TILE + o_q)[None, :])
        b_size, b_inverse = power_scale(tl.max(tl.abs(b_ds), 1))
        b_ds1, b_ds2 = halves(b_ds * b_inverse[:, None])
        b_dk += split_dot(b_ds1, b_ds2, b_q1, b_q2) * (b_size * q_scale)[:, None]
    # the weights, and what was computed of them, are scaled by 2^TOP
    o_d = i_b * stride_b + i_h * stride_h + o_j.to(tl.int64)[:, None] * stride_t + o_k[None, :]
    m_d = (o_j < T)[:, None] & (o_k < K)[None, :]
    tl.store(dk + o_d, b_dk * (scale * UNSCALE), mask=m_d)
    tl.store(dv + o_d, b_dv * (keep * UNSCALE), mask=m_d)


@triton.jit
def _queries_kernel(
    q, k, v, do, q_scales, k_scales, v_scales, do_scales, positions, seed, lse, delta, dq,
    scale, threshold, keep, P, T, H, q_tiles, k_tiles, stride_b, stride_t, stride_h,
    K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dq of a tile of queries. Matrices of pairs have a row for each query, a column for each key."""
    num_m = tl.cdiv(P, BLOCK_M)
    i_bh = tl.program_id(0).to(tl.int64) // num_m
    i_m = num_m - 1 - tl.program_id(0) % num_m
    i_b, i_h = i_bh // H, i_bh % H
    o_q, o_k = i_m * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    b_at = query_positions(positions, i_b, o_q, P)
    b_q1, b_q2 = load_parts(q, i_bh, i_m * BLOCK_M, q_tiles * TILE, BLOCK_M, BLOCK_K)
    b_do1, b_do2 = load_parts(do, i_bh, i_m * BLOCK_M, q_tiles * TILE, BLOCK_M, BLOCK_K)
    i_tile = i_bh * q_tiles + i_m * BLOCK_M // TILE
    q_scale, do_scale = tl.load(q_scales + i_tile) * (scale * LOG2E), tl.load(do_scales + i_tile)
    b_lse = tl.load(lse + i_bh * q_tiles * TILE + o_q)
    b_delta = tl.load(delta + i_bh * q_tiles * TILE + o_q)
    if seed is not None:
        b_key_1, b_key_2 = query_keys(seed, i_bh, o_q, P)
    b_dq = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    for j in tl.range(0, tl.max(b_at, 0) + 1, BLOCK_N, num_stages=STAGES):
        o_j = j + tl.arange(0, BLOCK_N)
        i_scale = i_bh * k_tiles + j // TILE
        k_scale, v_scale = tl.load(k_scales + i_scale), tl.load(v_scales + i_scale)
        b_k1, b_k2 = load_parts(k, i_bh, j, k_tiles * TILE, BLOCK_N, BLOCK_K)
        b_s = split_dot(b_q1, b_q2, tl.trans(b_k1), tl.trans(b_k2)) * (q_scale * k_scale)
        b_v1, b_v2 = load_parts(v, i_bh, j, k_tiles * TILE, BLOCK_N, BLOCK_K)
        b_dp = split_dot(b_do1, b_do2, tl.trans(b_v1), tl.trans(b_v2)) * (do_scale * v_scale)
        if seed is not None:
            b_dp = tl.where(kept(b_key_1[:, None], b_key_2[:, None], o_j[None, :], threshold), b_dp * keep, 0.0)
        b_p = tl.where(o_j[None, :] <= b_at[:, None], tl.exp2(b_s - b_lse[:, None]), 0.0)
        b_ds = b_p * (b_dp - b_delta[:, None])
        b_size, b_inverse = power_scale(tl.max(tl.abs(b_ds), 1))
        b_ds1, b_ds2 = halves(b_ds * b_inverse[:, None])
        b_dq += split_dot(b_ds1, b_ds2, b_k1, b_k2) * (b_size * k_scale)[:, None]
    o_d = i_b * stride_b + i_h * stride_h + o_q.to(tl.int64)[:, None] * stride_t + o_k[None, :]
    tl.store(dq + o_d, b_dq * scale, mask=(o_q < P)[:, None] & (o_k < K)[None, :])
