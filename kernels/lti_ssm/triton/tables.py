"""The matrices of a channel, made from the tables that `_prepare_kernel` writes."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.lti_ssm.triton.products import _load_parts, _multiply


@triton.jit
def _toeplitz(taps, C: tl.constexpr):
    """K[i, j] = taps[j - i], zero where j < i."""
    o_lag = tl.arange(0, C)[None, :] - tl.arange(0, C)[:, None]
    return tl.load(taps + o_lag, mask=o_lag >= 0, other=0.0)


@triton.jit
def _powers(powers, o_k, o_w, m_w, row, J: tl.constexpr, COMPLEX: tl.constexpr):
    """Abar^k of one channel [k, N], from the powers below J and the multiples of J; `row` numbers are a power."""
    o_k = o_k[:, None]
    near_re, near_im = _load_parts(powers, o_k % J * row + o_w, m_w, COMPLEX)
    far_re, far_im = _load_parts(powers, (J + o_k // J) * row + o_w, m_w, COMPLEX)
    return _multiply(near_re, near_im, far_re, far_im, COMPLEX)


@triton.jit
def _map(powers, factor, o_k, o_w, m_w, row, J: tl.constexpr, COMPLEX: tl.constexpr):
    """factor Abar^k."""
    p_re, p_im = _powers(powers, o_k, o_w, m_w, row, J, COMPLEX)
    f_re, f_im = _load_parts(factor, o_w, m_w, COMPLEX)
    return _multiply(p_re, p_im, f_re, f_im, COMPLEX)
