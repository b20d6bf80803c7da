"""The inputs of the long convolution as its kernels read them: gate times x, with time contiguous and wide loads."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import cdiv, launch, power_of_2
from kernels.layout import strides
from kernels.transpose import empty_time_last

LINE = 16
"""Number of elements of which lengths and strides must be multiples, so that loads are 16 bytes wide."""
GATE_BLOCK = 2048
"""Maximum number of steps of one channel that a program of `_gate_kernel` takes."""


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
    """out [B, D, out_T] = gate x, zero beyond T. Where `dgate` is given, dgate [B, D, T] = before x.

    Where `sums` [programs] is given, each program stores its sum of gate x direct_gate direct, before rounding.
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


class Gated(NamedTuple):
    """gate x as the kernels read it [B, T or more, D], and x and gate [B, T, D] as they were given."""

    product: Tensor
    x: Tensor
    gate: Tensor | None


def gated(
    x: Tensor, gate: Tensor | None, half: bool, before: Tensor | None = None, direct: Gated | None = None
) -> tuple[Gated, Tensor | None, Tensor | None]:
    """gate x as `Gated`; before x; and the sums over B and T of gate x direct, float32 [D].

    The second result is None without `before`, the third without `direct`. x: [B, T, D] with time contiguous. The
    product is x itself where there is no gate and loads of x are wide. half: whether convolutions multiply in
    bfloat16; if not, a gated product is float32.
    """
    batch, length, width = x.shape
    stride_b, stride_d = strides(x, 0, 2)
    wide = length % LINE == 0 and stride_b % LINE == 0 and stride_d % LINE == 0 and x.data_ptr() % 16 == 0
    if wide and gate is None and before is None and direct is None:
        return Gated(x, x, None), None, None
    size = cdiv(length, LINE) * LINE
    dtype = x.dtype if gate is None or half else torch.float32
    out = torch.empty((batch, width, size), dtype=dtype, device=x.device).transpose(1, 2)
    dgate = None if before is None else empty_time_last(x)
    block = min(GATE_BLOCK, power_of_2(size))
    direct_x, direct_gate, sums = None, None, None
    if direct is not None:
        _, direct_x, direct_gate = direct
        sums = torch.empty((batch, width, cdiv(size, block)), dtype=torch.float32, device=x.device)
    gate_stride_b, gate_stride_d = strides(gate, 0, 2)
    direct_stride_b, direct_stride_d = strides(direct_x, 0, 2)
    direct_gate_stride_b, direct_gate_stride_d = strides(direct_gate, 0, 2)
    launch(
        _gate_kernel,
        batch * width * cdiv(size, block),
        x=x,
        gate=gate,
        before=before,
        direct=direct_x,
        direct_gate=direct_gate,
        out=out,
        dgate=dgate,
        sums=sums,
        D=width,
        T=length,
        out_T=size,
        x_stride_b=stride_b,
        x_stride_d=stride_d,
        gate_stride_b=gate_stride_b,
        gate_stride_d=gate_stride_d,
        direct_stride_b=direct_stride_b,
        direct_stride_d=direct_stride_d,
        direct_gate_stride_b=direct_gate_stride_b,
        direct_gate_stride_d=direct_gate_stride_d,
        BLOCK=block,
        num_warps=4,
    )
    return Gated(out, x, gate), dgate, None if sums is None else sums.sum((0, 2))
