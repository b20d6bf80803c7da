"""Gated linear attention in Triton: chunks joined by their states, four kernels for every kind of decay.

    S_t = diag(exp(log_decay_t)) S_{t-1} + k_t^T v_t;   o_t = scale q_t S_t        source: package docstring

A chunk is C positions; P_i sums the log-decays of a chunk up to and with i, R_j those after j, D_ij those in (j, i].

    _scores_kernel   A_ij = scale sum_x q_ix k_jx exp(D_ijx) for j <= i, q_in = scale q exp(P), k_out = k exp(R)
    _states_kernel   the state before every chunk: S <- exp(P_C) S + k_out^T v; in reverse, its gradient
    _read_kernel     o = q_in S + A v; transposed, dv = k_out dS + A^T do
    _grads_kernel    dq, dk and the gradient of the log-decays, from dA = do v^T, do S^T and v dS^T

Without decay the first is left out: q_in and k_out are q and k, and `_read_kernel` forms A itself. Decays on values
need no kernel of their own: sum_ij A_ij <do_i, v_j> is the same under (q, k) <-> (do, v), so that o is what
`_grads_kernel` gives as dq, and dq, dk are what `_read_kernel` gives as o, dv (README).

D of a decay a channel couples i, j and the channel. Where both halves of a chunk decay by less than exp(-LIMIT), it is
the difference of two factors about the middle, within range on either side, and one product serves all pairs. Else a
block of 2h positions is halved; a query in its second half and a key in its first factor about the middle with
exponents <= 0, a level of the tree of `chunked.py`: h = 1, 2, ..., C/2, one product each, the diagonal apart. Exponents
are products of log-decays with matrices of zeros and ones: sums only, never a difference (of one decay a head in half
precision, and about the middle: differences of what is small enough).

A long sequence is cut in segments walked side by side: once from zeros, for what each adds to the state at its end, and
once from what those before it add up to. Chunks of packed sequences stand in a table and straddle no boundary.

float32: sums, exponentials, states while they grow. Operands of products and kept states: bfloat16 for bfloat16 inputs,
else float32 (fp16: tf32, fp32: three tf32 products). Deterministic: no atomics. Tiles are 64 numbers wide or more:
ptxas 12.8, which Triton 3.6 brings, gets addresses in shared memory wrong where narrower ones meet them (README).
Kept for backward besides the inputs: the state before each chunk, K V / C numbers a position; with a decay also the
outputs of `_scores_kernel`, 2 K + C.
"""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import cdiv, launch, power_of_2

NONE, HEAD, CHANNEL = 0, 1, 2
"""What decays: nothing, a head (constant or by step), a channel."""

CHUNK = 64


class Config(NamedTuple):
    """Of a tile: channels of keys, of values."""

    block_k: int
    block_v: int
    num_warps: int
    num_stages: int


NARROWEST = 64
"""Numbers a tile is wide at least (module docstring)."""
# by kind of decay
SCORES = {HEAD: Config(64, 0, 4, 2), CHANNEL: Config(64, 0, 4, 2)}
STATES = {NONE: Config(64, 128, 4, 3), HEAD: Config(64, 64, 4, 3), CHANNEL: Config(64, 64, 4, 3)}
READ = {kind: Config(64, 128, 4, 3) for kind in (NONE, HEAD, CHANNEL)}
GRADS = {NONE: Config(64, 64, 4, 2), HEAD: Config(64, 64, 4, 2), CHANNEL: Config(32, 64, 4, 2)}
SEGMENTS = {"below": 256, "programs": 512, "chunks": 8}
"""Fewer programs than `below` walk segments of at least `chunks` chunks, so many that there are `programs` of them."""

# below it a step keeps nothing that float32 could hold, and infinities would spoil the products with zeros
LOWEST = tl.constexpr(-128.0)
LOG2E = tl.constexpr(1.4426950408889634)
# log(2) in two parts, the first of ten bits
LN2_HIGH, LN2_LOW = tl.constexpr(0.693359375), tl.constexpr(-2.1219444005469057e-4)
_NONE, _HEAD, _CHANNEL = tl.constexpr(NONE), tl.constexpr(HEAD), tl.constexpr(CHANNEL)
WHOLE, ENDS, REST = 0, 1, 2
_ENDS, _REST = tl.constexpr(ENDS), tl.constexpr(REST)


@triton.jit
def _exp(x, PRECISION: tl.constexpr):
    """In half precision one special function; else the rounding of x LOG2E would count, and whole powers go apart."""
    if PRECISION == "tf32":
        b_exp = tl.exp2(x * LOG2E)
    else:
        b_n = tl.floor(x * LOG2E + 0.5)
        b_exp = tl.exp2(b_n) * tl.exp2((x - b_n * LN2_HIGH - b_n * LN2_LOW) * LOG2E)
    return b_exp


