"""Circular convolutions of real sequences in float32, by complex transforms of half their length.

PyTorch's real transforms copy and pad their inputs, and its products of spectra are kernels of their own. Here a real
sequence v of SIZE = 2 M steps is read as the complex sequence v[2 n] + i v[2 n + 1], whose transform Z [M] needs no
copy. With w = exp(-2 pi i / SIZE), Z[M] = Z[0] and for k = 0 ... M / 2

    A = (Z[k] + conj Z[M - k]) / 2,    B = (Z[k] - conj Z[M - k]) / 2i
    V[k] = A + w^k B,                  V[M - k] = conj(A - w^k B)

are the spectrum of v at k and at M - k. One kernel goes from Z to V, multiplies it by the spectrum of the taps, and
goes back to the transform of a complex sequence; in the backward pass it also sums the spectrum of the gradient of the
taps. What it moves, and no other pass but those of the transforms and of the two transpositions, takes the time.

Source: the transform of one real sequence as in Press et al., Numerical Recipes, section 12.3.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.autograd import OnceDifferentiable, needs_gradient, not_saved
from subquad.kernels.device import num_processors
from subquad.kernels.fft_conv.triton.tables import TableCache
from subquad.kernels.launch import CompileOptions, cdiv, launch
from subquad.kernels.transpose import channels_last, padded_time_last

BLOCK, OPTIONS = 256, CompileOptions(num_warps=4)
"""Pairs of frequencies in a program."""
PROGRAMS_PER_PROCESSOR = 32
"""Programs for each multiprocessor among which the sequences of a channel are divided."""


def make_turns(size: int, device: torch.device) -> Tensor:
    """w^k [M / 2 + 1, 2] for k = 0 ... M / 2, real and imaginary part."""
    angle = torch.arange(size // 4 + 1, dtype=torch.float64, device=device) * (-2 * math.pi / size)
    return torch.stack([angle.cos(), angle.sin()], dim=1).float()


TURNS = TableCache(make_turns)


@triton.jit
def _numbers(p, o, mask):
    """Real and imaginary parts of the complex numbers at offsets o."""
    parts = tl.load(p + o[:, None] * 2 + tl.arange(0, 2)[None, :], mask=mask[:, None], other=0.0)
    return tl.split(parts)


@triton.jit
def _store(p, o, re, im, mask):
    tl.store(p + o[:, None] * 2 + tl.arange(0, 2)[None, :], tl.join(re, im), mask=mask[:, None])


@triton.jit
def _spectrum(z, row, o_k, o_m, w_re, w_im, mask):
    """V[k] and V[M - k] (real and imaginary parts) of the real sequence whose transform is in a row of z."""
    k_re, k_im = _numbers(z + row, o_k, mask)
    m_re, m_im = _numbers(z + row, o_m, mask)
    a_re, a_im = 0.5 * (k_re + m_re), 0.5 * (k_im - m_im)
    b_re, b_im = 0.5 * (k_im + m_im), 0.5 * (m_re - k_re)
    t_re, t_im = w_re * b_re - w_im * b_im, w_re * b_im + w_im * b_re
    return a_re + t_re, a_im + t_im, a_re - t_re, t_im - a_im


@triton.jit
def _product_kernel(
    z, taps, turns, out, x, sums,
    B, D, M,
    stride_b,
    BLOCK: tl.constexpr, CONJUGATE: tl.constexpr,
):  # fmt: skip
    """Filters the sequences of a channel, and sums the spectrum of the gradient of its taps.

    z, out, x: [B, D, M] complex, transforms of complex sequences.   taps [D, M + 1] complex, divided by 2 M.
    out: z times the taps, conjugated with CONJUGATE, or None.
    sums [splits, D, M + 1] complex: conj(X) V summed over the sequences of a program, with X and V the spectra of x and
    z, or None.   Grid: blocks of k of all channels, splits.
    """
    # channels are on the first axis of the grid, because the others end at 65535
    num_k, i_s = tl.cdiv(M // 2 + 1, BLOCK), tl.program_id(1)
    i_k, i_d = tl.program_id(0) % num_k, tl.program_id(0) // num_k
    o_k = i_k * BLOCK + tl.arange(0, BLOCK)
    mask = o_k <= M // 2
    o_m = tl.where(o_k == 0, 0, M - o_k)
    # M - k is k itself in the middle, and both of its values are the same
    mask_m = mask & (o_m != o_k)
    w_re, w_im = _numbers(turns, o_k, mask)
    p_taps = taps + i_d.to(tl.int64) * (M + 1) * 2
    h_re, h_im = _numbers(p_taps, o_k, mask)
    g_re, g_im = _numbers(p_taps, M - o_k, mask)
    if CONJUGATE:
        h_im, g_im = -h_im, -g_im
    if sums is not None:
        s_re, s_im = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
        r_re, r_im = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    part = tl.cdiv(B, tl.num_programs(1))
    row = (i_s * part).to(tl.int64) * stride_b + i_d.to(tl.int64) * M * 2
    for _ in range(i_s * part, tl.minimum(B, (i_s + 1) * part)):
        k_re, k_im, m_re, m_im = _spectrum(z, row, o_k, o_m, w_re, w_im, mask)
        if sums is not None:
            x_re, x_im, y_re, y_im = _spectrum(x, row, o_k, o_m, w_re, w_im, mask)
            s_re += x_re * k_re + x_im * k_im
            s_im += x_re * k_im - x_im * k_re
            r_re += y_re * m_re + y_im * m_im
            r_im += y_re * m_im - y_im * m_re
        if out is not None:
            k_re, k_im = k_re * h_re - k_im * h_im, k_re * h_im + k_im * h_re
            m_re, m_im = m_re * g_re - m_im * g_im, m_re * g_im + m_im * g_re
            # twice A and B of the product: the taps hold the half
            a_re, a_im = k_re + m_re, k_im - m_im
            t_re, t_im = k_re - m_re, k_im + m_im
            b_re, b_im = w_re * t_re + w_im * t_im, w_re * t_im - w_im * t_re
            _store(out + row, o_k, a_re - b_im, a_im + b_re, mask)
            _store(out + row, o_m, a_re + b_im, b_re - a_im, mask_m)
        row += stride_b
    if sums is not None:
        p_sums = sums + (i_s.to(tl.int64) * D + i_d) * (M + 1) * 2
        _store(p_sums, o_k, s_re, s_im, mask)
        _store(p_sums, M - o_k, r_re, r_im, mask & (M - o_k != o_k))


def _product(z: Tensor, taps: Tensor, conjugate: bool, out: Tensor | None, x: Tensor | None) -> Tensor | None:
    """`_product_kernel` on z [B, D, M] and x of that shape; the sums [D, M + 1] where x is given."""
    batch, width, half = z.shape
    blocks = cdiv(half // 2 + 1, BLOCK)
    splits = min(batch, cdiv(PROGRAMS_PER_PROCESSOR * num_processors(z.device), blocks * width))
    sums = None if x is None else z.new_empty(splits, width, half + 1)
    parts = [None if t is None else torch.view_as_real(t) for t in (z, taps, out, x, sums)]
    launch(
        _product_kernel, (blocks * width, splits), z=parts[0], taps=parts[1], turns=TURNS.get(2 * half, z.device),
        out=parts[2], x=parts[3], sums=parts[4], B=batch, D=width, M=half, stride_b=2 * width * half, BLOCK=BLOCK,
        CONJUGATE=conjugate, **OPTIONS.keywords(),
    )  # fmt: skip
    return None if sums is None else sums.sum(0) if splits > 1 else sums[0]


def _transformed(v: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """v [B, T, D] and zeros, as complex sequences [B, D, size / 2], and their transforms."""
    pairs = torch.view_as_complex(padded_time_last(v, size).unflatten(2, (-1, 2)))
    return pairs, torch.fft.fft(pairs)


def _back(product: Tensor, steps: int) -> Tensor:
    """The first steps of the real sequences [B, T, D] with transforms [B, D, M], times M."""
    real = torch.view_as_real(torch.fft.ifft(product, norm="forward")).flatten(2)
    return channels_last(real[..., :steps].transpose(1, 2))


def _convolved(v: Tensor, taps: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    pairs, z = _transformed(v, size)
    # the kernel leaves out two halves and the inverse transform divides by M = size / 2: their product is 1 / size
    h_hat = torch.fft.rfft(taps, n=size, norm="forward")
    _product(z, h_hat, False, pairs, None)
    return _back(pairs, v.shape[1]), z, h_hat


class _HalfSizeConv(OnceDifferentiable):
    @staticmethod
    def forward(ctx: Any, v: Tensor, taps: Tensor, size: int) -> Tensor:
        y, z, h_hat = _convolved(v, taps, size)
        ctx.save_for_backward(z if ctx.needs_input_grad[1] else None, h_hat)
        not_saved(ctx, v, taps)
        ctx.lags, ctx.size = taps.shape[1], size
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """dv = correlation of dy with the taps, dtaps = correlation of dy with v, summed over sequences."""
        z, h_hat = ctx.saved_tensors
        pairs, g = _transformed(dy, ctx.size)
        wanted = ctx.needs_input_grad[0]
        sums = _product(g, h_hat, True, pairs if wanted else None, z)
        dv = _back(pairs, dy.shape[1]) if wanted else None
        dtaps = None if sums is None else torch.fft.irfft(sums, n=ctx.size)[:, : ctx.lags]
        return dv, dtaps, None


def half_size_conv(v: Tensor, taps: Tensor, size: int) -> Tensor:
    """The first T steps of the circular convolution of an even length `size`, with channels contiguous.

    v [B, T, D] float32 in any layout, taps [D, <= size] float32; y [B, T, D] float32.
    """
    return _HalfSizeConv.apply(v, taps, size) if needs_gradient(v, taps) else _convolved(v, taps, size)[0]
