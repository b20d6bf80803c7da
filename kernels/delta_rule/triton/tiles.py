"""Device functions that the kernels of the delta rule share."""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import triton
import triton.language as tl

from subquad.kernels.delta_rule.chunked import LOWEST_PLAIN as _LOWEST_PLAIN
from subquad.kernels.gated_linear_attention.triton.decays import LOWEST
from subquad.kernels.gated_linear_attention.triton.tiles import as_operand, load_tile, store_tile

LOWEST_PLAIN = tl.constexpr(_LOWEST_PLAIN)


@triton.jit
def bounded_decays(b_g, plain):
    """Log-decays of key channels in float32, at least LOWEST, or with keys `plain` LOWEST_PLAIN. NaN stays."""
    lowest: tl.constexpr = LOWEST if plain is None else LOWEST_PLAIN
    return tl.maximum(b_g.to(tl.float32), lowest, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def load_rows(p, stride_t, start, o_c, o_x, end, X, WHOLE: tl.constexpr):
    """Loads rows start + o_c and columns o_x of [end, X], zero outside of it.

    WHOLE: nothing is outside. Then there is no mask, and within the tile offsets are the same for every chunk.
    """
    if WHOLE:
        p += start.to(tl.int64) * stride_t
        b_x = tl.load(p + ((o_c * stride_t)[:, None] + o_x[None, :]))
    else:
        b_x = load_tile(p, stride_t, start + o_c, o_x, end, X)
    return b_x


@triton.jit
def load_row(p, start, o_c, end, WHOLE: tl.constexpr):
    """Loads the numbers of positions start + o_c, which are neighbours in memory."""
    p_row = p + start + o_c
    return tl.load(p_row) if WHOLE else tl.load(p_row, mask=start + o_c < end, other=0.0)


@triton.jit
def load_state(p, o_v, o_k, V: tl.constexpr, K: tl.constexpr, WHOLE: tl.constexpr):
    """Rows o_v and columns o_k of a contiguous transposed state [V, K], zero outside of it."""
    p_state = p + o_v[:, None] * K + o_k[None, :]
    return tl.load(p_state) if WHOLE else tl.load(p_state, mask=(o_v < V)[:, None] & (o_k < K)[None, :], other=0.0)


@triton.jit
def store_rows(p, stride_t, start, o_c, o_x, end, X, b_x, WHOLE: tl.constexpr):
    """Writes b_x to what `load_rows` reads, in the dtype of the pointer."""
    if WHOLE:
        p += start.to(tl.int64) * stride_t
        tl.store(p + ((o_c * stride_t)[:, None] + o_x[None, :]), b_x.to(p.dtype.element_ty))
    else:
        store_tile(p, stride_t, start + o_c, o_x, end, X, b_x)


@triton.jit
def store_state(p, o_v, o_k, b_state, V: tl.constexpr, K: tl.constexpr, WHOLE: tl.constexpr):
    """Writes rows o_v and columns o_k of a contiguous transposed state [V, K]."""
    p_state = p + (o_v[:, None] * K + o_k[None, :])
    if WHOLE:
        tl.store(p_state, b_state)
    else:
        tl.store(p_state, b_state, mask=(o_v < V)[:, None] & (o_k < K)[None, :])


@triton.jit
def cut_to_bfloat16(b_x):
    """Clears the bits of b_x that bfloat16 does not hold; the result is still in float32.

    A term that is rounded would be converted to bfloat16 and back, each element by an instruction of the slow unit for
    conversions. The second of two terms, which is rounded, makes up for the cut: both hold 16 bits in either case.
    """
    return (b_x.to(tl.int32, bitcast=True) & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def two_term_dot(b_left, b_right, b_sum, PRECISION: tl.constexpr, CUT: tl.constexpr):
    """b_sum + b_left b_right, with b_left in float32 and b_right an operand of matrix products.

    Where b_right is bfloat16, b_left is the sum of two bfloat16 terms, which hold 16 of its bits. What a walk adds to
    its state and what it subtracts again must agree more closely than one term would (see the README).
    CUT: the first term is cut instead of rounded.
    """
    dtype = b_right.dtype
    if dtype != tl.bfloat16:
        b_sum = tl.dot(as_operand(b_left, dtype, PRECISION), b_right, b_sum, input_precision=PRECISION)
    elif CUT:
        b_high32 = cut_to_bfloat16(b_left)
        b_sum = tl.dot(b_high32.to(dtype), b_right, b_sum, input_precision=PRECISION)
        b_sum = tl.dot((b_left - b_high32).to(dtype), b_right, b_sum, input_precision=PRECISION)
    else:
        # both terms are computed before the first product, so that what they are taken from needs no registers beside
        # the sum (see LOG.md)
        b_high = b_left.to(dtype)
        b_low = (b_left - b_high.to(tl.float32)).to(dtype)
        b_sum = tl.dot(b_high, b_right, b_sum, input_precision=PRECISION)
        b_sum = tl.dot(b_low, b_right, b_sum, input_precision=PRECISION)
    return b_sum


@triton.jit
def solve(b_right, b_inverse, b_inverse_low, PRECISION: tl.constexpr, CUT: tl.constexpr):
    """b_right (I + b_inverse) [BV, C], with b_inverse [C, C] strictly triangular; b_inverse_low is its second term.

    What stands on the diagonal is added in float32, so that b_right itself is not rounded.
    """
    b_sum = two_term_dot(b_right, b_inverse, b_right, PRECISION, CUT)
    if b_inverse_low is not None:
        b_high = cut_to_bfloat16(b_right) if CUT else b_right
        b_sum = tl.dot(b_high.to(b_inverse.dtype), b_inverse_low, b_sum, input_precision=PRECISION)
    return b_sum
