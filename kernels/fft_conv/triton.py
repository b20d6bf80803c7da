"""The long convolution in Triton: Toeplitz products on matrix units, without a transform.

A sequence lies as rows of C steps. With x the input of row c, step by step backwards from the end of the row,

    y[c C + j] = sum_m sum_i x[(c + 1) C - (m + 1) K + i] taps[(m + 1) K - C + j - i]

is for each m a product of [ROWS, K] numbers of x and a Toeplitz matrix [K, C] that every row of every sequence of the
channel shares. Row i of that matrix is C consecutive taps from (m + 1) K - C - i. `_taps_kernel` writes the taps in
SHIFTS copies, copy s moved by s steps, so that each such row begins at a multiple of SHIFTS numbers in one of them:
both operands are then plain wide loads, which Triton keeps in flight while products run.

Backward, with g the gradient of y, the same kernel goes forward in time (REVERSE),

    dx[c C + i] = sum_m sum_j g[c C + m K + j] taps[m K + j - i]

and taps come from spectra (`spectra.py`), few ones from products of chunks (`diagonals.py`).

Layout: time contiguous; y and gradients have it too. Inputs of another order are turned (`time_last`), those of lengths
that are no multiple of 16 and gated ones written once more (`_gate_kernel`). From AVERAGING_LAGS taps on bfloat16
inputs (gated ones rounded) meet bfloat16 taps. Below, ungated ones meet taps of two bfloat16 TERMS, the rounded tap and
what rounding leaves of it; together they are 2^-17 off, and the skip is part of the first tap. Else taps are float32
and products tf32x3. float32: sums, gates, the skip. Deterministic. Filters of more than MAX_LAGS take the FFT of
`chunked.py`. Multiply-adds for each of B T D: lags - lags^2 / 2 T forward (times TERMS), twice as many with dx. Bytes
forward: 2 numbers of B T D, and 2 SHIFTS numbers a tap.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.fft_conv.chunked import fft_conv_chunked
from kernels.fft_conv.diagonals import DIAGONAL_LAGS, few_taps_bwd
from kernels.fft_conv.spectra import (
    TAP_BLOCK,
    TapsSpectra,
    conv_spectra,
    finish,
    strides,
    takes_spectra,
    taps_bwd,
    taps_spectra,
)
from kernels.launch import cdiv, launch, power_of_2, save, saved
from kernels.ssm_kernel.triton import float32_products
from kernels.transpose import empty_time_last, time_last


class Config(NamedTuple):
    """What a program of the convolution takes at once.

    chunk, rows, parts, step: C, ROWS, PARTS and K.  shifts: copies of the taps.
    """

    chunk: int
    rows: int
    parts: int
    step: int
    shifts: int
    warps: int
    stages: int


# by the bfloat16 terms of a tap, or 0 where it is a float32
CONFIGS = {
    0: Config(64, 64, 1, 32, 1, 4, 2),
    1: Config(128, 128, 2, 64, 4, 4, 3),
    2: Config(64, 128, 1, 64, 4, 4, 2),
}
MAX_LAGS = {True: 16384, False: 1024}
"""By whether u is bfloat16: above it transforms are faster."""
SPECTRA_LAGS, SPECTRA_NUMBERS = 1024, 8192
"""From so many taps, and so many of them and sequences together, spectra convolve faster than products."""
AVERAGING_LAGS = 512
"""Below it outputs may be a few products, whose rounded factors do not average out."""
LINE = 16
"""Numbers; lengths and strides that are multiples of it make loads wide."""
GATE_BLOCK = 2048


@triton.jit
def _gate_kernel(
    x,
    gate,
    before,
    direct,
    direct_gate,
    out,
    dgate,
    sums,
    D,
    T,
    out_T,
    x_stride_b,
    x_stride_d,
    gate_stride_b,
    gate_stride_d,
    direct_stride_b,
    direct_stride_d,
    direct_gate_stride_b,
    direct_gate_stride_d,
    BLOCK: tl.constexpr,
):
    """out [B, D, out_T] = gate x, zero beyond T; on request dgate = before x [B, D, T].

    sums [programs] or None: of gate x direct_gate direct, unrounded.
    """
    num_t = tl.cdiv(out_T, BLOCK)
    i_row = (tl.program_id(0) // num_t).to(tl.int64)
    i_b, i_d = i_row // D, i_row % D
    o_t = tl.program_id(0) % num_t * BLOCK + tl.arange(0, BLOCK)
    m_t = o_t < T
    b_x = tl.load(x + i_b * x_stride_b + i_d * x_stride_d + o_t, mask=m_t, other=0.0).to(tl.float32)
    if dgate is not None:
        b_before = tl.load(before + i_row * T + o_t, mask=m_t, other=0.0).to(tl.float32)
        tl.store(dgate + i_row * T + o_t, (b_before * b_x).to(dgate.dtype.element_ty), mask=m_t)
    if gate is not None:
        b_x *= tl.load(gate + i_b * gate_stride_b + i_d * gate_stride_d + o_t, mask=m_t, other=0.0).to(tl.float32)
    tl.store(out + i_row * out_T + o_t, b_x.to(out.dtype.element_ty), mask=o_t < out_T)
    if sums is not None:
        b_x *= tl.load(direct + i_b * direct_stride_b + i_d * direct_stride_d + o_t, mask=m_t, other=0.0).to(tl.float32)
        if direct_gate is not None:
            o_gate = i_b * direct_gate_stride_b + i_d * direct_gate_stride_d + o_t
            b_x *= tl.load(direct_gate + o_gate, mask=m_t, other=0.0).to(tl.float32)
        tl.store(sums + tl.program_id(0), tl.sum(b_x, 0))


@triton.jit
def _taps_kernel(
    filter,
    skip,
    taps,
    lags,
    size,
    stride_d,
    stride_l,
    C: tl.constexpr,
    SHIFTS: tl.constexpr,
    TERMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """taps [D, TERMS, SHIFTS, size]: copy s holds the tap of lag x - C - s at x, zeros around.

    skip [D] or None, added at lag zero. The second of two terms is what rounding leaves of the tap.
    """
    num_x = tl.cdiv(size, BLOCK)
    i_d = (tl.program_id(0) // num_x).to(tl.int64)
    o_x = tl.program_id(0) % num_x * BLOCK + tl.arange(0, BLOCK)
    for s in tl.static_range(SHIFTS):
        o_l = o_x - C - s
        m_l = (o_l >= 0) & (o_l < lags)
        b_h = tl.load(filter + i_d * stride_d + o_l * stride_l, mask=m_l, other=0.0).to(tl.float32)
        if skip is not None:
            b_h += tl.where(o_l == 0, tl.load(skip + i_d).to(tl.float32), 0.0)
        p_taps = taps + (i_d * TERMS * SHIFTS + s) * size + o_x
        b_rounded = b_h.to(taps.dtype.element_ty)
        tl.store(p_taps, b_rounded, mask=o_x < size)
        if TERMS == 2:
            b_rest = (b_h - b_rounded.to(tl.float32)).to(taps.dtype.element_ty)
            tl.store(p_taps + SHIFTS * size, b_rest, mask=o_x < size)


@triton.jit
def _multiply(b_sum, a, b, PRECISION: tl.constexpr):
    """b_sum + a b, as they are or, where there is a precision, in float32."""
    if PRECISION is None:
        b_sum = tl.dot(a, b, b_sum)
    else:
        b_sum = tl.dot(a.to(tl.float32), b.to(tl.float32), b_sum, input_precision=PRECISION)
    return b_sum


@triton.jit
def _load_taps(p_rows, REVERSE: tl.constexpr):
    """The Toeplitz matrix whose rows, of the transpose where it is REVERSE, are at p_rows."""
    b_h = tl.load(p_rows)
    if REVERSE:
        b_h = tl.trans(b_h)
    return b_h


@triton.jit
def _load_rows(x, o_x, o_s, o_k, m_b, x_T):
    """x[o_s + o_k] of each row, zeros outside of the sequence."""
    m_x = (m_b & (o_s >= 0))[:, None] & (o_s[:, None] + o_k[None, :] < x_T)
    return tl.load(x + (o_x[:, None] + (o_s[:, None] + o_k[None, :])), mask=m_x, other=0.0)


@triton.jit
def _shifted(o_i, size, SHIFTS: tl.constexpr):
    """Where in the copies the tap i steps before a place is found, at a multiple of SHIFTS.

    o_i is a column: of a row Triton 3.6 takes -i for a multiple of the length, and loads would not be aligned.
    """
    return (o_i % SHIFTS) * size - o_i // SHIFTS * SHIFTS


@triton.jit(do_not_specialize=["B", "lags", "batch_groups", "num_groups"])
def _conv_kernel(
    x,
    taps,
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
    lags,
    size,
    batch_groups,
    num_groups,
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
    TERMS: tl.constexpr,
    PRECISION: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    BATCH: tl.constexpr,
    K: tl.constexpr,
    SHIFTS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """conv = taps * x (REVERSE: backwards in time) + skip direct_gate direct, whose product is x before rounding, for
    ROWS / BATCH chunks of BATCH sequences of one channel.

    y = scale conv, and on request plain = conv, product = other conv; all [B, D, T]. With two PARTS the half of the
    chunks that is nearer to the start (REVERSE: to the end) stops where it reaches it.
    """
    i_d, i_group = (tl.program_id(0) // num_groups).to(tl.int64), tl.program_id(0) % num_groups
    PART: tl.constexpr = ROWS // PARTS
    CHUNKS: tl.constexpr = PART // BATCH
    i_c = i_group // batch_groups * (PARTS * CHUNKS)
    if not REVERSE:
        # programs that have most to do first
        i_c = (num_groups // batch_groups - 1) * (PARTS * CHUNKS) - i_c
    o_r = tl.arange(0, PART)
    o_b = (i_group % batch_groups * BATCH + o_r // CHUNKS).to(tl.int64)
    m_b = o_b < B
    # of the part with more steps
    i_long = i_c if REVERSE else i_c + (PARTS - 1) * CHUNKS
    i_short = i_c + CHUNKS if REVERSE else i_c
    o_c = o_r % CHUNKS
    o_k, o_j = tl.arange(0, K), tl.arange(0, C)
    o_x = o_b * x_stride_b + i_d * x_stride_d
    p_taps = taps + i_d * TERMS * SHIFTS * size
    # from the first sum that reaches a tap to the last
    most_steps = tl.cdiv(lags + C - 1, K)
    if REVERSE:
        num_steps = tl.minimum(most_steps, tl.cdiv(T - i_long * C, K))
        num_short = tl.minimum(most_steps, tl.cdiv(tl.maximum(T - i_short * C, 0), K))
        o_first, towards = o_c * C, K
        # the rows of its transpose, which begin C steps further on
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
        b_long = _multiply(b_long, b_x, b_h, PRECISION)
        if TERMS == 2:
            b_h = _load_taps(p_rows + (SHIFTS * size + m * K), REVERSE)
            b_long = _multiply(b_long, b_x, b_h, PRECISION)

    for part in tl.static_range(PARTS):
        b_y = b_long
        o_t = (i_long + o_c)[:, None] * C + o_j[None, :]
        if part == 1:
            b_y = b_short
            o_t = (i_short + o_c)[:, None] * C + o_j[None, :]
        finish(
            b_y,
            o_b,
            o_t,
            m_b[:, None] & (o_t < T),
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


class Plan(NamedTuple):
    """How tiles of `rows` rows, of `batch` sequences each, cover [B, T].

    terms: of bfloat16 a tap consists of, or 0 where products are of float32 numbers.
    """

    terms: int
    rows: int
    parts: int
    batch: int
    batch_groups: int
    num_groups: int
    config: Config

    @property
    def precision(self) -> str | None:
        return None if self.terms else float32_products()


def _plan(u: Tensor, lags: int, with_gates: bool) -> Plan:
    few = 0 if with_gates else 2
    return _cheapest(*u.shape[:2], lags, 0 if u.dtype != torch.bfloat16 else 1 if lags >= AVERAGING_LAGS else few)


@functools.lru_cache(maxsize=1024)
def _cheapest(batch: int, length: int, lags: int, terms: int) -> Plan:
    """Fewest products: a tile with more sequences has less above the diagonal, but perhaps no sequence in its rows."""
    config = CONFIGS[terms]
    chunks = cdiv(length, config.chunk)
    rows = min(config.rows, max(64, power_of_2(batch * chunks)))
    parts = config.parts if rows == config.rows else 1

    def shared_by(sequences: int) -> tuple[int, Plan]:
        width = rows // parts // sequences
        batch_groups, chunk_groups = cdiv(batch, sequences), cdiv(chunks, width * parts)
        # of each part, all its chunks up to the last
        most = min(chunks * config.chunk, lags + config.chunk)
        ends = [min((i + 1) * width * config.chunk, most) for i in range(chunk_groups * parts)]
        plan = Plan(terms, rows, parts, sequences, batch_groups, batch_groups * chunk_groups, config)
        return batch_groups * sum(ends), plan

    sizes = [2**i for i in range((rows // parts).bit_length())]
    return min((shared_by(size) for size in sizes if size < 2 * batch), key=lambda pair: pair[0])[1]


class Gated(NamedTuple):
    """gate x as the kernels read it, and x and gate [B, T, D] themselves."""

    product: Tensor
    x: Tensor
    gate: Tensor | None


def gated(
    x: Tensor, gate: Tensor | None, half: bool, before: Tensor | None = None, direct: Gated | None = None
) -> tuple[Gated, Tensor | None, Tensor | None]:
    """gate x as `Gated`, before x, and the sums over B and T of gate x direct, the latter two where they are given.

    The product is x itself where there is no gate and loads of x are wide, else [B, T or more, D].
    """
    batch, length, width = x.shape
    stride_b, stride_d = strides(x)
    wide = length % LINE == 0 and stride_b % LINE == 0 and stride_d % LINE == 0 and x.data_ptr() % 16 == 0
    if wide and gate is None and before is None and direct is None:
        return Gated(x, x, None), None, None
    size = cdiv(length, LINE) * LINE
    # gated inputs keep their width where products do
    dtype = x.dtype if gate is None or half else torch.float32
    out = torch.empty((batch, width, size), dtype=dtype, device=x.device).transpose(1, 2)
    dgate = None if before is None else empty_time_last(x)
    block = min(GATE_BLOCK, power_of_2(size))
    sums = None
    if direct is not None:
        sums = torch.empty((batch, width, cdiv(size, block)), dtype=torch.float32, device=x.device)
    launch(
        _gate_kernel,
        batch * width * cdiv(size, block),
        x,
        gate,
        before,
        None if direct is None else direct.x,
        None if direct is None else direct.gate,
        out,
        dgate,
        sums,
        width,
        length,
        size,
        stride_b,
        stride_d,
        *strides(gate),
        *strides(None if direct is None else direct.x),
        *strides(None if direct is None else direct.gate),
        BLOCK=block,
        num_warps=4,
    )
    return Gated(out, x, gate), dgate, None if sums is None else sums.sum((0, 2))


def shifted_taps(filter: Tensor, skip: Tensor | None, lags: int, plan: Plan) -> Tensor:
    """taps [D, terms, copies, size] of `_taps_kernel`."""
    width, config = filter.shape[0], plan.config
    size = cdiv(lags + 2 * config.chunk + config.step, 64) * 64
    dtype, terms = (torch.bfloat16, plan.terms) if plan.terms else (torch.float32, 1)
    taps = torch.empty((width, terms, config.shifts, size), dtype=dtype, device=filter.device)
    launch(
        _taps_kernel,
        width * cdiv(size, TAP_BLOCK),
        filter,
        skip if plan.terms == 2 else None,
        taps,
        lags,
        size,
        *filter.stride(),
        C=config.chunk,
        SHIFTS=config.shifts,
        TERMS=terms,
        BLOCK=TAP_BLOCK,
        num_warps=4,
    )
    return taps


def conv(
    source: Gated,
    taps: Tensor,
    skip: Tensor | None,
    lags: int,
    plan: Plan,
    reverse: bool,
    scale: Tensor | None,
    other: Tensor | None,
    with_plain: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(scale conv, conv in float32, other conv), the second and third on request, all [B, T, D]."""
    x, direct, direct_gate = source
    batch, length, width = direct.shape
    config = plan.config
    if plan.terms == 2:
        # the first tap has it
        skip = None
    y = empty_time_last(direct)
    plain = empty_time_last(direct, torch.float32) if with_plain else None
    product = None if other is None else empty_time_last(direct)
    launch(
        _conv_kernel,
        width * plan.num_groups,
        x,
        taps,
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
        lags,
        taps.shape[3],
        plan.batch_groups,
        plan.num_groups,
        *strides(x),
        *strides(direct),
        *strides(direct_gate),
        *strides(scale),
        *strides(other),
        REVERSE=reverse,
        TERMS=taps.shape[1],
        PRECISION=plan.precision,
        C=config.chunk,
        ROWS=plan.rows,
        PARTS=plan.parts,
        BATCH=plan.batch,
        K=config.step,
        SHIFTS=config.shifts,
        NUM_STAGES=config.stages,
        num_warps=config.warps if plan.rows == config.rows else 4,
    )
    return y, plain, product


