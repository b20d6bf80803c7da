"""The inputs of the long convolution as its kernels read them: gate times x, with time contiguous and wide loads.

For products of halves, a float32 sequence is the scaled sum of two float16 numbers an element
(`kernels/float16_parts.py`), with one scale for each sequence of each channel. For products of terms, a gated sequence
is the sum of two bfloat16 numbers an element, which is exact: a product of two bfloat16 numbers has twice as many bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.fft_conv.triton.plan import Operands
from subquad.kernels.float16_parts import halves, power_scale
from subquad.kernels.launch import CompileOptions, cdiv, launch, power_of_2
from subquad.kernels.layout import address, strides
from subquad.kernels.transpose import empty_time_last

LINE = 16
"""Number of elements of which lengths and strides must be multiples, so that loads are 16 bytes wide."""
GATE_BLOCK, GATE_ELEMENTS = 2048, 512
"""Maximum number of steps of one channel that a program of `_gate_kernel` takes, and the number of elements for which
it takes several channels of shorter sequences."""


class SplitTile(NamedTuple):
    """Steps of time and channels that one program of `_split_kernel` takes at a time."""

    steps: int
    channels: int
    options: CompileOptions


SPLIT_TILE = SplitTile(64, 32, CompileOptions(num_warps=4))


@triton.jit
def _scales(b_most):
    """The scale of numbers of which b_most is the largest, and its inverse; a scale of zero for nothing but zeros."""
    b_scale, b_inverse = power_scale(b_most)
    return tl.where(b_most == 0.0, 0.0, b_scale), b_inverse


@triton.jit
def _gate_kernel(
    x, gate, before, direct, direct_gate, out, rest, scale, dgate, sums,
    D, T, out_T,
    x_stride_b, x_stride_d, gate_stride_b, gate_stride_d, direct_stride_b, direct_stride_d,
    direct_gate_stride_b, direct_gate_stride_d, dgate_stride_b, num_rows,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out [B, D, out_T] = gate x, zero beyond T. Where `dgate` is given, dgate [B, D, T] = before x.

    A program has ROWS of the num_rows = B D rows. Where `rest` is given, out + rest = gate x; where `scale` [B, D] is
    given as well, scale (out + rest) = gate x, and a program has whole sequences. Where `sums` [num_rows, blocks] is
    given, it has the sums of gate x direct_gate direct over each block, before rounding.
    """
    num_t = tl.cdiv(out_T, BLOCK)
    o_row = tl.program_id(0) // num_t * ROWS + tl.arange(0, ROWS)
    m_row = o_row < num_rows
    i_row = o_row.to(tl.int64)[:, None]
    i_b, i_d = i_row // D, i_row % D
    i_t = tl.program_id(0) % num_t
    o_t = (i_t * BLOCK + tl.arange(0, BLOCK))[None, :]
    m_t, m_out = m_row[:, None] & (o_t < T), m_row[:, None] & (o_t < out_T)
    b_x = tl.load(x + (i_b * x_stride_b + i_d * x_stride_d) + o_t, mask=m_t, other=0.0).to(tl.float32)
    if dgate is not None:
        b_before = tl.load(before + i_row * T + o_t, mask=m_t, other=0.0).to(tl.float32)
        p_dgate = dgate + (i_b * dgate_stride_b + i_d * T) + o_t
        tl.store(p_dgate, (b_before * b_x).to(dgate.dtype.element_ty), mask=m_t)
    if gate is not None:
        b_x *= tl.load(gate + (i_b * gate_stride_b + i_d * gate_stride_d) + o_t, mask=m_t, other=0.0).to(tl.float32)
    if scale is not None:
        b_scale, b_inverse = _scales(tl.max(tl.abs(b_x), 1))
        b_1, b_2 = halves(b_x * b_inverse[:, None])
        tl.store(out + i_row * out_T + o_t, b_1, mask=m_out)
        tl.store(rest + i_row * out_T + o_t, b_2, mask=m_out)
        tl.store(scale + o_row, b_scale, mask=m_row)
    else:
        b_rounded = b_x.to(out.dtype.element_ty)
        tl.store(out + i_row * out_T + o_t, b_rounded, mask=m_out)
        if rest is not None:
            b_rest = (b_x - b_rounded.to(tl.float32)).to(rest.dtype.element_ty)
            tl.store(rest + i_row * out_T + o_t, b_rest, mask=m_out)
    if sums is not None:
        o_direct = (i_b * direct_stride_b + i_d * direct_stride_d) + o_t
        b_x *= tl.load(direct + o_direct, mask=m_t, other=0.0).to(tl.float32)
        if direct_gate is not None:
            o_gate = (i_b * direct_gate_stride_b + i_d * direct_gate_stride_d) + o_t
            b_x *= tl.load(direct_gate + o_gate, mask=m_t, other=0.0).to(tl.float32)
        tl.store(sums + (o_row * num_t + i_t), tl.sum(b_x, 1), mask=m_row)


