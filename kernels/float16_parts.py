"""Products of float32 matrices on matrix units by float16 numbers, as parts of Triton kernels.

    x = scale (x_1 + x_2),   x_1 = float16(x / scale),   x_2 = float16(x / scale - x_1)

The scale is a power of two such that the largest element of a tile, or of a row of it, is near 2^14. An element has 22
bits and the sign of x_2 where it is at most 2^17 times smaller than that one, and below an absolute error of at most
2^-39 of the largest. Three of the four products of parts are added; the fourth is below 2^-22 of their sum. Matrix
units multiply float16 numbers twice as fast as TF32 numbers, and read them along any axis. Source: Ootomo and Yokota
2022 (arXiv 2203.03341), who scale the second part instead.
"""

# mypy: disable-error-code="assignment, misc"

import triton
import triton.language as tl

TOP = tl.constexpr(14)
"""Scaled numbers are below 2^(TOP + 1), so that no float16 overflows."""
UNSCALE = tl.constexpr(2.0**-14)
"""The inverse of 2^TOP."""


@triton.jit
def power_scale(b_max):
    """2^(e - TOP) and its inverse for b_max = m 2^e with m in [1, 2); both are one for zero, infinity and NaN."""
    exponent = (b_max.to(tl.int32, bitcast=True) >> 23) & 255
    exponent = tl.where((exponent == 0) | (exponent == 255), exponent * 0 + 127 + TOP, exponent)
    # inverses of the smallest scales would overflow
    exponent = tl.maximum(exponent, TOP + 1)
    scale = ((exponent - TOP) << 23).to(tl.float32, bitcast=True)
    return scale, ((254 - exponent + TOP) << 23).to(tl.float32, bitcast=True)


@triton.jit
def halves(b_x):
    """The two parts of numbers below 2^(TOP + 1)."""
    b_1 = b_x.to(tl.float16)
    return b_1, (b_x - b_1.to(tl.float32)).to(tl.float16)


@triton.jit
def split_dot(b_a1, b_a2, b_b1, b_b2):
    """(a_1 + a_2) (b_1 + b_2) without a_2 b_2; the small products first, since matrix units cut sums off."""
    b_c = tl.dot(b_a2, b_b1)
    b_c = tl.dot(b_a1, b_b2, b_c)
    return tl.dot(b_a1, b_b1, b_c)
