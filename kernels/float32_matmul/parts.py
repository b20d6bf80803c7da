"""Products of float32 matrices whose float16 parts were made once, for several products.

    X[r, c] = scale[r / SIDE, c / SIDE] (X_1[r, c] + X_2[r, c])
    C = A B + bias,   A B = sum over blocks of K of scale_a scale_b (A_2 B_1 + A_1 B_2 + A_1 B_1)

`_split_kernel` writes the parts of a matrix (`kernels/float16_parts.py`), with one scale for each tile of SIDE x SIDE
elements, so that a block of K has one scale whichever axis a product contracts. `_parts_kernel` multiplies: its loop
loads float16 tiles, which matrix units read from shared memory along either axis, and makes nothing. A linear map
needs the parts of x for the map and for the gradient of the weight, and those of the gradient for both gradients.

Matrix units cut off what does not fit, so they add over one block of K only, the small products first; blocks are
added by float32 additions. Where K has at most SIDE elements (ONE), one sum goes through all of K and is scaled once;
with TWO_SUMS the small products have a sum of their own, which costs registers and spares the large one two of three
truncations. K is split among programs where C has few tiles, and partial results are added in a fixed
order, so two runs give the same bits.

Layout:  parts [R, 2, C]: row r of X_1, then row r of X_2; scale [ceil(R / SIDE), ceil(C / SIDE)], or None for 2^-14.
         A [M, K] and B [K, N] are parts as they lie or transposed; C [M, N] dense; partial results [splits, M, N].
float32: scales, sums and results.
Limits:  an element has 22 bits down to 2^-17 of the largest finite one in its tile, and below an absolute error of
         2^-39 of that one. An infinity gives infinities or NaN in its row or column. Tiles whose largest product is
         below 2^-121 give zeros. BLOCK_M times a row has less than 2^31 elements; all other offsets are int64.
Cost:    a split reads and writes 4 bytes an element; a product takes 6 M N K FLOPs of float16, reads A N / BLOCK_N
         times and B M / BLOCK_M times, 4 bytes an element.
Source:  Ootomo and Yokota 2022 (arXiv 2203.03341), with the scales of `kernels/float16_parts.py`.
"""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.device import num_processors
from subquad.kernels.float16_parts import UNSCALE, halves, power_scale, split_dot
from subquad.kernels.launch import CompileOptions, cdiv, launch
from subquad.kernels.layout import dense_channels

SIDE = 128
"""Rows and columns of a tile that shares a scale."""
GROUP = 8
"""Tiles along M that run together, so that they find their parts of B in the second cache."""


class Tuning(NamedTuple):
    """Tile of a program. block_k divides SIDE; block_m and block_n divide it, or block_n is twice as large."""

    block_m: int
    block_n: int
    block_k: int
    options: CompileOptions
    programs: int = 1
    """Programs for each multiprocessor up to which K is split."""
    min_span: int = 256
    """Least part of K that a program takes where K is split."""
    two_sums: bool = True
    """Whether small products have a sum of their own where K has at most SIDE elements."""


