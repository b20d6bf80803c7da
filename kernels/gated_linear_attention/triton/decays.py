"""Device functions for sums of log-decays and their exponentials."""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gated_linear_attention.triton.plan import CHANNEL, HEAD, NONE

# below it a step keeps nothing that float32 could hold, and infinities would spoil the products with zeros
LOWEST = tl.constexpr(-128.0)
LOG2E = tl.constexpr(1.4426950408889634)
# log(2) in two parts, the first of ten bits
LN2_HIGH, LN2_LOW = tl.constexpr(0.693359375), tl.constexpr(-2.1219444005469057e-4)
NO_DECAY, HEAD_DECAY, CHANNEL_DECAY = tl.constexpr(NONE), tl.constexpr(HEAD), tl.constexpr(CHANNEL)


@triton.jit
def exponential(x, PRECISION: tl.constexpr):
    """In half precision one special function; else the rounding of x LOG2E would count, and whole powers go apart."""
    if PRECISION == "tf32":
        b_exp = tl.exp2(x * LOG2E)
    else:
        b_n = tl.floor(x * LOG2E + 0.5)
        b_exp = tl.exp2(b_n) * tl.exp2((x - b_n * LN2_HIGH - b_n * LN2_LOW) * LOG2E)
    return b_exp


@triton.jit
def masked_sums(m_w, b_x, NARROW: tl.constexpr, PRECISION: tl.constexpr):
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
def half_totals(b_g, o_c, C: tl.constexpr):
    """[X] each: sums over the first half of a chunk and over the second."""
    m_2 = (o_c >= C // 2)[:, None]
    return tl.sum(tl.where(m_2, 0.0, b_g), 0), tl.sum(tl.where(m_2, b_g, 0.0), 0)


@triton.jit
def from_middle(o_c, C: tl.constexpr):
    """[C, C] of -1, 0, 1: for the sum from the middle to and with a position, less than none of those before it."""
    return (o_c[None, :] <= o_c[:, None]).to(tl.float32) - (o_c < C // 2).to(tl.float32)[None, :]


@triton.jit
def tree_level(b_g, o_c, shift, NARROW: tl.constexpr, PRECISION: tl.constexpr):
    """For halves of h = 2^shift: factors of queries or keys [C, X], and the pairs i, j they are right for [C, C]."""
    half = 1 << shift
    m_2 = (o_c & half) != 0
    o_start = o_c & -half
    # of each row the columns from .. until, which leaves less to compute for a pair
    o_from, o_until = tl.where(m_2, o_start, o_c + 1), tl.where(m_2, o_c + 1, o_start + half)
    b_e = masked_sums((o_c[None, :] >= o_from[:, None]) & (o_c[None, :] < o_until[:, None]), b_g, NARROW, PRECISION)
    o_from, o_until = o_start - half, tl.where(m_2, o_start, 0)
    m_pair = (o_c[None, :] >= o_from[:, None]) & (o_c[None, :] < o_until[:, None])
    return exponential(b_e, PRECISION), m_pair


@triton.jit
def load_head_decays(g, stride_t, o_t, m_t):
    return tl.maximum(tl.load(g + o_t.to(tl.int64) * stride_t, mask=m_t, other=0.0).to(tl.float32), LOWEST)


@triton.jit
def head_prefix_suffix(g, stride_t, o_t, o_c, T, C: tl.constexpr):
    """[C] each: P_i and R_j."""
    b_p = tl.cumsum(load_head_decays(g, stride_t, o_t, o_t < T), 0)
    # those after j, so that nothing is subtracted
    b_r = tl.cumsum(load_head_decays(g, stride_t, o_t + 1, (o_t + 1 < T) & (o_c + 1 < C)), 0, reverse=True)
    return b_p, b_r


@triton.jit
def decay_matrix(b_g, b_p, o_c, PRECISION: tl.constexpr):
    """[C, C]: exp(D_ij) for j <= i, else 0."""
    m_past = o_c[:, None] >= o_c[None, :]
    if PRECISION == "tf32":
        b_d = b_p[:, None] - b_p[None, :]
    else:
        b_d = masked_sums(m_past, tl.where(o_c[:, None] > o_c[None, :], b_g[:, None], 0.0), False, PRECISION)
    return tl.where(m_past, exponential(tl.where(m_past, b_d, 0.0), PRECISION), 0.0)