@triton.jit
def _operand(b_x, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """As products take it. tf32 products cut off what they have no bits for; rounding loses half as much."""
    if dtype == tl.float32 and PRECISION == "tf32":
        b_bits = (b_x.to(tl.float32).to(tl.int32, bitcast=True) + 0x1000) & -0x2000
        b_operand = tl.where(b_x == b_x, b_bits.to(tl.float32, bitcast=True), b_x)
    else:
        b_operand = b_x.to(dtype)
    return b_operand


@triton.jit
def _load(p, stride_t, o_t, o_x, T, X):
    """Rows o_t and columns o_x, zero outside of T and X."""
    m_x = (o_t < T)[:, None] & (o_x < X)[None, :]
    return tl.load(p + o_t.to(tl.int64)[:, None] * stride_t + o_x[None, :], mask=m_x, other=0.0)


@triton.jit
def _load_transposed(p, stride_t, o_t, o_x, T, X):
    m_x = (o_x < X)[:, None] & (o_t < T)[None, :]
    return tl.load(p + o_t.to(tl.int64)[None, :] * stride_t + o_x[:, None], mask=m_x, other=0.0)


@triton.jit
def _store(p, stride_t, o_t, o_x, T, X, b_x):
    m_x = (o_t < T)[:, None] & (o_x < X)[None, :]
    tl.store(p + o_t.to(tl.int64)[:, None] * stride_t + o_x[None, :], b_x.to(p.dtype.element_ty), mask=m_x)


@triton.jit
def _positions(table, i_t, T, C: tl.constexpr):
    """Where chunk i_t starts, and where its sequence ends."""
    if table is None:
        start, end = i_t * C, T
    else:
        start, end = tl.load(table + 2 * i_t), tl.load(table + 2 * i_t + 1)
    return start, end


@triton.jit
def _load_state(p, o_k, o_v, K: tl.constexpr, V: tl.constexpr):
    m_s = (o_k < K)[:, None] & (o_v < V)[None, :]
    return tl.load(p + o_k[:, None] * V + o_v[None, :], mask=m_s, other=0.0)


@triton.jit
def _sums(m_w, b_x, NARROW: tl.constexpr, PRECISION: tl.constexpr):
    """sum_l m_w[i, l] b_x[l, :], for m_w of zeros and ones. NARROW: b_x has bfloat16 values."""
    if PRECISION == "tf32":
        b_w = m_w.to(tl.float32).to(tl.bfloat16)
        # two roundings to bfloat16 hold 16 bits; the exponent e errs by 2^-17 e, which exp(e) <= 1 keeps small
        b_high = b_x.to(tl.bfloat16)
        b_sum = tl.dot(b_w, b_high)
        if not NARROW:
            b_sum += tl.dot(b_w, (b_x - b_high.to(tl.float32)).to(tl.bfloat16))
    else:
        b_sum = tl.dot(m_w.to(tl.float32), b_x, input_precision=PRECISION)
    return b_sum


@triton.jit
def _halves(b_g, o_c, C: tl.constexpr):
    """[X] each: sums over the first half of a chunk and over the second."""
    m_2 = (o_c >= C // 2)[:, None]
    return tl.sum(tl.where(m_2, 0.0, b_g), 0), tl.sum(tl.where(m_2, b_g, 0.0), 0)


@triton.jit
def _about_middle(b_g, o_c, C: tl.constexpr, NARROW: tl.constexpr, PRECISION: tl.constexpr):
    """[C, X]: exp(P_i) over that of the middle, for queries; keys have its inverse."""
    m_2 = o_c >= C // 2
    o_from, o_until = tl.where(m_2, C // 2, o_c + 1), tl.where(m_2, o_c + 1, C // 2)
    b_e = _sums((o_c[None, :] >= o_from[:, None]) & (o_c[None, :] < o_until[:, None]), b_g, NARROW, PRECISION)
    return _exp(tl.where(m_2[:, None], b_e, -b_e), PRECISION)


@triton.jit
def _level(b_g, o_c, shift, NARROW: tl.constexpr, PRECISION: tl.constexpr):
    """For halves of h = 2^shift: factors of queries or keys [C, X], and the pairs i, j they are right for [C, C]."""
    half = 1 << shift
    m_2 = (o_c & half) != 0
    o_start = o_c & -half
    # of each row the columns from .. until, which leaves less to compute for a pair
    o_from, o_until = tl.where(m_2, o_start, o_c + 1), tl.where(m_2, o_c + 1, o_start + half)
    b_e = _sums((o_c[None, :] >= o_from[:, None]) & (o_c[None, :] < o_until[:, None]), b_g, NARROW, PRECISION)
    o_from, o_until = o_start - half, tl.where(m_2, o_start, 0)
    m_pair = (o_c[None, :] >= o_from[:, None]) & (o_c[None, :] < o_until[:, None])
    return _exp(b_e, PRECISION), m_pair


@triton.jit
def _load_head(g, stride_t, o_t, m_t):
    return tl.maximum(tl.load(g + o_t.to(tl.int64) * stride_t, mask=m_t, other=0.0).to(tl.float32), LOWEST)


@triton.jit
def _load_ends(g, stride_t, o_t, o_c, T, C: tl.constexpr):
    """[C] each: P_i and R_j."""
    b_p = tl.cumsum(_load_head(g, stride_t, o_t, o_t < T), 0)
    # those after j, so that nothing is subtracted
    b_r = tl.cumsum(_load_head(g, stride_t, o_t + 1, (o_t + 1 < T) & (o_c + 1 < C)), 0, reverse=True)
    return b_p, b_r


@triton.jit
def _decays(b_g, b_p, o_c, PRECISION: tl.constexpr):
    """[C, C]: exp(D_ij) for j <= i, else 0."""
    m_past = o_c[:, None] >= o_c[None, :]
    if PRECISION == "tf32":
        b_d = b_p[:, None] - b_p[None, :]
    else:
        b_d = _sums(m_past, tl.where(o_c[:, None] > o_c[None, :], b_g[:, None], 0.0), False, PRECISION)
    return tl.where(m_past, _exp(tl.where(m_past, b_d, 0.0), PRECISION), 0.0)


@triton.jit
def _scores_kernel(
    q,
    k,
    g,
    q_in,
    k_out,
    total,
    scores,
    table,
    T,
    num_t,
    scale,
    q_stride_b,
    q_stride_t,
    q_stride_h,
    k_stride_b,
    k_stride_t,
    k_stride_h,
    g_stride_b,
    g_stride_t,
    g_stride_h,
    H: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    LEVELS: tl.constexpr,
    BK: tl.constexpr,
    DECAY: tl.constexpr,
    LIMIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Of one chunk: scores A [C, C], q_in = scale q exp(P), k_out = k exp(R) [C, K], total = P_C [K].

    Without q only k_out and total; without k_out neither of the two.
    """
    i_t, i_bh = tl.program_id(0) % num_t, (tl.program_id(0) // num_t).to(tl.int64)
    i_b, i_h = i_bh // H, i_bh % H
    dtype = q_in.dtype.element_ty if k_out is None else k_out.dtype.element_ty
    NARROW: tl.constexpr = g.dtype.element_ty == tl.bfloat16
    o_c = tl.arange(0, C)
    k += i_b * k_stride_b + i_h * k_stride_h
    g += i_b * g_stride_b + i_h * g_stride_h
    o_dense, o_scores = (i_b * T * H + i_h) * K, (i_b * T * H + i_h) * C
    start, T = _positions(table, i_t, T, C)
    o_t = start + o_c
    m_until = o_c[None, :] <= o_c[:, None]
    b_a = tl.zeros([C, C], tl.float32)
    if DECAY == _HEAD:
        b_p, b_r = _load_ends(g, g_stride_t, o_t, o_c, T, C)
        b_head = _load_head(g, g_stride_t, o_t, o_t < T)
        b_in, b_out = _exp(b_p, PRECISION)[:, None], _exp(b_r, PRECISION)[:, None]
    for i_k in range(0, K, BK):
        o_k = i_k + tl.arange(0, BK)
        p_total = total + (i_bh * num_t + i_t) * K + o_k
        b_k = _load(k, k_stride_t, o_t, o_k, T, K).to(tl.float32)
        if q is not None:
            b_q = _load(q + i_b * q_stride_b + i_h * q_stride_h, q_stride_t, o_t, o_k, T, K).to(tl.float32)
        if DECAY == _HEAD:
            tl.store(p_total, tl.zeros([BK], tl.float32) + tl.sum(b_head, 0), mask=o_k < K)
            _store(k_out + o_dense, H * K, o_t, o_k, T, K, _operand(b_k * b_out, dtype, PRECISION))
            _store(q_in + o_dense, H * K, o_t, o_k, T, K, _operand(b_q * (b_in * scale), dtype, PRECISION))
            b_a += tl.dot(b_q.to(dtype), tl.trans(b_k.to(dtype)), input_precision=PRECISION)
        else:
            b_g = tl.maximum(_load(g, g_stride_t, o_t, o_k, T, K).to(tl.float32), LOWEST)
            b_1, b_2 = _halves(b_g, o_c, C)
            if k_out is not None:
                tl.store(p_total, b_1 + b_2, mask=o_k < K)
            if q is not None:
                b_q *= scale
            if tl.min(tl.minimum(b_1, b_2), 0) > -LIMIT:
                b_f = _about_middle(b_g, o_c, C, NARROW, PRECISION)
                b_kf = b_k / b_f
                b_out = b_kf * _exp(b_2, PRECISION)[None, :]
                if q is not None:
                    b_qf = b_q * b_f
                    b_in = b_qf * _exp(b_1, PRECISION)[None, :]
                    b_qf, b_kf = _operand(b_qf, dtype, PRECISION), _operand(b_kf, dtype, PRECISION)
                    b_pairs = tl.dot(b_qf, tl.trans(b_kf), input_precision=PRECISION)
                    b_a += tl.where(o_c[:, None] >= o_c[None, :], b_pairs, 0.0)
            else:
                b_out = b_k
                if k_out is not None:
                    b_out *= _exp(_sums(m_until == 0, b_g, NARROW, PRECISION), PRECISION)
                if q is not None:
                    b_in = b_q * _exp(_sums(m_until, b_g, NARROW, PRECISION), PRECISION)
                    b_a += tl.where(o_c[:, None] == o_c[None, :], tl.sum(b_q * b_k, 1)[:, None], 0.0)
                    for level in range(LEVELS):
                        b_f, m_pair = _level(b_g, o_c, level, NARROW, PRECISION)
                        b_qf = _operand(b_q * b_f, dtype, PRECISION)
                        b_kf = _operand(b_k * b_f, dtype, PRECISION)
                        b_pairs = tl.dot(b_qf, tl.trans(b_kf), input_precision=PRECISION)
                        b_a += tl.where(m_pair, b_pairs, 0.0)
            if k_out is not None:
                _store(k_out + o_dense, H * K, o_t, o_k, T, K, _operand(b_out, dtype, PRECISION))
            if q is not None:
                _store(q_in + o_dense, H * K, o_t, o_k, T, K, _operand(b_in, dtype, PRECISION))
    if q is not None:
        if DECAY == _HEAD:
            b_a *= _decays(b_head, b_p, o_c, PRECISION) * scale
        _store(scores + o_scores, H * C, o_t, o_c, T, C, _operand(b_a, dtype, PRECISION))


@triton.jit
def _states_kernel(
    x,
    y,
    total,
    states,
    ends,
    end_totals,
    first,
    last,
    table,
    bounds,
    T,
    num_t,
    scale,
    num_walked,
    x_stride_b,
    x_stride_t,
    x_stride_h,
    y_stride_b,
    y_stride_t,
    y_stride_h,
    end_stride_k,
    end_stride_v,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PART: tl.constexpr,
    REVERSE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """states [B, H, T / C, K, V], each from before its chunk: S <- exp(total) S + x^T y, x = k_out and y = v.

    REVERSE: gradients of the states after their chunks, last chunk first; x = q_in (without decay q) and y = do.
    PART WHOLE: a program walks all chunks. ENDS: a segment of `num_walked` from zeros, writing no states but what it
    ends with to `ends` [segments, B, H, K, V] and its decay to `end_totals`. REST: from what those before it add up to.
    """
    num_k, num_v = tl.cdiv(K, BK), tl.cdiv(V, BV)
    i_kv, i_bh = tl.program_id(0) % (num_k * num_v), (tl.program_id(0) // (num_k * num_v)).to(tl.int64)
    i_b, i_h = i_bh // H, i_bh % H
    i_s, num_bh = tl.program_id(1), (tl.num_programs(0) // (num_k * num_v)).to(tl.int64)
    o_k = i_kv // num_v * BK + tl.arange(0, BK)
    o_v = i_kv % num_v * BV + tl.arange(0, BV)
    o_c = tl.arange(0, C)
    m_s = (o_k < K)[:, None] & (o_v < V)[None, :]
    if table is None:
        i_first, num_own, o_chunks = 0, num_t, i_bh * num_t
        x += i_b * x_stride_b
        y += i_b * y_stride_b
    else:
        i_first = tl.load(bounds + i_b)
        num_own, o_chunks = tl.load(bounds + i_b + 1) - i_first, i_h * num_t
    x += i_h * x_stride_h
    y += i_h * y_stride_h
    o_end = i_bh * K * V + o_k[:, None] * end_stride_k + o_v[None, :] * end_stride_v
    o_dense = o_k[:, None] * V + o_v[None, :]
    dtype = states.dtype.element_ty
    b_s = tl.zeros([BK, BV], tl.float32)
    b_walked = tl.zeros([BK], tl.float32)
    if first is not None and PART != _ENDS:
        b_s += tl.load(first + o_end, mask=m_s, other=0.0).to(tl.float32)
    if PART == _REST:
        for i in range(i_s):
            if total is not None:
                b_total = tl.load(end_totals + (i * num_bh + i_bh) * K + o_k, mask=o_k < K, other=0.0)
                b_s *= _exp(b_total, PRECISION)[:, None]
            b_s += tl.load(ends + (i * num_bh + i_bh) * K * V + o_dense, mask=m_s, other=0.0)
    for i in range(i_s * num_walked, tl.minimum((i_s + 1) * num_walked, num_own)):
        i_t = i_first + (num_own - 1 - i if REVERSE else i)
        start, end = _positions(table, i_t, T, C)
        o_t = start + o_c
        if PART != _ENDS:
            p_s = states + (o_chunks + i_t) * (K * V) + o_dense
            tl.store(p_s, _operand(b_s, dtype, PRECISION), mask=m_s)
        b_x = _load_transposed(x, x_stride_t, o_t, o_k, end, K).to(dtype)
        b_y = _load(y, y_stride_t, o_t, o_v, end, V).to(dtype)
        if total is not None:
            b_total = tl.load(total + (o_chunks + i_t) * K + o_k, mask=o_k < K, other=0.0)
            b_s *= _exp(b_total, PRECISION)[:, None]
            b_walked += b_total
        b_new = tl.dot(b_x, b_y, input_precision=PRECISION)
        if REVERSE and total is None:
            b_new *= scale
        b_s += b_new
    if PART == _ENDS:
        tl.store(ends + (i_s * num_bh + i_bh) * K * V + o_dense, b_s, mask=m_s)
        if total is not None:
            # the same of all blocks of values
            tl.store(end_totals + (i_s * num_bh + i_bh) * K + o_k, b_walked, mask=o_k < K)
    elif last is not None:
        # of several segments, the last
        o_walked = (i_s + 1) * num_walked + o_v * 0
        tl.store(last + o_end, b_s.to(last.dtype.element_ty), mask=m_s & (o_walked >= num_t)[None, :])


@triton.jit
def _read_kernel(
    x,
    y,
    z,
    states,
    out,
    table,
    T,
    num_t,
    scale,
    x_stride_b,
    x_stride_t,
    x_stride_h,
    y_stride_b,
    y_stride_t,
    y_stride_h,
    z_stride_b,
    z_stride_t,
    z_stride_h,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    DECAY: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """out [C, V] = x S + A z of one chunk, with x = q_in and z = v.

    TRANSPOSED: A^T for A, x = k_out, z = do and S the gradient of the state after the chunk.
    With a decay y is A [B, T, H, C]; without, x is q, y is k (TRANSPOSED: k and q), and A is formed here.
    """
    num_v = tl.cdiv(V, BV)
    i_v, i_c = tl.program_id(0) % num_v, (tl.program_id(0) // num_v).to(tl.int64)
    i_t, i_bh = i_c % num_t, i_c // num_t
    i_b, i_h = i_bh // H, i_bh % H
    dtype = states.dtype.element_ty
    o_c = tl.arange(0, C)
    out += (i_b * T * H + i_h) * V
    start, T = _positions(table, i_t, T, C)
    o_t = start + o_c
    o_v = i_v * BV + tl.arange(0, BV)
    x += i_b * x_stride_b + i_h * x_stride_h
    y += i_b * y_stride_b + i_h * y_stride_h
    z += i_b * z_stride_b + i_h * z_stride_h
    states += i_c * K * V
    b_o = tl.zeros([C, BV], tl.float32)
    b_a = tl.zeros([C, C], tl.float32)
    for i_k in range(0, K, BK):
        o_k = i_k + tl.arange(0, BK)
        b_x = _load(x, x_stride_t, o_t, o_k, T, K).to(dtype)
        b_s = _load_state(states, o_k, o_v, K, V)
        b_o += tl.dot(b_x, b_s, input_precision=PRECISION)
        if DECAY == _NONE:
            b_y = _load_transposed(y, y_stride_t, o_t, o_k, T, K).to(dtype)
            b_a += tl.dot(b_x, b_y, input_precision=PRECISION)
    if DECAY == _NONE:
        m_pair = (o_c[:, None] <= o_c[None, :]) if TRANSPOSED else (o_c[:, None] >= o_c[None, :])
        b_a = tl.where(m_pair, b_a * scale, 0.0)
        if not TRANSPOSED:
            b_o *= scale
    else:
        b_a = _load_transposed(y, y_stride_t, o_t, o_c, T, C) if TRANSPOSED else _load(y, y_stride_t, o_t, o_c, T, C)
    b_z = _load(z, z_stride_t, o_t, o_v, T, V).to(dtype)
    b_o += tl.dot(_operand(b_a, dtype, PRECISION), b_z, input_precision=PRECISION)
    _store(out, H * V, o_t, o_v, T, V, b_o)


@triton.jit
def _grads_kernel(
    q,
    k,
    v,
    g,
    do,
    states,
    dstates,
    dq,
    dk,
    dg,
    table,
    T,
    num_t,
    scale,
    q_stride_b,
    q_stride_t,
    q_stride_h,
    k_stride_b,
    k_stride_t,
    k_stride_h,
    v_stride_b,
    v_stride_t,
    v_stride_h,
    g_stride_b,
    g_stride_t,
    g_stride_h,
    do_stride_b,
    do_stride_t,
    do_stride_h,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    LEVELS: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    DECAY: tl.constexpr,
    LIMIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dq, dk, dg [C, BK] of one chunk; dg of a decay a head is a sum over channels, [B, T, H, K / BK].

    dA_ij = scale <do_i, v_j>,   dq_i = scale exp(P_i) do_i S^T + sum_j dA_ij exp(D_ij) k_j
    dk_j = exp(R_j) v_j dS^T + sum_i dA_ij exp(D_ij) q_i,   S from before the chunk, dS the gradient of that after it

    dg_l is the sum of what passes l: from before the chunk to after it, exp(P_C) <S, dS>; from before it to i >= l;
    from j < l to after it; and from j < l to i >= l, which is a sum over i >= l of what arrives less what leaves. Both
    have the same rounded factors, so that what stays after l cancels. The diagonal passes nothing and is left out.

    dq, or dk and dg, may be None; q is needed for the latter.
    """
    num_k = tl.cdiv(K, BK)
    i_k, i_c = tl.program_id(0) % num_k, (tl.program_id(0) // num_k).to(tl.int64)
    i_t, i_bh = i_c % num_t, i_c // num_t
    i_b, i_h = i_bh // H, i_bh % H
    dtype = states.dtype.element_ty
    o_c = tl.arange(0, C)
    o_k = i_k * BK + tl.arange(0, BK)
    v += i_b * v_stride_b + i_h * v_stride_h
    do += i_b * do_stride_b + i_h * do_stride_h
    o_dense, o_head = (i_b * T * H + i_h) * K, i_b * T * H + i_h
    start, T = _positions(table, i_t, T, C)
    o_t = start + o_c

    b_da = tl.zeros([C, C], tl.float32)
    b_dq = tl.zeros([C, BK], tl.float32)
    b_dk = tl.zeros([C, BK], tl.float32)
    b_through = tl.zeros([BK], tl.float32)
    for i_v in range(0, V, BV):
        o_v = i_v + tl.arange(0, BV)
        b_do = _load(do, do_stride_t, o_t, o_v, T, V).to(dtype)
        b_v = _load(v, v_stride_t, o_t, o_v, T, V).to(dtype)
        b_da += tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
        if dq is not None or DECAY != _NONE:
            b_s = _load_state(states + i_c * K * V, o_k, o_v, K, V)
            b_dq += tl.dot(b_do, tl.trans(b_s), input_precision=PRECISION)
        if dk is not None:
            b_ds = _load_state(dstates + i_c * K * V, o_k, o_v, K, V)
            b_dk += tl.dot(b_v, tl.trans(b_ds), input_precision=PRECISION)
            if DECAY != _NONE:
                b_through += tl.sum(b_s.to(tl.float32) * b_ds.to(tl.float32), 1)

    b_da *= scale
    b_dq *= scale
    b_k = _load(k + i_b * k_stride_b + i_h * k_stride_h, k_stride_t, o_t, o_k, T, K).to(tl.float32)
    b_q = tl.zeros([C, BK], tl.float32)
    if q is not None:
        b_q += _load(q + i_b * q_stride_b + i_h * q_stride_h, q_stride_t, o_t, o_k, T, K).to(tl.float32)
    m_past = o_c[:, None] > o_c[None, :]
    # arrived less left
    b_net = tl.zeros([C, BK], tl.float32)
    if DECAY == _CHANNEL:
        NARROW: tl.constexpr = g.dtype.element_ty == tl.bfloat16
        p_g = g + i_b * g_stride_b + i_h * g_stride_h
        b_g = tl.maximum(_load(p_g, g_stride_t, o_t, o_k, T, K).to(tl.float32), LOWEST)
        b_1, b_2 = _halves(b_g, o_c, C)
        b_dg = tl.zeros([C, BK], tl.float32)
        if dg is not None:
            b_dg += (b_through * _exp(b_1 + b_2, PRECISION))[None, :]
        if tl.min(tl.minimum(b_1, b_2), 0) > -LIMIT:
            b_f = _about_middle(b_g, o_c, C, NARROW, PRECISION)
            b_p = _operand(tl.where(m_past, b_da, 0.0), dtype, PRECISION)
            b_kf = _operand(b_k / b_f, dtype, PRECISION)
            b_dqf = tl.dot(b_p, b_kf, input_precision=PRECISION)
            b_dq *= _exp(b_1, PRECISION)[None, :]
            if dk is not None:
                b_qf = _operand(b_q * b_f, dtype, PRECISION)
                b_dkf = tl.dot(tl.trans(b_p), b_qf, input_precision=PRECISION)
                b_dk *= _exp(b_2, PRECISION)[None, :]
                if dg is not None:
                    # what leaves the chunk from j < l is all that does less that from j >= l
                    b_leaves = b_k / b_f * b_dk
                    b_dg += tl.sum(b_leaves, 0)[None, :]
                    b_net += b_qf.to(tl.float32) * b_dqf - b_kf.to(tl.float32) * b_dkf
                    b_net += b_q * b_f * b_dq - b_leaves
                b_dk = (b_dk + b_dkf) / b_f
            b_dq = (b_dq + b_dqf) * b_f
        else:
            b_dq *= _exp(_sums(o_c[:, None] >= o_c[None, :], b_g, NARROW, PRECISION), PRECISION)
            if dk is not None:
                b_dk *= _exp(_sums(o_c[:, None] < o_c[None, :], b_g, NARROW, PRECISION), PRECISION)
            # before the inside is added: what enters the chunk and what leaves it
            if dg is not None:
                b_net += b_q * b_dq
                b_dg += _sums(m_past, b_k * b_dk, False, PRECISION)
            for level in range(LEVELS):
                b_f, m_pair = _level(b_g, o_c, level, NARROW, PRECISION)
                b_p = _operand(tl.where(m_pair, b_da, 0.0), dtype, PRECISION)
                b_kf = _operand(b_k * b_f, dtype, PRECISION)
                b_dqf = tl.dot(b_p, b_kf, input_precision=PRECISION)
                b_dq += b_dqf * b_f
                if dk is not None:
                    b_qf = _operand(b_q * b_f, dtype, PRECISION)
                    b_dkf = tl.dot(tl.trans(b_p), b_qf, input_precision=PRECISION)
                    b_dk += b_dkf * b_f
                    if dg is not None:
                        b_net += b_qf.to(tl.float32) * b_dqf - b_kf.to(tl.float32) * b_dkf
    else:
        b_p = tl.where(m_past, b_da, 0.0)
        b_leaves = b_net
        if DECAY == _HEAD:
            p_g = g + i_b * g_stride_b + i_h * g_stride_h
            b_g = _load_head(p_g, g_stride_t, o_t, o_t < T)
            b_in, b_out = _load_ends(p_g, g_stride_t, o_t, o_c, T, C)
            b_dq *= _exp(b_in, PRECISION)[:, None]
            b_dk *= _exp(b_out, PRECISION)[:, None]
            b_net, b_leaves = b_q * b_dq, b_k * b_dk
            b_p *= _decays(b_g, b_in, o_c, PRECISION)
        b_p = _operand(b_p, dtype, PRECISION)
        b_dq_in = tl.dot(b_p, b_k.to(dtype), input_precision=PRECISION)
        b_dk_in = tl.dot(tl.trans(b_p), b_q.to(dtype), input_precision=PRECISION)
        b_dq += b_dq_in
        b_dk += b_dk_in
        if DECAY == _HEAD:
            if PRECISION == "tf32":
                b_net += b_q * b_dq_in - b_k * b_dk_in
            else:
                # sums over time of what cancels would show in float32: sum_{i >= l} sum_{j < l} of the pairs themselves
                b_p *= tl.dot(b_q.to(dtype), tl.trans(b_k.to(dtype)), input_precision=PRECISION)
                b_p = tl.dot(b_p, tl.trans(m_past.to(tl.float32)), input_precision=PRECISION)
                b_inside = tl.sum(tl.where(o_c[:, None] >= o_c[None, :], b_p, 0.0), 0)

    b_diagonal = tl.sum(tl.where(o_c[:, None] == o_c[None, :], b_da, 0.0), 1)[:, None]
    if dq is not None:
        _store(dq + o_dense, H * K, o_t, o_k, T, K, b_dq + b_diagonal * b_k)
    if dk is not None:
        _store(dk + o_dense, H * K, o_t, o_k, T, K, b_dk + b_diagonal * b_q)
    if dg is not None:
        if DECAY == _CHANNEL:
            b_dg += _sums(o_c[None, :] >= o_c[:, None], b_net, False, PRECISION)
            _store(dg + o_dense, H * K, o_t, o_k, T, K, b_dg)
        else:
            b_1 = tl.sum(b_net, 1)
            b_2 = tl.sum(b_leaves, 1)
            b_dg_head = tl.sum(tl.where(o_c[:, None] <= o_c[None, :], b_1[None, :], 0.0), 1)
            b_dg_head += tl.sum(tl.where(m_past, b_2[None, :], 0.0), 1)
            if PRECISION != "tf32":
                b_dg_head += b_inside
            b_dg_head += tl.sum(b_through, 0) * _exp(tl.sum(b_g, 0), PRECISION)
            tl.store(dg + (o_head + o_t.to(tl.int64) * H) * num_k + i_k, b_dg_head, mask=o_t < T)


def _kind(g: Tensor | None) -> int:
    return NONE if g is None else HEAD if g.dim() == 3 else CHANNEL


def _limit(precision: str) -> float:
    """How far from the middle of a chunk factors may grow: within float32's range, where its rounding is no matter."""
    return 60.0 if precision == "tf32" else 2.0


def _block(block: int, size: int) -> int:
    """No larger than a small size has use for."""
    return max(NARROWEST, min(block, power_of_2(size)))


def _strides(x: Tensor | None) -> tuple[int, ...]:
    """Of B, T, H."""
    return (0, 0, 0) if x is None else x.stride()[:3]


def rows(x: Tensor) -> Tensor:
    """With dense channels, as every kernel reads them."""
    return x if x.stride(-1) == 1 else x.contiguous()


class Plan(NamedTuple):
    """What the kernels of one call have in common."""

    chunk: int
    scale: float
    work: torch.dtype
    """Of operands of products and of kept states."""
    precision: str
    """Of products of float32 operands: half precision asks for no more than tf32."""
    table: Tensor | None
    """Of packed sequences, where each chunk starts and its sequence ends [chunks, 2]."""
    bounds: Tensor | None
    """Of packed sequences, the first chunk of each, and their number [sequences + 1]."""

    @property
    def larger(self) -> int:
        """How many times as large a tile of CHUNK positions is, whose operands stay in registers."""
        return self.chunk // CHUNK * (self.work.itemsize // 2)

    def num_chunks(self, length: int) -> int:
        return cdiv(length, self.chunk) if self.table is None else len(self.table)


def plan(scale: float, *inputs: Tensor, chunk: int = CHUNK, ends: list[int] | None = None) -> Plan:
    """For products of `inputs`; `ends`: 0 and the end of each packed sequence."""
    dtypes = {x.dtype for x in inputs}
    work = torch.bfloat16 if dtypes == {torch.bfloat16} else torch.float32
    precision = "tf32" if torch.float32 not in dtypes else "ieee" if torch.version.hip else "tf32x3"
    if ends is None:
        return Plan(chunk, scale, work, precision, None, None)
    pairs = [(start, stop) for a, stop in pairwise(ends) for start in range(a, stop, chunk)]
    bounds = [0, *accumulate(cdiv(stop - a, chunk) for a, stop in pairwise(ends))]
    device = inputs[0].device
    table, firsts = (torch.tensor(x, dtype=torch.int32).to(device) for x in (pairs, bounds))
    return Plan(chunk, scale, work, precision, table, firsts)


def _options(config: Config, larger: int = 1) -> dict[str, int]:
    """Of a tile so many times as large."""
    return {"num_warps": min(8, config.num_warps * larger), "num_stages": config.num_stages}


def gla_scores(
    plan: Plan, q: Tensor | None, k: Tensor, g: Tensor, outgoing: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, ...]:
    """k_out, total, and with q also q_in and scores, see `_scores_kernel`; `outgoing` is k_out and total if known."""
    batch, length, heads, key_dim = k.shape
    kind = _kind(g)
    config, num_chunks = SCORES[kind], plan.num_chunks(length)

    def new(channels: int) -> Tensor:
        return torch.empty((batch, length, heads, channels), dtype=plan.work, device=k.device)

    q_in, scores = (None, None) if q is None else (new(key_dim), new(plan.chunk))
    if outgoing is None:
        total = torch.empty((batch, heads, num_chunks, key_dim), dtype=torch.float32, device=k.device)
        k_out = new(key_dim)
    else:
        k_out, total = outgoing
    launch(
        _scores_kernel,
        batch * heads * num_chunks,
        q,
        k,
        g,
        q_in,
        k_out if outgoing is None else None,
        total,
        scores,
        plan.table,
        length,
        num_chunks,
        plan.scale,
        *_strides(q),
        *_strides(k),
        *_strides(g),
        H=heads,
        K=key_dim,
        C=plan.chunk,
        LEVELS=plan.chunk.bit_length() - 1,
        BK=_block(config.block_k, key_dim),
        DECAY=kind,
        LIMIT=_limit(plan.precision),
        PRECISION=plan.precision,
        **_options(config, plan.larger),
    )
    return (k_out, total) if q_in is None or scores is None else (k_out, total, q_in, scores)


def _segments(num_chunks: int, programs: int) -> int:
    """Chunks a program walks."""
    if programs >= SEGMENTS["below"]:
        return num_chunks
    count = min(num_chunks // SEGMENTS["chunks"], cdiv(SEGMENTS["programs"], programs))
    return cdiv(num_chunks, max(count, 1))


def gla_states(
    plan: Plan,
    x: Tensor,
    y: Tensor,
    total: Tensor | None,
    kind: int,
    first: Tensor | None,
    last: Tensor | None,
    reverse: bool,
) -> Tensor:
    """States [B, H, T / C, K, V], see `_states_kernel`; `first` is read, `last` written, both [B, H, K, V]."""
    batch, length, heads, key_dim = x.shape
    value_dim, device = y.shape[-1], x.device
    config, num_chunks = STATES[kind], plan.num_chunks(length)
    num_sequences = batch if plan.bounds is None else len(plan.bounds) - 1
    block_k, block_v = _block(config.block_k, key_dim), _block(config.block_v, value_dim)
    states = torch.empty((batch, heads, num_chunks, key_dim, value_dim), dtype=plan.work, device=device)
    boundary = next((end for end in (first, last) if end is not None), None)
    programs = num_sequences * heads * cdiv(key_dim, block_k) * cdiv(value_dim, block_v)
    num_walked = _segments(num_chunks, programs) if plan.table is None else num_chunks
    num_segments = cdiv(num_chunks, num_walked)
    ends, end_totals = None, None
    if num_segments > 1:
        ends = torch.empty((num_segments - 1, batch, heads, key_dim, value_dim), dtype=torch.float32, device=device)
        if total is not None:
            end_totals = torch.empty((num_segments - 1, batch, heads, key_dim), dtype=torch.float32, device=device)
    for part in (WHOLE,) if ends is None else (ENDS, REST):
        launch(
            _states_kernel,
            (programs, num_segments - (part == ENDS)),
            x,
            y,
            total,
            states,
            ends,
            end_totals,
            first,
            last,
            plan.table,
            plan.bounds,
            length,
            num_chunks,
            plan.scale,
            num_walked,
            *_strides(x),
            *_strides(y),
            *((0, 0) if boundary is None else boundary.stride()[2:]),
            H=heads,
            K=key_dim,
            V=value_dim,
            C=plan.chunk,
            BK=block_k,
            BV=block_v,
            PART=part,
            REVERSE=reverse,
            PRECISION=plan.precision,
            **_options(config),
        )
    return states


def gla_read(
    plan: Plan, x: Tensor, y: Tensor, z: Tensor, states: Tensor, kind: int, dtype: torch.dtype, transposed: bool
) -> Tensor:
    """[B, T, H, V], see `_read_kernel`."""
    batch, length, heads, key_dim = x.shape
    value_dim = z.shape[-1]
    config = READ[kind]
    block_v = _block(config.block_v, value_dim)
    out = torch.empty((batch, length, heads, value_dim), dtype=dtype, device=x.device)
    num_chunks = plan.num_chunks(length)
    launch(
        _read_kernel,
        batch * heads * num_chunks * cdiv(value_dim, block_v),
        x,
        y,
        z,
        states,
        out,
        plan.table,
        length,
        num_chunks,
        plan.scale,
        *_strides(x),
        *_strides(y),
        *_strides(z),
        H=heads,
        K=key_dim,
        V=value_dim,
        C=plan.chunk,
        BK=_block(config.block_k, key_dim),
        BV=block_v,
        DECAY=kind,
        TRANSPOSED=transposed,
        PRECISION=plan.precision,
        **_options(config, plan.chunk // CHUNK),
    )
    return out


def gla_grads(
    plan: Plan,
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    do: Tensor,
    states: Tensor,
    dstates: Tensor | None,
    *,
    dq_dtype: torch.dtype | None,
    dk_dtype: torch.dtype | None,
    dg_dtype: torch.dtype | None,
) -> tuple[Any, Any, Any]:
    """Gradients of q, k, g, each None where it has no dtype, see `_grads_kernel`."""
    batch, length, heads, key_dim = k.shape
    value_dim, kind = v.shape[-1], _kind(g)
    config = GRADS[kind]
    block_v = _block(config.block_v, value_dim)
    # what is 32 wide only meets what is 64 wide in a loop, where addresses are right (module docstring)
    block_k = config.block_k if value_dim > block_v else _block(config.block_k, key_dim)
    num_k = cdiv(key_dim, block_k)

    def new(dtype: torch.dtype | None, channels: int) -> Tensor | None:
        return None if dtype is None else torch.empty((batch, length, heads, channels), dtype=dtype, device=k.device)

    dq, dk = new(dq_dtype, key_dim), new(dk_dtype, key_dim)
    partial = dg_dtype is not None and kind == HEAD
    dg = new(torch.float32, num_k) if partial else new(dg_dtype, key_dim)
    num_chunks = plan.num_chunks(length)
    launch(
        _grads_kernel,
        batch * heads * num_chunks * num_k,
        q,
        k,
        v,
        g,
        do,
        states,
        dstates,
        dq,
        dk,
        dg,
        plan.table,
        length,
        num_chunks,
        plan.scale,
        *_strides(q),
        *_strides(k),
        *_strides(v),
        *_strides(g),
        *_strides(do),
        H=heads,
        K=key_dim,
        V=value_dim,
        C=plan.chunk,
        LEVELS=plan.chunk.bit_length() - 1,
        BK=block_k,
        BV=block_v,
        DECAY=kind,
        LIMIT=_limit(plan.precision),
        PRECISION=plan.precision,
        **_options(config, plan.larger * max(1, block_k // config.block_k)),
    )
    if partial and dg is not None:
        dg = dg.sum(-1).to(dg_dtype)
    return dq, dk, dg


Ends = tuple[Tensor | None, Tensor | None]
"""States [B, H, K, V] at the two ends of time: the one that is given and the one to be written."""


def forward(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    on_value: bool,
    ends: Ends,
    dtype: torch.dtype,
    outgoing: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """o in `dtype`, the states, and what else `backward` needs.

    With decays on values, v and k take the parts of k and v, and do and q those of q and do (module docstring).
    `outgoing`: what the last result starts with, of the same k, g and chunks, if known.
    """
    kind = _kind(g)
    if g is None:
        states = gla_states(plan, k, v, None, kind, *ends, False)
        return gla_read(plan, q, k, v, states, kind, dtype, False), states, ()
    if on_value and kind == CHANNEL:
        v_out, total = gla_scores(plan, None, v, g) if outgoing is None else outgoing
        states = gla_states(plan, v_out, k, total, kind, *_transposed(ends), False)
        dtypes: dict[str, Any] = {"dq_dtype": dtype, "dk_dtype": None, "dg_dtype": None}
        o, _, _ = gla_grads(plan, None, v, k, g, q, states, None, **dtypes)
        return o, states, (v_out, total)
    made = gla_scores(plan, q, k, g, outgoing)
    k_out, total, q_in, scores = made
    states = gla_states(plan, k_out, v, total, kind, *ends, False)
    return gla_read(plan, q_in, scores, v, states, kind, dtype, False), states, made


def backward(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    on_value: bool,
    ends: Ends,
    do: Tensor,
    states: Tensor,
    made: tuple[Tensor, ...],
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype, torch.dtype | None],
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, v, g in `dtypes` (None: not wanted); `ends` are those of the final and the initial state."""
    kind = _kind(g)
    dq_dtype, dk_dtype, dv_dtype, dg_dtype = dtypes
    if g is None:
        dstates = gla_states(plan, q, do, None, kind, *ends, True)
        dv = gla_read(plan, k, q, do, dstates, kind, dv_dtype, True)
    elif on_value and kind == CHANNEL:
        v_out, total, do_in, da = gla_scores(plan, do, v, g, (made[0], made[1]))
        dstates = gla_states(plan, do_in, q, total, kind, *_transposed(ends), True)
        dq = gla_read(plan, do_in, da, k, states, kind, dq_dtype, False)
        dk = gla_read(plan, v_out, da, q, dstates, kind, dk_dtype, True)
        of_values: dict[str, Any] = {"dq_dtype": None, "dk_dtype": dv_dtype, "dg_dtype": dg_dtype}
        _, dv, dg = gla_grads(plan, do, v, k, g, q, states, dstates, **of_values)
        return dq, dk, dv, dg
    else:
        k_out, total, q_in, scores = made
        dstates = gla_states(plan, q_in, do, total, kind, *ends, True)
        dv = gla_read(plan, k_out, scores, do, dstates, kind, dv_dtype, True)
    of_keys: dict[str, Any] = {"dq_dtype": dq_dtype, "dk_dtype": dk_dtype, "dg_dtype": dg_dtype}
    dq, dk, dg = gla_grads(plan, q, k, v, g, do, states, dstates, **of_keys)
    return dq, dk, dv, dg


def _transposed(ends: Ends) -> Ends:
    first, last = (None if end is None else end.transpose(-1, -2) for end in ends)
    return first, last


class GatedLinearAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor | None,
        initial_state: Tensor | None,
        on_value: bool,
        scale: float,
        return_final_state: bool,
        packed: list[int] | None,
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v = (rows(x) for x in (q, k, v))
        if g is not None and g.dim() == 4:
            g = rows(g)
        # fewer states to write; kept for backward, whose scores are cheaper in shorter chunks, they would be too long
        longer = _kind(g) == HEAD and not any(ctx.needs_input_grad)
        common = plan(scale, q, k, v, chunk=2 * CHUNK if longer else CHUNK, ends=packed)
        first = None if initial_state is None else initial_state.contiguous()
        final = None
        shape = (q.shape[0] if packed is None else len(packed) - 1, q.shape[2], q.shape[3], v.shape[3])
        if return_final_state:
            final = torch.empty(shape, dtype=torch.float32, device=q.device)
        o, states, made = forward(common, q, k, v, g, on_value, (first, final), v.dtype)
        ctx.save_for_backward(q, k, v, g, states, *made)
        ctx.options = common, on_value, shape, None if initial_state is None else initial_state.dtype
        ctx.set_materialize_grads(False)
        return o, final

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, do: Tensor | None, dfinal: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, g, states, *made = ctx.saved_tensors
        common, on_value, shape, initial_dtype = ctx.options
        do = torch.zeros_like(v) if do is None else rows(do)
        dfinal = None if dfinal is None else dfinal.contiguous()
        dinitial = None
        if initial_dtype is not None:
            dinitial = torch.empty(shape, dtype=initial_dtype, device=q.device)
        dtypes = q.dtype, k.dtype, v.dtype, g.dtype if ctx.needs_input_grad[3] else None
        dq, dk, dv, dg = backward(common, q, k, v, g, on_value, (dfinal, dinitial), do, states, tuple(made), dtypes)
        return dq, dk, dv, dg, dinitial, None, None, None, None


def gated_linear_attention_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    *,
    decay_on: str,
    scale: float | None,
    initial_state: Tensor | None,
    return_final_state: bool,
    packed: list[int] | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Arguments and results as in the public operator; `packed` is cu_seqlens."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if log_decay is not None and log_decay.dim() == 1:
        log_decay = log_decay.expand(*q.shape[:3])
    o, state = GatedLinearAttention.apply(
        q, k, v, log_decay, initial_state, decay_on == "value", scale, return_final_state, packed
    )
    return (o, state) if return_final_state else o