class Parts(NamedTuple):
    """The parts of a float32 matrix X [R, C], or of its transpose."""

    values: Tensor
    """[R, 2, C], float16; rows are contiguous."""
    scale: Tensor | None
    """[ceil(R / SIDE), ceil(C / SIDE)], float32; None where all scales are 2^-14, for elements in [-1, 1]."""
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the matrix."""
        rows, _, columns = self.values.shape
        return (columns, rows) if self.transposed else (rows, columns)

    def t(self) -> Parts:
        """The parts of the transpose, which lie in the same memory."""
        return self._replace(transposed=not self.transposed)

    def rows(self, start: int, stop: int) -> Parts:
        """Rows of X from a multiple of SIDE on."""
        assert start % SIDE == 0
        scale = None if self.scale is None else self.scale[start // SIDE : cdiv(stop, SIDE)]
        return Parts(self.values[start:stop], scale, self.transposed)


@triton.jit
def _split_kernel(x, values, scale, R, C, stride, num_c, SIDE: tl.constexpr):
    """The parts [R, 2, C] of one tile of x [R, C], and its scale."""
    i_r, i_c = (tl.program_id(0) // num_c).to(tl.int64), tl.program_id(0) % num_c
    o_r, o_c = i_r * SIDE + tl.arange(0, SIDE), i_c * SIDE + tl.arange(0, SIDE)
    m = (o_r < R)[:, None] & (o_c < C)[None, :]
    b_x = tl.load(x + o_r[:, None] * stride + o_c[None, :], mask=m, other=0.0)
    b_abs = tl.abs(b_x)
    # an infinity or NaN must not take the digits of the other rows and columns
    b_scale, b_inverse = power_scale(tl.max(tl.max(tl.where(b_abs < float("inf"), b_abs, 0.0), 1), 0))
    tl.store(scale + tl.program_id(0), b_scale)
    b_1, b_2 = halves(b_x * b_inverse)
    p_values = values + o_r[:, None] * (2 * C) + o_c[None, :]
    tl.store(p_values, b_1, mask=m)
    tl.store(p_values + C, b_2, mask=m)


@triton.jit
def _scale(scale, i_k, i_side, num_side, tiles, K_LAST: tl.constexpr):
    """The scale of the tile i_k along K (int64) and i_side along the other axis. K_LAST: stored rows lie along K."""
    b_scale = UNSCALE
    if scale is not None:
        p_scale = scale + (i_k * tiles + i_side)
        if K_LAST:
            p_scale = scale + (i_side.to(tl.int64) * tiles + i_k)
        b_scale = tl.load(p_scale, mask=i_side < num_side, other=0.0)
    return b_scale


@triton.jit
def _column_scales(scale, i_k, o_n, i_n, N, tiles, K_LAST: tl.constexpr, BLOCK_N: tl.constexpr, SIDE: tl.constexpr):
    """The scale of B's columns: a number, or a row where a block has the columns of two tiles."""
    first, num_side = i_n * BLOCK_N // SIDE, tl.cdiv(N, SIDE)
    b_scale = _scale(scale, i_k, first, num_side, tiles, K_LAST)
    if scale is not None and BLOCK_N > SIDE:
        b_second = _scale(scale, i_k, first + 1, num_side, tiles, K_LAST)
        b_scale = tl.where(o_n < SIDE, b_scale, b_second)[None, :]
    return b_scale


