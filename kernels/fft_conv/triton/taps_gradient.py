"""The gradient of the taps from spectra of blocks: short transforms as products with small matrices (`tables.py`).

With x_c and g_c the blocks of x and of the gradient of y, X_c and G_c their spectra, and sums over all sequences too,

    S_k = sum_c conj(X_c) G_(c+k)
    s_k[m] = e(m / 4 SIZE) IFFT(S_k)[m] = sum_c sum_t x_c[t] (g_(c+k)[t + m] + i g_(c+k)[t + m - SIZE])
    dtaps[k SIZE + m] = Re s_k[m] + Im s_(k+1)[m]

x and g are bfloat16. Between products elements are float16, each row j with a scale of its own; sums are float32. The
result does not depend on the order of programs. Multiply-adds for each of B D: 8 SIZE (R + N) for each pair of blocks.
x and g of other dtypes take PyTorch's FFT.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.device import num_processors
from subquad.kernels.fft_conv.chunked import correlated, fast_length
from subquad.kernels.fft_conv.triton.plan import GRADIENT_OPTIONS, RADIX, gradient_plan
from subquad.kernels.fft_conv.triton.tables import TABLES
from subquad.kernels.launch import cdiv, launch
from subquad.kernels.layout import strides

LAG_BLOCK = 1024
"""Number of taps that one program of `_lags_kernel` computes."""
PROGRAMS_PER_PROCESSOR = 6
"""Target number of programs for each multiprocessor; to reach it, several programs share a sum S_k."""


@triton.jit
def _columns(b_x, b_re, b_re_rest, b_im, b_im_rest, b_cos, b_sin):
    """The sum over p of a block x [R, N] times its twiddle factors, each row j divided by its largest element; and
    that element [R]."""
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
    x, g, inner, turns, outer, spectra,
    B, D, x_T, g_T, num_chunks, num_k, num_splits,
    x_stride_b, x_stride_d, g_stride_b, g_stride_d,
    R: tl.constexpr, N: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """spectra [splits, D, num_k, R N, 2], whose sums over splits are S_k; inner, turns, outer: as in `Tables`."""
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
    # pairs of blocks are numbered through, sequence by sequence; this program takes those from first to end
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
        # a branch would keep loads out of the pipeline, and a division would take as long as they do
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
        # one part of the spectrum of g after the other takes fewer registers
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
    """dtaps [D, lags] from waves [D, num_k, SIZE, 2] = IFFT(S_k) and quarter [SIZE, 2] = e(m / 4 SIZE)."""
    num_l = tl.cdiv(lags, BLOCK)
    i_d = (tl.program_id(0) // num_l).to(tl.int64)
    o_l = tl.program_id(0) % num_l * BLOCK + tl.arange(0, BLOCK)
    m_l = o_l < lags
    p_quarter = quarter + 2 * (o_l % SIZE)
    b_cos, b_sin = tl.load(p_quarter), tl.load(p_quarter + 1)
    p_waves = waves + (i_d * num_k * (2 * SIZE) + 2 * o_l)
    b_re, b_im = tl.load(p_waves, mask=m_l, other=0.0), tl.load(p_waves + 1, mask=m_l, other=0.0)
    b_sum = b_re * b_cos - b_im * b_sin
    # the imaginary part comes from the next k
    m_l &= o_l // SIZE + 1 < num_k
    b_re = tl.load(p_waves + 2 * SIZE, mask=m_l, other=0.0)
    b_im = tl.load(p_waves + (2 * SIZE + 1), mask=m_l, other=0.0)
    tl.store(dtaps + i_d * lags + o_l, b_sum + (b_re * b_sin + b_im * b_cos), mask=o_l < lags)


def taps_gradient(x: Tensor, g: Tensor, length: int, lags: int) -> Tensor:
    """The gradient of the taps [D, lags] in float32, from the products x and g of `gates.gated` [B, >= length, D]."""
    if not x.dtype == g.dtype == torch.bfloat16:
        size = fast_length(length + lags - 1)
        x_hat, g_hat = (torch.fft.rfft(v.transpose(1, 2)[..., :length].float(), n=size) for v in (x, g))
        return correlated(x_hat, g_hat, size)[:, :lags]
    batch, _, width = x.shape
    plan = gradient_plan(length, lags)
    tables, options = TABLES.get(plan.columns, x.device), GRADIENT_OPTIONS[plan.columns]
    num_splits = min(batch, cdiv(PROGRAMS_PER_PROCESSOR * num_processors(x.device), width * plan.num_k))
    spectra = torch.empty(num_splits, width, plan.num_k, plan.size, 2, dtype=torch.float32, device=x.device)
    x_stride_b, x_stride_d = strides(x, 0, 2)
    g_stride_b, g_stride_d = strides(g, 0, 2)
    # NUM_STAGES is the depth of one loop alone, not an option of the whole kernel
    launch(
        _spectra_kernel, num_splits * width * plan.num_k, x=x, g=g, inner=tables.inner, turns=tables.turns,
        outer=tables.outer, spectra=spectra, B=batch, D=width, x_T=x.shape[1], g_T=g.shape[1],
        num_chunks=plan.num_chunks, num_k=plan.num_k, num_splits=num_splits, x_stride_b=x_stride_b,
        x_stride_d=x_stride_d, g_stride_b=g_stride_b, g_stride_d=g_stride_d, R=RADIX, N=plan.columns,
        NUM_STAGES=options.num_stages, **options._replace(num_stages=None).keywords(),
    )  # fmt: skip
    waves = torch.fft.ifft(torch.view_as_complex(spectra[0] if num_splits == 1 else spectra.sum(0)))
    dtaps = torch.empty(width, lags, dtype=torch.float32, device=x.device)
    launch(
        _lags_kernel, width * cdiv(lags, LAG_BLOCK), waves=waves, quarter=tables.quarter, dtaps=dtaps, lags=lags,
        num_k=plan.num_k, SIZE=plan.size, BLOCK=LAG_BLOCK, num_warps=4,
    )  # fmt: skip
    return dtaps
