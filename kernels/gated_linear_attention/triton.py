"""Gated linear attention in Triton: chunks joined by their states, five kernels for every kind of decay.

    S_t = diag(exp(log_decay_t)) S_{t-1} + k_t^T v_t;   o_t = scale q_t S_t        source: package docstring

A chunk is C positions; P_i sums the log-decays of a chunk up to and with i, R_j those after j, D_ij those in (j, i].

    _scores_kernel   A_ij = scale sum_x q_ix k_jx exp(D_ijx) for j <= i, q_in = scale q exp(P), k_out = k exp(R)
    _states_kernel   the state before every chunk: S <- exp(P_C) S + k_out^T v; in reverse, its gradient
    _read_kernel     o = q_in S + A v; transposed, dv = k_out dS + A^T do
    _walk_kernel     the two in one, on Hopper for bfloat16, K <= 256 and no gradients: S stays in registers, unwritten
    _grads_kernel    dq, dk and the gradient of the log-decays, from dA = do v^T, do S^T and v dS^T

Without decay the first is left out: q_in and k_out are q and k, and who needs A forms it. Decays on values need no
kernel of their own: sum_ij A_ij <do_i, v_j> is the same under (q, k) <-> (do, v), so that o is what `_grads_kernel`
gives as dq, and dq, dk are what `_read_kernel` gives as o, dv (README).

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
ptxas 12.8, which Triton 3.6 brings, gets addresses in shared memory wrong where narrower ones meet them outside of a
loop (README).
Kept for backward besides the inputs: the state before each chunk, K V / C numbers a position; with a decay also the
outputs of `_scores_kernel`, 2 K + C.
"""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import Form, Launch, cdiv, form, launch, power_of_2, save, saved

NONE, HEAD, CHANNEL = 0, 1, 2
"""What decays: nothing, a head (constant or by step), a channel."""

CHUNK = 64


class Config(NamedTuple):
    """Of a tile: channels of keys, of values."""

    block_k: int
    block_v: int
    num_warps: int
    num_stages: int
    registers: int | None = None
    """Of a thread at most; None leaves it to the compiler."""


