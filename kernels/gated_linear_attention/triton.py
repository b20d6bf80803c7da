"""Gated linear attention in Triton: chunks joined by their states, four kernels for every kind of decay.

    S_t = diag(exp(log_decay_t)) S_{t-1} + k_t^T v_t;   o_t = scale q_t S_t        source: package docstring

A chunk is C positions; P_i sums the log-decays of a chunk up to and with i, R_j those after j, D_ij those in (j, i].

    _scores_kernel   of a decay a channel: A_ij = scale sum_x q_ix k_jx exp(D_ijx) for j <= i, scale q exp(P), k exp(R)
    _states_kernel   the state before every chunk: S <- exp(P_C) S + (k exp(R))^T v; in reverse, its gradient
    _read_kernel     o = (q exp(P)) S + A v; transposed, dv = (k exp(R)) dS + A^T do
    _grads_kernel    dq, dk and the gradient of the log-decays, from dA = do v^T, do S^T and v dS^T

With one decay a head, or none, factors belong to rows and `_read_kernel` forms A itself. Decays on values need no
kernel of their own: sum_ij A_ij <do_i, v_j> is the same under (q, k) <-> (do, v), so that o is what `_grads_kernel`
gives as dq, and dq, dk are what `_read_kernel` gives as o, dv (README).

D couples i, j and the channel. A block of 2h positions is halved; a query in its second half and a key in its first
factor about the middle with exponents <= 0, a level of the tree of `chunked.py`: h = C/2, ..., 1, one product each, the
diagonal apart. Where all halves of a chunk have decayed by less than exp(-LIMIT), the factors about its middle are
within range on either side, and the first level serves all pairs. Exponents are products of log-decays with matrices of
zeros and ones: sums only, never a difference (of one decay a head in half precision: differences of a running sum).

float32: sums, exponentials, states while they grow. Operands of products and kept states: bfloat16 for bfloat16 inputs,
else float32 (fp16: tf32, fp32: three tf32 products). Deterministic: no atomics.
Kept for backward besides the inputs: the state before each chunk, K V / C numbers a position; with a decay a channel
also the outputs of `_scores_kernel`, 2 K + C.
"""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

NONE, HEAD, CHANNEL = 0, 1, 2
"""What decays: nothing, a head (constant or by step), a channel."""


class Config(NamedTuple):
    """Of a tile: channels of keys, of values."""

    block_k: int
    block_v: int
    num_warps: int
    num_stages: int


# by kind of decay
CHUNK = {NONE: 64, HEAD: 64, CHANNEL: 64}
SCORES = {CHANNEL: Config(64, 0, 8, 2)}
STATES = {kind: Config(64, 64, 4, 3) for kind in (NONE, HEAD, CHANNEL)}
READ = {kind: Config(64, 128, 4, 3) for kind in (NONE, HEAD, CHANNEL)}
GRADS = {kind: Config(64, 64, 8, 2) for kind in (NONE, HEAD, CHANNEL)}

# below it a step keeps nothing that float32 could hold, and infinities would spoil the products with zeros
LOWEST = tl.constexpr(-128.0)
LOG2E = tl.constexpr(1.4426950408889634)
# log(2) in two parts, the first of ten bits
LN2_HIGH, LN2_LOW = tl.constexpr(0.693359375), tl.constexpr(-2.1219444005469057e-4)
_NONE, _HEAD, _CHANNEL = tl.constexpr(NONE), tl.constexpr(HEAD), tl.constexpr(CHANNEL)


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
def _load_state(p, o_k, o_v, K: tl.constexpr, V: tl.constexpr):
    m_s = (o_k < K)[:, None] & (o_v < V)[None, :]
    return tl.load(p + o_k[:, None] * V + o_v[None, :], mask=m_s, other=0.0)


