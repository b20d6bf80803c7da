"""`time_last`, `channels_last`: x [B, T, D] with time or channels contiguous in memory, in Triton.

Linear maps read and write channels contiguous, state space models time; PyTorch's copy takes several times as long. A
tile is read along channels and written along time, 128 bytes of a row at least, turned in shared memory. Bytes: 2
numbers of B T D.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import cdiv, launch


class Config(NamedTuple):
    """Steps and channels of a tile."""

    steps: int
    channels: int
    warps: int


CONFIG = Config(64, 64, 4)


@triton.jit
def _turn_kernel(
    x,
    out,
    T,
    D,
    stride_b,
    stride_t,
    stride_d,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """out [B, D, T] = x [B, T, D]."""
    num_d, num_t = tl.cdiv(D, BLOCK_D), tl.cdiv(T, BLOCK_T)
    i_d, i_bt = tl.program_id(0) % num_d, tl.program_id(0) // num_d
    i_b = (i_bt // num_t).to(tl.int64)
    o_t = i_bt % num_t * BLOCK_T + tl.arange(0, BLOCK_T)
    o_d = i_d * BLOCK_D + tl.arange(0, BLOCK_D)
    m_t, m_d = o_t < T, o_d < D
    p_x = x + (i_b * stride_b + o_t.to(tl.int64)[:, None] * stride_t + o_d.to(tl.int64)[None, :] * stride_d)
    b_x = tl.load(p_x, mask=m_t[:, None] & m_d[None, :])
    p_out = out + ((i_b * D + o_d)[:, None] * T + o_t[None, :])
    tl.store(p_out, tl.trans(b_x), mask=m_d[:, None] & m_t[None, :])


def empty_time_last(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Empty, of the shape of x [B, T, D], with time contiguous."""
    _, length, width = x.shape
    # not the transpose of something else: a view that a custom function returns may not be changed in place
    return torch.empty_strided(x.shape, (width * length, 1, length), dtype=dtype or x.dtype, device=x.device)


def time_last(x: Tensor) -> Tensor:
    """x [B, T, D] itself where steps are neighbours in memory, else a copy; gradients are turned back."""
    return x if x.stride(1) == 1 or x.shape[1] == 1 else _Turn.apply(x)


def channels_last(x: Tensor) -> Tensor:
    """As `time_last`, for consumers who want channels to be neighbours."""
    return x if x.stride(2) == 1 or x.shape[2] == 1 else _Turn.apply(x.transpose(1, 2)).transpose(1, 2)


class _Turn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        out = empty_time_last(x)
        launch(
            _turn_kernel,
            batch * cdiv(length, CONFIG.steps) * cdiv(width, CONFIG.channels),
            x,
            out,
            length,
            width,
            *x.stride(),
            BLOCK_T=CONFIG.steps,
            BLOCK_D=CONFIG.channels,
            num_warps=CONFIG.warps,
        )
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        # in the memory of x: the sum or concatenation that waits for it would take several times as long
        return channels_last(gradient)