NARROWEST = 64
"""Numbers a tile is wide at least (module docstring)."""
# by kind of decay
SCORES = {HEAD: Config(64, 0, 4, 2), CHANNEL: Config(64, 0, 4, 2)}
STATES = {NONE: Config(64, 128, 4, 3), HEAD: Config(64, 64, 4, 3), CHANNEL: Config(64, 64, 4, 3)}
READ = {kind: Config(64, 128, 4, 3) for kind in (NONE, HEAD, CHANNEL)}
GRADS = {NONE: Config(64, 64, 4, 3), HEAD: Config(64, 64, 4, 3), CHANNEL: Config(32, 64, 4, 3)}
# by K, whose tile holds all of it
WALK = {64: Config(64, 64, 4, 3), 128: Config(128, 128, 8, 3), 256: Config(256, 128, 8, 2)}
FEW_STATES = 256, 512
"""Programs of `_states_kernel`: fewer than the first number walk segments, up to as many as the second."""
WARPS = 1024
"""Those of programs of `_walk_kernel` at a time: eight a multiprocessor, all that its registers hold."""
SHORTEST = 8
"""Chunks of a segment, at least."""

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
    """sum_l m_w[i, l] b_x[l, :], for m_w of whole numbers. NARROW: b_x has bfloat16 values."""
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
def _from_middle(o_c, C: tl.constexpr):
    """[C, C] of -1, 0, 1: for the sum from the middle to and with a position, less than none of those before it."""
    return (o_c[None, :] <= o_c[:, None]).to(tl.float32) - (o_c < C // 2).to(tl.float32)[None, :]


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
    decay,
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
    """Of one chunk: scores A [C, C], q_in = scale q exp(P), k_out = k exp(R) [C, K], decay = exp(P_C) [K].

    Without q only k_out and decay; without k_out neither of the two.
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
    b_middle = _from_middle(o_c, C)
    b_a = tl.zeros([C, C], tl.float32)
    if DECAY == _HEAD:
        b_p, b_r = _load_ends(g, g_stride_t, o_t, o_c, T, C)
        b_head = _load_head(g, g_stride_t, o_t, o_t < T)
        b_in_head, b_out_head = _exp(b_p, PRECISION)[:, None], _exp(b_r, PRECISION)[:, None]
        b_all = _exp(tl.sum(b_head, 0), PRECISION)
    for i_k in range(0, K, BK):
        o_k = i_k + tl.arange(0, BK)
        p_decay = decay + (i_bh * num_t + i_t) * K + o_k
        b_k = _load(k, k_stride_t, o_t, o_k, T, K)
        if q is not None:
            b_q = _load(q + i_b * q_stride_b + i_h * q_stride_h, q_stride_t, o_t, o_k, T, K)
        if DECAY == _HEAD:
            tl.store(p_decay, tl.zeros([BK], tl.float32) + b_all, mask=o_k < K)
            b_out, b_in = b_k.to(tl.float32) * b_out_head, b_q.to(tl.float32) * (b_in_head * scale)
            _store(k_out + o_dense, H * K, o_t, o_k, T, K, _operand(b_out, dtype, PRECISION))
            _store(q_in + o_dense, H * K, o_t, o_k, T, K, _operand(b_in, dtype, PRECISION))
            b_a += tl.dot(b_q.to(dtype), tl.trans(b_k.to(dtype)), input_precision=PRECISION)
        else:
            b_g = tl.maximum(_load(g, g_stride_t, o_t, o_k, T, K).to(tl.float32), LOWEST)
            b_1, b_2 = _halves(b_g, o_c, C)
            if k_out is not None:
                tl.store(p_decay, _exp(b_1 + b_2, PRECISION), mask=o_k < K)
            # asked for in any case, so that the matrix is laid out once
            b_e = _sums(b_middle, b_g, NARROW, PRECISION)
            if tl.min(tl.minimum(b_1, b_2), 0) > -LIMIT:
                b_kf = b_k.to(tl.float32) * _exp(-b_e, PRECISION)
                if k_out is not None:
                    b_scaled = _operand(b_kf * _exp(b_2, PRECISION)[None, :], dtype, PRECISION)
                    _store(k_out + o_dense, H * K, o_t, o_k, T, K, b_scaled)
                if q is not None:
                    b_right = tl.trans(_operand(b_kf, dtype, PRECISION))
                    b_qf = b_q.to(tl.float32) * (_exp(b_e, PRECISION) * scale)
                    b_scaled = _operand(b_qf * _exp(b_1, PRECISION)[None, :], dtype, PRECISION)
                    _store(q_in + o_dense, H * K, o_t, o_k, T, K, b_scaled)
                    b_pairs = tl.dot(_operand(b_qf, dtype, PRECISION), b_right, input_precision=PRECISION)
                    b_a += tl.where(o_c[:, None] >= o_c[None, :], b_pairs, 0.0)
            else:
                b_k32 = b_k.to(tl.float32)
                if k_out is not None:
                    b_out = b_k32 * _exp(_sums(o_c[:, None] < o_c[None, :], b_g, NARROW, PRECISION), PRECISION)
                    _store(k_out + o_dense, H * K, o_t, o_k, T, K, _operand(b_out, dtype, PRECISION))
                if q is not None:
                    b_q32 = b_q.to(tl.float32) * scale
                    b_in = b_q32 * _exp(_sums(o_c[:, None] >= o_c[None, :], b_g, NARROW, PRECISION), PRECISION)
                    _store(q_in + o_dense, H * K, o_t, o_k, T, K, _operand(b_in, dtype, PRECISION))
                    b_a += tl.where(o_c[:, None] == o_c[None, :], tl.sum(b_q32 * b_k32, 1)[:, None], 0.0)
                    for level in range(LEVELS):
                        b_f, m_pair = _level(b_g, o_c, level, NARROW, PRECISION)
                        b_left = _operand(b_q32 * b_f, dtype, PRECISION)
                        b_right = tl.trans(_operand(b_k32 * b_f, dtype, PRECISION))
                        b_a += tl.where(m_pair, tl.dot(b_left, b_right, input_precision=PRECISION), 0.0)
    if q is not None:
        if DECAY == _HEAD:
            b_a *= _decays(b_head, b_p, o_c, PRECISION) * scale
        _store(scores + o_scores, H * C, o_t, o_c, T, C, _operand(b_a, dtype, PRECISION))


@triton.jit
def _states_kernel(
    x,
    y,
    decay,
    states,
    ends,
    end_decays,
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
    """states [B, H, T / C, K, V], each from before its chunk: S <- decay S + x^T y, x = k_out and y = v.

    REVERSE: gradients of the states after their chunks, last chunk first; x = q_in (without decay q) and y = do.
    PART WHOLE: a program walks all chunks. ENDS: a segment of `num_walked` from zeros, writing no states but what it
    ends with to `ends` [segments, B, H, K, V] and its decay to `end_decays`. REST: from what those before it add up to.
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
    dtype = x.dtype.element_ty if states is None else states.dtype.element_ty
    b_s = tl.zeros([BK, BV], tl.float32)
    b_walked = tl.full([BK], 1.0, tl.float32)
    if first is not None and PART != _ENDS:
        b_s += tl.load(first + o_end, mask=m_s, other=0.0).to(tl.float32)
    if PART == _REST:
        for i in range(i_s):
            if decay is not None:
                b_s *= tl.load(end_decays + (i * num_bh + i_bh) * K + o_k, mask=o_k < K, other=0.0)[:, None]
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
        if decay is not None:
            b_decay = tl.load(decay + (o_chunks + i_t) * K + o_k, mask=o_k < K, other=0.0)
            b_s *= b_decay[:, None]
            b_walked *= b_decay
        b_new = tl.dot(b_x, b_y, input_precision=PRECISION)
        if REVERSE and decay is None:
            b_new *= scale
        b_s += b_new
    if PART == _ENDS:
        tl.store(ends + (i_s * num_bh + i_bh) * K * V + o_dense, b_s, mask=m_s)
        if decay is not None:
            # the same of all blocks of values
            tl.store(end_decays + (i_s * num_bh + i_bh) * K + o_k, b_walked, mask=o_k < K)
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
def _walk_kernel(
    x,
    y,
    v,
    scores,
    decay,
    o,
    ends,
    end_decays,
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
    v_stride_b,
    v_stride_t,
    v_stride_h,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """o [C, BV] of one chunk after the other, the state of all K at hand: `_states_kernel` and `_read_kernel` in one.

    x = q_in, y = k_out; without decay (and scores) q and k. A segment starts from what those before it add up to.
    The state is kept transposed, so that as the left operand of o^T = S^T q_in^T + v^T A^T it never leaves registers.
    o of a chunk is written when the next one begins, so that tiles are asked for while the state is updated.
    """
    num_v = tl.cdiv(V, BV)
    i_v, i_bh = tl.program_id(0) % num_v, (tl.program_id(0) // num_v).to(tl.int64)
    i_b, i_h = i_bh // H, i_bh % H
    i_s, num_bh = tl.program_id(1), (tl.num_programs(0) // num_v).to(tl.int64)
    o_k, o_v, o_c = tl.arange(0, BK), i_v * BV + tl.arange(0, BV), tl.arange(0, C)
    if table is None:
        i_first, num_own, o_chunks = 0, num_t, i_bh * num_t
    else:
        i_first = tl.load(bounds + i_b)
        num_own, o_chunks = tl.load(bounds + i_b + 1) - i_first, i_h * num_t
        i_b *= 0
    x += i_b * x_stride_b + i_h * x_stride_h
    y += i_b * y_stride_b + i_h * y_stride_h
    v += i_b * v_stride_b + i_h * v_stride_h
    o += (i_b * T * H + i_h) * V
    dtype = x.dtype.element_ty
    m_k, m_s = o_k < K, (o_v < V)[:, None] & (o_k < K)[None, :]
    o_s = i_bh * K * V + o_k[None, :] * V + o_v[:, None]
    b_s = tl.zeros([BV, BK], tl.float32)
    if first is not None:
        b_s += tl.load(first + o_s, mask=m_s, other=0.0).to(tl.float32)
    if ends is not None:
        for i in range(i_s):
            if decay is not None:
                b_s *= tl.load(end_decays + (i * num_bh + i_bh) * K + o_k, mask=m_k, other=0.0)[None, :]
            b_s += tl.load(ends + i * num_bh * K * V + o_s, mask=m_s, other=0.0)
    i_begin = i_first + i_s * num_walked
    i_last = i_first + tl.minimum((i_s + 1) * num_walked, num_own) - 1
    b_o = tl.zeros([BV, C], o.dtype.element_ty)
    if decay is not None:
        b_decay = tl.load(decay + (o_chunks + i_begin) * K + o_k, mask=m_k, other=0.0)
    for i_t in range(i_begin, i_last + 1):
        o_start, o_end = _positions(table, tl.maximum(i_t - 1, i_begin), T, C)
        _store(o, H * V, o_start + o_c, o_v, tl.where(i_t > i_begin, o_end, 0), V, tl.trans(b_o))
        start, end = _positions(table, i_t, T, C)
        o_t = start + o_c
        b_x = tl.trans(_load(x, x_stride_t, o_t, o_k, end, K))
        b_y = _load(y, y_stride_t, o_t, o_k, end, K)
        b_v = tl.trans(_load(v, v_stride_t, o_t, o_v, end, V))
        if decay is not None:
            b_a = tl.trans(_load(scores + (i_b * T * H + i_h) * C, H * C, o_t, o_c, end, C))
            b_sum = tl.dot(b_v, b_a, input_precision=PRECISION)
            b_sum = tl.dot(b_s.to(dtype), b_x, b_sum, input_precision=PRECISION)
            b_s *= b_decay[None, :]
            b_decay = tl.load(decay + (o_chunks + tl.minimum(i_t + 1, i_last)) * K + o_k, mask=m_k, other=0.0)
        else:
            b_a = tl.dot(b_y, b_x, input_precision=PRECISION)
            b_a = tl.where(o_c[:, None] <= o_c[None, :], b_a, 0.0).to(dtype)
            b_sum = tl.dot(b_s.to(dtype), b_x, input_precision=PRECISION)
            b_sum = tl.dot(b_v, b_a, b_sum, input_precision=PRECISION) * scale
        b_s = tl.dot(b_v, b_y, b_s, input_precision=PRECISION)
        b_o = b_sum.to(o.dtype.element_ty)
    o_start, o_end = _positions(table, i_last, T, C)
    _store(o, H * V, o_start + o_c, o_v, o_end, V, tl.trans(b_o))
    if last is not None:
        # of several segments, the last
        o_walked = (i_s + 1) * num_walked + o_v * 0
        tl.store(last + o_s, b_s, mask=m_s & (o_walked >= num_t)[:, None])


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
    dk_more,
    dg_more,
    table,
    T,
    num_t,
    end_v,
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

    dq, or dk and dg, may be None; q is needed for the latter. dk_more and dg_more are added to dk and dg.
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
    # no constant: of a single step there would be no loop, and 32 keys would be a narrow tile (module docstring)
    for i_v in range(0, end_v, BV):
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
            b_e = _sums(_from_middle(o_c, C), b_g, NARROW, PRECISION)
            b_f, b_inverse = _exp(b_e, PRECISION), _exp(-b_e, PRECISION)
            b_p = _operand(tl.where(m_past, b_da, 0.0), dtype, PRECISION)
            b_kf = _operand(b_k * b_inverse, dtype, PRECISION)
            b_dqf = tl.dot(b_p, b_kf, input_precision=PRECISION)
            b_dq *= _exp(b_1, PRECISION)[None, :]
            if dk is not None:
                b_qf = _operand(b_q * b_f, dtype, PRECISION)
                b_dkf = tl.dot(tl.trans(b_p), b_qf, input_precision=PRECISION)
                b_dk *= _exp(b_2, PRECISION)[None, :]
                if dg is not None:
                    # what leaves the chunk from j < l is all that does less that from j >= l
                    b_leaves = b_k * b_inverse * b_dk
                    b_dg += tl.sum(b_leaves, 0)[None, :]
                    b_net += b_qf.to(tl.float32) * b_dqf - b_kf.to(tl.float32) * b_dkf
                    b_net += b_q * b_f * b_dq - b_leaves
                b_dk = (b_dk + b_dkf) * b_inverse
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
        b_dk += b_diagonal * b_q
        if dk_more is not None:
            b_dk += _load(dk_more + o_dense, H * K, o_t, o_k, T, K)
        _store(dk + o_dense, H * K, o_t, o_k, T, K, b_dk)
    if dg is not None:
        if DECAY == _CHANNEL:
            b_dg += _sums(o_c[None, :] >= o_c[:, None], b_net, False, PRECISION)
            if dg_more is not None:
                b_dg += _load(dg_more + o_dense, H * K, o_t, o_k, T, K)
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


def _walks(plan: Plan, key_dim: int) -> bool:
    """Whether a program of `_walk_kernel` fits: on Hopper; others hold less or have not been looked at."""
    if plan.work != torch.bfloat16 or key_dim > max(WALK):
        return False
    return bool(triton.knobs.runtime.interpret) or _is_hopper(triton.runtime.driver.active)


@functools.cache
def _is_hopper(driver: Any) -> bool:
    """Asking takes the host some microseconds."""
    target = driver.get_current_target()
    return bool(target.backend == "cuda" and target.arch == 90)


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
    """What the kernels of one call have in common, and of calls on tensors of the same forms."""

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
    launches: dict[Any, Launch] | None
    """By kernel, configuration, and what the forms of the inputs leave open; None keeps none."""

    @property
    def larger(self) -> int:
        """How many times as large tiles are, whose operands stay in registers."""
        return self.work.itemsize // 2

    def num_chunks(self, length: int) -> int:
        return cdiv(length, self.chunk) if self.table is None else len(self.table)

    def num_sequences(self, x: Tensor) -> int:
        return x.shape[0] if self.bounds is None else len(self.bounds) - 1

    def launch(self, key: Any, arguments: Callable[[], tuple[Any, ...]], *tensors: Tensor | None) -> None:
        """arguments: gives kernel, grid, numbers and constants of what `key` stands for in this plan."""
        ready = None if self.launches is None else self.launches.get(key)
        if ready is None:
            kernel, grid, numbers, constants = arguments()
            ready = Launch(kernel, grid, *numbers, **constants)
            if self.launches is not None:
                self.launches[key] = ready
        ready(*tensors)


def plan(scale: float, *inputs: Tensor | None, ends: list[int] | None = None) -> Plan:
    """For products of the first three of all inputs of an operator; `ends`: 0 and the end of each packed sequence."""
    common = _plan(scale, CHUNK, *map(form, inputs))
    if ends is None:
        return common
    pairs = [(start, stop) for a, stop in pairwise(ends) for start in range(a, stop, CHUNK)]
    bounds = [0, *accumulate(cdiv(stop - a, CHUNK) for a, stop in pairwise(ends))]
    device = next(x.device for x in inputs if x is not None)
    table, firsts = (torch.tensor(x, dtype=torch.int32).to(device) for x in (pairs, bounds))
    return common._replace(table=table, bounds=firsts, launches=None)


@functools.lru_cache(256)
def _plan(scale: float, chunk: int, first: tuple[Any, ...], *others: Form) -> Plan:
    dtypes = {x[2] for x in (first, *others[:2]) if x is not None}
    work = torch.bfloat16 if dtypes == {torch.bfloat16} else torch.float32
    precision = "tf32" if torch.float32 not in dtypes else "ieee" if torch.version.hip else "tf32x3"
    # the interpreter is not in a hurry
    launches: dict[Any, Launch] | None = {} if first[3].type == "cuda" else None
    return Plan(chunk, scale, work, precision, None, None, launches)


def _options(config: Config, larger: int = 1) -> dict[str, int]:
    """Of a tile so many times as large."""
    options = {"num_warps": min(8, config.num_warps * larger), "num_stages": config.num_stages}
    return options if config.registers is None else options | {"maxnreg": config.registers}


def gla_scores(
    plan: Plan, q: Tensor | None, k: Tensor, g: Tensor, outgoing: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, ...]:
    """k_out, decay, and with q also q_in and scores, see `_scores_kernel`; `outgoing` is k_out and decay if known."""
    batch, length, heads, key_dim = k.shape
    kind = _kind(g)
    config, limit, num_chunks = SCORES[kind], _limit(plan.precision), plan.num_chunks(length)
    dense = batch, length, heads, key_dim
    if q is None:
        q_in, scores = None, None
    else:
        q_in, scores = k.new_empty(dense, dtype=plan.work), k.new_empty((*dense[:3], plan.chunk), dtype=plan.work)
    if outgoing is None:
        decay = k.new_empty((batch, heads, num_chunks, key_dim), dtype=torch.float32)
        k_out = k.new_empty(dense, dtype=plan.work)
    else:
        k_out, decay = outgoing

    def arguments() -> tuple[Any, ...]:
        numbers = length, num_chunks, plan.scale, *_strides(q), *_strides(k), *_strides(g)
        constants = {
            "H": heads,
            "K": key_dim,
            "C": plan.chunk,
            "LEVELS": plan.chunk.bit_length() - 1,
            "BK": _block(config.block_k, key_dim),
            "DECAY": kind,
            "LIMIT": limit,
            "PRECISION": plan.precision,
            # of fp16, eight warps meet the error of ptxas 12.8, too (module docstring)
            **_options(config, 1 if plan.precision == "tf32" else plan.larger),
        }
        return _scores_kernel, batch * heads * num_chunks, numbers, constants

    key = "scores", config, limit, outgoing is None, q if q is None else q.stride()
    plan.launch(key, arguments, q, k, g, q_in, k_out if outgoing is None else None, decay, scores, plan.table)
    return (k_out, decay) if q_in is None or scores is None else (k_out, decay, q_in, scores)


Ends = tuple[Tensor | None, Tensor | None]
"""States [B, H, K, V] at the two ends of time: the one that is given and the one to be written."""


class Segments(NamedTuple):
    """Of a walk over time: how many, chunks of one, and what all but the last end with (see `_states_kernel`)."""

    count: int
    num_walked: int
    ends: Tensor | None
    decays: Tensor | None


def _segments(plan: Plan, x: Tensor, y: Tensor, decay: Tensor | None, programs: int, below: int, most: int) -> Segments:
    """Fewer programs than `below` become up to `most`."""
    batch, length, heads, key_dim = x.shape
    num_chunks = plan.num_chunks(length)
    if programs >= below or plan.table is not None or num_chunks < 2 * SHORTEST:
        return Segments(1, num_chunks, None, None)
    num_walked = cdiv(num_chunks, min(num_chunks // SHORTEST, cdiv(most, programs)))
    count = cdiv(num_chunks, num_walked)
    if count == 1:
        return Segments(1, num_chunks, None, None)
    ends = x.new_empty((count - 1, batch, heads, key_dim, y.shape[-1]), dtype=torch.float32)
    decays = None
    if decay is not None:
        decays = x.new_empty((count - 1, batch, heads, key_dim), dtype=torch.float32)
    return Segments(count, num_walked, ends, decays)


def _launch_states(
    plan: Plan,
    kind: int,
    part: int,
    x: Tensor,
    y: Tensor,
    decay: Tensor | None,
    states: Tensor | None,
    segments: Segments,
    boundary: Ends,
    reverse: bool,
) -> None:
    _, length, heads, key_dim = x.shape
    value_dim, config = y.shape[-1], STATES[kind]
    first, last = boundary
    given = last if first is None else first
    end_strides = (0, 0) if given is None else given.stride()[2:]

    def arguments() -> tuple[Any, ...]:
        block_k, block_v = _block(config.block_k, key_dim), _block(config.block_v, value_dim)
        programs = plan.num_sequences(x) * heads * cdiv(key_dim, block_k) * cdiv(value_dim, block_v)
        constants = {
            "H": heads,
            "K": key_dim,
            "V": value_dim,
            "C": plan.chunk,
            "BK": block_k,
            "BV": block_v,
            "PART": part,
            "REVERSE": reverse,
            "PRECISION": plan.precision,
            **_options(config),
        }
        numbers = length, plan.num_chunks(length), plan.scale, segments.num_walked
        numbers = *numbers, *_strides(x), *_strides(y), *end_strides
        return _states_kernel, (programs, segments.count - (part == ENDS)), numbers, constants

    key = "states", config, part, reverse, segments[:2], x.stride(), y.stride(), end_strides, first is None
    key = *key, last if last is None else last.dtype
    tensors = x, y, decay, states, segments.ends, segments.decays, first, last, plan.table, plan.bounds
    plan.launch(key, arguments, *tensors)


def gla_states(
    plan: Plan,
    x: Tensor,
    y: Tensor,
    decay: Tensor | None,
    kind: int,
    first: Tensor | None,
    last: Tensor | None,
    reverse: bool,
) -> Tensor:
    """States [B, H, T / C, K, V], see `_states_kernel`; `first` is read, `last` written, both [B, H, K, V]."""
    batch, length, heads, key_dim = x.shape
    value_dim, config = y.shape[-1], STATES[kind]
    states = x.new_empty((batch, heads, plan.num_chunks(length), key_dim, value_dim), dtype=plan.work)
    tiles = cdiv(key_dim, config.block_k) * cdiv(value_dim, config.block_v)
    segments = _segments(plan, x, y, decay, batch * heads * tiles, *FEW_STATES)
    for part in (WHOLE,) if segments.ends is None else (ENDS, REST):
        _launch_states(plan, kind, part, x, y, decay, states, segments, (first, last), reverse)
    return states


def gla_walk(
    plan: Plan,
    x: Tensor,
    y: Tensor,
    v: Tensor,
    decay: Tensor | None,
    scores: Tensor | None,
    kind: int,
    first: Tensor | None,
    last: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """o [B, T, H, V], see `_walk_kernel`; `first` is read, `last` written, both [B, H, K, V]."""
    batch, length, heads, key_dim = x.shape
    value_dim, config = v.shape[-1], WALK[max(CHUNK, power_of_2(key_dim))]
    block_v = _block(config.block_v, value_dim)
    o = v.new_empty((batch, length, heads, value_dim), dtype=dtype)
    programs, at_once = plan.num_sequences(x) * heads * cdiv(value_dim, block_v), WARPS // config.num_warps
    segments = _segments(plan, x, v, decay, programs, at_once // 2, at_once)
    if segments.ends is not None:
        _launch_states(plan, kind, ENDS, y, v, decay, None, segments, (None, None), False)

    def arguments() -> tuple[Any, ...]:
        numbers = length, plan.num_chunks(length), plan.scale, segments.num_walked
        constants = {
            "H": heads,
            "K": key_dim,
            "V": value_dim,
            "C": plan.chunk,
            "BK": _block(config.block_k, key_dim),
            "BV": block_v,
            "PRECISION": plan.precision,
            **_options(config),
        }
        numbers = *numbers, *_strides(x), *_strides(y), *_strides(v)
        return _walk_kernel, (programs, segments.count), numbers, constants

    key = "walk", config, dtype, segments[:2], x.stride(), y.stride(), v.stride(), first is None, last is None
    tensors = x, y, v, scores, decay, o, segments.ends, segments.decays, first, last, plan.table, plan.bounds
    plan.launch(key, arguments, *tensors)
    return o


def gla_read(
    plan: Plan, x: Tensor, y: Tensor, z: Tensor, states: Tensor, kind: int, dtype: torch.dtype, transposed: bool
) -> Tensor:
    """[B, T, H, V], see `_read_kernel`."""
    batch, length, heads, key_dim = x.shape
    value_dim = z.shape[-1]
    config, num_chunks = READ[kind], plan.num_chunks(length)
    out = z.new_empty((batch, length, heads, value_dim), dtype=dtype)

    def arguments() -> tuple[Any, ...]:
        block_v = _block(config.block_v, value_dim)
        numbers = length, num_chunks, plan.scale, *_strides(x), *_strides(y), *_strides(z)
        constants = {
            "H": heads,
            "K": key_dim,
            "V": value_dim,
            "C": plan.chunk,
            "BK": _block(config.block_k, key_dim),
            "BV": block_v,
            "DECAY": kind,
            "TRANSPOSED": transposed,
            "PRECISION": plan.precision,
            **_options(config),
        }
        return _read_kernel, batch * heads * num_chunks * cdiv(value_dim, block_v), numbers, constants

    key = "read", config, dtype, transposed, x.stride(), y.stride(), z.stride(), value_dim
    plan.launch(key, arguments, x, y, z, states, out, plan.table)
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
    more: tuple[Tensor | None, Tensor | None] = (None, None),
) -> tuple[Any, Any, Any]:
    """Gradients of q, k, g, each None where it has no dtype, those of k and g plus `more`; see `_grads_kernel`."""
    batch, length, heads, key_dim = k.shape
    value_dim, kind = v.shape[-1], _kind(g)
    config, limit, num_chunks = GRADS[kind], _limit(plan.precision), plan.num_chunks(length)
    block_k = min(config.block_k, _block(config.block_k, key_dim))
    num_k = cdiv(key_dim, block_k)

    def new(dtype: torch.dtype | None, channels: int) -> Tensor | None:
        return None if dtype is None else k.new_empty((batch, length, heads, channels), dtype=dtype)

    dq, dk = new(dq_dtype, key_dim), new(dk_dtype, key_dim)
    partial = dg_dtype is not None and kind == HEAD
    dg = new(torch.float32, num_k) if partial else new(dg_dtype, key_dim)

    def arguments() -> tuple[Any, ...]:
        block_v = _block(config.block_v, value_dim)
        numbers = length, num_chunks, cdiv(value_dim, block_v) * block_v, plan.scale
        constants = {
            "H": heads,
            "K": key_dim,
            "V": value_dim,
            "C": plan.chunk,
            "LEVELS": plan.chunk.bit_length() - 1,
            "BK": block_k,
            "BV": block_v,
            "DECAY": kind,
            "LIMIT": limit,
            "PRECISION": plan.precision,
            **_options(config, plan.larger),
        }
        numbers = *numbers, *_strides(q), *_strides(k), *_strides(v), *_strides(g), *_strides(do)
        return _grads_kernel, batch * heads * num_chunks * num_k, numbers, constants

    key = "grads", config, limit, dq_dtype, dk_dtype, dg_dtype, more[0] is None, do.stride()
    key = *key, q if q is None else q.stride(), v.stride()
    plan.launch(key, arguments, q, k, v, g, do, states, dstates, dq, dk, dg, *more, plan.table)
    if partial and dg is not None:
        dg = dg.sum(-1).to(dg_dtype)
    return dq, dk, dg


def forward(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    on_value: bool,
    ends: Ends,
    dtype: torch.dtype,
    keep: bool,
    outgoing: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
    """o in `dtype`, and what `backward` needs if it is to be kept: the states and what `gla_scores` gives.

    With decays on values, v and k take the parts of k and v, and do and q those of q and do (module docstring).
    `outgoing`: what the last result starts with, of the same k, g and chunks, if known.
    """
    kind = _kind(g)
    if g is not None and on_value and kind == CHANNEL:
        v_out, decay = gla_scores(plan, None, v, g) if outgoing is None else outgoing
        states = gla_states(plan, v_out, k, decay, kind, *_transposed(ends), False)
        dtypes: dict[str, Any] = {"dq_dtype": dtype, "dk_dtype": None, "dg_dtype": None}
        o, _, _ = gla_grads(plan, None, v, k, g, q, states, None, **dtypes)
        return o, states, (v_out, decay)
    made: tuple[Tensor, ...] = ()
    x, y, decay, scores = q, k, None, None
    if g is not None:
        made = gla_scores(plan, q, k, g, outgoing)
        y, decay, x, scores = made
    if not keep and _walks(plan, q.shape[-1]):
        return gla_walk(plan, x, y, v, decay, scores, kind, *ends, dtype), None, made
    states = gla_states(plan, y, v, decay, kind, *ends, False)
    return gla_read(plan, x, y if scores is None else scores, v, states, kind, dtype, False), states, made


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
    more: tuple[Tensor | None, Tensor | None] = (None, None),
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, v, g in `dtypes` (None: not wanted); `ends` are those of the final and the initial state.

    `more`, for decays on values, is added to the gradients of v and g.
    """
    kind = _kind(g)
    dq_dtype, dk_dtype, dv_dtype, dg_dtype = dtypes
    if g is None:
        dstates = gla_states(plan, q, do, None, kind, *ends, True)
        dv = gla_read(plan, k, q, do, dstates, kind, dv_dtype, True)
    elif on_value and kind == CHANNEL:
        v_out, decay, do_in, da = gla_scores(plan, do, v, g, (made[0], made[1]))
        dstates = gla_states(plan, do_in, q, decay, kind, *_transposed(ends), True)
        dq = gla_read(plan, do_in, da, k, states, kind, dq_dtype, False)
        dk = gla_read(plan, v_out, da, q, dstates, kind, dk_dtype, True)
        of_values: dict[str, Any] = {"dq_dtype": None, "dk_dtype": dv_dtype, "dg_dtype": dg_dtype}
        _, dv, dg = gla_grads(plan, do, v, k, g, q, states, dstates, **of_values, more=more)
        return dq, dk, dv, dg
    else:
        k_out, decay, q_in, scores = made
        dstates = gla_states(plan, q_in, do, decay, kind, *ends, True)
        dv = gla_read(plan, k_out, scores, do, dstates, kind, dv_dtype, True)
    of_keys: dict[str, Any] = {"dq_dtype": dq_dtype, "dk_dtype": dk_dtype, "dg_dtype": dg_dtype}
    dq, dk, dg = gla_grads(plan, q, k, v, g, do, states, dstates, **of_keys)
    return dq, dk, dv, dg


def _transposed(ends: Ends) -> Ends:
    first, last = (None if end is None else end.transpose(-1, -2) for end in ends)
    return first, last


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    initial_state: Tensor | None,
    on_value: bool,
    scale: float,
    return_final_state: bool,
    packed: list[int] | None,
    keep: bool,
) -> tuple[Tensor, Tensor | None, tuple[Any, ...]]:
    """o, the final state, and what backward needs if it is to be kept: the plan, the inputs as rows and `forward`'s."""
    q, k, v = rows(q), rows(k), rows(v)
    if g is not None and g.dim() == 4:
        g = rows(g)
    common = plan(scale, q, k, v, g, initial_state, ends=packed)
    first, final = None if initial_state is None else initial_state.contiguous(), None
    if return_final_state:
        shape = (common.num_sequences(q), *q.shape[2:], v.shape[3])
        final = q.new_empty(shape, dtype=torch.float32)
    o, states, made = forward(common, q, k, v, g, on_value, (first, final), v.dtype, keep)
    return o, final, (common, q, k, v, g, states, *made)


class GatedLinearAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor | None,
        initial_state: Tensor | None,
        *options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        o, final, (common, *kept) = attend(q, k, v, g, initial_state, *options, keep=True)
        save(ctx, *kept)
        ctx.options = common, options[0], None if initial_state is None else initial_state.dtype
        ctx.set_materialize_grads(False)
        return o, final

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, do: Tensor | None, dfinal: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, g, states, *made = saved(ctx)
        common, on_value, initial_dtype = ctx.options
        do = torch.zeros_like(v) if do is None else rows(do)
        dfinal = None if dfinal is None else dfinal.contiguous()
        dinitial = None
        if initial_dtype is not None:
            shape = (common.num_sequences(q), *q.shape[2:], v.shape[3])
            dinitial = torch.empty(shape, dtype=initial_dtype, device=q.device)
        dtypes = q.dtype, k.dtype, v.dtype, g.dtype if ctx.needs_input_grad[3] else None
        dq, dk, dv, dg = backward(common, q, k, v, g, on_value, (dfinal, dinitial), do, states, tuple(made), dtypes)
        return dq, dk, dv, dg, dinitial, None, None, None, None


@triton.jit
def _step_kernel(
    q,
    k,
    v,
    g,
    state,
    o,
    new,
    scale,
    H,
    K,
    V,
    q_stride_b,
    q_stride_h,
    k_stride_b,
    k_stride_h,
    v_stride_b,
    v_stride_h,
    g_stride_b,
    g_stride_h,
    DECAY: tl.constexpr,
    ON_VALUE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """new = decay(state) + k^T v, o = scale q new: BLOCK_V columns of one head, which read and write the state once."""
    num_v = tl.cdiv(V, BLOCK_V)
    i_row = (tl.program_id(0) // num_v).to(tl.int64)
    i_b, i_h = i_row // H, i_row % H
    o_k = tl.arange(0, BLOCK_K)
    o_v = tl.program_id(0) % num_v * BLOCK_V + tl.arange(0, BLOCK_V)
    m_k, m_v = o_k < K, o_v < V
    b_q = tl.load(q + i_b * q_stride_b + i_h * q_stride_h + o_k, mask=m_k, other=0.0).to(tl.float32)
    b_k = tl.load(k + i_b * k_stride_b + i_h * k_stride_h + o_k, mask=m_k, other=0.0).to(tl.float32)
    b_v = tl.load(v + i_b * v_stride_b + i_h * v_stride_h + o_v, mask=m_v, other=0.0).to(tl.float32)
    o_s = i_row * K * V + o_k[:, None] * V + o_v[None, :]
    m_s = m_k[:, None] & m_v[None, :]
    b_s = tl.load(state + o_s, mask=m_s, other=0.0).to(tl.float32)
    p_g = g
    if DECAY != 0:
        p_g += i_b * g_stride_b + i_h * g_stride_h
    if DECAY == 1:
        b_s *= tl.exp(tl.load(p_g).to(tl.float32))
    elif DECAY == 2 and ON_VALUE:
        b_s *= tl.exp(tl.load(p_g + o_v, mask=m_v, other=0.0).to(tl.float32))[None, :]
    elif DECAY == 2:
        b_s *= tl.exp(tl.load(p_g + o_k, mask=m_k, other=0.0).to(tl.float32))[:, None]
    b_s += b_k[:, None] * b_v[None, :]
    tl.store(new + o_s, b_s.to(new.dtype.element_ty), mask=m_s)
    b_o = scale * tl.sum(b_q[:, None] * b_s, 0)
    tl.store(o + i_row * V + o_v, b_o.to(o.dtype.element_ty), mask=m_v)


STEP_BLOCK = 4096
"""Numbers of the state that a program of a step takes."""


def gated_linear_attention_step_triton(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, state: Tensor, *, decay_on: str, scale: float
) -> tuple[Tensor, Tensor]:
    """One step without gradients: o [B, H, V] in the dtype of v and the next state in that of the state."""
    batch, heads, key_dim = q.shape
    value_dim = v.shape[-1]
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
    state = state.contiguous()
    kind, g_strides = NONE, (0, 0)
    if log_decay is not None:
        kind = CHANNEL if log_decay.dim() == 3 else HEAD
        if kind == CHANNEL and log_decay.stride(2) != 1:
            log_decay = log_decay.contiguous()
        g_strides = (0, log_decay.stride(0)) if log_decay.dim() == 1 else log_decay.stride()[:2]
    o, new = torch.empty((batch, heads, value_dim), dtype=v.dtype, device=v.device), torch.empty_like(state)
    block_k = power_of_2(key_dim)
    block_v = min(power_of_2(value_dim), max(4, STEP_BLOCK // block_k))
    launch(
        _step_kernel, batch * heads * cdiv(value_dim, block_v),
        q, k, v, log_decay, state, o, new, scale, heads, key_dim, value_dim,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *g_strides,
        DECAY=kind, ON_VALUE=decay_on == "value", BLOCK_K=block_k, BLOCK_V=block_v, num_warps=4,
    )  # fmt: skip
    return o, new


def recorded(*inputs: Tensor | None) -> bool:
    """Whether gradients may be asked for."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)


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
    inputs = q, k, v, log_decay, initial_state
    options = decay_on == "value", scale, return_final_state, packed
    if recorded(*inputs):
        o, state = GatedLinearAttention.apply(*inputs, *options)
    else:
        o, state, _ = attend(*inputs, *options, keep=False)
    return (o, state) if return_final_state else o
