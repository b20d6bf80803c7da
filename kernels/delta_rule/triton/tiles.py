"""Device functions that both walks of the delta rule share."""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gated_linear_attention.triton.tiles import as_operand


@triton.jit
def two_term_dot(b_left, b_right, b_sum, PRECISION: tl.constexpr):
    """b_sum + b_left b_right, with b_left in float32 and b_right an operand of matrix products.

    Where b_right is bfloat16, b_left is the sum of two bfloat16 terms, which hold 16 of its bits. What a walk adds to
    its state and what it subtracts again must agree more closely than one term would (see the README).
    """
    dtype = b_right.dtype
    b_high = as_operand(b_left, dtype, PRECISION)
    b_sum = tl.dot(b_high, b_right, b_sum, input_precision=PRECISION)
    if dtype == tl.bfloat16:
        b_low = (b_left - b_high.to(tl.float32)).to(dtype)
        b_sum = tl.dot(b_low, b_right, b_sum, input_precision=PRECISION)
    return b_sum


@triton.jit
def solve(b_right, b_inverse, b_inverse_low, PRECISION: tl.constexpr):
    """b_right (I + b_inverse) [BV, C], with b_inverse [C, C] strictly triangular; b_inverse_low is its second term.

    What stands on the diagonal is added in float32, so that b_right itself is not rounded.
    """
    b_sum = two_term_dot(b_right, b_inverse, b_right, PRECISION)
    if b_inverse_low is not None:
        b_sum = tl.dot(b_right.to(b_inverse.dtype), b_inverse_low, b_sum, input_precision=PRECISION)
    return b_sum
