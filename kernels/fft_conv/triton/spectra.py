"""The long convolution by spectra of blocks: short transforms as products with small matrices (`tables.py`).

With x_c and h_k the blocks of a sequence and of the taps (elements outside of them are zeros) and X_c, H_k their
spectra,

    p_c[m] = e(m / 4 SIZE) IFFT(sum_k H_k X_(c-k))[m] = sum_k sum_t h_k[t] (x_(c-k)[m - t] - i x_(c-k)[m + SIZE - t])
    y[c SIZE + m] = Re p_c[m] - Im p_(c-1)[m] = Re e(m / 4 SIZE) IFFT(sum_k W_k X_(c-k))[m],    W_k = H_k + i H_(k-1)
    dx[c SIZE + m] = Re e(m / 4 SIZE) IFFT(sum_k conj(W_k) G_(c+k))[m]

so that blocks do not wait for their neighbours. The inverse transform is the same two products in the other order, and
only its real part is computed.

Inputs are bfloat16, everything between products is float16, sums over k as well. Each sequence and each channel has one
scale, a power of two from the sum of its magnitudes, which no element of a spectrum exceeds. So the future changes the
past by rounding: 1e-3 of its own size. Multiply-adds for each of B D: 4 SIZE (R + 2 N) for each block, and on the
vector units 4 SIZE for each pair of blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.device import num_processors
from subquad.kernels.fft_conv.triton.epilogue import (
    Epilogue,
    Outputs,
    empty_outputs,
    finish,
    stride_arguments,
    tensor_arguments,
)
from subquad.kernels.fft_conv.triton.gates import Gated
from subquad.kernels.fft_conv.triton.plan import RADIX, SpectraPlan, conv_options, conv_plan
from subquad.kernels.fft_conv.triton.tables import TABLES
from subquad.kernels.launch import cdiv, launch

LARGEST = 32768.0
"""Upper bound of the magnitude of every float16 value, which the scales ensure."""
SEQUENCES_PER_PROGRAM = 4
"""Number of sequences that one program convolves one after the other; fewer if there would be too few programs."""
LEAST_PROGRAMS = 12
"""Target number of programs for each multiprocessor."""


@triton.jit
def _spectrum(b_x, b_re, b_im, b_cos, b_sin, b_wr, b_wi, b_minus_wi):
    """Both parts of the spectrum of a block x [R, N] in float16, which must be able to hold the sum of |x|."""
    b_vr, b_vi = tl.dot(b_re, b_x).to(tl.float16), tl.dot(b_im, b_x).to(tl.float16)
    b_vr, b_vi = b_vr * b_cos - b_vi * b_sin, b_vr * b_sin + b_vi * b_cos
    b_xr = tl.dot(b_vi, b_minus_wi, tl.dot(b_vr, b_wr))
    b_xi = tl.dot(b_vi, b_wr, tl.dot(b_vr, b_wi))
    return b_xr.to(tl.float16), b_xi.to(tl.float16)


@triton.jit
def load_part(p_spectra, R: tl.constexpr, N: tl.constexpr):
    """One part of a spectrum [R, N], which lies in memory as threads hold the result of a product, so that no element
    moves between threads."""
    b_part = tl.load(p_spectra + tl.arange(0, R * N))
    b_part = tl.permute(tl.reshape(b_part, [N // 16, R // 16, 8, 4, 2, 2, 2]), (1, 4, 2, 0, 5, 3, 6))
    return tl.reshape(b_part, [R, N])


@triton.jit
def store_part(p_spectra, b_part, R: tl.constexpr, N: tl.constexpr):
    """Stores one part of a spectrum in the order of `load_part`."""
    b_part = tl.permute(tl.reshape(b_part, [R // 16, 2, 8, N // 16, 2, 4, 2]), (3, 0, 2, 5, 1, 4, 6))
    tl.store(p_spectra + tl.arange(0, R * N), tl.reshape(b_part, [R * N]))


@triton.jit
def _add_product(b_r, b_i, b_hr, b_hi, b_xr, b_xi, CONJUGATE: tl.constexpr):
    """b + h x, with CONJUGATE b + conj(h) x, in float16, of which one instruction computes two."""
    if CONJUGATE:
        b_hi = -b_hi
    b_r = tl.fma(-b_hi, b_xi, tl.fma(b_hr, b_xr, b_r))
    return b_r, tl.fma(b_hi, b_xr, tl.fma(b_hr, b_xi, b_i))


@triton.jit
def times_at_most(size, limit):
    """The largest power of two whose product with `size` is at most `limit`."""
    return tl.exp2(tl.floor(tl.log2(limit / tl.maximum(size, 1e-30))))


@triton.jit(do_not_specialize=["num_k"])
def _taps_spectra_kernel(
    filter, inner, turns, outer, spectra, factors,
    lags, num_k,
    stride_d, stride_l,
    R: tl.constexpr, N: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """spectra [D, num_k, 2, R N]: both parts of W_k divided by a scale, in the order of `store_part`.

    factors [D, 2]: the inverse of the largest sum over k of |W_k|, at most N; and the factor that undoes the scale and
    the normalization of the inverse transform.
    """
    SIZE: tl.constexpr = R * N
    i_d = tl.program_id(0).to(tl.int64)
    o_r, o_n = tl.arange(0, R), tl.arange(0, N)
    o_t = o_r[:, None] * N + o_n[None, :]
    p_filter = filter + i_d * stride_d
    b_sums = tl.zeros([SIZE], tl.float32)
    for k in range(num_k):
        o_l = (k * SIZE + tl.arange(0, SIZE)).to(tl.int64)
        b_sums += tl.abs(tl.load(p_filter + o_l * stride_l, mask=o_l < lags, other=0.0).to(tl.float32))
    # no element of a spectrum exceeds the sum of magnitudes
    b_times = times_at_most(tl.sum(b_sums, 0), LARGEST)
    p_inner = inner + (o_r[:, None] * R + o_r[None, :])
    b_re, b_im = tl.load(p_inner), tl.load(p_inner + R * R)
    b_cos, b_sin = tl.load(turns + o_t), tl.load(turns + SIZE + o_t)
    p_outer = outer + (o_n[:, None] * N + o_n[None, :])
    b_wr, b_wi, b_minus_wi = tl.load(p_outer), tl.load(p_outer + N * N), tl.load(p_outer + 2 * N * N)
    b_before_r, b_before_i = tl.zeros([R, N], tl.float32), tl.zeros([R, N], tl.float32)
    b_total = tl.zeros([R, N], tl.float32)
    for k in range(num_k):
        o_l = (k * SIZE + o_t).to(tl.int64)
        b_h = tl.load(p_filter + o_l * stride_l, mask=o_l < lags, other=0.0).to(tl.float32)
        b_r, b_i = _spectrum((b_h * b_times).to(tl.float16), b_re, b_im, b_cos, b_sin, b_wr, b_wi, b_minus_wi)
        # W_k has two blocks of taps, and the sum of |W_k| is to be at most one
        b_r, b_i = b_r.to(tl.float32) * (0.5 / LARGEST), b_i.to(tl.float32) * (0.5 / LARGEST)
        b_hr, b_hi = b_r - b_before_i, b_i + b_before_r
        b_before_r, b_before_i = b_r, b_i
        b_total += tl.sqrt(b_hr * b_hr + b_hi * b_hi)
        p_spectra = spectra + (i_d * num_k + k) * (2 * SIZE)
        store_part(p_spectra, b_hr.to(tl.float16), R, N)
        store_part(p_spectra + SIZE, b_hi.to(tl.float16), R, N)
    most = tl.max(tl.max(b_total, 1), 0)
    tl.store(factors + 2 * i_d, tl.minimum(1.0 / tl.maximum(most, 1e-30), N))
    tl.store(factors + 2 * i_d + 1, 2.0 * LARGEST / SIZE / b_times)


@triton.jit(do_not_specialize=["B", "num_groups", "per_group"])
def _conv_spectra_kernel(
    x, spectra, factors, inner, turns, outer, skip, direct, direct_gate, scale, other, y, plain, product,
    B, D, T, x_T, num_groups, per_group,
    x_stride_b, x_stride_d, direct_stride_b, direct_stride_d, direct_gate_stride_b, direct_gate_stride_d,
    scale_stride_b, scale_stride_d, other_stride_b, other_stride_d,
    REVERSE: tl.constexpr, R: tl.constexpr, N: tl.constexpr, NUM_CHUNKS: tl.constexpr, NUM_K: tl.constexpr,
    LARGEST: tl.constexpr,
):  # fmt: skip
    """The convolution (REVERSE: the correlation) of per_group sequences of one channel, one block after the other, with
    the outputs of `epilogue.py`."""
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
    tensors = skip, direct, direct_gate, scale, other, y, plain, product
    strides_b = direct_stride_b, direct_gate_stride_b, scale_stride_b, other_stride_b
    strides_d = direct_stride_d, direct_gate_stride_d, scale_stride_d, other_stride_d
    for b in range(tl.minimum(per_group, B - first)):
        i_b = first + b
        p_x = x + (i_b * x_stride_b + i_d * x_stride_d)
        b_sums = tl.zeros([SIZE], tl.float32)
        for i in tl.static_range(NUM_CHUNKS):
            b_sums += tl.abs(tl.load(p_x + i * SIZE + o_s, mask=i * SIZE + o_s < x_T, other=0.0).to(tl.float32))
        # no element of a spectrum exceeds the sum of magnitudes; the inverse multiplies by N at most
        times = times_at_most(tl.sum(b_sums, 0), factor * (LARGEST / N))
        past_r, past_i = (), ()
        o_x = (NUM_CHUNKS - 1) * SIZE + o_t if REVERSE else o_t
        b_next = tl.load(p_x + o_x, mask=o_x < x_T, other=0.0)
        # unrolled, because values that a loop carries would take twice the registers
        for i in tl.static_range(NUM_CHUNKS):
            o_x = ((NUM_CHUNKS - 1 - i) if REVERSE else i) * SIZE + o_t
            b_x = (b_next.to(tl.float32) * times).to(tl.float16)
            if i + 1 < NUM_CHUNKS:
                o_next = ((NUM_CHUNKS - 2 - i) if REVERSE else i + 1) * SIZE + o_t
                b_next = tl.load(p_x + o_next, mask=o_next < x_T, other=0.0)
            b_hr, b_hi = load_part(p_spectra, R, N), load_part(p_spectra + SIZE, R, N)
            b_xr, b_xi = _spectrum(b_x, b_re, b_im, b_cos, b_sin, b_wr, b_wi, b_minus_wi)
            b_pr, b_pi = _add_product(b_zero, b_zero, b_hr, b_hi, b_xr, b_xi, REVERSE)
            for k in tl.static_range(1, NUM_K):
                if k <= i:
                    p_k = p_spectra + k * (2 * SIZE)
                    b_hr, b_hi = load_part(p_k, R, N), load_part(p_k + SIZE, R, N)
                    b_pr, b_pi = _add_product(b_pr, b_pi, b_hr, b_hi, past_r[k - 1], past_i[k - 1], REVERSE)
            # Triton does not support unpacking in a tuple
            past_r, past_i = (b_xr,) + past_r, (b_xi,) + past_i  # type: ignore[assignment]  # noqa: RUF005
            b_ur = tl.dot(b_pi, b_wi, tl.dot(b_pr, b_wr)).to(tl.float16)
            b_ui = tl.dot(b_pr, b_minus_wi, tl.dot(b_pi, b_wr)).to(tl.float16)
            # adding one part after the other takes fewer registers
            b_y = tl.dot(tl.trans(b_re), b_ur * b_cos + b_ui * b_sin)
            b_y = tl.dot(tl.trans(b_im), b_ui * b_cos - b_ur * b_sin, b_y)
            finish(b_y * (back / times), i_b + o_r * 0, o_x, o_x < T, i_d, D, T, tensors, strides_b, strides_d)


class TapsSpectra(NamedTuple):
    """The spectra and factors of `_taps_spectra_kernel`, and the plan they are made for."""

    spectra: Tensor
    factors: Tensor
    plan: SpectraPlan


def taps_spectra(filter: Tensor, length: int, lags: int) -> TapsSpectra:
    """The spectra of the first `lags` taps of filter [D, L], for sequences of some length."""
    plan = conv_plan(length, lags)
    width, tables = filter.shape[0], TABLES.get(plan.columns, filter.device)
    spectra = torch.empty(width, plan.num_k, 2, plan.size, dtype=torch.float16, device=filter.device)
    factors = torch.empty(width, 2, dtype=torch.float32, device=filter.device)
    stride_d, stride_l = filter.stride()
    launch(
        _taps_spectra_kernel, width, filter=filter, inner=tables.half_inner, turns=tables.turns, outer=tables.outer,
        spectra=spectra, factors=factors, lags=lags, num_k=plan.num_k, stride_d=stride_d, stride_l=stride_l, R=RADIX,
        N=plan.columns, LARGEST=LARGEST, num_warps=4,
    )  # fmt: skip
    return TapsSpectra(spectra, factors, plan)


def conv_spectra(source: Gated, taps: TapsSpectra, epilogue: Epilogue, reverse: bool) -> Outputs:
    """The convolution of `_conv_spectra_kernel`, or with `reverse` the correlation.

    The product of `source` is bfloat16, with a length and strides that are multiples of 16.
    """
    x, plan = source.product, taps.plan
    batch, length, width = source.x.shape
    outputs, tables = empty_outputs(source.x, epilogue), TABLES.get(plan.columns, x.device)
    most = width * batch // (LEAST_PROGRAMS * num_processors(x.device))
    per_group = max(1, min(SEQUENCES_PER_PROGRAM, most))
    num_groups = cdiv(batch, per_group)
    launch(
        _conv_spectra_kernel, width * num_groups, x=x, spectra=taps.spectra, factors=taps.factors,
        inner=tables.half_inner, turns=tables.turns, outer=tables.outer, **tensor_arguments(source, epilogue, outputs),
        B=batch, D=width, T=length, x_T=x.shape[1], num_groups=num_groups, per_group=per_group,
        **stride_arguments(source, epilogue), REVERSE=reverse, R=RADIX, N=plan.columns, NUM_CHUNKS=plan.num_chunks,
        NUM_K=plan.num_k, LARGEST=LARGEST, **conv_options(plan),
    )  # fmt: skip
    return outputs
