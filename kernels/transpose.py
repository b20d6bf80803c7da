"""Copies of x [B, T, D] with another axis contiguous in memory: `time_last`, `padded_time_last`, `channels_last`.

Linear maps read and write tensors whose channels are contiguous, state space models those whose time is contiguous.
PyTorch's own copy between the two takes several times as long as this kernel, which reads a tile along channels,
transposes it in shared memory and writes it along time, at least 128 bytes of a row at once. It moves 2 B T D elements.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.autograd import Function
from subquad.kernels.launch import CompileOptions, cdiv, launch


class Tile(NamedTuple):
    """Steps of time and channels that one program transposes."""

    steps: int
    channels: int
    options: CompileOptions


TILE = Tile(64, 64, CompileOptions(num_warps=4))


@triton.jit
def _transpose_kernel(
    x, out,
    T, D, size,
    stride_b, stride_t, stride_d,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out [B, D, size] = x [B, T, D] with zeros after its T <= size steps."""
    num_d, num_t = tl.cdiv(D, BLOCK_D), tl.cdiv(size, BLOCK_T)
    i_d, i_bt = tl.program_id(0) % num_d, tl.program_id(0) // num_d
    i_b = (i_bt // num_t).to(tl.int64)
    o_t = i_bt % num_t * BLOCK_T + tl.arange(0, BLOCK_T)
    o_d = i_d * BLOCK_D + tl.arange(0, BLOCK_D)
    m_t, m_d = o_t < T, o_d < D
    p_x = x + (i_b * stride_b + o_t.to(tl.int64)[:, None] * stride_t + o_d.to(tl.int64)[None, :] * stride_d)
    b_x = tl.load(p_x, mask=m_t[:, None] & m_d[None, :], other=0.0)
    p_out = out + ((i_b * D + o_d)[:, None] * size + o_t[None, :])
    tl.store(p_out, tl.trans(b_x), mask=m_d[:, None] & (o_t < size)[None, :])


def empty_time_last(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """An empty tensor of the shape of x [B, T, D], with time contiguous; dtype: that of x where None."""
    _, length, width = x.shape
    # not `empty(...).transpose`: a view that a custom autograd function returns cannot be changed in place
    return torch.empty_strided(x.shape, (width * length, 1, length), dtype=dtype or x.dtype, device=x.device)


def time_last(x: Tensor) -> Tensor:
    """x [B, T, D] itself where time is contiguous, else a copy. The gradient of a copy has channels contiguous."""
    return x if x.stride(1) == 1 or x.shape[1] == 1 else _Transpose.apply(x)


def channels_last(x: Tensor) -> Tensor:
    """x [B, T, D] itself where channels are contiguous, else a copy. The gradient of a copy has time contiguous."""
    return x if x.stride(2) == 1 or x.shape[2] == 1 else _Transpose.apply(x.transpose(1, 2)).transpose(1, 2)


def padded_time_last(x: Tensor, size: int) -> Tensor:
    """[B, D, size]: x [B, T, D] and zeros after its T <= size steps, contiguous. It has no gradient."""
    out = x.new_empty(x.shape[0], x.shape[2], size)
    _write(x, out, size)
    return out


def _write(x: Tensor, out: Tensor, size: int) -> None:
    batch, length, width = x.shape
    stride_b, stride_t, stride_d = x.stride()
    launch(
        _transpose_kernel, batch * cdiv(size, TILE.steps) * cdiv(width, TILE.channels), x=x, out=out, T=length, D=width,
        size=size, stride_b=stride_b, stride_t=stride_t, stride_d=stride_d, BLOCK_T=TILE.steps, BLOCK_D=TILE.channels,
        **TILE.options.keywords(),
    )  # fmt: skip


class _Transpose(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = empty_time_last(x)
        _write(x, out, x.shape[1])
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        # with the strides of x: autograd adds or concatenates this gradient to others, which is slow across layouts
        return channels_last(gradient)
