"""The gradient of few taps from products of chunks and sums along their diagonals.

    G_k[i, j] = sum_c x[c C + i] g[(c + k) C + j],  0 <= j < 2 C,    dtaps[k C + l] = sum_i G_k[i, i + l],  l < C

over the chunks c of C steps of all sequences: for each k one product [C, chunks] x [chunks, 2 C] a channel, kept in
registers, and one pass over x and g. Half of G belongs to no lag; with few k reading x and g costs more than products.

x and g are bfloat16, sums float32. Deterministic. Multiply-adds for each of B T D: 2 C for each k. Bytes: 2 elements
for each of B T D and k, one of which is read once more from the second cache.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.device import num_processors
from kernels.launch import CompileOptions, cdiv, launch, power_of_2
from kernels.layout import strides


class ChunkTile(NamedTuple):
    """A tile of `_products_kernel`: `rows` chunks of `chunk` steps (C)."""

    chunk: int
    rows: int
    options: CompileOptions


TILE = ChunkTile(64, 64, CompileOptions(num_warps=4, num_stages=3))
PROGRAMS_PER_PROCESSOR = 6
"""Target number of programs for each multiprocessor; to reach it, several programs share a sum G_k."""


@triton.jit(do_not_specialize=["B", "num_k", "num_tiles", "num_splits", "num_chunks", "chunk_bits"])
def _products_kernel(
    x,
    g,
    products,
    B,
    D,
    x_T,
    g_T,
    num_k,
    num_tiles,
    num_splits,
    num_chunks,
    chunk_bits,
    x_stride_b,
    x_stride_d,
    g_stride_b,
    g_stride_d,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """products [splits, D, num_k, C, C], whose sums over splits at [i, l] are G_k[i, i + l].

    A tile has 2^chunk_bits chunks of each of ROWS / 2^chunk_bits sequences.
    """
    i_k, i_d = tl.program_id(0) % num_k, (tl.program_id(0) // num_k % D).to(tl.int64)
    i_split = tl.program_id(0) // num_k // D
    o_r, o_i, o_j = tl.arange(0, ROWS), tl.arange(0, C), tl.arange(0, 2 * C)
    p_x, p_g = x + i_d * x_stride_d, g + i_d * g_stride_d
    # tiles are numbered through, group of sequences by group; this program takes those from first to end
    first, end = num_tiles * i_split // num_splits, num_tiles * (i_split + 1) // num_splits
    num_groups = tl.cdiv(num_chunks, 1 << chunk_bits)
    i_c = first % num_groups << chunk_bits
    o_b = (first // num_groups * (ROWS >> chunk_bits) + (o_r >> chunk_bits)).to(tl.int64)
    o_c = o_r & ((1 << chunk_bits) - 1)
    b_sum = tl.zeros([C, 2 * C], tl.float32)
    for _ in tl.range(first, end, num_stages=NUM_STAGES):
        o_x = ((i_c + o_c) * C)[:, None] + o_i[None, :]
        o_g = ((i_c + o_c + i_k) * C)[:, None] + o_j[None, :]
        m_b = (o_b < B)[:, None]
        b_x = tl.load(p_x + (o_b[:, None] * x_stride_b + o_x), mask=m_b & (o_x < x_T), other=0.0)
        b_g = tl.load(p_g + (o_b[:, None] * g_stride_b + o_g), mask=m_b & (o_g < g_T), other=0.0)
        b_sum = tl.dot(tl.trans(b_x), b_g, b_sum)
        # a branch or a division would keep loads out of the pipeline
        i_c += 1 << chunk_bits
        is_last = i_c >= num_chunks
        o_b += tl.where(is_last, ROWS >> chunk_bits, 0)
        i_c = tl.where(is_last, 0, i_c)

    o_l = o_j[None, :] - o_i[:, None]
    p_products = products + ((i_split * D + i_d) * num_k + i_k) * (C * C) + (o_i[:, None] * C + o_l)
    tl.store(p_products, b_sum, mask=(o_l >= 0) & (o_l < C))


@triton.jit(do_not_specialize=["lags", "num_k", "num_splits"])
def _diagonals_kernel(products, dtaps, D, lags, num_k, num_splits, C: tl.constexpr):
    """dtaps [D, lags]: the sums over splits and i of products [splits, D, num_k, C (i), C (l)]."""
    i_k, i_d = tl.program_id(0) % num_k, (tl.program_id(0) // num_k).to(tl.int64)
    o_i, o_l = tl.arange(0, C), tl.arange(0, C)
    p_products = products + (i_d * num_k + i_k) * (C * C) + (o_i[:, None] * C + o_l[None, :])
    b_sum = tl.load(p_products)
    for _ in range(1, num_splits):
        p_products += D.to(tl.int64) * num_k * (C * C)
        b_sum += tl.load(p_products)
    tl.store(dtaps + i_d * lags + i_k * C + o_l, tl.sum(b_sum, 0), mask=i_k * C + o_l < lags)


def few_taps_gradient(x: Tensor, g: Tensor, length: int, lags: int) -> Tensor:
    """The gradient of the taps [D, lags] in float32, from x and g [B, >= length, D] in bfloat16, time contiguous."""
    batch, _, width = x.shape
    num_chunks, num_k = cdiv(length, TILE.chunk), cdiv(lags, TILE.chunk)
    tile_chunks = min(TILE.rows, power_of_2(num_chunks))
    num_tiles = cdiv(num_chunks, tile_chunks) * cdiv(batch, TILE.rows // tile_chunks)
    num_splits = min(num_tiles, cdiv(PROGRAMS_PER_PROCESSOR * num_processors(x.device), width * num_k))
    products = torch.empty((num_splits, width, num_k, TILE.chunk, TILE.chunk), dtype=torch.float32, device=x.device)
    x_stride_b, x_stride_d = strides(x, 0, 2)
    g_stride_b, g_stride_d = strides(g, 0, 2)
    launch(
        _products_kernel,
        num_splits * width * num_k,
        x=x,
        g=g,
        products=products,
        B=batch,
        D=width,
        x_T=x.shape[1],
        g_T=g.shape[1],
        num_k=num_k,
        num_tiles=num_tiles,
        num_splits=num_splits,
        num_chunks=num_chunks,
        chunk_bits=tile_chunks.bit_length() - 1,
        x_stride_b=x_stride_b,
        x_stride_d=x_stride_d,
        g_stride_b=g_stride_b,
        g_stride_d=g_stride_d,
        C=TILE.chunk,
        ROWS=TILE.rows,
        # the depth of this loop alone, not an option of the whole kernel
        NUM_STAGES=TILE.options.num_stages,
        num_warps=TILE.options.num_warps,
    )
    dtaps = torch.empty((width, lags), dtype=torch.float32, device=x.device)
    launch(
        _diagonals_kernel,
        width * num_k,
        products=products,
        dtaps=dtaps,
        D=width,
        lags=lags,
        num_k=num_k,
        num_splits=num_splits,
        C=TILE.chunk,
        num_warps=4,
    )
    return dtaps
