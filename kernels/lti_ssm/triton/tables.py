"""The matrices K, E and W of a channel, made from the tables that `_prepare_kernel` writes."""

from __future__ import annotations

import triton
import triton.language as tl

from subquad.kernels.lti_ssm.triton.products import load_parts, multiply


@triton.jit
def load_toeplitz(taps, CHUNK: tl.constexpr):
    """K[i, j] = taps[j - i], and zero where j < i."""
    o_lag = tl.arange(0, CHUNK)[None, :] - tl.arange(0, CHUNK)[:, None]
    return tl.load(taps + o_lag, mask=o_lag >= 0, other=0.0)


@triton.jit
def load_powers(powers, o_k, o_w, m_w, row, NEAR: tl.constexpr, COMPLEX: tl.constexpr):
    """Abar^k [k, N] of one channel, as products of a power below NEAR and a multiple of NEAR.

    row: elements of one power in the table.   o_w, m_w: offsets and mask of the interleaved states.
    """
    o_k = o_k[:, None]
    near_re, near_im = load_parts(powers, o_k % NEAR * row + o_w, m_w, COMPLEX)
    far_re, far_im = load_parts(powers, (NEAR + o_k // NEAR) * row + o_w, m_w, COMPLEX)
    return multiply(near_re, near_im, far_re, far_im, COMPLEX)


@triton.jit
def load_map(powers, factor, o_k, o_w, m_w, row, NEAR: tl.constexpr, COMPLEX: tl.constexpr):
    """factor Abar^k [k, N]: E with factor Bbar, W with factor c."""
    p_re, p_im = load_powers(powers, o_k, o_w, m_w, row, NEAR, COMPLEX)
    f_re, f_im = load_parts(factor, o_w, m_w, COMPLEX)
    return multiply(p_re, p_im, f_re, f_im, COMPLEX)
