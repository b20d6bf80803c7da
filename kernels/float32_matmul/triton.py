"""`_product_kernel`: C = A B + bias in float32 on matrix units, by products of shorter numbers for each block of K.

A program computes BLOCK_M x BLOCK_N elements of C over a part of K. The products of a block of K are added on the
matrix units, which cut off what does not fit; the sums over the blocks are float32 additions, rounded as usual. Where C
has few tiles, K is split among programs, whose partial results are added in a fixed order: two runs give the same bits.
Matrix units read both factors of TF32 products along K. Where B has contiguous rows, its transposition costs more than
three more products of bfloat16 numbers, which are read either way.

Layout:  A [M, K] and B [K, N], each with contiguous rows or columns; C [M, N] dense; partial results [splits, M, N].
float32: everything.
Limits:  none; offsets are int64.
Cost:    2 M N K FLOPs, three times as many of TF32 or six times as many of bfloat16 numbers; A is read N / BLOCK_N
         times, B M / BLOCK_M times.
"""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.device import float32_products, interpreted, num_processors
from subquad.kernels.launch import CompileOptions, cdiv, launch

TF32, BF16 = "tf32x3", "bf16x6"
"""Three products of two TF32 numbers each, or six of three bfloat16 numbers each, as Triton names them."""
HAS_BF16 = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 6)
"""Whether this Triton knows the second kind. The first one takes its place where it does not."""
GROUP = 8
"""Tiles along M that run together, so that they find their parts of B in the second cache."""


class Tuning(NamedTuple):
    """Tile of a program."""

    block_m: int
    block_n: int
    block_k: int
    parts: str
    """Format of the parts that a float32 number is split into: TF32 or BF16. It has an effect on NVIDIA GPUs only."""
    options: CompileOptions
    min_span: int = 256
    """Least part of K that a program takes where K is split."""


@triton.jit
def _product_kernel(
    a, b, bias, c,
    M, N, K, a_stride_m, a_stride_k, b_stride_k, b_stride_n, span,
    A_ROWS: tl.constexpr, B_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of C over one part of K. A_ROWS, B_ROWS: whether rows are contiguous, else columns are."""
    num_m, num_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    i_tile, i_s = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first = i_tile // (GROUP * num_n) * GROUP
    size = tl.minimum(num_m - first, GROUP)
    i_m, i_n = first + i_tile % (GROUP * num_n) % size, i_tile % (GROUP * num_n) // size
    o_m = (i_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    o_n = (i_n * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    o_k = tl.arange(0, BLOCK_K).to(tl.int64)
    m_m, m_n = (o_m < M)[:, None], (o_n < N)[None, :]
    # only a stride of one that the compiler knows makes loads wide
    if A_ROWS:
        a_stride_k = 1
    else:
        a_stride_m = 1
    if B_ROWS:
        b_stride_n = 1
    else:
        b_stride_k = 1
    end = tl.minimum((i_s + 1) * span, K)
    p_a, p_b = a + o_m[:, None] * a_stride_m, b + o_n[None, :] * b_stride_n
    b_c = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(i_s * span, end, BLOCK_K):
        o_now = k + o_k
        m_k = o_now < end
        b_a = tl.load(p_a + o_now[None, :] * a_stride_k, mask=m_m & m_k[None, :], other=0.0)
        b_b = tl.load(p_b + o_now[:, None] * b_stride_k, mask=m_k[:, None] & m_n, other=0.0)
        b_c = tl.dot(b_a, b_b, b_c, input_precision=PRECISION)
    if bias is not None:
        b_c += tl.load(bias + o_n, mask=o_n < N, other=0.0)[None, :]
    tl.store(c + (i_s * M + o_m[:, None]) * N + o_n[None, :], b_c, mask=m_m & m_n)


def tuning(a_rows: bool, b_rows: bool) -> Tuning:
    """The measured tile for factors with contiguous rows or columns."""
    if not b_rows:
        return Tuning(128, 64, 32, TF32, CompileOptions(num_warps=8, num_stages=3))
    if a_rows:
        return Tuning(128, 128, 32, BF16, CompileOptions(num_warps=8, num_stages=3))
    return Tuning(128, 64, 32, BF16, CompileOptions(num_warps=4, num_stages=3))


def _precision(tile: Tuning) -> str:
    """Triton's name of the products. Its interpreter knows no bfloat16 parts, and other GPUs know neither kind."""
    known = float32_products()
    return tile.parts if known == TF32 and HAS_BF16 and not interpreted() else known


def float32_matmul_triton(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
    tile: Tuning | None = None,
    splits: int | None = None,
) -> Tensor:
    """`float32_matmul` for arguments that were checked; tile and splits replace the chosen ones."""
    (rows, depth), columns = a.shape, b.shape[1]
    a_rows, b_rows = a.stride(1) == 1, b.stride(1) == 1
    tile = tile or tuning(a_rows, b_rows)
    tiles = cdiv(rows, tile.block_m) * cdiv(columns, tile.block_n)
    if splits is None:
        # the partial results are read again, so K is split only where tiles leave multiprocessors idle
        splits = min(depth // tile.min_span, 2 * num_processors(a.device) // tiles)
    span = cdiv(cdiv(depth, max(1, splits)), tile.block_k) * tile.block_k
    splits = cdiv(depth, span)
    c = out
    if splits > 1:
        c = torch.empty(splits, rows, columns, dtype=torch.float32, device=a.device)
    elif c is None:
        c = torch.empty(rows, columns, dtype=torch.float32, device=a.device)
    launch(
        _product_kernel, (tiles, splits), a=a, b=b, bias=bias if bias is None or splits == 1 else None, c=c, M=rows,
        N=columns, K=depth, a_stride_m=a.stride(0), a_stride_k=a.stride(1), b_stride_k=b.stride(0),
        b_stride_n=b.stride(1), span=span, A_ROWS=a_rows, B_ROWS=b_rows, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k, GROUP=GROUP, PRECISION=_precision(tile), **tile.options.keywords(),
    )  # fmt: skip
    if splits == 1:
        return c
    total = torch.sum(c, 0, out=out) if out is not None else c.sum(0)
    return total if bias is None else total.add_(bias)
