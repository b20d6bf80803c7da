"""Tiles of complex numbers in two layouts, and their products on matrix units."""

# a tuple of tiles that grows has no type of its own
# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _multiply(a_re, a_im, b_re, b_im, COMPLEX: tl.constexpr):
    if COMPLEX:
        return a_re * b_re - a_im * b_im, a_re * b_im + a_im * b_re
    else:  # noqa: RET505
        return a_re * b_re, a_im


@triton.jit
def _interleave(b_re, b_im, COMPLEX: tl.constexpr):
    """[.., 2 N] of real and imaginary parts by turns: both then lie in one thread, and a product is 64 wide."""
    if COMPLEX:
        return tl.reshape(tl.join(b_re, b_im), [b_re.shape[0], 2 * b_re.shape[1]])
    else:  # noqa: RET505
        return b_re


@triton.jit
def _parts(b_x, COMPLEX: tl.constexpr):
    """The inverse of `_interleave`."""
    if COMPLEX:
        return tl.split(tl.reshape(b_x, [b_x.shape[0], b_x.shape[1] // 2, 2]))
    else:  # noqa: RET505
        return b_x, b_x


@triton.jit
def _load_parts(p, o, m, COMPLEX: tl.constexpr):
    """Real and imaginary part; read as they lie, so that neighbours are read together."""
    return _parts(tl.load(p + o, mask=m, other=0.0), COMPLEX)


@triton.jit
def _load_tile(p, o_row, o_t, m_t):
    return tl.load(p + (o_row + o_t), mask=m_t, other=0.0)


@triton.jit
def _terms(b_x, NUM: tl.constexpr, HALF: tl.constexpr):
    """What matrix units multiply: NUM bfloat16 tiles that add up to b_x, or b_x in float32."""
    if HALF:
        b_high = b_x.to(tl.bfloat16)
        terms = (b_high,)
        if NUM == 2:
            terms += ((b_x - b_high.to(tl.float32)).to(tl.bfloat16),)
    else:
        terms = (b_x,)
    return terms


@triton.jit
def _factors(b_x, NUM: tl.constexpr, HALF: tl.constexpr):
    """`_terms` of a tile as it was loaded, or of a float32 one."""
    if HALF and b_x.dtype == tl.bfloat16:  # noqa: SIM108
        terms = (b_x,)
    else:
        terms = _terms(b_x.to(tl.float32), NUM, HALF)
    return terms


@triton.jit
def _transposed(terms):
    turned = ()
    for i in tl.static_range(len(terms)):
        turned += (tl.trans(terms[i]),)
    return turned


@triton.jit
def _add_product(b_sum, a, b, HALF: tl.constexpr):
    """b_sum + a b, the products of two second terms left out."""
    for i in tl.static_range(len(a)):
        for j in tl.static_range(len(b)):
            if i + j <= 1:
                # bfloat16 terms have no such choice
                b_sum = tl.dot(a[i], b[j], b_sum, input_precision="ieee" if HALF else "tf32x3")
    return b_sum
