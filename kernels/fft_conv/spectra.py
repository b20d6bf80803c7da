"""The gradient of the taps of a long convolution in Triton, from spectra of blocks as products with small matrices.

Of a block of n = R N steps, t = N p + q, at n frequencies a quarter off the usual ones,

    X[j + R k] = sum_t x[t] e(-(j + R k + 1/4) t / n),    e(z) = exp(2 pi i z)
               = sum_q e(-q k / N) e(-(j + 1/4) q / n) sum_p e(-(j + 1/4) p / R) x[N p + q]

is two products with small matrices and a turn of each number between. With x_c, g_c the blocks of all sequences,

    S_k = sum_c conj(X_c) G_(c+k),    s_k[m] = e(m / 4 n) IFFT(S_k)[m] = sum_c sum_t x_c[t] (g_(c+k)[t + m]
                                                                                   + i g_(c+k)[t + m - n])
    dtaps[k n + m] = Re s_k[m] + Im s_(k+1)[m]

(numbers outside of a block are zeros): the quarter keeps what goes around apart, so n steps need no padding.

x and g in bfloat16; float16 between the two products, each j with a scale of its own; sums in float32. Of other dtypes
PyTorch's FFT. Deterministic. Multiply-adds for each of B D and each pair of blocks: 8 n (R + N).
"""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.fft_conv.chunked import fast_length
from kernels.launch import cdiv, launch, num_processors, speaks_ptx

RADIX = 64
"""R of the spectra: rows of the smallest product."""
REGISTERS = {16: 128, 32: 168}
"""By N of the spectra: what a thread of theirs may have, so that four and three programs fit a multiprocessor."""
SPECTRA_STAGES = {16: 2, 32: 3}
TAP_BLOCK = 1024


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


def _tables(n: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What does not depend on the input, kept unless a graph is being recorded, to whose memory it would belong."""
    recording = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    return (_make_tables.__wrapped__ if recording else _make_tables)(n, device)


@functools.cache
def _make_tables(n: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
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
    return torch.stack(inner), torch.stack(turns).half(), outer.half(), quarter.float()


def strides(x: Tensor | None) -> tuple[int, int]:
    return (0, 0) if x is None else (x.stride(0), x.stride(2))


def taps_bwd(x: Tensor, g: Tensor, length: int, lags: int) -> Tensor:
    """The gradient of taps [D, lags] in float32, from x and g of `gated`."""
    if not x.dtype == g.dtype == torch.bfloat16:
        size = fast_length(length + lags - 1)
        x_hat, g_hat = (torch.fft.rfft(v.transpose(1, 2)[..., :length].float(), n=size) for v in (x, g))
        return torch.fft.irfft((x_hat.conj() * g_hat).sum(0), n=size)[:, :lags]
    batch, _, width = x.shape
    n, num_chunks, num_k = _spectra_plan(length, lags)
    size = RADIX * n
    inner, turns, outer, quarter = _tables(n, x.device)
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
