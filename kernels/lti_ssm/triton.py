"""The state space model in Triton: Toeplitz products inside chunks, states between them, all on matrix units.

With chunks of C steps, v_r the inputs of chunk r, h_r the state before it and a = Abar^C, for one channel

    y_r = v_r K + Re(h_r O);   h_{r+1} = a h_r + v_r E
    K[i, j] = taps[j - i],     E[i, n] = Bbar_n Abar_n^{C-1-i},     O[n, i] = c_n Abar_n^i,     c = s C Abar

No power but 0 .. C is ever formed, so nothing overflows where |Abar| <= 1. A program takes ROWS chunks of one sequence
of one channel at a time: products [ROWS, C] x [C, C] and [ROWS, C] x [C, N], then an exclusive scan over the rows. The
filter, and matrices for a channel, exist in registers only: K is read from C taps, E and O are made from two short
tables of powers (k = i J + j). `_prepare_kernel` computes taps, powers, Bbar and c from the parameters in float64,
`_prepare_bwd_kernel` takes their gradients back. Where there are few sequences they are cut into segments: a first
pass (y=None) gives their ends from a zero start, PyTorch passes them on.

Backward, with g_r the gradient of y_r and H_r that of h_r (real part: of Re h, imaginary part: of Im h),

    H_r = g_r conj(O) + conj(a) H_{r+1};   dv_r = g_r K^T + Re(H_{r+1} conj(E))
    dK = sum v_r^T g_r;   dE = sum v_r^T H_{r+1};   dO = sum g_r^T conj(h_r);   da = sum H_{r+1} conj(h_r)

goes through the blocks of ROWS chunks in reverse; forward kept the state before each block, the states inside are
computed again. At its end a program contracts dK to C taps, and dE, dO, da to the gradients of Bbar, c and
z = log Abar (d Abar^k / dz = k Abar^k), one row of partial sums for each program.

Layout: time contiguous; u and the gates may be any view of that kind, others are copied into it. y and du have it too.
float32: v, gates, sums, states, scans. bfloat16 inputs meet bfloat16 matrices, as one or two terms (Config); float32
and float16 inputs multiply in tf32x3. Deterministic: partial sums, no atomics. Limits: N <= 64; not dss-softmax, not
two-sided. Bytes: forward 2, backward 3 numbers of B T D, and 8 N / (C ROWS) for each step. Products: C + 4 N
multiply-adds a step forward, 2 C + 10 N backward (C more with gate_out).
"""

# a tuple of tiles that grows has no type of its own
# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.lti_ssm.chunked import _powers_sum, state_dtype
from kernels.ssm_kernel.chunked import widen
from kernels.ssm_kernel.discretize import discretize


class Config(NamedTuple):
    """What a program takes at once.

    chunk, rows:  C and ROWS.
    gated, taps, maps, states: bfloat16 terms of gated v and g, of K, of E and O, of h and H.
    warps, stages: forward, backward.
    """

    chunk: int
    rows: int
    gated: int
    taps: int
    maps: int
    states: int
    warps: tuple[int, int]
    stages: tuple[int, int]


# by the bytes of a number
CONFIGS = {2: Config(64, 64, 1, 2, 1, 1, (4, 4), (2, 1)), 4: Config(32, 64, 1, 1, 1, 1, (4, 4), (2, 1))}
AVERAGING_LENGTH = 512
"""Below it outputs may be a few products, whose rounded factors do not average out: two terms of everything."""
BUSY_PROGRAMS = 3
"""Of a multiprocessor; sequences are cut to have as many."""


@triton.jit
def _multiply(a_re, a_im, b_re, b_im, COMPLEX: tl.constexpr):
    if COMPLEX:
        return a_re * b_re - a_im * b_im, a_re * b_im + a_im * b_re
    else:  # noqa: RET505
        return a_re * b_re, a_im


@triton.jit
def _load_complex(p, o, m, COMPLEX: tl.constexpr):
    """Real and imaginary part; of a real system the second is never used."""
    if COMPLEX:
        return tl.load(p + 2 * o, mask=m, other=0.0), tl.load(p + 2 * o + 1, mask=m, other=0.0)
    else:  # noqa: RET505
        b_x = tl.load(p + o, mask=m, other=0.0)
        return b_x, b_x


@triton.jit
def _store_complex(p, o, b_re, b_im, m, COMPLEX: tl.constexpr):
    if COMPLEX:
        tl.store(p + 2 * o, b_re, mask=m)
        tl.store(p + 2 * o + 1, b_im, mask=m)
    else:
        tl.store(p + o, b_re, mask=m)


@triton.jit
def _load_wide(p, o, m, COMPLEX: tl.constexpr):
    """In float64, the imaginary part of a real tensor as zeros."""
    if COMPLEX:
        b_re = tl.load(p + 2 * o, mask=m, other=0.0).to(tl.float64)
        return b_re, tl.load(p + 2 * o + 1, mask=m, other=0.0).to(tl.float64)
    else:  # noqa: RET505
        b_re = tl.load(p + o, mask=m, other=0.0).to(tl.float64)
        return b_re, tl.zeros_like(b_re)


@triton.jit
def _times(a_re, a_im, b_re, b_im):
    return a_re * b_re - a_im * b_im, a_re * b_im + a_im * b_re


@triton.jit
def _over(a_re, a_im, b_re, b_im):
    """a / b, and a where b is zero."""
    b_abs = b_re * b_re + b_im * b_im
    b_re, b_abs = tl.where(b_abs == 0, 1.0, b_re), tl.where(b_abs == 0, 1.0, b_abs)
    return (a_re * b_re + a_im * b_im) / b_abs, (a_im * b_re - a_re * b_im) / b_abs


@triton.jit
def _small(z_re, z_im, c0, c1, c2, c3, c4, c5, c6):
    """The polynomial of z with these coefficients."""
    b_re, b_im = c6 + 0 * z_re, 0 * z_re
    for c in tl.static_range(6):
        b_re, b_im = _times(b_re, b_im, z_re, z_im)
        b_re += c5 if c == 0 else (c4 if c == 1 else (c3 if c == 2 else (c2 if c == 3 else (c1 if c == 4 else c0))))
    return b_re, b_im


@triton.jit
def _discretize(z_re, z_im, RULE: tl.constexpr):
    """For z = dt A: Abar, g with Bbar = dt g B, dg / dz, and dlog(Abar) / dz; of dss-exp-no-scale g is not used."""
    one, zero = 1.0 + 0 * z_re, 0 * z_re
    if RULE == "bilinear":
        g_re, g_im = _over(one, zero, 1 - z_re / 2, -z_im / 2)
        a_re, a_im = _times(1 + z_re / 2, z_im / 2, g_re, g_im)
        dg_re, dg_im = _times(g_re / 2, g_im / 2, g_re, g_im)
        s_re, s_im = _times(z_re, z_im, z_re, z_im)
        dlog_re, dlog_im = _over(one, zero, 1 - s_re / 4, -s_im / 4)
    else:
        b_exp = tl.exp(z_re)
        a_re, a_im = b_exp * tl.cos(z_im), b_exp * tl.sin(z_im)
        # (exp(z) - 1) / z and its derivative (exp(z) - g) / z, by their series near zero
        near = z_re * z_re + z_im * z_im < 1e-4
        g_re, g_im = _over(a_re - 1, a_im, z_re, z_im)
        dg_re, dg_im = _over(a_re - g_re, a_im - g_im, z_re, z_im)
        x_re, x_im = _small(z_re, z_im, 1.0, 1 / 2, 1 / 6, 1 / 24, 1 / 120, 1 / 720, 1 / 5040)
        g_re, g_im = tl.where(near, x_re, g_re), tl.where(near, x_im, g_im)
        x_re, x_im = _small(z_re, z_im, 1 / 2, 1 / 3, 1 / 8, 1 / 30, 1 / 144, 1 / 840, 1 / 5760)
        dg_re, dg_im = tl.where(near, x_re, dg_re), tl.where(near, x_im, dg_im)
        dlog_re, dlog_im = one, zero
    return a_re, a_im, g_re, g_im, dg_re, dg_im, dlog_re, dlog_im


