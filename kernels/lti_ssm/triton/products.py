"""Tiles of complex numbers, and products of tiles on matrix units.

A complex tile is either a pair of real tiles (names ending in `_re` and `_im`), for multiplication element by element,
or *interleaved*: real and imaginary parts in alternate columns, twice as wide, for loads and matrix products. With
COMPLEX=False the imaginary part is whatever stands there and is never used.
"""

# Triton lets a name change its type while it traces: a tuple of tiles that grows, a tile that becomes a tuple
# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def multiply(a_re, a_im, b_re, b_im, COMPLEX: tl.constexpr):
    """a b, element by element."""
    if COMPLEX:
        return a_re * b_re - a_im * b_im, a_re * b_im + a_im * b_re
    else:  # noqa: RET505
        return a_re * b_re, a_im


@triton.jit
def interleave(b_re, b_im, COMPLEX: tl.constexpr):
    """The interleaved tile [.., 2 N] of real and imaginary parts [.., N]; one thread holds both parts of an element."""
    if COMPLEX:
        return tl.reshape(tl.join(b_re, b_im), [b_re.shape[0], 2 * b_re.shape[1]])
    else:  # noqa: RET505
        return b_re


@triton.jit
def split_parts(b_x, COMPLEX: tl.constexpr):
    """Real and imaginary parts of an interleaved tile, the inverse of `interleave`."""
    if COMPLEX:
        return tl.split(tl.reshape(b_x, [b_x.shape[0], b_x.shape[1] // 2, 2]))
    else:  # noqa: RET505
        return b_x, b_x


@triton.jit
def load_parts(p, o, m, COMPLEX: tl.constexpr):
    """Real and imaginary parts of what is interleaved in memory, in one load of neighbouring elements."""
    return split_parts(tl.load(p + o, mask=m, other=0.0), COMPLEX)


@triton.jit
def load_tile(p, o_row, o_t, m_t):
    """A tile [ROWS, CHUNK] of a sequence with time contiguous; zeros outside the mask."""
    return tl.load(p + (o_row + o_t), mask=m_t, other=0.0)


@triton.jit
def split_terms(b_x, NUM: tl.constexpr, BF16: tl.constexpr):
    """Factors for the matrix units, a tuple: NUM bfloat16 tiles whose sum is b_x (float32), or b_x itself."""
    if BF16:
        b_high = b_x.to(tl.bfloat16)
        terms = (b_high,)
        if NUM == 2:
            terms += ((b_x - b_high.to(tl.float32)).to(tl.bfloat16),)
    else:
        terms = (b_x,)
    return terms


@triton.jit
def as_factors(b_x, NUM: tl.constexpr, BF16: tl.constexpr):
    """`split_terms` of a tile of any dtype; a bfloat16 tile is its own only term."""
    if BF16 and b_x.dtype == tl.bfloat16:  # noqa: SIM108
        terms = (b_x,)
    else:
        terms = split_terms(b_x.to(tl.float32), NUM, BF16)
    return terms


@triton.jit
def leading_terms(terms, NUM: tl.constexpr):
    """The first NUM tiles of a tuple; with NUM = 2, all of them."""
    if NUM == 1:  # noqa: SIM108
        leading = (terms[0],)
    else:
        leading = terms
    return leading


@triton.jit
def transpose_terms(terms):
    """The transpose of every tile of a tuple."""
    transposed = ()
    for i in tl.static_range(len(terms)):
        transposed += (tl.trans(terms[i]),)
    return transposed


@triton.jit
def add_product(b_sum, a, b, BF16: tl.constexpr):
    """b_sum + a b for tuples of terms a and b, without the product of their second terms."""
    for i in tl.static_range(len(a)):
        for j in tl.static_range(len(b)):
            if i + j <= 1:
                # the precision is a choice for float32 only; bfloat16 products are exact
                b_sum = tl.dot(a[i], b[j], b_sum, input_precision="ieee" if BF16 else "tf32x3")
    return b_sum
