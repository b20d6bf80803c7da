"""`_forward_kernel`: causal attention in float32 by products of float16 parts, without the matrix of all pairs.

    s_ij = scale q_i k_j,   m_i = max_j s_ij,   o_i = sum_j exp(s_ij - m_i) v_j / sum_j exp(s_ij - m_i)

A program takes BLOCK_M queries of one head and walks over the keys that they see, with running maxima and sums. Weights
are scaled by 2^TOP, the range of the parts (`split.py`).

Layout:  parts and scales of q [B H, P], k and v [B H, T] as `split` gives them; o [B, P, H, K] dense; lse [B H, tiles
         TILE] logarithms of the sums to base 2; positions [B, P] int64, strictly ascending.
float32: sums, maxima, and what is not in parts.
Cost:    12 K FLOPs of float16 parts and an exponential for each pair.
"""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import triton
import triton.language as tl

from subquad.kernels.attention.triton.dropout import kept, query_keys
from subquad.kernels.float16_parts import TOP, halves, split_dot

LOG2E = tl.constexpr(1.4426950408889634)
# a number and not -inf, because the difference of two of them is used
LOWEST = tl.constexpr(-1e30)


@triton.jit
def load_parts(parts, i_bh, start, length, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    """Rows from `start` on of both parts of a head. length: rows of a head, those of its last tile included."""
    p = (
        parts
        + (2 * i_bh * length + start) * BLOCK_K
        + (tl.arange(0, BLOCK) * BLOCK_K)[:, None]
        + tl.arange(0, BLOCK_K)[None, :]
    )
    return tl.load(p), tl.load(p + length * BLOCK_K)


@triton.jit
def query_positions(positions, i_b, o_q, P):
    """Positions of queries; -1, which sees no key, behind the last."""
    if positions is None:
        b_at = tl.where(o_q < P, o_q, -1)
    else:
        b_at = tl.load(positions + i_b * P + o_q, mask=o_q < P, other=-1).to(tl.int32)
    return b_at


@triton.jit
def _forward_kernel(
    q, k, v, q_scales, k_scales, v_scales, positions, seed, o, lse,
    scale, threshold, keep, P, T, H, q_tiles, k_tiles,
    K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    num_m = tl.cdiv(P, BLOCK_M)
    i_bh = tl.program_id(0).to(tl.int64) // num_m
    # the longest programs start first
    i_m = num_m - 1 - tl.program_id(0) % num_m
    i_b, i_h = i_bh // H, i_bh % H
    o_q, o_k = i_m * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    b_at = query_positions(positions, i_b, o_q, P)
    b_q1, b_q2 = load_parts(q, i_bh, i_m * BLOCK_M, q_tiles * TILE, BLOCK_M, BLOCK_K)
    b_factor = tl.load(q_scales + i_bh * q_tiles + i_m * BLOCK_M // TILE) * (scale * LOG2E)
    if seed is not None:
        b_key_1, b_key_2 = query_keys(seed, i_bh, o_q, P)
    b_max = tl.full([BLOCK_M], LOWEST, tl.float32)
    b_total = tl.zeros([BLOCK_M], tl.float32)
    b_o = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    for j in tl.range(0, tl.max(b_at, 0) + 1, BLOCK_N, num_stages=STAGES):
        o_j = j + tl.arange(0, BLOCK_N)
        i_scale = i_bh * k_tiles + j // TILE
        b_k1, b_k2 = load_parts(k, i_bh, j, k_tiles * TILE, BLOCK_N, BLOCK_K)
        b_s = split_dot(b_q1, b_q2, tl.trans(b_k1), tl.trans(b_k2)) * (b_factor * tl.load(k_scales + i_scale))
        m_s = o_j[None, :] <= b_at[:, None]
        b_s = tl.where(m_s, b_s, LOWEST)
        b_new = tl.maximum(b_max, tl.max(b_s, 1))
        b_keep = tl.exp2(b_max - b_new)
        b_p = tl.where(m_s, tl.exp2(b_s - (b_new - TOP)[:, None]), 0.0)
        b_total = b_total * b_keep + tl.sum(b_p, 1)
        b_max = b_new
        if seed is not None:
            b_p = tl.where(kept(b_key_1[:, None], b_key_2[:, None], o_j[None, :], threshold), b_p, 0.0)
        b_v1, b_v2 = load_parts(v, i_bh, j, k_tiles * TILE, BLOCK_N, BLOCK_K)
        b_p1, b_p2 = halves(b_p)
        b_o = b_o * b_keep[:, None] + split_dot(b_p1, b_p2, b_v1, b_v2) * tl.load(v_scales + i_scale)
    # at least 2^TOP for a query that sees a key
    b_total = tl.maximum(b_total, 1.0)
    b_o *= (keep / b_total)[:, None]
    p_o = o + ((i_b * P + o_q)[:, None] * H + i_h) * K + o_k[None, :]
    tl.store(p_o, b_o, mask=(o_q < P)[:, None] & (o_k < K)[None, :])
    # queries behind the last keep what no gradient can come from
    tl.store(lse + i_bh * q_tiles * TILE + o_q, tl.where(o_q < P, b_max - TOP + tl.log2(b_total), 0.0))