@triton.jit
def _split_kernel(
    x, out, rest, scale,
    D, T, out_T,
    stride_b, stride_t, stride_d,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """scale [B, D] (out + rest [B, D, out_T]) = x [B, T, D], zero beyond T; a program has whole sequences."""
    num_d = tl.cdiv(D, BLOCK_D)
    i_b = (tl.program_id(0) // num_d).to(tl.int64)
    o_d = tl.program_id(0) % num_d * BLOCK_D + tl.arange(0, BLOCK_D)
    o_t = tl.arange(0, BLOCK_T)
    m_d = o_d < D
    p_x = x + (i_b * stride_b + o_t.to(tl.int64)[:, None] * stride_t + o_d.to(tl.int64)[None, :] * stride_d)
    b_most = tl.zeros([BLOCK_D], tl.float32)
    for t in range(0, T, BLOCK_T):
        b_x = tl.load(p_x + t * stride_t, mask=(o_t < T - t)[:, None] & m_d[None, :], other=0.0)
        b_most = tl.maximum(b_most, tl.max(tl.abs(b_x), 0))
    b_scale, b_inverse = _scales(b_most)
    tl.store(scale + (i_b * D + o_d), b_scale, mask=m_d)
    o_out = (i_b * D + o_d)[:, None] * out_T + o_t[None, :]
    for t in range(0, out_T, BLOCK_T):
        b_x = tl.load(p_x + t * stride_t, mask=(o_t < T - t)[:, None] & m_d[None, :], other=0.0)
        b_1, b_2 = halves(b_x * b_inverse[None, :])
        m_out = m_d[:, None] & (o_t < out_T - t)[None, :]
        tl.store(out + (o_out + t), tl.trans(b_1), mask=m_out)
        tl.store(rest + (o_out + t), tl.trans(b_2), mask=m_out)


class Gated(NamedTuple):
    """gate x as the kernels read it, [B, T or more, D] with time contiguous, and x and gate [B, T, D] as given."""

    product: Tensor
    x: Tensor
    gate: Tensor | None
    rest: Tensor | None = None
    """This tensor holds what rounding the product leaves, in the dtype of the product. It is None where gate x is not a
    sum of two numbers."""
    scale: Tensor | None = None
    """float32 [B, D], with which scale (product + rest) = gate x. None where the numbers are not divided by a scale."""


def split(x: Tensor) -> Gated:
    """x [B, T, D] in float32, of any strides, as halves."""
    batch, length, width = x.shape
    size = cdiv(length, LINE) * LINE
    out, rest, scale = _empty_halves(batch, width, size, x.device)
    stride_b, stride_t, stride_d = x.stride()
    launch(
        _split_kernel, batch * cdiv(width, SPLIT_TILE.channels), x=x, out=out, rest=rest, scale=scale, D=width,
        T=length, out_T=size, stride_b=stride_b, stride_t=stride_t, stride_d=stride_d, BLOCK_T=SPLIT_TILE.steps,
        BLOCK_D=SPLIT_TILE.channels, **SPLIT_TILE.options.keywords(),
    )  # fmt: skip
    return Gated(out, x, None, rest, scale)


def _empty_halves(batch: int, width: int, size: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The two halves [B, size, D], with time contiguous, and their scales [B, D]."""
    pair = _empty_pair(batch, width, size, torch.float16, device)
    return *pair, torch.empty(batch, width, dtype=torch.float32, device=device)


def _empty_pair(batch: int, width: int, size: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Two tensors [B, size, D], with time contiguous."""
    first, second = torch.empty(2, batch, width, size, dtype=dtype, device=device).transpose(2, 3)
    return first, second


def gated(
    x: Tensor,
    gate: Tensor | None,
    operands: Operands,
    before: Tensor | None = None,
    direct: Gated | None = None,
    dgate: Tensor | None = None,
) -> tuple[Gated, Tensor | None, Tensor | None]:
    """gate x as `Gated`; before x; and the sums over B and T of gate x direct, float32 [D].

    The second result is None without `before`, the third without `direct`. dgate: where the second is written, with
    time and then channels dense; None: into a new tensor. x: [B, T, D]; of halves without a gate any
    strides, or else with time contiguous. The product is x itself where there is no gate and loads of x are wide.
    """
    batch, length, width = x.shape
    in_halves = operands is Operands.HALVES
    if in_halves and gate is None and before is None and direct is None:
        return split(x), None, None
    stride_b, stride_d = strides(x, 0, 2)
    wide = length % LINE == 0 and stride_b % LINE == 0 and stride_d % LINE == 0 and address(x) % 16 == 0
    if wide and gate is None and before is None and direct is None:
        return Gated(x, x, None), None, None
    size = cdiv(length, LINE) * LINE
    rest, scale = None, None
    if in_halves:
        out, rest, scale = _empty_halves(batch, width, size, x.device)
    elif gate is not None and operands is Operands.TERMS:
        out, rest = _empty_pair(batch, width, size, x.dtype, x.device)
    else:
        dtype = torch.float32 if gate is not None and operands is Operands.FLOAT32 else x.dtype
        out = torch.empty(batch, width, size, dtype=dtype, device=x.device).transpose(1, 2)
    if dgate is None and before is not None:
        dgate = empty_time_last(x)
    block = power_of_2(size) if in_halves else min(GATE_BLOCK, power_of_2(size))
    rows = max(1, GATE_ELEMENTS // block)
    direct_x, direct_gate, sums = None, None, None
    if direct is not None:
        direct_x, direct_gate = direct.x, direct.gate
        sums = torch.empty(batch, width, cdiv(size, block), dtype=torch.float32, device=x.device)
    gate_stride_b, gate_stride_d = strides(gate, 0, 2)
    direct_stride_b, direct_stride_d = strides(direct_x, 0, 2)
    direct_gate_stride_b, direct_gate_stride_d = strides(direct_gate, 0, 2)
    launch(
        _gate_kernel, cdiv(batch * width, rows) * cdiv(size, block), x=x, gate=gate, before=before, direct=direct_x,
        direct_gate=direct_gate, out=out, rest=rest, scale=scale, dgate=dgate, sums=sums, D=width, T=length, out_T=size,
        x_stride_b=stride_b, x_stride_d=stride_d, gate_stride_b=gate_stride_b, gate_stride_d=gate_stride_d,
        direct_stride_b=direct_stride_b, direct_stride_d=direct_stride_d, direct_gate_stride_b=direct_gate_stride_b,
        direct_gate_stride_d=direct_gate_stride_d, dgate_stride_b=strides(dgate, 0)[0], num_rows=batch * width,
        ROWS=rows, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return Gated(out, x, gate, rest, scale), dgate, None if sums is None else sums.sum((0, 2))
