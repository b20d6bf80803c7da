"""Parts of Triton kernels that discretize a continuous system, in float64, with complex numbers as two real ones.

The formulas are those of the package docstring, and `discretize.py` has the same in PyTorch. Near zero,
(exp(z) - 1) / z and its derivative are computed by their series.
"""

from __future__ import annotations

import triton
import triton.language as tl

from subquad.kernels import positions
from subquad.kernels.ssm_kernel import discretize

LARGEST_LOG = tl.constexpr(positions.LARGEST_LOG)
SOFTMAX_EPS = tl.constexpr(discretize.SOFTMAX_EPS)


@triton.jit
def times(a_re, a_im, b_re, b_im):
    """a b."""
    return a_re * b_re - a_im * b_im, a_re * b_im + a_im * b_re


@triton.jit
def over(a_re, a_im, b_re, b_im):
    """a / b; where b is zero, a."""
    b_abs = b_re * b_re + b_im * b_im
    b_re, b_abs = tl.where(b_abs == 0, 1.0, b_re), tl.where(b_abs == 0, 1.0, b_abs)
    # one float64 division, of some twenty instructions, instead of two
    inverse = 1.0 / b_abs
    return (a_re * b_re + a_im * b_im) * inverse, (a_im * b_re - a_re * b_im) * inverse


@triton.jit
def _series(z_re, z_im, c0, c1, c2, c3, c4, c5, c6):
    """c0 + c1 z + .. + c6 z^6."""
    b_re, b_im = c6 + 0 * z_re, 0 * z_re
    for c in tl.static_range(6):
        b_re, b_im = times(b_re, b_im, z_re, z_im)
        b_re += c5 if c == 0 else (c4 if c == 1 else (c3 if c == 2 else (c2 if c == 3 else (c1 if c == 4 else c0))))
    return b_re, b_im


@triton.jit
def power(a_re, a_im, o_k, num_bits):
    """a^k for integers k below 2^num_bits, by repeated squaring."""
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
    """a^k for all k below 2^BITS, [2^BITS, N], from a [1, N]; and a^(2^BITS)."""
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
    """Real and imaginary parts in float64; the imaginary part of a real tensor is zero."""
    if COMPLEX:
        b_re = tl.load(p + 2 * o, mask=m, other=0.0).to(tl.float64)
        return b_re, tl.load(p + 2 * o + 1, mask=m, other=0.0).to(tl.float64)
    else:  # noqa: RET505
        b_re = tl.load(p + o, mask=m, other=0.0).to(tl.float64)
        return b_re, tl.zeros_like(b_re)


@triton.jit
def store_narrow(p, o, b_re, b_im, m, COMPLEX: tl.constexpr):
    """The inverse of `load_wide`, in the dtype of the tensor; the imaginary part is dropped if that is real."""
    dtype: tl.constexpr = p.dtype.element_ty
    if COMPLEX:
        tl.store(p + 2 * o, b_re.to(dtype), mask=m)
        tl.store(p + 2 * o + 1, b_im.to(dtype), mask=m)
    else:
        tl.store(p + o, b_re.to(dtype), mask=m)


@triton.jit
def abar(z_re, z_im, RULE: tl.constexpr):
    """Abar from z = dt A."""
    if RULE == "bilinear":
        b_re, b_im = over(1 + z_re / 2, z_im / 2, 1 - z_re / 2, -z_im / 2)
    else:
        b_exp = tl.exp(z_re)
        b_re, b_im = b_exp * tl.cos(z_im), b_exp * tl.sin(z_im)
    return b_re, b_im