@triton.jit
def _sums(m_w, b_x, PRECISION: tl.constexpr):
    """sum_l m_w[i, l] b_x[l, :], for m_w of zeros and ones."""
    if PRECISION == "tf32":
        b_w = m_w.to(tl.float32).to(tl.bfloat16)
        # two roundings to bfloat16 hold 16 bits; the exponent e errs by 2^-17 e, which exp(e) <= 1 keeps small
        b_high = b_x.to(tl.bfloat16)
        b_sum = tl.dot(b_w, b_high)
        if b_x.dtype != tl.bfloat16:
            b_sum += tl.dot(b_w, (b_x.to(tl.float32) - b_high.to(tl.float32)).to(tl.bfloat16))
    else:
        b_sum = tl.dot(m_w.to(tl.float32), b_x.to(tl.float32), input_precision=PRECISION)
    return b_sum


@triton.jit
def _lowest(b_g):
    return tl.maximum(b_g.to(tl.float32), LOWEST).to(b_g.dtype)


@triton.jit
def _is_mild(b_g, o_c, C: tl.constexpr, LIMIT: tl.constexpr):
    """1 if neither half of the chunk decays by exp(-LIMIT) in any channel, else 0."""
    m_2 = (o_c >= C // 2)[:, None]
    b_wide = b_g.to(tl.float32)
    b_1 = tl.min(tl.sum(tl.where(m_2, 0.0, b_wide), 0), 0)
    b_2 = tl.min(tl.sum(tl.where(m_2, b_wide, 0.0), 0), 0)
    return (tl.minimum(b_1, b_2) > -LIMIT).to(tl.int32)


@triton.jit
def _level(b_g, o_c, shift, mild, PRECISION: tl.constexpr):
    """For halves of h = 2^shift: factors of queries and of keys [C, X], and the pairs i, j they are right for [C, C].

    Exponents go from the middle of a block; towards it for the queries of a first half and the keys of a second, which
    only count if the decays are mild.
    """
    half = 1 << shift
    m_2 = (o_c & half) != 0
    o_start = o_c & -half
    # of each row the columns from .. until, which leaves less to compute for a pair
    o_from, o_until = tl.where(m_2, o_start, o_c + 1), tl.where(m_2, o_c + 1, o_start + half)
    b_e = _sums((o_c[None, :] >= o_from[:, None]) & (o_c[None, :] < o_until[:, None]), b_g, PRECISION)
    b_sign = 1.0 - 2.0 * mild
    b_fq = _exp(b_e * tl.where(m_2, 1.0, b_sign)[:, None], PRECISION)
    b_fk = _exp(b_e * tl.where(m_2, b_sign, 1.0)[:, None], PRECISION)
    o_from, o_until = (o_start - half) * (1 - mild), tl.where(m_2, o_start, 0) * (1 - mild) + o_c * mild
    m_pair = (o_c[None, :] >= o_from[:, None]) & (o_c[None, :] < o_until[:, None])
    return b_fq, b_fk, m_pair


@triton.jit
def _prefix(b_g, o_c):
    """[C]: P_i."""
    return tl.sum(tl.where(o_c[None, :] <= o_c[:, None], b_g[None, :], 0.0), 1)


@triton.jit
def _suffix(b_g, o_c):
    """[C]: R_j."""
    return tl.sum(tl.where(o_c[None, :] > o_c[:, None], b_g[None, :], 0.0), 1)


@triton.jit
def _load_head(g, stride_t, o_t, T):
    return tl.maximum(tl.load(g + o_t.to(tl.int64) * stride_t, mask=o_t < T, other=0.0).to(tl.float32), LOWEST)


@triton.jit
def _decays(b_g, o_c, PRECISION: tl.constexpr):
    """[C, C]: exp(D_ij) for j <= i, else 0."""
    m_past = o_c[:, None] >= o_c[None, :]
    if PRECISION == "tf32":
        b_column = tl.sum(tl.where(o_c[:, None] <= o_c[None, :], b_g[:, None], 0.0), 0)
        b_d = _prefix(b_g, o_c)[:, None] - b_column[None, :]
    else:
        b_d = _sums(m_past, tl.where(o_c[:, None] > o_c[None, :], b_g[:, None], 0.0), PRECISION)
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
    T,
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
    LIMIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Of one chunk: scores A [C, C], q_in = scale q exp(P), k_out = k exp(R) [C, K], total = P_C [K].

    Without q only k_out and total.
    """
    num_t = tl.cdiv(T, C)
    i_t, i_bh = tl.program_id(0) % num_t, (tl.program_id(0) // num_t).to(tl.int64)
    i_b, i_h = i_bh // H, i_bh % H
    o_c = tl.arange(0, C)
    o_t = i_t * C + o_c
    k += i_b * k_stride_b + i_h * k_stride_h
    g += i_b * g_stride_b + i_h * g_stride_h
    o_dense = (i_b * T * H + i_h) * K
    m_until = o_c[None, :] <= o_c[:, None]
    b_a = tl.zeros([C, C], tl.float32)
    for i_k in range(0, K, BK):
        o_k = i_k + tl.arange(0, BK)
        b_g = _lowest(_load(g, g_stride_t, o_t, o_k, T, K))
        b_k = _load(k, k_stride_t, o_t, o_k, T, K).to(tl.float32)
        tl.store(total + (i_bh * num_t + i_t) * K + o_k, tl.sum(b_g.to(tl.float32), 0), mask=o_k < K)
        b_out = b_k * _exp(_sums(m_until == 0, b_g, PRECISION), PRECISION)
        _store(k_out + o_dense, H * K, o_t, o_k, T, K, b_out)
        if q is not None:
            b_q = _load(q + i_b * q_stride_b + i_h * q_stride_h, q_stride_t, o_t, o_k, T, K).to(tl.float32) * scale
            _store(q_in + o_dense, H * K, o_t, o_k, T, K, b_q * _exp(_sums(m_until, b_g, PRECISION), PRECISION))
            b_a += tl.where(o_c[:, None] == o_c[None, :], tl.sum(b_q * b_k, 1)[:, None], 0.0)
            mild = _is_mild(b_g, o_c, C, LIMIT)
            for level in range(LEVELS - mild * (LEVELS - 1)):
                b_fq, b_fk, m_pair = _level(b_g, o_c, LEVELS - 1 - level, mild, PRECISION)
                b_fq = (b_q * b_fq).to(k_out.dtype.element_ty)
                b_fk = (b_k * b_fk).to(k_out.dtype.element_ty)
                b_pairs = tl.dot(b_fq, tl.trans(b_fk), input_precision=PRECISION)
                b_a += tl.where(m_pair, b_pairs, 0.0)
    if q is not None:
        _store(scores + (i_b * T * H + i_h) * C, H * C, o_t, o_c, T, C, b_a)


@triton.jit
def _states_kernel(
    x,
    y,
    g,
    states,
    first,
    last,
    T,
    scale,
    x_stride_b,
    x_stride_t,
    x_stride_h,
    y_stride_b,
    y_stride_t,
    y_stride_h,
    g_stride_b,
    g_stride_t,
    g_stride_h,
    end_stride_k,
    end_stride_v,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    DECAY: tl.constexpr,
    REVERSE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """states [B, H, T / C, K, V], each from before its chunk: S <- exp(P_C) S + x^T y, x = k exp(R) and y = v.

    REVERSE: gradients of the states after their chunks, last chunk first; x = scale q exp(P), y = do.
    Of a decay a channel, x has its factors and g is P_C [B, H, T / C, K]; else the factors are formed here.
    """
    num_k, num_v, num_t = tl.cdiv(K, BK), tl.cdiv(V, BV), tl.cdiv(T, C)
    i_kv, i_bh = tl.program_id(0) % (num_k * num_v), (tl.program_id(0) // (num_k * num_v)).to(tl.int64)
    i_b, i_h = i_bh // H, i_bh % H
    o_k = i_kv // num_v * BK + tl.arange(0, BK)
    o_v = i_kv % num_v * BV + tl.arange(0, BV)
    o_c = tl.arange(0, C)
    m_s = (o_k < K)[:, None] & (o_v < V)[None, :]
    x += i_b * x_stride_b + i_h * x_stride_h
    y += i_b * y_stride_b + i_h * y_stride_h
    o_end = i_bh * K * V + o_k[:, None] * end_stride_k + o_v[None, :] * end_stride_v
    b_s = tl.zeros([BK, BV], tl.float32)
    if first is not None:
        b_s += tl.load(first + o_end, mask=m_s, other=0.0).to(tl.float32)
    for i in range(num_t):
        i_t = num_t - 1 - i if REVERSE else i
        o_t = i_t * C + o_c
        p_s = states + (i_bh * num_t + i_t) * (K * V) + o_k[:, None] * V + o_v[None, :]
        tl.store(p_s, b_s.to(states.dtype.element_ty), mask=m_s)
        b_x = _load_transposed(x, x_stride_t, o_t, o_k, T, K).to(states.dtype.element_ty)
        b_y = _load(y, y_stride_t, o_t, o_v, T, V).to(states.dtype.element_ty)
        if DECAY == _CHANNEL:
            b_total = tl.load(g + (i_bh * num_t + i_t) * K + o_k, mask=o_k < K, other=0.0)
            b_s *= _exp(b_total, PRECISION)[:, None]
        elif DECAY == _HEAD:
            b_g = _load_head(g + i_b * g_stride_b + i_h * g_stride_h, g_stride_t, o_t, T)
            b_f = _exp(_prefix(b_g, o_c), PRECISION) * scale if REVERSE else _exp(_suffix(b_g, o_c), PRECISION)
            b_x = (b_x * b_f[None, :]).to(states.dtype.element_ty)
            b_s *= _exp(tl.sum(b_g, 0), PRECISION)
        b_new = tl.dot(b_x, b_y, input_precision=PRECISION)
        if REVERSE and DECAY == _NONE:
            b_new *= scale
        b_s += b_new
    if last is not None:
        tl.store(last + o_end, b_s.to(last.dtype.element_ty), mask=m_s)


@triton.jit
def _read_kernel(
    x,
    y,
    z,
    g,
    states,
    out,
    T,
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
    g_stride_b,
    g_stride_t,
    g_stride_h,
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
    """out [C, V] = x S + A z of one chunk, with x = scale q exp(P) and z = v.

    TRANSPOSED: A^T for A, x = k exp(R), z = do and S the gradient of the state after the chunk.
    Of a decay a channel, y is A [B, T, H, C] and x has its factors; else y is k (TRANSPOSED: q), and A is formed here.
    """
    num_v, num_t = tl.cdiv(V, BV), tl.cdiv(T, C)
    i_v, i_c = tl.program_id(0) % num_v, (tl.program_id(0) // num_v).to(tl.int64)
    i_t, i_bh = i_c % num_t, i_c // num_t
    i_b, i_h = i_bh // H, i_bh % H
    o_c = tl.arange(0, C)
    o_t = i_t * C + o_c
    o_v = i_v * BV + tl.arange(0, BV)
    x += i_b * x_stride_b + i_h * x_stride_h
    y += i_b * y_stride_b + i_h * y_stride_h
    z += i_b * z_stride_b + i_h * z_stride_h
    states += i_c * K * V
    b_o = tl.zeros([C, BV], tl.float32)
    b_a = tl.zeros([C, C], tl.float32)
    for i_k in range(0, K, BK):
        o_k = i_k + tl.arange(0, BK)
        b_x = _load(x, x_stride_t, o_t, o_k, T, K).to(states.dtype.element_ty)
        b_s = _load_state(states, o_k, o_v, K, V)
        b_o += tl.dot(b_x, b_s, input_precision=PRECISION)
        if DECAY != _CHANNEL:
            b_y = _load_transposed(y, y_stride_t, o_t, o_k, T, K).to(states.dtype.element_ty)
            b_a += tl.dot(b_x, b_y, input_precision=PRECISION)
    if DECAY == _CHANNEL:
        b_a = _load_transposed(y, y_stride_t, o_t, o_c, T, C) if TRANSPOSED else _load(y, y_stride_t, o_t, o_c, T, C)
    else:
        b_d = (o_c[:, None] >= o_c[None, :]).to(tl.float32)
        if DECAY == _HEAD:
            b_g = _load_head(g + i_b * g_stride_b + i_h * g_stride_h, g_stride_t, o_t, T)
            b_f = _exp(_suffix(b_g, o_c) if TRANSPOSED else _prefix(b_g, o_c), PRECISION)
            b_o *= b_f[:, None]
            b_d = _decays(b_g, o_c, PRECISION)
        b_a *= (tl.trans(b_d) if TRANSPOSED else b_d) * scale
        if not TRANSPOSED:
            b_o *= scale
    b_z = _load(z, z_stride_t, o_t, o_v, T, V).to(states.dtype.element_ty)
    b_o += tl.dot(b_a.to(states.dtype.element_ty), b_z, input_precision=PRECISION)
    _store(out + (i_b * T * H + i_h) * V, H * V, o_t, o_v, T, V, b_o)


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
    T,
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
    num_k, num_t = tl.cdiv(K, BK), tl.cdiv(T, C)
    i_k, i_c = tl.program_id(0) % num_k, (tl.program_id(0) // num_k).to(tl.int64)
    i_t, i_bh = i_c % num_t, i_c // num_t
    i_b, i_h = i_bh // H, i_bh % H
    dtype = states.dtype.element_ty
    o_c = tl.arange(0, C)
    o_t = i_t * C + o_c
    o_k = i_k * BK + tl.arange(0, BK)
    v += i_b * v_stride_b + i_h * v_stride_h
    do += i_b * do_stride_b + i_h * do_stride_h
    o_dense = (i_b * T * H + i_h) * K

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
        p_g = g + i_b * g_stride_b + i_h * g_stride_h
        b_g = _lowest(_load(p_g, g_stride_t, o_t, o_k, T, K))
        b_dq *= _exp(_sums(m_past | (o_c[:, None] == o_c[None, :]), b_g, PRECISION), PRECISION)
        if dk is not None:
            b_dk *= _exp(_sums(o_c[:, None] < o_c[None, :], b_g, PRECISION), PRECISION)
        # before the inside is added: what enters the chunk and what leaves it
        if dg is not None:
            b_net += b_q * b_dq
            b_dg = _sums(m_past, b_k * b_dk, PRECISION)
            b_dg += (b_through * _exp(tl.sum(b_g.to(tl.float32), 0), PRECISION))[None, :]
        mild = _is_mild(b_g, o_c, C, LIMIT)
        for level in range(LEVELS - mild * (LEVELS - 1)):
            b_fq, b_fk, m_pair = _level(b_g, o_c, LEVELS - 1 - level, mild, PRECISION)
            b_p = tl.where(m_pair, b_da, 0.0).to(dtype)
            b_kf = (b_k * b_fk).to(dtype)
            b_dqf = tl.dot(b_p, b_kf, input_precision=PRECISION)
            b_dq += b_dqf * b_fq
            if dk is not None:
                b_qf = (b_q * b_fq).to(dtype)
                b_dkf = tl.dot(tl.trans(b_p), b_qf, input_precision=PRECISION)
                b_dk += b_dkf * b_fk
                if dg is not None:
                    b_net += b_qf.to(tl.float32) * b_dqf - b_kf.to(tl.float32) * b_dkf
    else:
        b_p = tl.where(m_past, b_da, 0.0)
        b_leaves = b_net
        if DECAY == _HEAD:
            b_g = _load_head(g + i_b * g_stride_b + i_h * g_stride_h, g_stride_t, o_t, T)
            b_dq *= _exp(_prefix(b_g, o_c), PRECISION)[:, None]
            b_dk *= _exp(_suffix(b_g, o_c), PRECISION)[:, None]
            b_net, b_leaves = b_q * b_dq, b_k * b_dk
            b_p *= _decays(b_g, o_c, PRECISION)
        b_p = b_p.to(dtype)
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
            b_dg += _sums(o_c[None, :] >= o_c[:, None], b_net, PRECISION)
            _store(dg + o_dense, H * K, o_t, o_k, T, K, b_dg)
        else:
            b_1 = tl.sum(b_net, 1)
            b_2 = tl.sum(b_leaves, 1)
            b_dg_head = b_1 + _suffix(b_1, o_c) + tl.sum(tl.where(m_past, b_2[None, :], 0.0), 1)
            if PRECISION != "tf32":
                b_dg_head += b_inside
            b_dg_head += tl.sum(b_through, 0) * _exp(tl.sum(b_g, 0), PRECISION)
            o_dg = ((i_b * T + o_t) * H + i_h) * num_k + i_k
            tl.store(dg + o_dg, b_dg_head, mask=o_t < T)


def _kind(g: Tensor | None) -> int:
    return NONE if g is None else HEAD if g.dim() == 3 else CHANNEL


def _precision(dtype: torch.dtype, *others: torch.dtype) -> str:
    """Of products with float32 operands: half precision asks for no more than tf32."""
    if torch.float32 not in (dtype, *others):
        return "tf32"
    return "ieee" if torch.version.hip else "tf32x3"


def _limit(precision: str) -> float:
    """How far from the middle of a chunk factors may grow: within float32's range, where its rounding is no matter."""
    return 60.0 if precision == "tf32" else 2.0


def _block(block: int, size: int) -> int:
    """No larger than a small size has use for; matrix units take 16 and more."""
    return max(16, min(block, triton.next_power_of_2(size)))


def _strides(x: Tensor | None) -> tuple[int, ...]:
    """Of B, T, H."""
    return (0, 0, 0) if x is None else x.stride()[:3]


def _rows(x: Tensor) -> Tensor:
    """With dense channels, as every kernel reads them."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _num_chunks(x: Tensor, kind: int) -> int:
    return triton.cdiv(x.shape[1], CHUNK[kind])


def gla_scores(
    q: Tensor | None, k: Tensor, g: Tensor, scale: float, work: torch.dtype, precision: str
) -> tuple[Tensor, ...]:
    """Of a decay a channel: k_out, total, and with q also q_in and scores, see `_scores_kernel`."""
    batch, length, heads, key_dim = k.shape
    config, chunk, num_chunks = SCORES[CHANNEL], CHUNK[CHANNEL], _num_chunks(k, CHANNEL)

    def new(channels: int) -> Tensor:
        return torch.empty((batch, length, heads, channels), dtype=work, device=k.device)

    q_in, scores = (None, None) if q is None else (new(key_dim), new(chunk))
    k_out = new(key_dim)
    total = torch.empty((batch, heads, num_chunks, key_dim), dtype=torch.float32, device=k.device)
    _scores_kernel[(batch * heads * num_chunks,)](
        q,
        k,
        g,
        q_in,
        k_out,
        total,
        scores,
        length,
        scale,
        *_strides(q),
        *_strides(k),
        *_strides(g),
        H=heads,
        K=key_dim,
        C=chunk,
        LEVELS=chunk.bit_length() - 1,
        BK=_block(config.block_k, key_dim),
        LIMIT=_limit(precision),
        PRECISION=precision,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return (k_out, total) if q_in is None or scores is None else (k_out, total, q_in, scores)


def gla_states(
    x: Tensor,
    y: Tensor,
    g: Tensor | None,
    kind: int,
    scale: float,
    work: torch.dtype,
    precision: str,
    first: Tensor | None,
    last: Tensor | None,
    reverse: bool,
) -> Tensor:
    """States [B, H, T / C, K, V], see `_states_kernel`; `first` is read, `last` written, both [B, H, K, V]."""
    batch, _, heads, key_dim = x.shape
    value_dim = y.shape[-1]
    config, num_chunks = STATES[kind], _num_chunks(x, kind)
    block_k, block_v = _block(config.block_k, key_dim), _block(config.block_v, value_dim)
    states = torch.empty((batch, heads, num_chunks, key_dim, value_dim), dtype=work, device=x.device)
    ends = next((end for end in (first, last) if end is not None), None)
    programs = batch * heads * triton.cdiv(key_dim, block_k) * triton.cdiv(value_dim, block_v)
    _states_kernel[(programs,)](
        x,
        y,
        g,
        states,
        first,
        last,
        x.shape[1],
        scale,
        *_strides(x),
        *_strides(y),
        *(_strides(g) if kind == HEAD else (0, 0, 0)),
        *((0, 0) if ends is None else ends.stride()[2:]),
        H=heads,
        K=key_dim,
        V=value_dim,
        C=CHUNK[kind],
        BK=block_k,
        BV=block_v,
        DECAY=kind,
        REVERSE=reverse,
        PRECISION=precision,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return states


def gla_read(
    x: Tensor,
    y: Tensor,
    z: Tensor,
    g: Tensor | None,
    kind: int,
    states: Tensor,
    scale: float,
    dtype: torch.dtype,
    precision: str,
    transposed: bool,
) -> Tensor:
    """[B, T, H, V], see `_read_kernel`."""
    batch, length, heads, key_dim = x.shape
    value_dim = z.shape[-1]
    config = READ[kind]
    block_v = _block(config.block_v, value_dim)
    out = torch.empty((batch, length, heads, value_dim), dtype=dtype, device=x.device)
    _read_kernel[(batch * heads * _num_chunks(x, kind) * triton.cdiv(value_dim, block_v),)](
        x,
        y,
        z,
        g if kind == HEAD else None,
        states,
        out,
        length,
        scale,
        *_strides(x),
        *_strides(y),
        *_strides(z),
        *(_strides(g) if kind == HEAD else (0, 0, 0)),
        H=heads,
        K=key_dim,
        V=value_dim,
        C=CHUNK[kind],
        BK=_block(config.block_k, key_dim),
        BV=block_v,
        DECAY=kind,
        TRANSPOSED=transposed,
        PRECISION=precision,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out


def gla_grads(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    do: Tensor,
    states: Tensor,
    dstates: Tensor | None,
    scale: float,
    precision: str,
    *,
    dq_dtype: torch.dtype | None,
    dk_dtype: torch.dtype | None,
    dg_dtype: torch.dtype | None,
) -> tuple[Any, Any, Any]:
    """Gradients of q, k, g, each None where it has no dtype, see `_grads_kernel`."""
    batch, length, heads, key_dim = k.shape
    value_dim, kind = v.shape[-1], _kind(g)
    config = GRADS[kind]
    block_k = _block(config.block_k, key_dim)
    num_k = triton.cdiv(key_dim, block_k)

    def new(dtype: torch.dtype | None, channels: int) -> Tensor | None:
        return None if dtype is None else torch.empty((batch, length, heads, channels), dtype=dtype, device=k.device)

    dq, dk = new(dq_dtype, key_dim), new(dk_dtype, key_dim)
    partial = dg_dtype is not None and kind == HEAD
    dg = new(torch.float32, num_k) if partial else new(dg_dtype, key_dim)
    chunk = CHUNK[kind]
    _grads_kernel[(batch * heads * _num_chunks(k, kind) * num_k,)](
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
        length,
        scale,
        *_strides(q),
        *_strides(k),
        *_strides(v),
        *_strides(g),
        *_strides(do),
        H=heads,
        K=key_dim,
        V=value_dim,
        C=chunk,
        LEVELS=chunk.bit_length() - 1,
        BK=block_k,
        BV=_block(config.block_v, value_dim),
        DECAY=kind,
        LIMIT=_limit(precision),
        PRECISION=precision,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if partial and dg is not None:
        dg = dg.sum(-1).to(dg_dtype)
    return dq, dk, dg


class GatedLinearAttention(torch.autograd.Function):
    """With decays on values, v and k take the parts of k and v, and do and q those of q and do (module docstring)."""

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
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v = (_rows(x) for x in (q, k, v))
        if g is not None and g.dim() == 4:
            g = _rows(g)
        kind = _kind(g)
        on_value = on_value and kind == CHANNEL
        work = torch.bfloat16 if q.dtype == k.dtype == v.dtype == torch.bfloat16 else torch.float32
        precision = _precision(q.dtype, k.dtype, v.dtype)
        batch, _, heads, key_dim = q.shape
        first = None if initial_state is None else initial_state.contiguous()
        final = None
        if return_final_state:
            final = torch.empty((batch, heads, key_dim, v.shape[-1]), dtype=torch.float32, device=q.device)

        made: tuple[Tensor, ...] = ()
        if kind != CHANNEL or g is None:
            states = gla_states(k, v, g, kind, scale, work, precision, first, final, False)
            o = gla_read(q, k, v, g, kind, states, scale, v.dtype, precision, False)
        elif on_value:
            v_out, total = gla_scores(None, v, g, scale, work, precision)
            ends = [None if end is None else end.transpose(-1, -2) for end in (first, final)]
            states = gla_states(v_out, k, total, kind, scale, work, precision, ends[0], ends[1], False)
            dtypes = {"dq_dtype": v.dtype, "dk_dtype": None, "dg_dtype": None}
            o, _, _ = gla_grads(None, v, k, g, q, states, None, scale, precision, **dtypes)
        else:
            made = gla_scores(q, k, g, scale, work, precision)
            k_out, total, q_in, scores = made
            states = gla_states(k_out, v, total, kind, scale, work, precision, first, final, False)
            o = gla_read(q_in, scores, v, None, kind, states, scale, v.dtype, precision, False)
        ctx.save_for_backward(q, k, v, g, states, *made)
        ctx.options = on_value, scale, work, precision, None if initial_state is None else initial_state.dtype
        ctx.set_materialize_grads(False)
        return o, final

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, do: Tensor | None, dfinal: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, g, states, *made = ctx.saved_tensors
        on_value, scale, work, precision, initial_dtype = ctx.options
        kind = _kind(g)
        do = torch.zeros_like(v) if do is None else _rows(do)
        dfinal = None if dfinal is None else dfinal.contiguous()
        dinitial = None
        if initial_dtype is not None:
            batch, _, heads, key_dim = q.shape
            dinitial = torch.empty((batch, heads, key_dim, v.shape[-1]), dtype=initial_dtype, device=q.device)
        ends = dfinal, dinitial
        dg_dtype = g.dtype if ctx.needs_input_grad[3] else None
        dtypes = {"dq_dtype": q.dtype, "dk_dtype": k.dtype, "dg_dtype": dg_dtype}
        if kind != CHANNEL:
            dstates = gla_states(q, do, g, kind, scale, work, precision, *ends, True)
            dv = gla_read(k, q, do, g, kind, dstates, scale, v.dtype, precision, True)
            dq, dk, dg = gla_grads(q, k, v, g, do, states, dstates, scale, precision, **dtypes)
        elif on_value:
            v_out, total, do_in, da = gla_scores(do, v, g, scale, work, precision)
            ends = tuple(None if end is None else end.transpose(-1, -2) for end in ends)
            dstates = gla_states(do_in, q, total, kind, scale, work, precision, *ends, True)
            dq = gla_read(do_in, da, k, None, kind, states, scale, q.dtype, precision, False)
            dk = gla_read(v_out, da, q, None, kind, dstates, scale, k.dtype, precision, True)
            dtypes |= {"dq_dtype": None, "dk_dtype": v.dtype}
            _, dv, dg = gla_grads(do, v, k, g, q, states, dstates, scale, precision, **dtypes)
        else:
            k_out, total, q_in, scores = made
            dstates = gla_states(q_in, do, total, kind, scale, work, precision, *ends, True)
            dv = gla_read(k_out, scores, do, None, kind, dstates, scale, v.dtype, precision, True)
            dq, dk, dg = gla_grads(q, k, v, g, do, states, dstates, scale, precision, **dtypes)
        return dq, dk, dv, dg, dinitial, None, None, None


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
) -> Tensor | tuple[Tensor, Tensor]:
    """Arguments and results as in the public operator."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if log_decay is not None and log_decay.dim() == 1:
        log_decay = log_decay.expand(*q.shape[:3])
    o, state = GatedLinearAttention.apply(
        q, k, v, log_decay, initial_state, decay_on == "value", scale, return_final_state
    )
    return (o, state) if return_final_state else o
