"""Deterministic sums over programs: each program of a backward pass writes a row of partial sums, one more kernel adds
the rows with `column_sums`, in a fixed order and without atomics."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.device import num_processors
from subquad.kernels.launch import cdiv, launch, power_of_2
from subquad.kernels.layout import dense_channels

COLUMNS = 32
"""Columns that one program adds: 128 bytes of a row in float32."""
ROWS = 64
"""Rows that are loaded at once."""


@triton.jit
def column_sums(partial, o, m, rows, stride, ROWS: tl.constexpr):
    """Sums of the columns o of partial [rows, stride] where the mask m holds, float32 [COLUMNS]."""
    o_r = tl.arange(0, ROWS)
    p = partial + o_r.to(tl.int64)[:, None] * stride + o[None, :]
    b_sums = tl.load(p, mask=(o_r < rows)[:, None] & m[None, :], other=0.0)
    for i in range(ROWS, rows, ROWS):
        p += ROWS * stride
        b_sums += tl.load(p, mask=(i + o_r < rows)[:, None] & m[None, :], other=0.0)
    return tl.sum(b_sums, 0)


@triton.jit
def _partial_sums_kernel(x, partial, R, N, stride, num_n, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """partial [programs along R, N]: the sums over the tiles of each program."""
    i_n, i_r = tl.program_id(0) % num_n, tl.program_id(0) // num_n
    o_n = i_n * BLOCK + tl.arange(0, BLOCK)
    b_sums = tl.zeros([ROWS, BLOCK], tl.float32)
    for i in range(i_r, tl.cdiv(R, ROWS), tl.num_programs(0) // num_n):
        o_r = (i * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        m = (o_r < R)[:, None] & (o_n < N)[None, :]
        b_sums += tl.load(x + o_r[:, None] * stride + o_n[None, :], mask=m, other=0.0).to(tl.float32)
    tl.store(partial + i_r.to(tl.int64) * N + o_n, tl.sum(b_sums, 0), mask=o_n < N)


@triton.jit
def _add_partial_sums_kernel(partial, y, rows, N, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b_y = column_sums(partial, o, o < N, rows, N, ROWS)
    tl.store(y + o, b_y.to(y.dtype.element_ty), mask=o < N)


@triton.jit
def _parameter_gradients_kernel(partial, dweight, dbias, rows, size, total, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Sums over the rows of partial [rows, total]: the first `size` columns are dweight, the others dbias."""
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b_sum = column_sums(partial, o, o < total, rows, total, ROWS)
    tl.store(dweight + o, b_sum.to(dweight.dtype.element_ty), mask=o < size)
    if dbias is not None:
        tl.store(dbias + o - size, b_sum.to(dbias.dtype.element_ty), mask=(o >= size) & (o < total))


def parameter_gradients(
    partial: Tensor, weight: Tensor, bias: Tensor | None, *, rows: int = ROWS
) -> tuple[Tensor, Tensor | None]:
    """The gradients of weight and bias: the sums over the rows of partial [programs, elements of both], in float32.

    Without a bias, the sums of the columns behind those of the weight are dropped. rows: rows that are loaded at once.
    """
    total = partial.shape[1]
    dweight = torch.empty_like(weight)
    dbias = None if bias is None else torch.empty_like(bias)
    launch(
        _parameter_gradients_kernel, cdiv(total, COLUMNS), partial=partial, dweight=dweight, dbias=dbias,
        rows=len(partial), size=weight.numel(), total=total, ROWS=rows, BLOCK=COLUMNS, num_warps=4,
    )  # fmt: skip
    return dweight, dbias


TILE, MAX_COLUMNS, PROGRAMS = 4096, 128, 4
"""Elements of a tile of `row_sums`, its largest width, and programs for each multiprocessor."""


def row_sums(x: Tensor) -> Tensor:
    """The sum over the rows of x [R, N], added in float32, in the dtype of x. It reads x once, in two launches."""
    x = dense_channels(x)
    rows, width = x.shape
    block = min(MAX_COLUMNS, power_of_2(width))
    num_n, tile_rows = cdiv(width, block), TILE // block
    programs = max(1, min(cdiv(rows, tile_rows), PROGRAMS * num_processors(x.device) // num_n))
    partial = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    launch(
        _partial_sums_kernel, programs * num_n, x=x, partial=partial, R=rows, N=width, stride=x.stride(0), num_n=num_n,
        ROWS=tile_rows, BLOCK=block, num_warps=4,
    )  # fmt: skip
    y = torch.empty(width, dtype=x.dtype, device=x.device)
    launch(
        _add_partial_sums_kernel, cdiv(width, COLUMNS), partial=partial, y=y, rows=programs, N=width, ROWS=ROWS,
        BLOCK=COLUMNS, num_warps=4,
    )  # fmt: skip
    return y