@triton.jit
def entry(z_re, z_im, a_re, a_im, RULE: tl.constexpr):
    """g such that Bbar = dt g B, for every rule but dss-exp-no-scale, where Bbar = B."""
    if RULE == "bilinear":
        g_re, g_im = over(1.0 + 0 * z_re, 0 * z_re, 1 - z_re / 2, -z_im / 2)
    else:
        # (exp(z) - 1) / z, near zero by its series
        g_re, g_im = over(a_re - 1, a_im, z_re, z_im)
        x_re, x_im = _series(z_re, z_im, 1.0, 1 / 2, 1 / 6, 1 / 24, 1 / 120, 1 / 720, 1 / 5040)
        near = z_re * z_re + z_im * z_im < 1e-4
        g_re, g_im = tl.where(near, x_re, g_re), tl.where(near, x_im, g_im)
    return g_re, g_im


@triton.jit
def falling(z_re, z_im):
    """Whether Re(z) > 0, and z, negated there: dss-softmax computes such modes in reversed time."""
    grows = z_re > 0
    return grows, tl.where(grows, -z_re, z_re), tl.where(grows, -z_im, z_im)


@triton.jit
def _softmax_parts(lam_re, lam_im, z_re, z_im, a_re, a_im, whole):
    """e = exp(z) - 1, l = exp(whole z), l - 1 and x = A (l - 1), from A and a = exp(z)."""
    e_re, e_im = entry(z_re, z_im, a_re, a_im, "zoh")
    e_re, e_im = times(e_re, e_im, z_re, z_im)
    z_re, z_im = whole * z_re, whole * z_im
    l_re, l_im = abar(z_re, z_im, "zoh")
    m_re, m_im = entry(z_re, z_im, l_re, l_im, "zoh")
    m_re, m_im = times(m_re, m_im, z_re, z_im)
    x_re, x_im = times(lam_re, lam_im, m_re, m_im)
    return e_re, e_im, l_re, l_im, m_re, m_im, x_re, x_im


@triton.jit
def softmax_factor(lam_re, lam_im, z_re, z_im, a_re, a_im, grows, whole, rest):
    """f with Bbar = f B for dss-softmax, from A, z of `falling` and a = exp(z).

    f = (exp(z) - 1) conj(x) / (|x|^2 + eps), times exp(rest z) where `grows`;    x = A (exp(whole z) - 1)
    """
    e_re, e_im, _, _, _, _, x_re, x_im = _softmax_parts(lam_re, lam_im, z_re, z_im, a_re, a_im, whole)
    inverse = 1.0 / (x_re * x_re + x_im * x_im + SOFTMAX_EPS)
    f_re, f_im = times(e_re, e_im, x_re * inverse, -x_im * inverse)
    r_re, r_im = abar(rest * z_re, rest * z_im, "zoh")
    r_re, r_im = times(f_re, f_im, r_re, r_im)
    return tl.where(grows, r_re, f_re), tl.where(grows, r_im, f_im)


@triton.jit
def softmax_gradient(
    lam_re, lam_im, z_re, z_im, a_re, a_im, f_re, f_im, df_re, df_im, grows, whole, rest, slope
):  # fmt: skip
    """The gradients of A, by way of x alone, and of z, from that of f = `softmax_factor`.

    slope: the factor of z in the logarithm of f where `grows`, as it is differentiated.
    """
    e_re, e_im, l_re, l_im, m_re, m_im, x_re, x_im = _softmax_parts(lam_re, lam_im, z_re, z_im, a_re, a_im, whole)
    # f has a factor of exp(rest z) where the mode grows
    dz_re, dz_im = times(f_re, -f_im, df_re, df_im)
    dz_re, dz_im = tl.where(grows, slope * dz_re, 0.0), tl.where(grows, slope * dz_im, 0.0)
    r_re, r_im = abar(rest * z_re, rest * z_im, "zoh")
    r_re, r_im = times(r_re, -r_im, df_re, df_im)
    df_re, df_im = tl.where(grows, r_re, df_re), tl.where(grows, r_im, df_im)
    inverse = 1.0 / (x_re * x_re + x_im * x_im + SOFTMAX_EPS)
    # through exp(z) - 1
    y_re, y_im = times(x_re * inverse, x_im * inverse, df_re, df_im)
    y_re, y_im = times(a_re, -a_im, y_re, y_im)
    dz_re, dz_im = dz_re + y_re, dz_im + y_im
    # through the guarded reciprocal r of x, which is not holomorphic: dr/dx = -conj(x)^2 / m^2 and
    # dr/dconj(x) = eps / m^2 with m = |x|^2 + eps
    df_re, df_im = times(e_re, -e_im, df_re, df_im)
    s_re, s_im = times(x_re * inverse, x_im * inverse, x_re * inverse, x_im * inverse)
    dx_re, dx_im = times(-s_re, -s_im, df_re, df_im)
    dx_re += SOFTMAX_EPS * inverse * inverse * df_re
    dx_im -= SOFTMAX_EPS * inverse * inverse * df_im
    # through x = A (exp(whole z) - 1)
    y_re, y_im = times(lam_re, -lam_im, dx_re, dx_im)
    y_re, y_im = times(l_re, -l_im, y_re, y_im)
    dlam_re, dlam_im = times(m_re, -m_im, dx_re, dx_im)
    return dlam_re, dlam_im, dz_re + whole * y_re, dz_im + whole * y_im


