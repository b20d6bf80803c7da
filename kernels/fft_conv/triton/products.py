"""The long convolution by products with Toeplitz matrices on matrix units, without a transform.

For few taps; `spectra.py` takes over where a transform costs less.

A sequence lies as rows of C steps. With x the input of row c, step by step backwards from the end of the row,

    y[c C + j] = sum_m sum_i x[(c + 1) C - (m + 1) K + i] taps[(m + 1) K - C + j - i]

is for each m a product of [ROWS, K] elements of x and a Toeplitz matrix [K, C] that every row of every sequence of the
channel shares. Row i of that matrix is C consecutive taps from (m + 1) K - C - i on. `_taps_kernel` writes the taps in
SHIFTS copies, copy s shifted by s taps, so that each such row begins at a multiple of SHIFTS elements in one of them:
both operands are then plain wide loads, which Triton keeps in flight while products run.

Backward, with g the gradient of y, the same kernel goes forward in time (REVERSE),

    dx[c C + i] = sum_m sum_j g[c C + m K + j] taps[m K + j - i]

What is multiplied (`plan.Operands`): from `averaging_lags` taps on bfloat16 inputs (gated ones rounded) are multiplied
with bfloat16 taps. Below, taps are the sum of two bfloat16 TERMS, the rounded tap and the rounded rest, which together
are off by 2^-17; so are gated inputs, without an error, and of the four products that of the two rests is left out.
float32 inputs of up to `halves_steps` steps and their taps are halves, scaled sums of two float16 numbers, whose
products are three as well (`kernels/float16_parts.py`). With two terms the skip is part of the first tap. Otherwise
taps are float32 and products tf32x3.

Multiply-adds for each of B T D: lags - lags^2 / 2 T forward (times TERMS), and as many for dx. Bytes forward: 2
elements for each of B T D, and 2 SHIFTS elements a tap.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.fft_conv.triton.epilogue import (
    Epilogue,
    Outputs,
    empty_outputs,
    finish,
    stride_arguments,
    tensor_arguments,
)
from subquad.kernels.fft_conv.triton.gates import Gated
from subquad.kernels.fft_conv.triton.plan import Operands, ToeplitzPlan
from subquad.kernels.float16_parts import power_scale, split_dot
from subquad.kernels.launch import cdiv, launch

TAP_BLOCK = 1024
"""Number of taps that one program of `_taps_kernel` copies."""


@triton.jit
def _taps(filter, skip, o_l, lags, stride_l):
    """The taps [L] of the lags o_l, zero outside of them, with the skip in that of lag zero."""
    b_h = tl.load(filter + o_l.to(tl.int64) * stride_l, mask=(o_l >= 0) & (o_l < lags), other=0.0).to(tl.float32)
    if skip is not None:
        b_h += tl.where(o_l == 0, tl.load(skip).to(tl.float32), 0.0)
    return b_h


@triton.jit
def _taps_kernel(
    filter, skip, taps, scale,
    lags, size,
    stride_d, stride_l,
    C: tl.constexpr, SHIFTS: tl.constexpr, TERMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """taps [D, TERMS, SHIFTS, size]: copy s holds the tap of lag x - C - s at position x, and zeros around the taps.

    skip: [D] or None, added to the tap of lag zero. The second of two terms is what rounding leaves of the tap. Where
    `scale` [D] is given, taps are divided by it, a power of two.
    """
    num_x = tl.cdiv(size, BLOCK)
    i_d = (tl.program_id(0) // num_x).to(tl.int64)
    i_x = tl.program_id(0) % num_x
    o_x = i_x * BLOCK + tl.arange(0, BLOCK)
    p_filter = filter + i_d * stride_d
    p_skip = skip
    if skip is not None:
        p_skip = skip + i_d
    b_inverse = 1.0
    if scale is not None:
        b_most = tl.zeros([BLOCK], tl.float32)
        for first in range(0, lags, BLOCK):
            b_most = tl.maximum(b_most, tl.abs(_taps(p_filter, p_skip, first + tl.arange(0, BLOCK), lags, stride_l)))
        b_scale, b_inverse = power_scale(tl.max(b_most, 0))
        tl.store(scale + i_d, b_scale, mask=i_x == 0)
    for s in tl.static_range(SHIFTS):
        b_h = _taps(p_filter, p_skip, o_x - C - s, lags, stride_l) * b_inverse
        p_taps = taps + (i_d * TERMS * SHIFTS + s) * size + o_x
        b_rounded = b_h.to(taps.dtype.element_ty)
        tl.store(p_taps, b_rounded, mask=o_x < size)
        if TERMS == 2:
            b_rest = (b_h - b_rounded.to(tl.float32)).to(taps.dtype.element_ty)
            tl.store(p_taps + SHIFTS * size, b_rest, mask=o_x < size)


@triton.jit
def _multiply(b_sum, a, b, PRECISION: tl.constexpr):
    """b_sum + a b; the operands as they are or, where PRECISION is given, in float32."""
    if PRECISION is None:
        b_sum = tl.dot(a, b, b_sum)
    else:
        b_sum = tl.dot(a.to(tl.float32), b.to(tl.float32), b_sum, input_precision=PRECISION)
    return b_sum


@triton.jit
def _load_taps(p_rows, REVERSE: tl.constexpr):
    """The Toeplitz matrix whose rows are at p_rows; REVERSE: its transpose."""
    b_h = tl.load(p_rows)
    if REVERSE:
        b_h = tl.trans(b_h)
    return b_h


@triton.jit
def _load_rows(x, o_x, o_s, o_k, m_b, x_T):
    """x[o_s + o_k] for each row, with zeros outside of the sequence."""
    m_x = (m_b & (o_s >= 0))[:, None] & (o_s[:, None] + o_k[None, :] < x_T)
    return tl.load(x + (o_x[:, None] + (o_s[:, None] + o_k[None, :])), mask=m_x, other=0.0)


@triton.jit
def _shifted(o_i, size, SHIFTS: tl.constexpr):
    """Offset of the copy that holds the taps shifted by i, so that the rest of the offset is a multiple of SHIFTS.

    o_i must be a column: of a row, Triton 3.6 takes -i for a multiple of its length and makes misaligned loads.
    """
    return (o_i % SHIFTS) * size - o_i // SHIFTS * SHIFTS


@triton.jit(do_not_specialize=["B", "lags", "batch_groups", "num_groups"])
def _conv_kernel(
    x, x_rest, x_scale, taps, taps_scale, skip, direct, direct_gate, scale, other, y, plain, product,
    B, D, T, x_T, lags, size, batch_groups, num_groups,
    x_stride_b, x_stride_d, direct_stride_b, direct_stride_d, direct_gate_stride_b, direct_gate_stride_d,
    scale_stride_b, scale_stride_d, other_stride_b, other_stride_d, y_stride_b,
    REVERSE: tl.constexpr, TERMS: tl.constexpr, PRECISION: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr,
    PARTS: tl.constexpr, BATCH: tl.constexpr, K: tl.constexpr, SHIFTS: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """The convolution taps * x (REVERSE: the correlation, towards later steps) for ROWS / BATCH chunks of BATCH
    sequences of one channel, with the outputs of `epilogue.py`, all [B, D, T] with a stride along B.

    With two PARTS the half of the chunks nearer to the start of the sequence (REVERSE: to the end) stops there.
    """
    i_d, i_group = (tl.program_id(0) // num_groups).to(tl.int64), tl.program_id(0) % num_groups
    PART: tl.constexpr = ROWS // PARTS
    CHUNKS: tl.constexpr = PART // BATCH
    i_c = i_group // batch_groups * (PARTS * CHUNKS)
    if not REVERSE:
        # programs with the most work start first
        i_c = (num_groups // batch_groups - 1) * (PARTS * CHUNKS) - i_c
    o_r = tl.arange(0, PART)
    o_b = (i_group % batch_groups * BATCH + o_r // CHUNKS).to(tl.int64)
    m_b = o_b < B
    # the first chunk of the part that takes more steps, and of the other one
    i_long = i_c if REVERSE else i_c + (PARTS - 1) * CHUNKS
    i_short = i_c + CHUNKS if REVERSE else i_c
    o_c = o_r % CHUNKS
    o_k, o_j = tl.arange(0, K), tl.arange(0, C)
    o_x = o_b * x_stride_b + i_d * x_stride_d
    p_taps = taps + i_d * TERMS * SHIFTS * size
    # no product beyond these reaches a tap
    most_steps = tl.cdiv(lags + C - 1, K)
    if REVERSE:
        num_steps = tl.minimum(most_steps, tl.cdiv(T - i_long * C, K))
        num_short = tl.minimum(most_steps, tl.cdiv(tl.maximum(T - i_short * C, 0), K))
        o_first, towards = o_c * C, K
        # the rows of the transposed matrix, which begin C taps later
        p_rows = p_taps + (_shifted(o_j[:, None], size, SHIFTS) + C + o_k[None, :])
    else:
        most_steps = tl.minimum(most_steps, tl.cdiv(T, C) * (C // K))
        num_steps = tl.minimum(most_steps, (i_long + CHUNKS) * (C // K))
        num_short = tl.minimum(most_steps, (i_short + CHUNKS) * (C // K))
        o_first, towards = (o_c + 1) * C - K, -K
        p_rows = p_taps + (_shifted(o_k[:, None], size, SHIFTS) + K + o_j[None, :])
    o_long = o_first + i_long * C

    b_long = tl.zeros([PART, C], tl.float32)
    first = 0
    if PARTS == 2:
        o_short = o_first + i_short * C
        b_short = tl.zeros([PART, C], tl.float32)
        for m in tl.range(0, num_short, num_stages=NUM_STAGES):
            b_x = _load_rows(x, o_x, o_long + m * towards, o_k, m_b, x_T)
            b_z = _load_rows(x, o_x, o_short + m * towards, o_k, m_b, x_T)
            b_h = _load_taps(p_rows + m * K, REVERSE)
            if x_rest is not None:
                b_x2 = _load_rows(x_rest, o_x, o_long + m * towards, o_k, m_b, x_T)
                b_z2 = _load_rows(x_rest, o_x, o_short + m * towards, o_k, m_b, x_T)
                b_h2 = _load_taps(p_rows + (SHIFTS * size + m * K), REVERSE)
                b_long += split_dot(b_x, b_x2, b_h, b_h2)
                b_short += split_dot(b_z, b_z2, b_h, b_h2)
            else:
                b_long = _multiply(b_long, b_x, b_h, PRECISION)
                b_short = _multiply(b_short, b_z, b_h, PRECISION)
                if TERMS == 2:
                    b_h = _load_taps(p_rows + (SHIFTS * size + m * K), REVERSE)
                    b_long = _multiply(b_long, b_x, b_h, PRECISION)
                    b_short = _multiply(b_short, b_z, b_h, PRECISION)
        first = num_short
    for m in tl.range(first, num_steps, num_stages=NUM_STAGES):
        b_x = _load_rows(x, o_x, o_long + m * towards, o_k, m_b, x_T)
        b_h = _load_taps(p_rows + m * K, REVERSE)
        if x_rest is not None:
            b_x2 = _load_rows(x_rest, o_x, o_long + m * towards, o_k, m_b, x_T)
            b_h2 = _load_taps(p_rows + (SHIFTS * size + m * K), REVERSE)
            b_long += split_dot(b_x, b_x2, b_h, b_h2)
        else:
            b_long = _multiply(b_long, b_x, b_h, PRECISION)
            if TERMS == 2:
                b_h = _load_taps(p_rows + (SHIFTS * size + m * K), REVERSE)
                b_long = _multiply(b_long, b_x, b_h, PRECISION)

    tensors = skip, direct, direct_gate, scale, other, y, plain, product
    strides_b = direct_stride_b, direct_gate_stride_b, scale_stride_b, other_stride_b
    strides_d = direct_stride_d, direct_gate_stride_d, scale_stride_d, other_stride_d
    for part in tl.static_range(PARTS):
        b_y = b_long
        o_t = (i_long + o_c)[:, None] * C + o_j[None, :]
        if part == 1:
            b_y = b_short
            o_t = (i_short + o_c)[:, None] * C + o_j[None, :]
        if x_scale is not None:
            b_scale = tl.load(x_scale + (o_b * D + i_d), mask=m_b, other=0.0) * tl.load(taps_scale + i_d)
            b_y *= b_scale[:, None]
        finish(b_y, o_b, o_t, m_b[:, None] & (o_t < T), i_d, D, T, tensors, strides_b, strides_d, y_stride_b)


class ShiftedTaps(NamedTuple):
    """The copies [D, terms, SHIFTS, size] and scales [D] of `_taps_kernel`, of so many taps, and their plan."""

    copies: Tensor
    scale: Tensor | None
    """None where taps are not divided by a scale."""
    lags: int
    plan: ToeplitzPlan


def shifted_taps(filter: Tensor, skip: Tensor | None, lags: int, plan: ToeplitzPlan) -> ShiftedTaps:
    """Copies of the first `lags` taps of filter [D, L]; two terms contain the skip [D]."""
    width, tile, operands = filter.shape[0], plan.tile, plan.operands
    size = cdiv(lags + 2 * tile.chunk + tile.step, 64) * 64
    shape = (width, operands.num_terms, tile.copies, size)
    copies = torch.empty(shape, dtype=operands.dtype, device=filter.device)
    scale = torch.empty(width, dtype=torch.float32, device=filter.device) if operands is Operands.HALVES else None
    stride_d, stride_l = filter.stride()
    launch(
        _taps_kernel, width * cdiv(size, TAP_BLOCK), filter=filter, skip=skip if operands.num_terms == 2 else None,
        taps=copies, scale=scale, lags=lags, size=size, stride_d=stride_d, stride_l=stride_l, C=tile.chunk,
        SHIFTS=tile.copies, TERMS=operands.num_terms, BLOCK=TAP_BLOCK, num_warps=4,
    )  # fmt: skip
    return ShiftedTaps(copies, scale, lags, plan)


def conv_products(
    source: Gated, taps: ShiftedTaps, epilogue: Epilogue, reverse: bool, outputs: Outputs | None = None
) -> Outputs:
    """The convolution of `_conv_kernel`, or with `reverse` the correlation.

    outputs: where the results are written, all with one stride along B; None: into new tensors.
    """
    copies, scale, lags, plan = taps
    if plan.operands.num_terms == 2:
        # the first tap contains it
        epilogue = epilogue._replace(skip=None)
    batch, length, width = source.x.shape
    outputs, tile = outputs or empty_outputs(source.x, epilogue), plan.tile
    launch(
        _conv_kernel, width * plan.num_groups, x=source.product, x_rest=source.rest, x_scale=source.scale, taps=copies,
        taps_scale=scale, **tensor_arguments(source, epilogue, outputs), B=batch, D=width, T=length,
        x_T=source.product.shape[1], lags=lags, size=copies.shape[3], batch_groups=plan.batch_groups,
        num_groups=plan.num_groups, **stride_arguments(source, epilogue), y_stride_b=outputs.y.stride(0),
        REVERSE=reverse, TERMS=copies.shape[1], PRECISION=plan.precision, C=tile.chunk, ROWS=plan.rows,
        PARTS=plan.parts, BATCH=plan.batch, K=tile.step, SHIFTS=tile.copies, NUM_STAGES=tile.options.num_stages,
        num_warps=tile.options.num_warps,
    )  # fmt: skip
    return outputs
