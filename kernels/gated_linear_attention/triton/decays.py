"""Device functions for sums of log-decays and their exponentials.

A chunk has C positions. Log-decays `b_g` are [C, X], one for each channel, or [C], one for each position of a head.
No exponent is the difference of two long sums: after 60 steps of exp(-50) such a difference has no correct digits left.
Sums over ranges of positions are products with matrices of zeros and ones instead.
"""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import triton
import triton.language as tl

from subquad.kernels.gated_linear_attention.triton.plan import CHANNEL, HEAD, NONE

NO_DECAY, HEAD_DECAY, CHANNEL_DECAY = tl.constexpr(NONE), tl.constexpr(HEAD), tl.constexpr(CHANNEL)

# a step that decays by exp(-128) keeps nothing that float32 could hold, and products of -inf with zeros would be NaN
LOWEST = tl.constexpr(-128.0)
LOG2E = tl.constexpr(1.4426950408889634)
# log(2) in two parts, the first with ten bits, so that its products with whole numbers are exact
LN2_HIGH, LN2_LOW = tl.constexpr(0.693359375), tl.constexpr(-2.1219444005469057e-4)


@triton.jit
def exponential(x, PRECISION: tl.constexpr):
    """exp(x). For half precision exp2(x LOG2E); for float32 the rounding error of x LOG2E would be visible.

    For float32 the whole powers of two are split off first.
    """
    if PRECISION == "tf32":
        b_exp = tl.exp2(x * LOG2E)
    else:
        b_n = tl.floor(x * LOG2E + 0.5)
        b_exp = tl.exp2(b_n) * tl.exp2((x - b_n * LN2_HIGH - b_n * LN2_LOW) * LOG2E)
    return b_exp


@triton.jit
def masked_sums(m_sum, b_x, NARROW: tl.constexpr, PRECISION: tl.constexpr):
    """sum_l m_sum[i, l] b_x[l, :] for a matrix of small whole numbers. NARROW: b_x holds bfloat16 values."""
    if PRECISION == "tf32":
        b_weights = m_sum.to(tl.float32).to(tl.bfloat16)
        # two bfloat16 terms hold 16 bits of b_x; the exponent e then errs by 2^-17 e, which is small beside exp(e) <= 1
        b_high = b_x.to(tl.bfloat16)
        b_sum = tl.dot(b_weights, b_high)
        if not NARROW:
            b_sum += tl.dot(b_weights, (b_x - b_high.to(tl.float32)).to(tl.bfloat16))
    else:
        b_sum = tl.dot(m_sum.to(tl.float32), b_x, input_precision=PRECISION)
    return b_sum


@triton.jit
def half_totals(b_g, o_c, C: tl.constexpr):
    """Sums over the first and over the second half of a chunk, [X] each."""
    m_second = (o_c >= C // 2)[:, None]
    return tl.sum(tl.where(m_second, 0.0, b_g), 0), tl.sum(tl.where(m_second, b_g, 0.0), 0)


@triton.jit
def from_middle(o_c, C: tl.constexpr):
    """[C, C] of -1, 0, 1: row i sums from the middle of the chunk up to position i, which is negative before it."""
    return (o_c[None, :] <= o_c[:, None]).to(tl.float32) - (o_c < C // 2).to(tl.float32)[None, :]


@triton.jit
def tree_level(b_g, o_c, shift, NARROW: tl.constexpr, PRECISION: tl.constexpr):
    """The level of the tree with halves of 2^shift positions: its factors [C, X], and the pairs [C, C] it accounts for.

    A factor is that of a key in the first half of a block and that of a query in the second half.
    """
    half = 1 << shift
    m_second = (o_c & half) != 0
    o_start = o_c & -half
    # the columns that a row sums are a range, so that an entry of the matrix takes two comparisons
    o_from, o_until = tl.where(m_second, o_start, o_c + 1), tl.where(m_second, o_c + 1, o_start + half)
    m_sum = (o_c[None, :] >= o_from[:, None]) & (o_c[None, :] < o_until[:, None])
    b_exponent = masked_sums(m_sum, b_g, NARROW, PRECISION)
    o_from, o_until = o_start - half, tl.where(m_second, o_start, 0)
    m_pair = (o_c[None, :] >= o_from[:, None]) & (o_c[None, :] < o_until[:, None])
    return exponential(b_exponent, PRECISION), m_pair


@triton.jit
def at_least_lowest(b_g):
    """Log-decays in float32, at least LOWEST. NaN stays, so that a network that has diverged shows it."""
    return tl.maximum(b_g.to(tl.float32), LOWEST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def load_head_decays(g, stride_t, o_t, m_t):
    """The log-decays of one head at positions o_t, at least LOWEST; zero where m_t is false."""
    return at_least_lowest(tl.load(g + o_t.to(tl.int64) * stride_t, mask=m_t, other=0.0))


@triton.jit
def head_prefix_suffix(g, stride_t, o_t, o_c, end, C: tl.constexpr):
    """Sums from the start of the chunk up to each position, and from after each position to the end, [C] each."""
    b_prefix = tl.cumsum(load_head_decays(g, stride_t, o_t, o_t < end), 0)
    # a sum of its own, so that nothing is subtracted
    b_after = load_head_decays(g, stride_t, o_t + 1, (o_t + 1 < end) & (o_c + 1 < C))
    b_suffix = tl.cumsum(b_after, 0, reverse=True)
    return b_prefix, b_suffix


@triton.jit
def decay_matrix(b_g, b_prefix, o_c, PRECISION: tl.constexpr):
    """[C, C] for a decay of a head: exp of the sum of log-decays in (j, i] for j <= i, else 0.

    In half precision a difference of prefix sums is accurate enough.
    """
    m_past = o_c[:, None] >= o_c[None, :]
    if PRECISION == "tf32":
        b_exponent = b_prefix[:, None] - b_prefix[None, :]
    else:
        b_after = tl.where(o_c[:, None] > o_c[None, :], b_g[:, None], 0.0)
        b_exponent = masked_sums(m_past, b_after, False, PRECISION)
    return tl.where(m_past, exponential(tl.where(m_past, b_exponent, 0.0), PRECISION), 0.0)