class Saved(NamedTuple):
    """What the backward pass takes."""

    source: Gated
    taps: Tensor | TapsSpectra
    plain: Tensor | None
    plan: Plan
    lags: int


def convolve(
    source: Gated,
    taps: Tensor | TapsSpectra,
    skip: Tensor | None,
    lags: int,
    plan: Plan,
    reverse: bool,
    scale: Tensor | None,
    other: Tensor | None,
    with_plain: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """`conv`, or `conv_spectra` where the taps are spectra."""
    if isinstance(taps, TapsSpectra):
        return conv_spectra(source, taps, skip, reverse, scale, other, with_plain)
    return conv(source, taps, skip, lags, plan, reverse, scale, other, with_plain)


def fft_conv_fwd(
    u: Tensor, filter: Tensor, skip: Tensor | None, gate_in: Tensor | None, gate_out: Tensor | None, keep: bool
) -> tuple[Tensor, Saved]:
    """y, and what the backward pass takes."""
    batch, length, _ = u.shape
    lags = min(length, filter.shape[1])
    plan = _plan(u, lags, gate_in is not None or gate_out is not None)
    source, _, _ = gated(u, gate_in, plan.terms > 0)
    taps: Tensor | TapsSpectra
    if lags >= SPECTRA_LAGS and batch * lags >= SPECTRA_NUMBERS and takes_spectra(source.product, lags):
        taps = taps_spectra(filter, length, lags)
    else:
        taps = shifted_taps(filter, skip, lags, plan)
    y, plain, _ = convolve(source, taps, skip, lags, plan, False, gate_out, None, keep and gate_out is not None)
    return y, Saved(source, taps, plain, plan, lags)


class FftConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, u: Tensor, filter: Tensor, skip: Tensor | None, gate_in: Tensor | None, gate_out: Tensor | None
    ) -> Tensor:
        y, kept = fft_conv_fwd(u, filter, skip, gate_in, gate_out, True)
        ctx.plan, ctx.lags, ctx.spectra_plan = kept.plan, kept.lags, None
        taps, factors = kept.taps, None
        if isinstance(taps, TapsSpectra):
            taps, factors, ctx.spectra_plan = taps
        save(ctx, *kept.source, taps, factors, kept.plain, gate_out, filter, skip)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, u, gate_in, taps, factors, plain, gate_out, filter, skip = saved(ctx)
        if factors is not None:
            taps = TapsSpectra(taps, factors, ctx.spectra_plan)
        plan, lags, length = ctx.plan, ctx.lags, dy.shape[1]
        source = Gated(x, u, gate_in)
        # of rounded factors the gradient of the skip, a single lag, would lose too much
        direct = source if skip is not None and (gate_in is not None or gate_out is not None) else None
        g, dgate_out, dskip = gated(time_last(dy), gate_out, plan.terms > 0, plain, direct)
        other = None if gate_in is None else u
        du, _, dgate_in = convolve(g, taps, skip, lags, plan, True, gate_in, other, False)
        dfilter = None
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            is_few = lags <= DIAGONAL_LAGS and x.dtype == g.product.dtype == torch.bfloat16
            dtaps = (few_taps_bwd if is_few else taps_bwd)(x, g.product, length, lags)
            dfilter = dtaps.to(filter.dtype)
            if lags < filter.shape[1]:
                dfilter = torch.nn.functional.pad(dfilter, (0, filter.shape[1] - lags))
            if skip is not None:
                dskip = (dtaps[:, 0] if dskip is None else dskip).to(skip.dtype)
        return du, dfilter, dskip, dgate_in, dgate_out


def fft_conv_triton(
    u: Tensor,
    filter: Tensor,
    *,
    D: Tensor | None = None,
    gate_in: Tensor | None = None,
    gate_out: Tensor | None = None,
) -> Tensor:
    """y [B, T, D] in the dtype of u; time contiguous, unless the filter is longer than MAX_LAGS."""
    lags = min(u.shape[1], filter.shape[1])
    if lags > MAX_LAGS[u.dtype == torch.bfloat16]:
        return fft_conv_chunked(u, filter, D=D, gate_in=gate_in, gate_out=gate_out)
    u = time_last(u)
    gate_in, gate_out = (None if gate is None else time_last(gate) for gate in (gate_in, gate_out))
    skip = None if D is None else D.contiguous()
    tensors = (u, filter, skip, gate_in, gate_out)
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        return FftConv.apply(*tensors)
    return fft_conv_fwd(*tensors, keep=False)[0]