@triton.jit
def _power(a_re, a_im, o_k, num_bits):
    """a^k for whole k below 2^num_bits, by squaring."""
    p_re = 1.0 + 0 * (a_re + o_k)
    p_im = 0 * p_re
    for _ in range(num_bits):
        x_re, x_im = _times(p_re, p_im, a_re, a_im)
        p_re, p_im = tl.where(o_k % 2 == 1, x_re, p_re), tl.where(o_k % 2 == 1, x_im, p_im)
        a_re, a_im = _times(a_re, a_im, a_re, a_im)
        o_k = o_k // 2
    return p_re, p_im


@triton.jit(do_not_specialize=["segment", "num_bits", "A_stride_d"])
def _prepare_kernel(
    A,
    B,
    C,
    dt,
    skip,
    taps,
    powers,
    bbar,
    weight,
    N,
    A_stride_d,
    segment,
    num_bits,
    factor,
    RULE: tl.constexpr,
    A_COMPLEX: tl.constexpr,
    B_COMPLEX: tl.constexpr,
    C_COMPLEX: tl.constexpr,
    COMPLEX: tl.constexpr,
    CHUNK: tl.constexpr,
    BITS: tl.constexpr,
    J: tl.constexpr,
    PARTS: tl.constexpr,
    STEP: tl.constexpr,
    NUM_POWERS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """What the other kernels take of one channel, in float64: taps with the skip, powers, Bbar, c = factor C Abar.

    powers [NUM_POWERS, N]: below J, multiples of J below CHUNK, of STEP up to PARTS STEP (all rows of a block), CHUNK
    2^level, and that of a segment.
    """
    i_d = tl.program_id(0)
    o_n = tl.arange(0, BLOCK_N)[None, :]
    m_n = o_n < N
    b_dt = tl.load(dt + i_d).to(tl.float64)
    lam_re, lam_im = _load_wide(A, i_d * A_stride_d + o_n, m_n, A_COMPLEX)
    c_re, c_im = _load_wide(C, i_d * N + o_n, m_n, C_COMPLEX)
    c_re, c_im = factor * c_re, factor * c_im
    a_re, a_im, g_re, g_im, _, _, _, _ = _discretize(b_dt * lam_re, b_dt * lam_im, RULE)
    if RULE == "dss-exp-no-scale":
        g_re, g_im = 1.0 + 0 * g_re, 0 * g_im
    else:
        g_re, g_im = b_dt * g_re, b_dt * g_im
    if B is not None:
        b_re, b_im = _load_wide(B, i_d * N + o_n, m_n, B_COMPLEX)
        g_re, g_im = _times(g_re, g_im, b_re, b_im)
    _store_complex(bbar, i_d * N + o_n, g_re.to(tl.float32), g_im.to(tl.float32), m_n, COMPLEX)
    w_re, w_im = _times(c_re, c_im, a_re, a_im)
    _store_complex(weight, i_d * N + o_n, w_re.to(tl.float32), w_im.to(tl.float32), m_n, COMPLEX)

    o_k = tl.arange(0, CHUNK)
    p_re, p_im = _power(a_re, a_im, o_k[:, None], BITS)
    q_re, q_im = _times(c_re, c_im, g_re, g_im)
    # beyond N there is no C
    b_taps = tl.sum(p_re * q_re - p_im * q_im, 1)
    if skip is not None:
        b_taps += tl.where(o_k == 0, tl.load(skip + i_d).to(tl.float64), 0.0)
    tl.store(taps + i_d * CHUNK + o_k, b_taps.to(tl.float32))

    o_p = tl.arange(0, BLOCK_P)[:, None]
    far: tl.constexpr = J
    part: tl.constexpr = J + CHUNK // J
    level: tl.constexpr = part + PARTS + 1
    o_k = tl.where(o_p < far, o_p, tl.where(o_p < part, (o_p - far) * J, (o_p - part) * STEP))
    o_k = tl.where(o_p < level, o_k, CHUNK * (1 << tl.maximum(tl.minimum(o_p - level, 16), 0)))
    o_k = tl.where(o_p == NUM_POWERS - 1, segment, o_k)
    p_re, p_im = _power(a_re, a_im, o_k, num_bits)
    o_out = (i_d * NUM_POWERS + o_p) * N + o_n
    _store_complex(powers, o_out, p_re.to(tl.float32), p_im.to(tl.float32), m_n & (o_p < NUM_POWERS), COMPLEX)


@triton.jit
def _load_sum(p, o, m, stride, count):
    """The sum of `count` rows of partial sums."""
    b_x = tl.load(p + o, mask=m, other=0.0).to(tl.float64)
    for _ in range(1, count):
        p += stride
        b_x += tl.load(p + o, mask=m, other=0.0).to(tl.float64)
    return b_x


@triton.jit
def _load_complex_sum(p, o, m, stride, count, COMPLEX: tl.constexpr):
    if COMPLEX:
        return _load_sum(p, 2 * o, m, stride, count), _load_sum(p, 2 * o + 1, m, stride, count)
    else:  # noqa: RET505
        b_x = _load_sum(p, o, m, stride, count)
        return b_x, 0 * b_x


@triton.jit(do_not_specialize=["count", "A_stride_d"])
def _prepare_bwd_kernel(
    A,
    B,
    C,
    dt,
    partial,
    dA,
    dB,
    dC,
    ddt,
    dskip,
    D,
    N,
    A_stride_d,
    count,
    factor,
    RULE: tl.constexpr,
    A_COMPLEX: tl.constexpr,
    B_COMPLEX: tl.constexpr,
    C_COMPLEX: tl.constexpr,
    COMPLEX: tl.constexpr,
    CHUNK: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """From `count` rows of partial gradients (see `_lti_bwd_kernel`) to those of the system, one channel a program.

    With c = factor C: taps_k = Re(sum q Abar^k), q = c Bbar, and l = log Abar,
    dl = dz + conj(q) sum k conj(Abar^k) dtaps_k + conj(c Abar) dweight, then through `_discretize` to A, B, C and dt.
    """
    i_d = tl.program_id(0)
    o_n = tl.arange(0, BLOCK_N)[None, :]
    m_n = o_n < N
    pair: tl.constexpr = 2 if COMPLEX else 1
    b_dt = tl.load(dt + i_d).to(tl.float64)
    lam_re, lam_im = _load_wide(A, i_d * A_stride_d + o_n, m_n, A_COMPLEX)
    c_re, c_im = _load_wide(C, i_d * N + o_n, m_n, C_COMPLEX)
    c_re, c_im = factor * c_re, factor * c_im
    a_re, a_im, g_re, g_im, dg_re, dg_im, dlog_re, dlog_im = _discretize(b_dt * lam_re, b_dt * lam_im, RULE)
    b_re, b_im = 1.0 + 0 * a_re, 0 * a_im
    if B is not None:
        b_re, b_im = _load_wide(B, i_d * N + o_n, m_n, B_COMPLEX)
    # Bbar = f B
    f_re, f_im = b_dt * g_re, b_dt * g_im
    if RULE == "dss-exp-no-scale":
        f_re, f_im = 1.0 + 0 * a_re, 0 * a_im
    bbar_re, bbar_im = _times(f_re, f_im, b_re, b_im)
    q_re, q_im = _times(c_re, c_im, bbar_re, bbar_im)

    size = CHUNK + 3 * N * pair
    partial += i_d * size
    stride = D * size
    o_k = tl.arange(0, CHUNK)
    b_dtaps = _load_sum(partial, o_k, o_k < CHUNK, stride, count)
    partial += CHUNK
    dbbar_re, dbbar_im = _load_complex_sum(partial, o_n, m_n, stride, count, COMPLEX)
    dw_re, dw_im = _load_complex_sum(partial + N * pair, o_n, m_n, stride, count, COMPLEX)
    dl_re, dl_im = _load_complex_sum(partial + 2 * N * pair, o_n, m_n, stride, count, COMPLEX)
    if dskip is not None:
        tl.store(dskip + i_d, tl.sum(tl.where(o_k == 0, b_dtaps, 0.0), 0).to(dskip.dtype.element_ty))

    p_re, p_im = _power(a_re, a_im, o_k[:, None], BITS)
    p_re, p_im = p_re * b_dtaps[:, None], -p_im * b_dtaps[:, None]
    dq_re, dq_im = tl.sum(p_re, 0)[None, :], tl.sum(p_im, 0)[None, :]
    x_re, x_im = tl.sum(p_re * o_k[:, None], 0)[None, :], tl.sum(p_im * o_k[:, None], 0)[None, :]
    x_re, x_im = _times(q_re, -q_im, x_re, x_im)
    dl_re, dl_im = dl_re + x_re, dl_im + x_im
    w_re, w_im = _times(c_re, c_im, a_re, a_im)
    x_re, x_im = _times(w_re, -w_im, dw_re, dw_im)
    dl_re, dl_im = dl_re + x_re, dl_im + x_im
    x_re, x_im = _times(bbar_re, -bbar_im, dq_re, dq_im)
    y_re, y_im = _times(a_re, -a_im, dw_re, dw_im)
    o_out = i_d * N + o_n
    dtype: tl.constexpr = dC.dtype.element_ty
    _store_complex(dC, o_out, (factor * (x_re + y_re)).to(dtype), (factor * (x_im + y_im)).to(dtype), m_n, C_COMPLEX)
    x_re, x_im = _times(c_re, -c_im, dq_re, dq_im)
    dbbar_re, dbbar_im = dbbar_re + x_re, dbbar_im + x_im
    if dB is not None:
        x_re, x_im = _times(f_re, -f_im, dbbar_re, dbbar_im)
        dtype_B: tl.constexpr = dB.dtype.element_ty
        _store_complex(dB, o_out, x_re.to(dtype_B), x_im.to(dtype_B), m_n, B_COMPLEX)

    dz_re, dz_im = _times(dlog_re, -dlog_im, dl_re, dl_im)
    b_ddt = 0 * dz_re
    if RULE != "dss-exp-no-scale":
        x_re, x_im = _times(dg_re, dg_im, b_re, b_im)
        x_re, x_im = _times(b_dt * x_re, -b_dt * x_im, dbbar_re, dbbar_im)
        dz_re, dz_im = dz_re + x_re, dz_im + x_im
        x_re, x_im = _times(g_re, g_im, b_re, b_im)
        b_ddt += x_re * dbbar_re + x_im * dbbar_im
    b_ddt += lam_re * dz_re + lam_im * dz_im
    tl.store(ddt + i_d, tl.sum(tl.sum(b_ddt, 1), 0).to(ddt.dtype.element_ty))
    dtype_A: tl.constexpr = dA.dtype.element_ty
    _store_complex(dA, o_out, (b_dt * dz_re).to(dtype_A), (b_dt * dz_im).to(dtype_A), m_n, A_COMPLEX)


@triton.jit
def _powers(near, far, o_k, o_n, m_n, N, J: tl.constexpr, COMPLEX: tl.constexpr):
    """Abar^k of one channel, from the tables of powers below J and of multiples of J."""
    near_re, near_im = _load_complex(near, o_k % J * N + o_n, m_n, COMPLEX)
    far_re, far_im = _load_complex(far, o_k // J * N + o_n, m_n, COMPLEX)
    return _multiply(near_re, near_im, far_re, far_im, COMPLEX)


@triton.jit
def _toeplitz(taps, C: tl.constexpr):
    """K[i, j] = taps[j - i], zero where j < i."""
    o_lag = tl.arange(0, C)[None, :] - tl.arange(0, C)[:, None]
    return tl.load(taps + o_lag, mask=o_lag >= 0, other=0.0)


@triton.jit
def _tap_sums(b_x):
    """The sum of each diagonal: the gradient of taps from that of K."""
    C: tl.constexpr = b_x.shape[0]
    o_l = tl.arange(0, C)[None, :]
    o_j = o_l + tl.arange(0, C)[:, None]
    return tl.sum(tl.where(o_j < C, tl.gather(b_x, tl.minimum(o_j, C - 1), 1), 0.0), 0)


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


@triton.jit
def _rows_of(b_x, REVERSE: tl.constexpr):
    """The even and the odd rows, or the odd and the even ones."""
    even, odd = tl.split(tl.permute(tl.reshape(b_x, [b_x.shape[0] // 2, 2, b_x.shape[1]]), [0, 2, 1]))
    if REVERSE:
        even, odd = odd, even
    return even, odd


@triton.jit
def _alternate(b_first, b_second, REVERSE: tl.constexpr):
    """The inverse of `_rows_of`."""
    if REVERSE:
        b_first, b_second = b_second, b_first
    b_x = tl.permute(tl.join(b_first, b_second), [0, 2, 1])
    return tl.reshape(b_x, [2 * b_first.shape[0], b_first.shape[1]])


@triton.jit
def _multiply_add(decays, i: tl.constexpr, x_re, x_im, s_re, s_im, REVERSE: tl.constexpr, COMPLEX: tl.constexpr):
    """s + a x with the i-th of the decays, conj(a) if REVERSE, in as few instructions as there are products."""
    a_re, a_im = decays[2 * i], decays[2 * i + 1]
    if COMPLEX:
        if REVERSE:
            return s_re + a_re * x_re + a_im * x_im, s_im + a_re * x_im - a_im * x_re
        else:  # noqa: RET505
            return s_re + a_re * x_re - a_im * x_im, s_im + a_re * x_im + a_im * x_re
    else:
        s_re = s_re + a_re * x_re
        return s_re, s_re


@triton.jit
def _load_decays(
    decays,
    N,
    LEVELS: tl.constexpr,
    GROUPS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    REVERSE: tl.constexpr,
    COMPLEX: tl.constexpr,
):
    """What `_scan` multiplies with, real and imaginary part by turns.

    decays [*, N] are the decays over 0 .. PARTS of PARTS parts of all rows (a group has some), then a^(2^level).
    Returns first a^(2^level) [1, GROUPS BLOCK_N] of each level. Then the decays from the end of group i to the start
    of group o [o, i, n], from the start of the scan to that of o [o, n], from the end of i to that of the scan [i, n].
    """
    o_n = tl.arange(0, GROUPS * BLOCK_N)[None, :] % BLOCK_N
    loaded = ()
    for level in tl.static_range(LEVELS):
        loaded += _load_complex(decays, (PARTS + 1 + level) * N + o_n, o_n < N, COMPLEX)
    o_g, o_n = tl.arange(0, GROUPS), tl.arange(0, BLOCK_N)
    steps = o_g[:, None, None] - 1 - o_g[None, :, None]
    o_start, o_end = o_g[:, None], GROUPS - 1 - o_g[:, None]
    if REVERSE:
        steps = o_g[None, :, None] - 1 - o_g[:, None, None]
        o_start, o_end = GROUPS - 1 - o_g[:, None], o_g[:, None]
    m_n = o_n[None, :] < N
    loaded += _load_complex(
        decays, steps * (PARTS // GROUPS) * N + o_n[None, None, :], (steps >= 0) & (o_n[None, None, :] < N), COMPLEX
    )
    loaded += _load_complex(decays, o_start * (PARTS // GROUPS) * N + o_n[None, :], m_n, COMPLEX)
    loaded += _load_complex(decays, o_end * (PARTS // GROUPS) * N + o_n[None, :], m_n, COMPLEX)
    # the whole scan
    loaded += _load_complex(decays, PARTS * N + o_n[None, :], m_n, COMPLEX)
    return loaded


@triton.jit
def _scan(
    p_re,
    p_im,
    s_re,
    s_im,
    decays,
    LEVELS: tl.constexpr,
    GROUPS: tl.constexpr,
    REVERSE: tl.constexpr,
    COMPLEX: tl.constexpr,
):
    """s_{r+1} = a s_r + p_r over rows from s [1, N]: (s_r of every row, the last s).

    REVERSE: s_{r-1} = conj(a) s_r + p_r, from the last row on.

    Row i GROUPS + g is the i-th of 2^LEVELS in group g. With as many groups as all threads have rows of the tile, a
    thread has a column of a group to itself. There, pairs of rows become one, and are taken apart again: work of two
    multiply-adds an element, and exclusive sums without a shift. Between, one sum over groups crosses threads.
    """
    BLOCK_N: tl.constexpr = p_re.shape[1]
    p_re = tl.reshape(p_re, [1 << LEVELS, GROUPS * BLOCK_N])
    p_im = tl.reshape(p_im, [1 << LEVELS, GROUPS * BLOCK_N]) if COMPLEX else p_re
    kept = ()
    for i in tl.static_range(LEVELS):
        first_re, second_re = _rows_of(p_re, REVERSE)
        first_im, second_im = first_re, second_re
        if COMPLEX:
            first_im, second_im = _rows_of(p_im, REVERSE)
        kept += (first_re, first_im)
        p_re, p_im = _multiply_add(decays, i, first_re, first_im, second_re, second_im, REVERSE, COMPLEX)

    p_re = tl.reshape(p_re, [GROUPS, BLOCK_N])
    p_im = tl.reshape(p_im, [GROUPS, BLOCK_N])
    x_re, x_im = _multiply_add(decays, LEVELS, p_re[None, :, :], p_im[None, :, :], 0.0, 0.0, REVERSE, COMPLEX)
    last_re, last_im = _multiply_add(decays, LEVELS + 2, p_re, p_im, 0.0, 0.0, REVERSE, COMPLEX)
    x_re, last_re = tl.sum(x_re, 1), tl.sum(last_re, 0)[None, :]
    x_im, last_im = (tl.sum(x_im, 1), tl.sum(last_im, 0)[None, :]) if COMPLEX else (x_re, last_re)
    x_re, x_im = _multiply_add(decays, LEVELS + 1, s_re, s_im, x_re, x_im, REVERSE, COMPLEX)
    last_re, last_im = _multiply_add(decays, LEVELS + 3, s_re, s_im, last_re, last_im, REVERSE, COMPLEX)

    x_re = tl.reshape(x_re, [1, GROUPS * BLOCK_N])
    x_im = tl.reshape(x_im, [1, GROUPS * BLOCK_N]) if COMPLEX else x_re
    for i in tl.static_range(LEVELS - 1, -1, -1):
        next_re, next_im = _multiply_add(decays, i, x_re, x_im, kept[2 * i], kept[2 * i + 1], REVERSE, COMPLEX)
        x_re = _alternate(x_re, next_re, REVERSE)
        x_im = _alternate(x_im, next_im, REVERSE) if COMPLEX else x_re
    BLOCK: tl.constexpr = GROUPS << LEVELS
    return tl.reshape(x_re, [BLOCK, BLOCK_N]), tl.reshape(x_im, [BLOCK, BLOCK_N]), last_re, last_im


@triton.jit
def _load_tile(p, o_t, m_t, stride_b, stride_d, i_b, i_d):
    o_row = i_b * stride_b + i_d.to(tl.int64) * stride_d
    return tl.load(p + o_row + o_t, mask=m_t, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["num_segments", "num_blocks", "end_row"])
def _lti_fwd_kernel(
    u,
    gate_in,
    gate_out,
    taps,
    powers,
    bbar,
    weight,
    start,
    y,
    saved,
    end,
    T,
    D,
    N,
    num_segments,
    num_blocks,
    end_row,
    u_stride_b,
    u_stride_d,
    in_stride_b,
    in_stride_d,
    out_stride_b,
    out_stride_d,
    COMPLEX: tl.constexpr,
    HALF: tl.constexpr,
    C: tl.constexpr,
    J: tl.constexpr,
    ROWS: tl.constexpr,
    LEVELS: tl.constexpr,
    GROUPS: tl.constexpr,
    PARTS: tl.constexpr,
    NUM_POWERS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GATED_TERMS: tl.constexpr,
    TAP_TERMS: tl.constexpr,
    MAP_TERMS: tl.constexpr,
    STATE_TERMS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """y of num_blocks blocks of ROWS chunks of one sequence and channel; y None: only the state after them.

    start [S, B, D, N] or None (zeros): the state before each of the S segments. saved [B, D, blocks, N]: the one before
    each block. end [S, B, D, N]: after each segment (y None), or [B, D, N]: before chunk end_row.
    """
    i_d, i_bs = tl.program_id(0) % D, tl.program_id(0) // D
    i_s, i_b = i_bs % num_segments, (i_bs // num_segments).to(tl.int64)
    num_batch = tl.num_programs(0) // (D * num_segments)
    # see _scan
    o_r = tl.arange(0, ROWS) % GROUPS * (ROWS // GROUPS) + tl.arange(0, ROWS) // GROUPS
    o_r, o_c = o_r[:, None], tl.arange(0, C)
    o_n = tl.arange(0, BLOCK_N)[None, :]
    m_n = o_n < N
    pair: tl.constexpr = 2 if COMPLEX else 1
    near = powers + i_d * NUM_POWERS * N * pair
    far, decays = near + J * N * pair, near + (J + C // J) * N * pair
    b_decays = _load_decays(decays, N, LEVELS, GROUPS, PARTS, BLOCK_N, False, COMPLEX)

    e_re, e_im = _powers(near, far, (C - 1 - o_c)[:, None], o_n, m_n, N, J, COMPLEX)
    b_re, b_im = _load_complex(bbar, i_d * N + o_n, m_n, COMPLEX)
    e_re, e_im = _multiply(e_re, e_im, b_re, b_im, COMPLEX)
    e_re, e_im = _terms(e_re, MAP_TERMS, HALF), _terms(e_im, MAP_TERMS, HALF)
    if y is not None:
        k = _terms(_toeplitz(taps + i_d * C, C), TAP_TERMS, HALF)
        o_column = tl.arange(0, BLOCK_N)[:, None]
        w_re, w_im = _powers(near, far, o_c[None, :], o_column, o_column < N, N, J, COMPLEX)
        c_re, c_im = _load_complex(weight, i_d * N + o_column, o_column < N, COMPLEX)
        w_re, w_im = _multiply(w_re, w_im, c_re, c_im, COMPLEX)
        w_re, w_im = _terms(w_re, MAP_TERMS, HALF), _terms(-w_im, MAP_TERMS, HALF)

    s_re = tl.zeros([1, BLOCK_N], tl.float32)
    s_im = tl.zeros([1, BLOCK_N], tl.float32)
    if start is not None:
        s_re, s_im = _load_complex(start, ((i_s * num_batch + i_b) * D + i_d) * N + o_n, m_n, COMPLEX)

    for i in tl.range(0, num_blocks, num_stages=NUM_STAGES):
        i_block = i_s * num_blocks + i
        o_t = (i_block * ROWS + o_r).to(tl.int64) * C + o_c[None, :]
        m_t = o_t < T
        b_v = _load_tile(u, o_t, m_t, u_stride_b, u_stride_d, i_b, i_d)
        if gate_in is not None:
            b_v *= _load_tile(gate_in, o_t, m_t, in_stride_b, in_stride_d, i_b, i_d)
        v = _terms(b_v, 1 if gate_in is None else GATED_TERMS, HALF)
        p_re = _add_product(tl.zeros([ROWS, BLOCK_N], tl.float32), v, e_re, HALF)
        p_im = p_re
        if COMPLEX:
            p_im = _add_product(tl.zeros([ROWS, BLOCK_N], tl.float32), v, e_im, HALF)
        if saved is not None:
            o_saved = ((i_b * D + i_d) * (num_segments * num_blocks) + i_block) * N + o_n
            _store_complex(saved, o_saved, s_re, s_im, m_n, COMPLEX)
        h_re, h_im, s_re, s_im = _scan(p_re, p_im, s_re, s_im, b_decays, LEVELS, GROUPS, False, COMPLEX)

        if y is not None:
            b_y = _add_product(tl.zeros([ROWS, C], tl.float32), v, k, HALF)
            b_y = _add_product(b_y, _terms(h_re, STATE_TERMS, HALF), w_re, HALF)
            if COMPLEX:
                b_y = _add_product(b_y, _terms(h_im, STATE_TERMS, HALF), w_im, HALF)
            if gate_out is not None:
                b_y *= _load_tile(gate_out, o_t, m_t, out_stride_b, out_stride_d, i_b, i_d)
            tl.store(y + (i_b * D + i_d) * T + o_t, b_y.to(y.dtype.element_ty), mask=m_t)
            # two conditions, for the first is decided when compiling
            if end is not None:  # noqa: SIM102
                if i_block == end_row // ROWS:
                    m_end = o_r == end_row % ROWS
                    end_re = tl.sum(tl.where(m_end, h_re, 0.0), 0)[None, :]
                    end_im = end_re
                    if COMPLEX:
                        end_im = tl.sum(tl.where(m_end, h_im, 0.0), 0)[None, :]
                    _store_complex(end, (i_b * D + i_d) * N + o_n, end_re, end_im, m_n, COMPLEX)
    if y is None:
        _store_complex(end, ((i_s * num_batch + i_b) * D + i_d) * N + o_n, s_re, s_im, m_n, COMPLEX)


@triton.jit(do_not_specialize=["num_segments", "num_blocks", "end_row"])
def _lti_bwd_kernel(
    u,
    gate_in,
    gate_out,
    dy,
    taps,
    powers,
    bbar,
    weight,
    saved,
    after,
    dend,
    du,
    dgate_in,
    dgate_out,
    dstart,
    partial,
    T,
    D,
    N,
    num_segments,
    num_blocks,
    end_row,
    u_stride_b,
    u_stride_d,
    in_stride_b,
    in_stride_d,
    out_stride_b,
    out_stride_d,
    dy_stride_b,
    dy_stride_d,
    COMPLEX: tl.constexpr,
    HALF: tl.constexpr,
    C: tl.constexpr,
    J: tl.constexpr,
    ROWS: tl.constexpr,
    LEVELS: tl.constexpr,
    GROUPS: tl.constexpr,
    PARTS: tl.constexpr,
    NUM_POWERS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GATED_TERMS: tl.constexpr,
    TAP_TERMS: tl.constexpr,
    MAP_TERMS: tl.constexpr,
    STATE_TERMS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """The gradient recurrence of this module; du None: only dstart, the gradient H of the state before each segment.

    after [S, B, D, N] or None: H after each segment. dend [B, D, N] or None: gradient of the state before chunk
    end_row. dstart [S, B, D, N] or None. partial [B S, D, taps C, then Bbar, c, z each N].
    """
    i_d, i_bs = tl.program_id(0) % D, tl.program_id(0) // D
    i_s, i_b = i_bs % num_segments, (i_bs // num_segments).to(tl.int64)
    num_batch = tl.num_programs(0) // (D * num_segments)
    # see _scan
    o_r = tl.arange(0, ROWS) % GROUPS * (ROWS // GROUPS) + tl.arange(0, ROWS) // GROUPS
    o_r, o_c = o_r[:, None], tl.arange(0, C)
    o_n = tl.arange(0, BLOCK_N)[None, :]
    m_n = o_n < N
    pair: tl.constexpr = 2 if COMPLEX else 1
    near = powers + i_d * NUM_POWERS * N * pair
    far, decays = near + J * N * pair, near + (J + C // J) * N * pair
    b_decays = _load_decays(decays, N, LEVELS, GROUPS, PARTS, BLOCK_N, False, COMPLEX)
    b_conj_decays = _load_decays(decays, N, LEVELS, GROUPS, PARTS, BLOCK_N, True, COMPLEX)
    o_last = C - 1 - o_c

    # both as [C, N]
    w_re, w_im = _powers(near, far, o_c[:, None], o_n, m_n, N, J, COMPLEX)
    c_re, c_im = _load_complex(weight, i_d * N + o_n, m_n, COMPLEX)
    w_re, w_im = _multiply(w_re, w_im, c_re, c_im, COMPLEX)
    w_re, w_im = _terms(w_re, MAP_TERMS, HALF), _terms(-w_im, MAP_TERMS, HALF)
    if du is not None:
        e_re, e_im = _powers(near, far, o_last[:, None], o_n, m_n, N, J, COMPLEX)
        b_re, b_im = _load_complex(bbar, i_d * N + o_n, m_n, COMPLEX)
        e_re, e_im = _multiply(e_re, e_im, b_re, b_im, COMPLEX)
        e_re, e_im = _terms(e_re, MAP_TERMS, HALF), _terms(e_im, MAP_TERMS, HALF)
        k = _terms(_toeplitz(taps + i_d * C, C), TAP_TERMS, HALF)
        dk = tl.zeros([C, C], tl.float32)
        de_re = tl.zeros([C, BLOCK_N], tl.float32)
        de_im = tl.zeros([C, BLOCK_N], tl.float32)
        # minus the imaginary part of dO, as -h_im is what g meets
        do_re = tl.zeros([C, BLOCK_N], tl.float32)
        do_im = tl.zeros([C, BLOCK_N], tl.float32)
        dtap = 0.0
        da_re = tl.zeros([GROUPS * BLOCK_N], tl.float32)
        da_im = tl.zeros([GROUPS * BLOCK_N], tl.float32)

    x_re = tl.zeros([1, BLOCK_N], tl.float32)
    x_im = tl.zeros([1, BLOCK_N], tl.float32)
    o_state = ((i_s * num_batch + i_b) * D + i_d) * N + o_n
    if after is not None:
        x_re, x_im = _load_complex(after, o_state, m_n, COMPLEX)

    for i in tl.range(0, num_blocks, num_stages=NUM_STAGES):
        i_block = i_s * num_blocks + (num_blocks - 1 - i)
        o_t = (i_block * ROWS + o_r).to(tl.int64) * C + o_c[None, :]
        m_t = o_t < T
        b_dy = _load_tile(dy, o_t, m_t, dy_stride_b, dy_stride_d, i_b, i_d)
        b_g = b_dy
        if gate_out is not None:
            b_gate_out = _load_tile(gate_out, o_t, m_t, out_stride_b, out_stride_d, i_b, i_d)
            b_g = b_dy * b_gate_out
        g = _terms(b_g, 1 if gate_out is None else GATED_TERMS, HALF)
        q_re = _add_product(tl.zeros([ROWS, BLOCK_N], tl.float32), g, w_re, HALF)
        q_im = q_re
        if COMPLEX:
            q_im = _add_product(tl.zeros([ROWS, BLOCK_N], tl.float32), g, w_im, HALF)
        # two conditions, for the first is decided when compiling
        if dend is not None:  # noqa: SIM102
            if i_block == end_row // ROWS:
                end_re, end_im = _load_complex(dend, (i_b * D + i_d) * N + o_n, m_n, COMPLEX)
                m_end = o_r == end_row % ROWS
                q_re += tl.where(m_end, end_re, 0.0)
                q_im += tl.where(m_end, end_im, 0.0)
        # the rows of x are H after each chunk
        after_re, after_im, x_re, x_im = _scan(q_re, q_im, x_re, x_im, b_conj_decays, LEVELS, GROUPS, True, COMPLEX)

        if du is not None:
            b_u = _load_tile(u, o_t, m_t, u_stride_b, u_stride_d, i_b, i_d)
            b_v = b_u
            if gate_in is not None:
                b_gate_in = _load_tile(gate_in, o_t, m_t, in_stride_b, in_stride_d, i_b, i_d)
                b_v = b_u * b_gate_in
            v = _terms(b_v, 1 if gate_in is None else GATED_TERMS, HALF)
            p_re = _add_product(tl.zeros([ROWS, BLOCK_N], tl.float32), v, e_re, HALF)
            p_im = p_re
            if COMPLEX:
                p_im = _add_product(tl.zeros([ROWS, BLOCK_N], tl.float32), v, e_im, HALF)
            o_saved = ((i_b * D + i_d) * (num_segments * num_blocks) + i_block) * N + o_n
            s_re, s_im = _load_complex(saved, o_saved, m_n, COMPLEX)
            b_h_re, b_h_im, _, _ = _scan(p_re, p_im, s_re, s_im, b_decays, LEVELS, GROUPS, False, COMPLEX)

            # as in the scan, so that a thread adds up rows of its own
            x1 = tl.reshape(after_re, [1 << LEVELS, GROUPS * BLOCK_N])
            h1 = tl.reshape(b_h_re, [1 << LEVELS, GROUPS * BLOCK_N])
            da_re += tl.sum(x1 * h1, 0)
            if COMPLEX:
                x2 = tl.reshape(after_im, [1 << LEVELS, GROUPS * BLOCK_N])
                h2 = tl.reshape(b_h_im, [1 << LEVELS, GROUPS * BLOCK_N])
                da_re += tl.sum(x2 * h2, 0)
                da_im += tl.sum(x2 * h1 - x1 * h2, 0)
            h_re, h_im = _terms(b_h_re, STATE_TERMS, HALF), _terms(b_h_im, STATE_TERMS, HALF)
            a_re, a_im = _terms(after_re, STATE_TERMS, HALF), _terms(after_im, STATE_TERMS, HALF)

            b_dv = _add_product(tl.zeros([ROWS, C], tl.float32), g, _transposed(k), HALF)
            b_dv = _add_product(b_dv, a_re, _transposed(e_re), HALF)
            if COMPLEX:
                b_dv = _add_product(b_dv, a_im, _transposed(e_im), HALF)
            o_out = (i_b * D + i_d) * T + o_t
            if gate_in is not None:
                tl.store(dgate_in + o_out, (b_dv * b_u).to(dgate_in.dtype.element_ty), mask=m_t)
                b_dv *= b_gate_in
            tl.store(du + o_out, b_dv.to(du.dtype.element_ty), mask=m_t)
            if gate_out is not None:
                b_y = _add_product(tl.zeros([ROWS, C], tl.float32), v, k, HALF)
                b_y = _add_product(b_y, h_re, _transposed(w_re), HALF)
                if COMPLEX:
                    b_y = _add_product(b_y, h_im, _transposed(w_im), HALF)
                tl.store(dgate_out + o_out, (b_y * b_dy).to(dgate_out.dtype.element_ty), mask=m_t)

            if gate_in is not None or gate_out is not None:
                # the gradient of D is this alone, and rounded v or g would lose more than the products do
                dtap += tl.sum(b_v * b_g)
            v, turned_g = _transposed(v), _transposed(g)
            dk = _add_product(dk, v, g, HALF)
            de_re = _add_product(de_re, v, a_re, HALF)
            do_re = _add_product(do_re, turned_g, h_re, HALF)
            if COMPLEX:
                de_im = _add_product(de_im, v, a_im, HALF)
                do_im = _add_product(do_im, turned_g, h_im, HALF)

    if dstart is not None:
        _store_complex(dstart, o_state, x_re, x_im, m_n, COMPLEX)
    if du is not None:
        p_partial = partial + (i_bs.to(tl.int64) * D + i_d) * (C + 3 * N * pair)
        b_taps = _tap_sums(dk)
        if gate_in is not None or gate_out is not None:
            b_taps = tl.where(o_c == 0, dtap, b_taps)
        tl.store(p_partial + o_c, b_taps)
        p_partial += C
        # dBbar = sum conj(Abar^k) dE, and the share of dz is k conj(E) dE
        w_re, w_im = _powers(near, far, o_last[:, None], o_n, m_n, N, J, COMPLEX)
        de_re, de_im = _multiply(w_re, -w_im, de_re, de_im, COMPLEX)
        b_re, b_im = _load_complex(bbar, i_d * N + o_n, m_n, COMPLEX)
        sum_re, sum_im = tl.sum(de_re, 0)[None, :], tl.sum(de_im, 0)[None, :]
        _store_complex(p_partial, o_n, sum_re, sum_im, m_n, COMPLEX)
        b_k = o_last[:, None].to(tl.float32)
        sum_re, sum_im = tl.sum(b_k * de_re, 0)[None, :], tl.sum(b_k * de_im, 0)[None, :]
        dz_re, dz_im = _multiply(b_re, -b_im, sum_re, sum_im, COMPLEX)
        # the same for c and dO
        w_re, w_im = _powers(near, far, o_c[:, None], o_n, m_n, N, J, COMPLEX)
        do_re, do_im = _multiply(w_re, -w_im, do_re, -do_im, COMPLEX)
        c_re, c_im = _load_complex(weight, i_d * N + o_n, m_n, COMPLEX)
        sum_re, sum_im = tl.sum(do_re, 0)[None, :], tl.sum(do_im, 0)[None, :]
        _store_complex(p_partial + N * pair, o_n, sum_re, sum_im, m_n, COMPLEX)
        b_k = o_c[:, None].to(tl.float32)
        sum_re, sum_im = tl.sum(b_k * do_re, 0)[None, :], tl.sum(b_k * do_im, 0)[None, :]
        sum_re, sum_im = _multiply(c_re, -c_im, sum_re, sum_im, COMPLEX)
        dz_re += sum_re
        dz_im += sum_im
        # and of the chunk decay: C conj(a) da
        b_re, b_im = _load_complex(decays, (PARTS + 1) * N + o_n, m_n, COMPLEX)
        sum_re = tl.sum(tl.reshape(da_re, [GROUPS, BLOCK_N]), 0)[None, :]
        sum_im = tl.sum(tl.reshape(da_im, [GROUPS, BLOCK_N]), 0)[None, :]
        sum_re, sum_im = _multiply(b_re, -b_im, sum_re, sum_im, COMPLEX)
        _store_complex(p_partial + 2 * N * pair, o_n, dz_re + C * sum_re, dz_im + C * sum_im, m_n, COMPLEX)


class Plan(NamedTuple):
    """How a kernel covers B D sequences: segments of `blocks` blocks of `rows` chunks."""

    chunk: int
    rows: int
    blocks: int
    segments: int
    groups: tuple[int, int]
    """Of rows in a scan, forward and backward."""
    config: Config


@functools.cache
def _num_processors(device: torch.device) -> int:
    if device.type == "cpu":
        # interpreter: enough to cut time
        return 1
    driver = triton.runtime.driver.active
    return driver.utils.get_device_properties(driver.get_current_device())["multiprocessor_count"]


def _padded(num_states: int) -> int:
    """Matrix units take 16 at least."""
    return max(16, triton.next_power_of_2(num_states))


def _plan(u: Tensor, num_states: int, with_end: bool) -> Plan:
    batch, length, width = u.shape
    config = CONFIGS[u.element_size() if u.dtype == torch.bfloat16 else 4]
    if length < AVERAGING_LENGTH:
        config = config._replace(gated=2, taps=2, maps=2, states=2)
    chunk = min(config.chunk, max(16, triton.next_power_of_2(length)))
    # the state after the last whole chunk stands before a chunk that may be empty
    chunks = length // chunk + 1 if with_end else triton.cdiv(length, chunk)
    rows = min(config.rows, max(16, triton.next_power_of_2(chunks)))
    total = triton.cdiv(chunks, rows)
    wanted = triton.cdiv(BUSY_PROGRAMS * _num_processors(u.device), batch * width)
    # a segment costs a second reading, so only where the chip would be idle otherwise
    blocks = triton.cdiv(total, min(wanted, total))
    forward, backward = (min(rows // 2, max(2, 32 * warps // _padded(num_states))) for warps in config.warps)
    return Plan(chunk, rows, blocks, triton.cdiv(total, blocks), (forward, backward), config)


def _inner(plan: Plan) -> int:
    return int(2 ** (plan.chunk.bit_length() // 2))


class System(NamedTuple):
    """The parameters of a state space, and the rule by which they become discrete."""

    A: Tensor
    B: Tensor | None
    C: Tensor
    dt: Tensor
    skip: Tensor | None
    factor: float
    rule: str

    @property
    def complex(self) -> bool:
        return any(x is not None and x.is_complex() for x in (self.A, self.B, self.C))

    def constants(self, plan: Plan) -> dict[str, Any]:
        return {
            # one rule has two names
            "RULE": "zoh" if self.rule == "dss-exp" else self.rule,
            "A_COMPLEX": self.A.is_complex(),
            "B_COMPLEX": self.B is not None and self.B.is_complex(),
            "C_COMPLEX": self.C.is_complex(),
            "COMPLEX": self.complex,
            "CHUNK": plan.chunk,
            "BITS": plan.chunk.bit_length() - 1,
            "BLOCK_N": _padded(self.A.shape[-1]),
            "num_warps": 4,
        }

    @property
    def stride(self) -> int:
        """From channel to channel in A."""
        return self.A.shape[-1] if self.A.ndim == 2 else 0


def prepare(system: System, plan: Plan) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """taps [D, C], powers [D, *, N], Bbar and c [D, N]."""
    width, num_states = system.C.shape
    kind = torch.complex64 if system.complex else torch.float32
    inner, block, parts = _inner(plan), plan.chunk * plan.rows, max(plan.groups)
    levels = (plan.rows // min(plan.groups)).bit_length() - 1
    num_powers = inner + plan.chunk // inner + parts + 1 + levels + 1
    segment = block * plan.blocks

    def empty(*size: int, dtype: torch.dtype = kind) -> Tensor:
        return torch.empty(size, dtype=dtype, device=system.C.device)

    taps, powers = empty(width, plan.chunk, dtype=torch.float32), empty(width, num_powers, num_states)
    bbar, weight = empty(width, num_states), empty(width, num_states)
    _prepare_kernel[(width,)](
        _flat(system.A),
        _flat(system.B),
        _flat(system.C),
        system.dt,
        system.skip,
        taps,
        _flat(powers),
        _flat(bbar),
        _flat(weight),
        num_states,
        system.stride,
        segment,
        segment.bit_length(),
        system.factor,
        J=inner,
        PARTS=parts,
        STEP=block // parts,
        NUM_POWERS=num_powers,
        BLOCK_P=triton.next_power_of_2(num_powers),
        **system.constants(plan),
    )
    return taps, powers, bbar, weight


def prepare_bwd(
    system: System, partial: Tensor, plan: Plan
) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor | None]:
    """Gradients of A, B, C, dt and the skip."""
    width, num_states = system.C.shape
    dA = torch.empty((width, num_states), dtype=system.A.dtype, device=system.A.device)
    dB = None if system.B is None else torch.empty_like(system.B)
    dskip = None if system.skip is None else torch.empty_like(system.skip)
    dC, ddt = torch.empty_like(system.C), torch.empty_like(system.dt)
    _prepare_bwd_kernel[(width,)](
        _flat(system.A),
        _flat(system.B),
        _flat(system.C),
        system.dt,
        partial,
        _flat(dA),
        _flat(dB),
        _flat(dC),
        ddt,
        dskip,
        width,
        num_states,
        system.stride,
        partial.shape[0],
        system.factor,
        **system.constants(plan),
    )
    return dA if system.A.ndim == 2 else dA.sum(0), dB, dC, ddt, dskip


def _flat(x: Tensor | None) -> Tensor | None:
    """Complex numbers as pairs."""
    return torch.view_as_real(x) if x is not None and x.is_complex() else x


def _constants(plan: Plan, powers: Tensor, num_states: int, dtype: torch.dtype, backward: bool) -> dict[str, Any]:
    groups = plan.groups[backward]
    return {
        "COMPLEX": powers.is_complex(),
        "HALF": dtype == torch.bfloat16,
        "C": plan.chunk,
        "J": _inner(plan),
        "ROWS": plan.rows,
        "LEVELS": (plan.rows // groups).bit_length() - 1,
        "GROUPS": groups,
        "PARTS": max(plan.groups),
        "NUM_POWERS": powers.shape[1],
        "BLOCK_N": _padded(num_states),
        "GATED_TERMS": plan.config.gated,
        "TAP_TERMS": plan.config.taps,
        "MAP_TERMS": plan.config.maps,
        "STATE_TERMS": plan.config.states,
        "NUM_STAGES": plan.config.stages[backward],
        "num_warps": plan.config.warps[backward],
    }


def _strides(x: Tensor | None) -> tuple[int, int]:
    return (0, 0) if x is None else (x.stride(0), x.stride(2))


def _time_last(x: Tensor) -> Tensor:
    """Empty, of the shape of x, with time contiguous."""
    batch, length, width = x.shape
    return torch.empty((batch, width, length), dtype=x.dtype, device=x.device).transpose(1, 2)


def _with_contiguous_time(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.transpose(1, 2).contiguous().transpose(1, 2)


def lti_fwd(
    u: Tensor,
    gate_in: Tensor | None,
    gate_out: Tensor | None,
    taps: Tensor,
    powers: Tensor,
    bbar: Tensor,
    weight: Tensor,
    initial_state: Tensor | None,
    plan: Plan,
    with_end: bool,
    keep: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """y, the state before chunk T // C and, to keep for the backward pass, the states before each block."""
    batch, length, width = u.shape
    num_states, kind = bbar.shape[-1], bbar.dtype
    constants = _constants(plan, powers, num_states, u.dtype, False)

    def launch(start: Tensor | None, y: Tensor | None, saved: Tensor | None, end: Tensor | None) -> None:
        _lti_fwd_kernel[(batch * plan.segments * width,)](
            u,
            gate_in,
            gate_out if y is not None else None,
            taps if y is not None else None,
            _flat(powers),
            _flat(bbar),
            _flat(weight) if y is not None else None,
            _flat(start),
            y,
            _flat(saved),
            _flat(end),
            length,
            width,
            num_states,
            plan.segments,
            plan.blocks,
            length // plan.chunk,
            *_strides(u),
            *_strides(gate_in),
            *_strides(gate_out),
            **constants,
        )

    start = None if initial_state is None else initial_state.unsqueeze(0)
    if plan.segments > 1:
        ends = torch.empty((plan.segments, batch, width, num_states), dtype=kind, device=u.device)
        launch(None, None, None, ends)
        decay = powers[:, -1]
        starts = [torch.zeros_like(ends[0]) if initial_state is None else initial_state]
        for segment_end in ends[:-1]:
            starts.append(torch.addcmul(segment_end, decay, starts[-1]))
        start = torch.stack(starts)
    y = _time_last(u)
    shape = (batch, width, plan.segments * plan.blocks, num_states)
    saved = torch.empty(shape, dtype=kind, device=u.device) if keep else None
    end = torch.empty((batch, width, num_states), dtype=kind, device=u.device) if with_end else None
    launch(start, y, saved, end)
    return y, end, saved


def lti_bwd(
    u: Tensor,
    gate_in: Tensor | None,
    gate_out: Tensor | None,
    dy: Tensor,
    taps: Tensor,
    powers: Tensor,
    bbar: Tensor,
    weight: Tensor,
    saved: Tensor,
    dend: Tensor | None,
    plan: Plan,
    with_start: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, Tensor | None]:
    """Gradients of u, the gates, partial ones of taps, Bbar, c and log Abar [*, D, *], and of the initial state."""
    batch, length, width = u.shape
    num_states, kind = bbar.shape[-1], bbar.dtype
    constants = _constants(plan, powers, num_states, u.dtype, True)
    pair = 2 if kind.is_complex else 1
    states = (plan.segments, batch, width, num_states)

    def launch(
        after: Tensor | None,
        du: Tensor | None,
        dgate_in: Tensor | None,
        dgate_out: Tensor | None,
        dstart: Tensor | None,
        partial: Tensor | None,
    ) -> None:
        whole = du is not None
        _lti_bwd_kernel[(batch * plan.segments * width,)](
            u if whole else None,
            gate_in if whole else None,
            gate_out,
            dy,
            taps if whole else None,
            _flat(powers),
            _flat(bbar) if whole else None,
            _flat(weight),
            _flat(saved) if whole else None,
            _flat(after),
            _flat(dend),
            du,
            dgate_in,
            dgate_out,
            _flat(dstart),
            partial,
            length,
            width,
            num_states,
            plan.segments,
            plan.blocks,
            length // plan.chunk,
            *_strides(u),
            *_strides(gate_in),
            *_strides(gate_out),
            *_strides(dy),
            **constants,
        )

    after = None
    if plan.segments > 1:
        starts = torch.empty(states, dtype=kind, device=u.device)
        launch(None, None, None, None, starts, None)
        decay = powers[:, -1].conj()
        afters = [torch.zeros_like(starts[0])]
        for segment_start in starts[1:].flip(0):
            afters.append(torch.addcmul(segment_start, decay, afters[-1]))
        after = torch.stack(afters[::-1])
    du = _time_last(u)
    dgate_in = None if gate_in is None else _time_last(gate_in)
    dgate_out = None if gate_out is None else _time_last(gate_out)
    dstart = torch.empty(states, dtype=kind, device=u.device) if with_start else None
    shape = (batch * plan.segments, width, plan.chunk + 3 * num_states * pair)
    partial = torch.empty(shape, dtype=torch.float32, device=u.device)
    launch(after, du, dgate_in, dgate_out, dstart, partial)
    return du, dgate_in, dgate_out, partial, None if dstart is None else dstart[0]


class LtiSsm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        u: Tensor,
        gate_in: Tensor | None,
        gate_out: Tensor | None,
        A: Tensor,
        B: Tensor | None,
        C: Tensor,
        dt: Tensor,
        skip: Tensor | None,
        initial_state: Tensor | None,
        conj_pairs: bool,
        discretization: str,
        with_end: bool,
    ) -> tuple[Tensor, Tensor | None]:
        A, B, C, dt, skip, initial_state = (_dense(x) for x in (A, B, C, dt, skip, initial_state))
        assert A is not None
        assert C is not None
        assert dt is not None
        plan = _plan(u, A.shape[-1], with_end)
        system = System(A, B, C, dt, skip, 2.0 if conj_pairs else 1.0, discretization)
        small = prepare(system, plan)
        keep = any(ctx.needs_input_grad)
        y, end, saved = lti_fwd(u, gate_in, gate_out, *small, initial_state, plan, with_end, keep)
        ctx.save_for_backward(u, gate_in, gate_out, A, B, C, dt, skip, saved, *small)
        ctx.plan, ctx.options = plan, system[5:]
        ctx.set_materialize_grads(False)
        return y, end

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dend: Tensor | None) -> tuple[Tensor | None, ...]:
        u, gate_in, gate_out, A, B, C, dt, skip, saved, taps, powers, bbar, weight = ctx.saved_tensors
        dy = _time_last(u).zero_() if dy is None else _with_contiguous_time(dy)
        with_start = ctx.needs_input_grad[8]
        du, dgate_in, dgate_out, partial, dinitial = lti_bwd(
            u, gate_in, gate_out, dy, taps, powers, bbar, weight, saved, _dense(dend), ctx.plan, with_start
        )
        system = System(A, B, C, dt, skip, *ctx.options)
        return du, dgate_in, dgate_out, *prepare_bwd(system, partial, ctx.plan), dinitial, None, None, None


def _dense(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.resolve_conj().contiguous()


def lti_ssm_triton(
    u: Tensor,
    A: Tensor,
    B: Tensor | None,
    C: Tensor,
    dt: Tensor,
    *,
    conj_pairs: bool,
    D: Tensor | None,
    discretization: str,
    gate_in: Tensor | None,
    gate_out: Tensor | None,
    initial_state: Tensor | None,
    return_final_state: bool,
) -> tuple[Tensor, Tensor | None]:
    """y [B, T, D] as u, time contiguous, and on request the final state [B, D, N] in float32 or complex64."""
    kind = state_dtype(A, B, C, torch.float32)
    u = _with_contiguous_time(u)
    gate_in = None if gate_in is None else _with_contiguous_time(gate_in)
    gate_out = None if gate_out is None else _with_contiguous_time(gate_out)
    initial_state = None if initial_state is None else initial_state.to(kind)
    y, state = LtiSsm.apply(
        u, gate_in, gate_out, A, B, C, dt, D, initial_state, conj_pairs, discretization, return_final_state
    )
    rest = u.shape[1] % _plan(u, A.shape[-1], return_final_state).chunk
    if state is None or not rest:
        return y, state
    # the last steps that are no whole chunk
    A, B, _, dt, _ = widen(A, B, C, dt)
    z, bbar = discretize(A, dt, discretization)
    v = u[:, -rest:].float() if gate_in is None else gate_in[:, -rest:].float() * u[:, -rest:].float()
    added = _powers_sum(v, z)
    for factor in (bbar, B):
        added = added if factor is None else added * factor
    state = torch.exp(z * rest) * state + added
    # the logarithm of a negative Abar makes a real system complex on the way only
    return y, (state if kind.is_complex else state.real).to(kind)
