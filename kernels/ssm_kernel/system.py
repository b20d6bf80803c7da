"""Inside Triton kernels: the discrete system of a continuous one, in float64, complex numbers as two real ones.

Formulas in the package docstring; `discretize.py` has the same in PyTorch. Near zero (exp(z) - 1) / z and its
derivative are series. And what launchers hand over: complex numbers as pairs, the stride of A.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def as_pairs(x: Tensor | None) -> Tensor | None:
    """Complex numbers as two real ones."""
    return torch.view_as_real(x) if x is not None and x.is_complex() else x


def channel_stride(A: Tensor) -> int:
    """From channel to channel in A, [D, N] or [N], contiguous."""
    return A.shape[-1] if A.ndim == 2 else 0


@triton.jit
def times(a_re, a_im, b_re, b_im):
    return a_re * b_re - a_im * b_im, a_re * b_im + a_im * b_re


@triton.jit
def over(a_re, a_im, b_re, b_im):
    """a / b, and a where b is zero."""
    b_abs = b_re * b_re + b_im * b_im
    b_re, b_abs = tl.where(b_abs == 0, 1.0, b_re), tl.where(b_abs == 0, 1.0, b_abs)
    # a float64 division is twenty instructions; who divides twice by one b has this once
    inverse = 1.0 / b_abs
    return (a_re * b_re + a_im * b_im) * inverse, (a_im * b_re - a_re * b_im) * inverse


@triton.jit
def _series(z_re, z_im, c0, c1, c2, c3, c4, c5, c6):
    """The polynomial of z with these coefficients."""
    b_re, b_im = c6 + 0 * z_re, 0 * z_re
    for c in tl.static_range(6):
        b_re, b_im = times(b_re, b_im, z_re, z_im)
        b_re += c5 if c == 0 else (c4 if c == 1 else (c3 if c == 2 else (c2 if c == 3 else (c1 if c == 4 else c0))))
    return b_re, b_im


@triton.jit
def power(a_re, a_im, o_k, num_bits):
    """a^k for whole k below 2^num_bits, by squaring."""
    p_re = 1.0 + 0 * (a_re + o_k)
    p_im = 0 * p_re
    for _ in range(num_bits):
        x_re, x_im = times(p_re, p_im, a_re, a_im)
        p_re, p_im = tl.where(o_k % 2 == 1, x_re, p_re), tl.where(o_k % 2 == 1, x_im, p_im)
        a_re, a_im = times(a_re, a_im, a_re, a_im)
        o_k = o_k // 2
    return p_re, p_im


@triton.jit
def power_table(a_re, a_im, BITS: tl.constexpr):
    """a^k for k below 2^BITS, [2^BITS, N] from a [1, N], and a^(2^BITS)."""
    o_k = tl.arange(0, 2**BITS)[:, None]
    p_re, p_im = tl.where(o_k % 2 == 1, a_re, 1.0), tl.where(o_k % 2 == 1, a_im, 0.0)
    a_re, a_im = times(a_re, a_im, a_re, a_im)
    for i in tl.static_range(1, BITS):
        x_re, x_im = times(p_re, p_im, a_re, a_im)
        odd = o_k // 2**i % 2 == 1
        p_re, p_im = tl.where(odd, x_re, p_re), tl.where(odd, x_im, p_im)
        a_re, a_im = times(a_re, a_im, a_re, a_im)
    return p_re, p_im, a_re, a_im


@triton.jit
def load_wide(p, o, m, COMPLEX: tl.constexpr):
    """In float64, the imaginary part of a real tensor as zeros."""
    if COMPLEX:
        b_re = tl.load(p + 2 * o, mask=m, other=0.0).to(tl.float64)
        return b_re, tl.load(p + 2 * o + 1, mask=m, other=0.0).to(tl.float64)
    else:  # noqa: RET505
        b_re = tl.load(p + o, mask=m, other=0.0).to(tl.float64)
        return b_re, tl.zeros_like(b_re)


@triton.jit
def store_narrow(p, o, b_re, b_im, m, COMPLEX: tl.constexpr):
    dtype: tl.constexpr = p.dtype.element_ty
    if COMPLEX:
        tl.store(p + 2 * o, b_re.to(dtype), mask=m)
        tl.store(p + 2 * o + 1, b_im.to(dtype), mask=m)
    else:
        tl.store(p + o, b_re.to(dtype), mask=m)


@triton.jit
def abar(z_re, z_im, RULE: tl.constexpr):
    """Abar for z = dt A."""
    if RULE == "bilinear":
        b_re, b_im = over(1 + z_re / 2, z_im / 2, 1 - z_re / 2, -z_im / 2)
    else:
        b_exp = tl.exp(z_re)
        b_re, b_im = b_exp * tl.cos(z_im), b_exp * tl.sin(z_im)
    return b_re, b_im


@triton.jit
def entry(z_re, z_im, a_re, a_im, RULE: tl.constexpr):
    """g with Bbar = dt g B; not for dss-exp-no-scale."""
    if RULE == "bilinear":
        g_re, g_im = over(1.0 + 0 * z_re, 0 * z_re, 1 - z_re / 2, -z_im / 2)
    else:
        # (exp(z) - 1) / z, by its series near zero
        g_re, g_im = over(a_re - 1, a_im, z_re, z_im)
        x_re, x_im = _series(z_re, z_im, 1.0, 1 / 2, 1 / 6, 1 / 24, 1 / 120, 1 / 720, 1 / 5040)
        near = z_re * z_re + z_im * z_im < 1e-4
        g_re, g_im = tl.where(near, x_re, g_re), tl.where(near, x_im, g_im)
    return g_re, g_im


@triton.jit
def entry_gradient(z_re, z_im, a_re, a_im, g_re, g_im, RULE: tl.constexpr):
    """dg / dz and dlog(Abar) / dz."""
    one, zero = 1.0 + 0 * z_re, 0 * z_re
    if RULE == "bilinear":
        dg_re, dg_im = times(g_re / 2, g_im / 2, g_re, g_im)
        s_re, s_im = times(z_re, z_im, z_re, z_im)
        dlog_re, dlog_im = over(one, zero, 1 - s_re / 4, -s_im / 4)
    else:
        dg_re, dg_im = over(a_re - g_re, a_im - g_im, z_re, z_im)
        x_re, x_im = _series(z_re, z_im, 1 / 2, 1 / 3, 1 / 8, 1 / 30, 1 / 144, 1 / 840, 1 / 5760)
        near = z_re * z_re + z_im * z_im < 1e-4
        dg_re, dg_im = tl.where(near, x_re, dg_re), tl.where(near, x_im, dg_im)
        dlog_re, dlog_im = one, zero
    return dg_re, dg_im, dlog_re, dlog_im


@triton.jit
def load_sum(p, o, m, stride, count):
    """The sum of `count` rows of partial sums."""
    b_x = tl.load(p + o, mask=m, other=0.0).to(tl.float64)
    for _ in range(1, count):
        p += stride
        b_x += tl.load(p + o, mask=m, other=0.0).to(tl.float64)
    return b_x
