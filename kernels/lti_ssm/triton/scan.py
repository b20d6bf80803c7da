"""Propagation of states: through one chunk by its decay, and through the segments of a sequence by a scan over rows.

A decay is given in two terms, a (float32) and r, the rounding error of a. For float32 inputs both are used, because an
error in a would be raised to the power of the number of chunks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from subquad.kernels.lti_ssm.triton.products import interleave, multiply, split_parts


@triton.jit
def decay_states(b_x, a_re, a_im, r_re, r_im, COMPLEX: tl.constexpr, BF16: tl.constexpr):
    """(a + r) x for interleaved states x [ROWS, 2 N]; with BF16, a x."""
    x_re, x_im = split_parts(b_x, COMPLEX)
    y_re, y_im = multiply(a_re, a_im, x_re, x_im, COMPLEX)
    if not BF16:
        x_re, x_im = multiply(r_re, r_im, x_re, x_im, COMPLEX)
        y_re, y_im = y_re + x_re, y_im + x_im
    return interleave(y_re, y_im, COMPLEX)


@triton.jit
def _compose(a_re, a_im, x_re, x_im, b_re, b_im, y_re, y_im):
    """The map h -> a h + x followed by h -> b h + y."""
    return (
        b_re * a_re - b_im * a_im,
        b_re * a_im + b_im * a_re,
        b_re * x_re - b_im * x_im + y_re,
        b_re * x_im + b_im * x_re + y_im,
    )


@triton.jit
def _compose_real(a, x, b, y):
    return b * a, b * x + y


@triton.jit
def scan_segments(b_x, a_re, a_im, r_re, r_im, SEGMENTS: tl.constexpr, COMPLEX: tl.constexpr, BF16: tl.constexpr):
    """s_r = (a + r) s_{r-1} + x_r over the rows of interleaved x [ROWS, 2 N], anew for every SEGMENTS rows."""
    x_re, x_im = split_parts(b_x, COMPLEX)
    if not BF16:
        # float64, because the scan forms powers of a
        a_re, a_im = a_re.to(tl.float64) + r_re.to(tl.float64), a_im.to(tl.float64) + r_im.to(tl.float64)
        x_re, x_im = x_re.to(tl.float64), x_im.to(tl.float64)
    ROWS: tl.constexpr = x_re.shape[0]
    N: tl.constexpr = x_re.shape[1]
    x_re = tl.reshape(x_re, [ROWS // SEGMENTS, SEGMENTS, N])
    a_re = a_re[None, :, :] + tl.zeros_like(x_re)
    if COMPLEX:
        x_im = tl.reshape(x_im, [ROWS // SEGMENTS, SEGMENTS, N])
        a_im = a_im[None, :, :] + tl.zeros_like(x_re)
        _, _, x_re, x_im = tl.associative_scan((a_re, a_im, x_re, x_im), 1, _compose)
        x_im = tl.reshape(x_im, [ROWS, N])
    else:
        _, x_re = tl.associative_scan((a_re, x_re), 1, _compose_real)
    return interleave(tl.reshape(x_re, [ROWS, N]).to(tl.float32), x_im.to(tl.float32), COMPLEX)
