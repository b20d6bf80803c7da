"""`_split_kernel`: the rows of heads as two float16 parts and a scale for each tile of TILE positions.

The parts are those of `kernels.float16_parts`. They are made once for each pass, because every program of a head reads
them again.

Layout:  x [B, T, H, K] with contiguous channels; parts [B H, 2, tiles TILE, BLOCK_K], zero beyond T and K; scales and
         sums [B H, tiles], [B H, tiles TILE].
float32: everything between a load and a store.
Cost:    reads x once and writes as many bytes.
"""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.float16_parts import halves, power_scale
from subquad.kernels.launch import cdiv, launch, power_of_2


class Parts(NamedTuple):
    """The two parts of a tensor [B, T, H, K], and their scales."""

    halves: Tensor
    """[B H, 2, tiles TILE, BLOCK_K], float16."""
    scales: Tensor
    """[B H, tiles]."""


@triton.jit
def _split_kernel(
    x, y, parts, scales, sums,
    T, H, x_stride_b, x_stride_t, x_stride_h, y_stride_b, y_stride_t, y_stride_h,
    K: tl.constexpr, BLOCK_K: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One tile of x; where there is y, also its products with the rows of y, which are the sums."""
    num = tl.cdiv(T, TILE)
    i_bh, i_tile = tl.program_id(0).to(tl.int64) // num, tl.program_id(0).to(tl.int64) % num
    i_b, i_h = i_bh // H, i_bh % H
    o_t = i_tile * TILE + tl.arange(0, TILE)
    o_k = tl.arange(0, BLOCK_K)
    m = (o_t < T)[:, None] & (o_k < K)[None, :]
    b_x = tl.load(x + i_b * x_stride_b + i_h * x_stride_h + o_t[:, None] * x_stride_t + o_k[None, :], mask=m, other=0.0)
    scale, inverse = power_scale(tl.max(tl.max(tl.abs(b_x), 1), 0))
    b_1, b_2 = halves(b_x * inverse)
    p_parts = (
        parts + (2 * i_bh * num + i_tile) * TILE * BLOCK_K + (tl.arange(0, TILE) * BLOCK_K)[:, None] + o_k[None, :]
    )
    tl.store(p_parts, b_1)
    tl.store(p_parts + num * TILE * BLOCK_K, b_2)
    tl.store(scales + i_bh * num + i_tile, scale)
    if y is not None:
        p_y = y + i_b * y_stride_b + i_h * y_stride_h + o_t[:, None] * y_stride_t + o_k[None, :]
        tl.store(sums + i_bh * num * TILE + o_t, tl.sum(b_x * tl.load(p_y, mask=m, other=0.0), 1))


def split(x: Tensor, tile: int, y: Tensor | None = None) -> tuple[Parts, Tensor | None]:
    """The parts of x [B, T, H, K], and where y is given the sums [B H, tiles tile] of x y over the channels.

    tile: number of positions that share a scale, a power of two.
    """
    batch, length, heads, size = x.shape
    x, y = (z if z is None or z.stride(3) == 1 else z.contiguous() for z in (x, y))
    block_k, num = max(16, power_of_2(size)), cdiv(length, tile)
    parts = torch.empty(batch * heads, 2, num * tile, block_k, dtype=torch.float16, device=x.device)
    scales = torch.empty(batch * heads, num, dtype=torch.float32, device=x.device)
    sums = None if y is None else torch.empty(batch * heads, num * tile, dtype=torch.float32, device=x.device)
    y_strides = (0, 0, 0) if y is None else y.stride()
    launch(
        _split_kernel, batch * heads * num, x=x, y=y, parts=parts, scales=scales, sums=sums, T=length, H=heads,
        x_stride_b=x.stride(0), x_stride_t=x.stride(1), x_stride_h=x.stride(2), y_stride_b=y_strides[0],
        y_stride_t=y_strides[1], y_stride_h=y_strides[2], K=size, BLOCK_K=block_k, TILE=tile, num_warps=8,
    )  # fmt: skip
    return Parts(parts, scales), sums
