"""A long convolution and the gradient of its taps in Triton, from spectra of blocks as products with small matrices.

Of a block of n = R N steps, t = N p + q, at n frequencies a quarter off the usual ones,

    X[j + R k] = sum_t x[t] e(-(j + R k + 1/4) t / n),    e(z) = exp(2 pi i z)
               = sum_q e(-q k / N) e(-(j + 1/4) q / n) sum_p e(-(j + 1/4) p / R) x[N p + q]

is two products with small matrices and a turn of each number between. What goes around a block once comes back times
i, so n steps need no padding. With x_c, g_c, h_k the blocks of sequences and taps (numbers outside of one are zeros):

The gradient of the taps, the sum being over all sequences too:

    S_k = sum_c conj(X_c) G_(c+k),    s_k[m] = e(m / 4 n) IFFT(S_k)[m] = sum_c sum_t x_c[t] (g_(c+k)[t + m]
                                                                                   + i g_(c+k)[t + m - n])
    dtaps[k n + m] = Re s_k[m] + Im s_(k+1)[m]

Forward and the gradient of x, of each sequence alone:

    p_c[m] = e(m / 4 n) IFFT(sum_k H_k X_(c-k))[m] = sum_k sum_t h_k[t] (x_(c-k)[m - t] - i x_(c-k)[m + n - t])
    y[c n + m] = Re p_c[m] - Im p_(c-1)[m] = Re e(m / 4 n) IFFT(sum_k W_k X_(c-k))[m],    W_k = H_k + i H_(k-1)
    dx[c n + m] = Re e(m / 4 n) IFFT(sum_k conj(W_k) G_(c+k))[m]

so blocks do not wait for their neighbours. The inverse is the same two products in the other order, real parts only.

x and g in bfloat16; of other dtypes the gradient of the taps takes PyTorch's FFT, and there is no convolution here.
Between products numbers are float16: for S each j with a scale of its own and sums in float32; of a convolution one
scale a sequence and one a channel, powers of two from the sum of magnitudes, which no number of a spectrum exceeds,
and sums over k in float16 as well. So the future changes the past by rounding, 1e-3 of what meets it. Deterministic.
Multiply-adds for each of B D: 8 n (R + N) each pair of blocks of S; of a convolution 4 n (R + 2 N) each block, and 4 n
on the vector units each pair.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.fft_conv.chunked import correlated, fast_length
from kernels.launch import cdiv, launch, num_processors, speaks_ptx
from kernels.transpose import empty_time_last

RADIX = 64
"""R of the spectra: rows of the smallest product."""
REGISTERS = {16: 128, 32: 168}
"""By N of the spectra: what a thread of theirs may have, so that four and three programs fit a multiprocessor."""
SPECTRA_STAGES = {16: 2, 32: 3}
TAP_BLOCK = 1024
CONV_SIZES = (16, 32)
"""N that a convolution may have."""
CONV_REGISTERS = {2: 128, 4: 168, 8: 255}
"""Of convolutions, by how many blocks a sequence has at most: all are kept."""
LARGEST = 32768.0
"""No number in float16 is meant to be larger."""
PER_PROGRAM, LEAST_PROGRAMS = 4, 12
"""Sequences of a program of the convolution, fewer where programs for each multiprocessor would be."""


@triton.jit
def _columns(b_x, b_re, b_re_rest, b_im, b_im_rest, b_cos, b_sin):
    """The sum over p of the blocks x [R, N], turned, by row j over its largest number; that number [R]."""
    b_yr = tl.dot(b_re, b_x)
    b_yr = tl.dot(b_re_rest, b_x, b_yr)
    b_yi = tl.dot(b_im, b_x)
    b_yi = tl.dot(b_im_rest, b_x, b_yi)
    b_most = tl.maximum(tl.max(tl.maximum(tl.abs(b_yr), tl.abs(b_yi)), 1), 1e-30)
    b_scale = (1.0 / b_most)[:, None]
    b_yr, b_yi = (b_yr * b_scale).to(b_cos.dtype), (b_yi * b_scale).to(b_cos.dtype)
    return b_yr * b_cos - b_yi * b_sin, b_yr * b_sin + b_yi * b_cos, b_most


@triton.jit(do_not_specialize=["B", "num_chunks", "num_k", "num_splits"])
def _spectra_kernel(
    x,
    g,
    inner,
    turns,
    outer,
    spectra,
    B,
    D,
    x_T,
    g_T,
    num_chunks,
    num_k,
    num_splits,
    x_stride_b,
    x_stride_d,
    g_stride_b,
    g_stride_d,
    R: tl.constexpr,
    N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """spectra [splits, D, num_k, R N, 2], which add up to S_k over splits; inner, turns, outer of `_tables`."""
    SIZE: tl.constexpr = R * N
    i_k, i_d = tl.program_id(0) % num_k, (tl.program_id(0) // num_k % D).to(tl.int64)
    i_split = tl.program_id(0) // num_k // D
    o_r, o_n = tl.arange(0, R), tl.arange(0, N)
    o_t = o_r[:, None] * N + o_n[None, :]
    p_inner = inner + (o_r[:, None] * R + o_r[None, :])
    b_re, b_re_rest = tl.load(p_inner), tl.load(p_inner + R * R)
    b_im, b_im_rest = tl.load(p_inner + 2 * R * R), tl.load(p_inner + 3 * R * R)
    b_cos, b_sin = tl.load(turns + o_t), tl.load(turns + SIZE + o_t)
    p_outer = outer + (o_n[:, None] * N + o_n[None, :])
    b_wr, b_wi, b_minus_wi = tl.load(p_outer), tl.load(p_outer + N * N), tl.load(p_outer + 2 * N * N)
    b_sr = tl.zeros([R, N], tl.float32)
    b_si = tl.zeros([R, N], tl.float32)
    # pairs of blocks, all of one sequence after those of another
    num_c = num_chunks - i_k
    first, end = B * num_c * i_split // num_splits, B * num_c * (i_split + 1) // num_splits
    i_b, i_c = (first // num_c).to(tl.int64), first % num_c
    p_x = x + (i_b * x_stride_b + i_d * x_stride_d)
    p_g = g + (i_b * g_stride_b + i_d * g_stride_d)
    for _ in tl.range(first, end, num_stages=NUM_STAGES):
        o_x = i_c * SIZE + o_t
        o_g = o_x + i_k * SIZE
        b_x = tl.load(p_x + o_x, mask=o_x < x_T, other=0.0)
        b_g = tl.load(p_g + o_g, mask=o_g < g_T, other=0.0)
        # without a branch or a division, which would keep loads out of the pipeline or cost as much as they do
        i_c += 1
        is_last = i_c == num_c
        p_x += tl.where(is_last, x_stride_b, 0)
        p_g += tl.where(is_last, g_stride_b, 0)
        i_c = tl.where(is_last, 0, i_c)
        b_vr, b_vi, b_most = _columns(b_x, b_re, b_re_rest, b_im, b_im_rest, b_cos, b_sin)
        b_xr = tl.dot(b_vi, b_minus_wi, tl.dot(b_vr, b_wr))
        b_xi = tl.dot(b_vi, b_wr, tl.dot(b_vr, b_wi))
        b_vr, b_vi, b_more = _columns(b_g, b_re, b_re_rest, b_im, b_im_rest, b_cos, b_sin)
        b_scale = (b_most * b_more)[:, None]
        # one part of the spectrum of g after the other: fewer registers
        b_part = tl.dot(b_vi, b_minus_wi, tl.dot(b_vr, b_wr)) * b_scale
        b_sr += b_xr * b_part
        b_si -= b_xi * b_part
        b_part = tl.dot(b_vi, b_wr, tl.dot(b_vr, b_wi)) * b_scale
        b_sr += b_xi * b_part
        b_si += b_xr * b_part

    p_spectra = spectra + ((i_split * D + i_d) * num_k + i_k) * (2 * SIZE) + 2 * (o_n[None, :] * R + o_r[:, None])
    tl.store(p_spectra, b_sr)
    tl.store(p_spectra + 1, b_si)


@triton.jit(do_not_specialize=["lags", "num_k"])
def _lags_kernel(waves, quarter, dtaps, lags, num_k, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """dtaps [D, lags] from waves [D, num_k, SIZE, 2] = IFFT(S_k); quarter [SIZE, 2] = e(m / 4 SIZE)."""
    num_l = tl.cdiv(lags, BLOCK)
    i_d = (tl.program_id(0) // num_l).to(tl.int64)
    o_l = tl.program_id(0) % num_l * BLOCK + tl.arange(0, BLOCK)
    m_l = o_l < lags
    p_quarter = quarter + 2 * (o_l % SIZE)
    b_cos, b_sin = tl.load(p_quarter), tl.load(p_quarter + 1)
    p_waves = waves + (i_d * num_k * (2 * SIZE) + 2 * o_l)
    b_re, b_im = tl.load(p_waves, mask=m_l, other=0.0), tl.load(p_waves + 1, mask=m_l, other=0.0)
    b_sum = b_re * b_cos - b_im * b_sin
    # lags less one block of the next k
    m_l &= o_l // SIZE + 1 < num_k
    b_re = tl.load(p_waves + 2 * SIZE, mask=m_l, other=0.0)
    b_im = tl.load(p_waves + (2 * SIZE + 1), mask=m_l, other=0.0)
    tl.store(dtaps + i_d * lags + o_l, b_sum + (b_re * b_sin + b_im * b_cos), mask=o_l < lags)


@triton.jit
def finish(
    b_y,
    o_b,
    o_t,
    m_t,
    i_d,
    skip,
    direct,
    direct_gate,
    scale,
    other,
    y,
    plain,
    product,
    D,
    T,
    direct_stride_b,
    direct_stride_d,
    direct_gate_stride_b,
    direct_gate_stride_d,
    scale_stride_b,
    scale_stride_d,
    other_stride_b,
    other_stride_d,
):
    """From sums over taps to the outputs of a convolution."""
    o_y = (o_b * D + i_d)[:, None] * T + o_t
    if skip is not None:
        o_direct = (o_b * direct_stride_b + i_d * direct_stride_d)[:, None] + o_t
        b_x = tl.load(direct + o_direct, mask=m_t, other=0.0).to(tl.float32)
        if direct_gate is not None:
            o_direct = (o_b * direct_gate_stride_b + i_d * direct_gate_stride_d)[:, None] + o_t
            b_x *= tl.load(direct_gate + o_direct, mask=m_t, other=0.0).to(tl.float32)
        b_y += tl.load(skip + i_d).to(tl.float32) * b_x
    if plain is not None:
        tl.store(plain + o_y, b_y, mask=m_t)
    if product is not None:
        o_other = (o_b * other_stride_b + i_d * other_stride_d)[:, None] + o_t
        b_other = tl.load(other + o_other, mask=m_t, other=0.0).to(tl.float32)
        tl.store(product + o_y, (b_y * b_other).to(product.dtype.element_ty), mask=m_t)
    if scale is not None:
        o_scale = (o_b * scale_stride_b + i_d * scale_stride_d)[:, None] + o_t
        b_y *= tl.load(scale + o_scale, mask=m_t, other=0.0).to(tl.float32)
    tl.store(y + o_y, b_y.to(y.dtype.element_ty), mask=m_t)


@triton.jit
def _spectrum(b_x, b_re, b_im, b_cos, b_sin, b_wr, b_wi, b_minus_wi):
    """Both parts of the spectrum of a block x [R, N], in float16, which must hold the sum of its magnitudes."""
    b_vr, b_vi = tl.dot(b_re, b_x).to(tl.float16), tl.dot(b_im, b_x).to(tl.float16)
    b_vr, b_vi = b_vr * b_cos - b_vi * b_sin, b_vr * b_sin + b_vi * b_cos
    b_xr = tl.dot(b_vi, b_minus_wi, tl.dot(b_vr, b_wr))
    b_xi = tl.dot(b_vi, b_wr, tl.dot(b_vr, b_wi))
    return b_xr.to(tl.float16), b_xi.to(tl.float16)


@triton.jit
def _load_part(p_spectra, R: tl.constexpr, N: tl.constexpr):
    """[R, N] numbers that lie as the threads hold the result of a product, so that nothing is exchanged."""
    b_part = tl.load(p_spectra + tl.arange(0, R * N))
    b_part = tl.permute(tl.reshape(b_part, [N // 16, R // 16, 8, 4, 2, 2, 2]), (1, 4, 2, 0, 5, 3, 6))
    return tl.reshape(b_part, [R, N])


@triton.jit
def _store_part(p_spectra, b_part, R: tl.constexpr, N: tl.constexpr):
    """What `_load_part` loads."""
    b_part = tl.permute(tl.reshape(b_part, [R // 16, 2, 8, N // 16, 2, 4, 2]), (3, 0, 2, 5, 1, 4, 6))
    tl.store(p_spectra + tl.arange(0, R * N), tl.reshape(b_part, [R * N]))


@triton.jit
def _add_product(b_r, b_i, b_hr, b_hi, b_xr, b_xi, CONJUGATE: tl.constexpr):
    """b + h x (CONJUGATE: the conjugate of h). Sums in float16, of which one instruction makes two."""
    if CONJUGATE:
        b_hi = -b_hi
    b_r = tl.fma(-b_hi, b_xi, tl.fma(b_hr, b_xr, b_r))
    return b_r, tl.fma(b_hi, b_xr, tl.fma(b_hr, b_xi, b_i))


@triton.jit
def _times_at_most(size, limit):
    """The largest power of two by which numbers up to size may be multiplied to be no larger than limit."""
    return tl.exp2(tl.floor(tl.log2(limit / tl.maximum(size, 1e-30))))


@triton.jit(do_not_specialize=["num_k"])
def _taps_spectra_kernel(
    filter,
    inner,
    turns,
    outer,
    spectra,
    factors,
    lags,
    num_k,
    stride_d,
    stride_l,
    R: tl.constexpr,
    N: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """spectra [D, num_k, 2, R N]: both parts of W_k over a scale, in the order of `_store_part`.

    factors [D, 2]: by how much the largest sum over k of their magnitudes is below one, at most N; what takes the
    scale and that of the inverse back.
    """
    SIZE: tl.constexpr = R * N
    i_d = tl.program_id(0).to(tl.int64)
    o_r, o_n = tl.arange(0, R), tl.arange(0, N)
    o_t = o_r[:, None] * N + o_n[None, :]
    p_filter = filter + i_d * stride_d
    b_sums = tl.zeros([SIZE], tl.float32)
    for k in range(num_k):
        o_l = k * SIZE + tl.arange(0, SIZE)
        b_sums += tl.abs(tl.load(p_filter + o_l * stride_l, mask=o_l < lags, other=0.0).to(tl.float32))
    # no number of a spectrum is larger than the sum of magnitudes
    b_times = _times_at_most(tl.sum(b_sums, 0), LARGEST)
    p_inner = inner + (o_r[:, None] * R + o_r[None, :])
    b_re, b_im = tl.load(p_inner), tl.load(p_inner + R * R)
    b_cos, b_sin = tl.load(turns + o_t), tl.load(turns + SIZE + o_t)
    p_outer = outer + (o_n[:, None] * N + o_n[None, :])
    b_wr, b_wi, b_minus_wi = tl.load(p_outer), tl.load(p_outer + N * N), tl.load(p_outer + 2 * N * N)
    b_before_r, b_before_i = tl.zeros([R, N], tl.float32), tl.zeros([R, N], tl.float32)
    b_total = tl.zeros([R, N], tl.float32)
    for k in range(num_k):
        o_l = k * SIZE + o_t
        b_h = tl.load(p_filter + o_l * stride_l, mask=o_l < lags, other=0.0).to(tl.float32)
        b_r, b_i = _spectrum((b_h * b_times).to(tl.float16), b_re, b_im, b_cos, b_sin, b_wr, b_wi, b_minus_wi)
        # two windows overlap, and the sum over all of them shall be at most one
        b_r, b_i = b_r.to(tl.float32) * (0.5 / LARGEST), b_i.to(tl.float32) * (0.5 / LARGEST)
        b_hr, b_hi = b_r - b_before_i, b_i + b_before_r
        b_before_r, b_before_i = b_r, b_i
        b_total += tl.sqrt(b_hr * b_hr + b_hi * b_hi)
        p_spectra = spectra + (i_d * num_k + k) * (2 * SIZE)
        _store_part(p_spectra, b_hr.to(tl.float16), R, N)
        _store_part(p_spectra + SIZE, b_hi.to(tl.float16), R, N)
    most = tl.max(tl.max(b_total, 1), 0)
    tl.store(factors + 2 * i_d, tl.minimum(1.0 / tl.maximum(most, 1e-30), N))
    tl.store(factors + 2 * i_d + 1, 2.0 * LARGEST / SIZE / b_times)


@triton.jit(do_not_specialize=["B", "num_groups", "per_group"])
def _conv_spectra_kernel(
    x,
    spectra,
    factors,
    inner,
    turns,
    outer,
    skip,
    direct,
    direct_gate,
    scale,
    other,
    y,
    plain,
    product,
    B,
    D,
    T,
    x_T,
    num_groups,
    per_group,
    x_stride_b,
    x_stride_d,
    direct_stride_b,
    direct_stride_d,
    direct_gate_stride_b,
    direct_gate_stride_d,
    scale_stride_b,
    scale_stride_d,
    other_stride_b,
    other_stride_d,
    REVERSE: tl.constexpr,
    R: tl.constexpr,
    N: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    NUM_K: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """What `_conv_kernel` of `triton.py` computes, for per_group sequences of one channel, block after block."""
    SIZE: tl.constexpr = R * N
    i_d, i_group = (tl.program_id(0) // num_groups).to(tl.int64), tl.program_id(0) % num_groups
    o_r, o_n, o_s = tl.arange(0, R), tl.arange(0, N), tl.arange(0, SIZE)
    o_t = o_r[:, None] * N + o_n[None, :]
    p_inner = inner + (o_r[:, None] * R + o_r[None, :])
    b_re, b_im = tl.load(p_inner), tl.load(p_inner + R * R)
    b_cos, b_sin = tl.load(turns + o_t), tl.load(turns + SIZE + o_t)
    p_outer = outer + (o_n[:, None] * N + o_n[None, :])
    b_wr, b_wi, b_minus_wi = tl.load(p_outer), tl.load(p_outer + N * N), tl.load(p_outer + 2 * N * N)
    factor, back = tl.load(factors + 2 * i_d), tl.load(factors + 2 * i_d + 1)
    p_spectra = spectra + i_d * (NUM_K * 2 * SIZE)
    b_zero = tl.zeros([R, N], tl.float16)
    first = (i_group * per_group).to(tl.int64)
    for b in range(tl.minimum(per_group, B - first)):
        i_b = first + b
        p_x = x + (i_b * x_stride_b + i_d * x_stride_d)
        b_sums = tl.zeros([SIZE], tl.float32)
        for i in tl.static_range(NUM_CHUNKS):
            b_sums += tl.abs(tl.load(p_x + i * SIZE + o_s, mask=i * SIZE + o_s < x_T, other=0.0).to(tl.float32))
        # no number of a spectrum is larger than the sum of magnitudes; the inverse multiplies by N at most
        times = _times_at_most(tl.sum(b_sums, 0), factor * (LARGEST / N))
        past_r, past_i = (), ()
        o_x = (NUM_CHUNKS - 1) * SIZE + o_t if REVERSE else o_t
        b_next = tl.load(p_x + o_x, mask=o_x < x_T, other=0.0)
        # unrolled: what a loop carries would take twice the registers
        for i in tl.static_range(NUM_CHUNKS):
            o_x = ((NUM_CHUNKS - 1 - i) if REVERSE else i) * SIZE + o_t
            b_x = (b_next.to(tl.float32) * times).to(tl.float16)
            if i + 1 < NUM_CHUNKS:
                o_next = ((NUM_CHUNKS - 2 - i) if REVERSE else i + 1) * SIZE + o_t
                b_next = tl.load(p_x + o_next, mask=o_next < x_T, other=0.0)
            b_hr, b_hi = _load_part(p_spectra, R, N), _load_part(p_spectra + SIZE, R, N)
            b_xr, b_xi = _spectrum(b_x, b_re, b_im, b_cos, b_sin, b_wr, b_wi, b_minus_wi)
            b_pr, b_pi = _add_product(b_zero, b_zero, b_hr, b_hi, b_xr, b_xi, REVERSE)
            for k in tl.static_range(1, NUM_K):
                if k <= i:
                    p_k = p_spectra + k * (2 * SIZE)
                    b_hr, b_hi = _load_part(p_k, R, N), _load_part(p_k + SIZE, R, N)
                    b_pr, b_pi = _add_product(b_pr, b_pi, b_hr, b_hi, past_r[k - 1], past_i[k - 1], REVERSE)
            # Triton knows no stars in tuples
            past_r, past_i = (b_xr,) + past_r, (b_xi,) + past_i  # type: ignore[assignment]  # noqa: RUF005
            b_ur = tl.dot(b_pi, b_wi, tl.dot(b_pr, b_wr)).to(tl.float16)
            b_ui = tl.dot(b_pr, b_minus_wi, tl.dot(b_pi, b_wr)).to(tl.float16)
            # one part after the other: fewer registers
            b_y = tl.dot(tl.trans(b_re), b_ur * b_cos + b_ui * b_sin)
            b_y = tl.dot(tl.trans(b_im), b_ui * b_cos - b_ur * b_sin, b_y)
            finish(
                b_y * (back / times),
                i_b + o_r * 0,
                o_x,
                o_x < T,
                i_d,
                skip,
                direct,
                direct_gate,
                scale,
                other,
                y,
                plain,
                product,
                D,
                T,
                direct_stride_b,
                direct_stride_d,
                direct_gate_stride_b,
                direct_gate_stride_d,
                scale_stride_b,
                scale_stride_d,
                other_stride_b,
                other_stride_d,
            )


@functools.lru_cache(maxsize=1024)
def _spectra_plan(length: int, lags: int) -> tuple[int, int, int]:
    """(N, blocks of a sequence, spectra S_k) with the fewest numbers transformed."""

    def counts(n: int) -> tuple[int, int, int]:
        chunks, blocks = cdiv(length, RADIX * n), cdiv(lags, RADIX * n)
        # one more for what it has of the last lags
        return n, chunks, blocks + (chunks > blocks)

    def cost(plan: tuple[int, int, int]) -> int:
        n, chunks, num_k = plan
        return n * sum(chunks - k for k in range(num_k))

    return min((counts(n) for n in REGISTERS), key=cost)


_kept_tables: dict[tuple[int, torch.device], tuple[Tensor, ...]] = {}


def _tables(n: int, device: torch.device) -> tuple[Tensor, ...]:
    """What does not depend on the input: made once, unless first while a graph is recorded, to whose memory it belongs.

    Some forty small kernels make it, as long as a short convolution takes.
    """
    tables = _kept_tables.get((n, device))
    if tables is None:
        tables = _make_tables(n, device)
        if not (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            _kept_tables[n, device] = tables
    return tables


def _make_tables(n: int, device: torch.device) -> tuple[Tensor, ...]:
    """inner [4, R, R], turns [2, R, N], outer [3, N, N] of `_spectra_kernel`, quarter [R N, 2] of `_lags_kernel`.

    inner: e(-(j + 1/4) p / R), its real and imaginary part, in bfloat16 and what that leaves. turns: e(-(j + 1/4) q /
    R N), outer: e(-q k / N), both parts in float16, and minus the second one.
    """
    size = RADIX * n
    row, column, step = (torch.arange(i, dtype=torch.float64, device=device) for i in (RADIX, n, size))

    def e(turns: Tensor) -> tuple[Tensor, Tensor]:
        return (2 * math.pi * turns).cos(), (2 * math.pi * turns).sin()

    inner = []
    for part in e(-(row[:, None] + 0.25) * row / RADIX):
        rounded = part.bfloat16()
        inner += [rounded, (part - rounded.double()).bfloat16()]
    turns = e(-(row[:, None] + 0.25) * column / size)
    real, imaginary = e(-column[:, None] * column / n)
    outer = torch.stack([real, imaginary, -imaginary])
    quarter = torch.stack(e(step / (4 * size)), 1)
    half = torch.stack(e(-(row[:, None] + 0.25) * row / RADIX)).half()
    return torch.stack(inner), torch.stack(turns).half(), outer.half(), quarter.float(), half


def strides(x: Tensor | None) -> tuple[int, int]:
    return (0, 0) if x is None else (x.stride(0), x.stride(2))


def taps_bwd(x: Tensor, g: Tensor, length: int, lags: int) -> Tensor:
    """The gradient of taps [D, lags] in float32, from x and g of `gated`."""
    if not x.dtype == g.dtype == torch.bfloat16:
        size = fast_length(length + lags - 1)
        x_hat, g_hat = (torch.fft.rfft(v.transpose(1, 2)[..., :length].float(), n=size) for v in (x, g))
        return correlated(x_hat, g_hat, size)[:, :lags]
    batch, _, width = x.shape
    n, num_chunks, num_k = _spectra_plan(length, lags)
    size = RADIX * n
    inner, turns, outer, quarter, _ = _tables(n, x.device)
    # programs enough for every multiprocessor
    num_splits = min(batch, cdiv(6 * num_processors(x.device), width * num_k))
    spectra = torch.empty((num_splits, width, num_k, size, 2), dtype=torch.float32, device=x.device)
    launch(
        _spectra_kernel,
        num_splits * width * num_k,
        x,
        g,
        inner,
        turns,
        outer,
        spectra,
        batch,
        width,
        x.shape[1],
        g.shape[1],
        num_chunks,
        num_k,
        num_splits,
        *strides(x),
        *strides(g),
        R=RADIX,
        N=n,
        NUM_STAGES=SPECTRA_STAGES[n],
        num_warps=4,
        # which AMD's compiler does not know
        **({"maxnreg": REGISTERS[n]} if speaks_ptx() else {}),
    )
    waves = torch.fft.ifft(torch.view_as_complex(spectra[0] if num_splits == 1 else spectra.sum(0)))
    dtaps = torch.empty((width, lags), dtype=torch.float32, device=x.device)
    launch(
        _lags_kernel,
        width * cdiv(lags, TAP_BLOCK),
        torch.view_as_real(waves),
        quarter,
        dtaps,
        lags,
        num_k,
        SIZE=size,
        BLOCK=TAP_BLOCK,
        num_warps=4,
    )
    return dtaps


class ConvPlan(NamedTuple):
    """n: N. num_chunks: blocks of a sequence. num_k: spectra of the taps."""

    n: int
    num_chunks: int
    num_k: int


class TapsSpectra(NamedTuple):
    """W_k and factors of `_taps_spectra_kernel`, for a plan."""

    spectra: Tensor
    factors: Tensor
    plan: ConvPlan


@functools.lru_cache(maxsize=1024)
def _conv_plan(length: int, lags: int) -> ConvPlan:
    """The smaller blocks where one is enough."""
    n = next((n for n in CONV_SIZES if length <= RADIX * n), max(CONV_SIZES))
    chunks, blocks = cdiv(length, RADIX * n), cdiv(lags, RADIX * n)
    # one more for what of the last lags goes on in the next block
    return ConvPlan(n, chunks, blocks + (chunks > blocks))


def takes_spectra(x: Tensor, lags: int) -> bool:
    """Whether `conv_spectra` convolves x [B, T, D], the product of `Gated`, with that many taps."""
    return x.dtype == torch.bfloat16 and _conv_plan(x.shape[1], lags).num_chunks <= max(CONV_REGISTERS)


def taps_spectra(filter: Tensor, length: int, lags: int) -> TapsSpectra:
    """Of the first lags taps of filter [D, L], for sequences of some length."""
    plan = _conv_plan(length, lags)
    width, size = filter.shape[0], RADIX * plan.n
    spectra = torch.empty((width, plan.num_k, 2, size), dtype=torch.float16, device=filter.device)
    factors = torch.empty((width, 2), dtype=torch.float32, device=filter.device)
    launch(
        _taps_spectra_kernel,
        width,
        filter,
        *_half_tables(plan.n, filter.device),
        spectra,
        factors,
        lags,
        plan.num_k,
        *filter.stride(),
        R=RADIX,
        N=plan.n,
        LARGEST=LARGEST,
        num_warps=4,
    )
    return TapsSpectra(spectra, factors, plan)


def _conv_registers(plan: ConvPlan) -> int:
    return next(registers for chunks, registers in CONV_REGISTERS.items() if plan.num_chunks <= chunks)


def conv_spectra(
    source: tuple[Tensor, Tensor, Tensor | None],
    taps: TapsSpectra,
    skip: Tensor | None = None,
    reverse: bool = False,
    scale: Tensor | None = None,
    other: Tensor | None = None,
    with_plain: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(scale conv, conv in float32, other conv), the second and third on request, all [B, T, D]; see `conv`.

    source: `Gated` of bfloat16, whose product has lengths and strides that are multiples of 16.
    """
    x, direct, direct_gate = source
    batch, length, width = direct.shape
    n, num_chunks, num_k = taps.plan
    y = empty_time_last(direct)
    plain = empty_time_last(direct, torch.float32) if with_plain else None
    product = None if other is None else empty_time_last(direct)
    per_group = max(1, min(PER_PROGRAM, width * batch // (LEAST_PROGRAMS * num_processors(x.device))))
    num_groups = cdiv(batch, per_group)
    launch(
        _conv_spectra_kernel,
        width * num_groups,
        x,
        taps.spectra,
        taps.factors,
        *_half_tables(n, x.device),
        skip,
        direct if skip is not None else None,
        direct_gate if skip is not None else None,
        scale,
        other,
        y,
        plain,
        product,
        batch,
        width,
        length,
        x.shape[1],
        num_groups,
        per_group,
        *strides(x),
        *strides(direct),
        *strides(direct_gate),
        *strides(scale),
        *strides(other),
        REVERSE=reverse,
        R=RADIX,
        N=n,
        NUM_CHUNKS=num_chunks,
        NUM_K=num_k,
        LARGEST=LARGEST,
        num_warps=4,
        # with more, everything that is loaded would have a place in shared memory
        num_stages=1,
        # which AMD's compiler does not know
        **({"maxnreg": _conv_registers(taps.plan)} if speaks_ptx() else {}),
    )
    return y, plain, product


def _half_tables(n: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """inner [2, R, R], turns and outer of `_make_tables`, all in float16."""
    _, turns, outer, _, inner = _tables(n, device)
    return inner, turns, outer