@triton.jit
def _bounded_exp(b_log):
    """e^log in float64, at most e^LARGEST_LOG, as `positions.bounded_exp`; NaN stays."""
    return tl.exp(tl.minimum(b_log.to(tl.float64), LARGEST_LOG, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def load_system(
    log_dt, log_A_real, A_imag, B, C, o_d, o_n, D, A_stride_d, dt_scale,
    N: tl.constexpr, FACTOR: tl.constexpr, RULE: tl.constexpr,
):  # fmt: skip
    """Abar, Bbar and FACTOR C of channels o_d and states o_n, real and imaginary parts [D, N] each, in float32.

    The system is given by its trained parameters (`kernels.lti_ssm.systems.DiagonalSystem`) in contiguous tensors; B
    may be None. dt is multiplied by dt_scale.
    """
    m_d = o_d < D
    m_n = m_d[:, None] & (o_n < N)[None, :]
    b_dt = (_bounded_exp(tl.load(log_dt + o_d, mask=m_d, other=0.0)) * dt_scale)[:, None]
    o_a = o_d[:, None] * A_stride_d + o_n[None, :]
    z_re = -b_dt * _bounded_exp(tl.load(log_A_real + o_a, mask=m_n, other=0.0))
    z_im = b_dt * tl.load(A_imag + o_a, mask=m_n, other=0.0).to(tl.float64)
    a_re, a_im = abar(z_re, z_im, RULE)
    if RULE == "dss-exp-no-scale":
        g_re, g_im = 1.0 + 0 * z_re, 0 * z_re
    else:
        g_re, g_im = entry(z_re, z_im, a_re, a_im, RULE)
    o_c = o_d[:, None] * N + o_n[None, :]
    if B is not None:
        b_re, b_im = load_wide(B, o_c, m_n, True)
        g_re, g_im = times(g_re, g_im, b_re, b_im)
    if RULE != "dss-exp-no-scale":
        g_re, g_im = b_dt * g_re, b_dt * g_im
    a_re, a_im, g_re, g_im = a_re.to(tl.float32), a_im.to(tl.float32), g_re.to(tl.float32), g_im.to(tl.float32)
    c_re = FACTOR * tl.load(C + 2 * o_c, mask=m_n, other=0.0).to(tl.float32)
    c_im = FACTOR * tl.load(C + 2 * o_c + 1, mask=m_n, other=0.0).to(tl.float32)
    return a_re, a_im, g_re, g_im, c_re, c_im


@triton.jit
def entry_gradient(z_re, z_im, a_re, a_im, g_re, g_im, RULE: tl.constexpr):
    """The derivatives dg / dz and dlog(Abar) / dz."""
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
    """The sum in float64 of `count` rows of partial sums, `stride` elements apart."""
    b_x = tl.load(p + o, mask=m, other=0.0).to(tl.float64)
    for _ in range(1, count):
        p += stride
        b_x += tl.load(p + o, mask=m, other=0.0).to(tl.float64)
    return b_x