@triton.jit(do_not_specialize=["a_tiles", "b_tiles"])
def _parts_kernel(
    a, a_scale, b, b_scale, bias, c,
    M, N, K, a_stride, a_rest, a_tiles, b_stride, b_rest, b_tiles, span,
    A_K_LAST: tl.constexpr, B_K_LAST: tl.constexpr, ADD: tl.constexpr, ONE: tl.constexpr, TWO_SUMS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SIDE: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One tile of C over one part of K. A_K_LAST, B_K_LAST: whether the rows of the stored parts lie along K.

    a_rest: from an element of the first part to that of the second. ADD: the result is added to C.
    """
    num_m, num_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    i_tile, i_s = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first = i_tile // (GROUP * num_n) * GROUP
    size = tl.minimum(num_m - first, GROUP)
    i_m, i_n = first + i_tile % (GROUP * num_n) % size, i_tile % (GROUP * num_n) // size
    o_m, o_n, o_k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    first_m, first_n = i_m.to(tl.int64) * BLOCK_M, i_n.to(tl.int64) * BLOCK_N
    m_m, m_n = (first_m + o_m < M)[:, None], (first_n + o_n < N)[None, :]
    if A_K_LAST:
        p_a, o_a, step_a = a + first_m * a_stride, o_m[:, None] * a_stride + o_k[None, :], 1
    else:
        p_a, o_a, step_a = a + first_m, o_m[:, None] + o_k[None, :] * a_stride, a_stride
    if B_K_LAST:
        p_b, o_b, step_b = b + first_n * b_stride, o_n[None, :] * b_stride + o_k[:, None], 1
    else:
        p_b, o_b, step_b = b + first_n, o_n[None, :] + o_k[:, None] * b_stride, b_stride
    end = tl.minimum((i_s + 1) * span, K)
    i_am, num_am = i_m * BLOCK_M // SIDE, tl.cdiv(M, SIDE)
    b_c = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if ONE and TWO_SUMS:
        b_small = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(i_s * span, end, BLOCK_K):
        m_k = k + o_k < end
        m_a, m_b = m_m & m_k[None, :], m_k[:, None] & m_n
        b_a1 = tl.load(p_a + k * step_a + o_a, mask=m_a, other=0.0)
        b_a2 = tl.load(p_a + k * step_a + a_rest + o_a, mask=m_a, other=0.0)
        b_b1 = tl.load(p_b + k * step_b + o_b, mask=m_b, other=0.0)
        b_b2 = tl.load(p_b + k * step_b + b_rest + o_b, mask=m_b, other=0.0)
        if ONE and TWO_SUMS:
            b_small = tl.dot(b_a2, b_b1, b_small)
            b_small = tl.dot(b_a1, b_b2, b_small)
            b_c = tl.dot(b_a1, b_b1, b_c)
        elif ONE:
            b_c = tl.dot(b_a2, b_b1, b_c)
            b_c = tl.dot(b_a1, b_b2, b_c)
            b_c = tl.dot(b_a1, b_b1, b_c)
        else:
            b_factor = _scale(a_scale, k // SIDE, i_am, num_am, a_tiles, A_K_LAST)
            b_factor *= _column_scales(b_scale, k // SIDE, o_n, i_n, N, b_tiles, B_K_LAST, BLOCK_N, SIDE)
            b_c += split_dot(b_a1, b_a2, b_b1, b_b2) * b_factor
    if ONE:
        if TWO_SUMS:
            b_c += b_small
        i_k = i_s * 0
        b_factor = _scale(a_scale, i_k, i_am, num_am, a_tiles, A_K_LAST)
        b_factor *= _column_scales(b_scale, i_k, o_n, i_n, N, b_tiles, B_K_LAST, BLOCK_N, SIDE)
        b_c *= b_factor
    if bias is not None:
        b_c += tl.load(bias + first_n + o_n, mask=first_n + o_n < N, other=0.0)[None, :]
    p_c = c + (i_s * M + first_m) * N + first_n + (o_m.to(tl.int64)[:, None] * N + o_n[None, :])
    if ADD:
        b_c += tl.load(p_c, mask=m_m & m_n, other=0.0)
    tl.store(p_c, b_c, mask=m_m & m_n)


def tuning(a: Parts, b: Parts) -> Tuning:
    """The measured tile for a product."""
    if a.shape[1] <= SIDE:
        # with one sum, tiles of 128 x 128 take 2 to 7 % less time and have twice the error
        return Tuning(128, 64, 32, CompileOptions(num_warps=4, num_stages=3, max_registers=168))
    return Tuning(128, 128, 64, CompileOptions(num_warps=8, num_stages=3))


def split(x: Tensor) -> Parts:
    """The parts of a float32 matrix [R, C] with at least one element and less than MAX_COLUMNS columns.

    Its columns are copied where rows are strided. `takes_parts` sees to the number of columns.
    """
    x = dense_channels(x)
    rows, columns = x.shape
    num_r, num_c = cdiv(rows, SIDE), cdiv(columns, SIDE)
    values = torch.empty(rows, 2, columns, dtype=torch.float16, device=x.device)
    scale = torch.empty(num_r, num_c, dtype=torch.float32, device=x.device)
    launch(
        _split_kernel, num_r * num_c, x=x, values=values, scale=scale, R=rows, C=columns, stride=x.stride(0),
        num_c=num_c, SIDE=SIDE, num_warps=8,
    )  # fmt: skip
    return Parts(values, scale)


def parts_matmul(
    a: Parts,
    b: Parts,
    bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
    add: bool = False,
    tile: Tuning | None = None,
    splits: int | None = None,
) -> Tensor:
    """C [M, N] of A [M, K], B [K, N] and bias [N], float32.

    out: contiguous; C is written into it, or with `add` added to it. tile and splits replace the chosen ones.
    """
    (rows, depth), columns = a.shape, b.shape[1]
    assert b.shape[0] == depth
    tile = tile or tuning(a, b)
    tiles = cdiv(rows, tile.block_m) * cdiv(columns, tile.block_n)
    if splits is None:
        # the partial results are read again, so K is split only where tiles leave multiprocessors idle
        splits = min(depth // tile.min_span, tile.programs * num_processors(a.values.device) // tiles)
    span = cdiv(cdiv(depth, max(1, splits)), tile.block_k) * tile.block_k
    splits = cdiv(depth, span)
    c = out
    if splits > 1:
        c = torch.empty(splits, rows, columns, dtype=torch.float32, device=a.values.device)
    elif c is None:
        c = torch.empty(rows, columns, dtype=torch.float32, device=a.values.device)
    launch(
        _parts_kernel, (tiles, splits), a=a.values, a_scale=a.scale, b=b.values, b_scale=b.scale,
        bias=bias if splits == 1 else None, c=c, M=rows, N=columns, K=depth, a_stride=a.values.stride(0),
        a_rest=a.values.stride(1), a_tiles=cdiv(a.values.shape[2], SIDE), b_stride=b.values.stride(0),
        b_rest=b.values.stride(1), b_tiles=cdiv(b.values.shape[2], SIDE), span=span, A_K_LAST=not a.transposed,
        B_K_LAST=b.transposed, ADD=add and splits == 1, ONE=depth <= SIDE, TWO_SUMS=depth <= SIDE and tile.two_sums,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, SIDE=SIDE, GROUP=GROUP,
        **tile.options.keywords(),
    )  # fmt: skip
    if splits == 1:
        return c
    if out is not None and add:
        return out.add_(c.sum(0) if bias is None else c.sum(0).add_(bias))
    total = c.sum(0) if out is None else torch.sum(c, 0, out=out)
    return total if bias is None else total.add_(bias)
