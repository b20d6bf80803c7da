"""The gradient of a few taps in Triton, from products of chunks and sums along their diagonals.

    G_k[i, j] = sum_c x[c C + i] g[(c + k) C + j],  0 <= j < 2 C,    dtaps[k C + l] = sum_i G_k[i, i + l],  l < C

over the chunks c of C steps of all sequences: for each k one product [C, chunks] x [chunks, 2 C] a channel, kept in
registers, and one pass over x and g. Half of G is no lag of its own; with few k the pass costs more than products do.

x and g in bfloat16, sums in float32. Deterministic. Multiply-adds for each of B T D: 2 C a k. Bytes: 2 numbers of
B T D a k, one of them from the second cache once more.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import cdiv, launch, num_processors, power_of_2


class Config(NamedTuple):
    """Of the products: C, chunks of a tile."""

    chunk: int
    rows: int
    warps: int
    stages: int


CONFIG = Config(64, 64, 4, 3)
DIAGONAL_LAGS = 128
"""Up to which this is faster than `spectra.py`."""


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
    """products [splits, D, num_k, C, C], which add up over splits to G_k[i, i + l] at [i, l].

    A tile is 2^chunk_bits chunks of as many sequences as make ROWS.
    """
    i_k, i_d = tl.program_id(0) % num_k, (tl.program_id(0) // num_k % D).to(tl.int64)
    i_split = tl.program_id(0) // num_k // D
    o_r, o_i, o_j = tl.arange(0, ROWS), tl.arange(0, C), tl.arange(0, 2 * C)
    p_x, p_g = x + i_d * x_stride_d, g + i_d * g_stride_d
    # tiles of the same sequences are neighbours
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
        # without a branch or a division, which would keep loads out of the pipeline
        i_c += 1 << chunk_bits
        is_last = i_c >= num_chunks
        o_b += tl.where(is_last, ROWS >> chunk_bits, 0)
        i_c = tl.where(is_last, 0, i_c)

    o_l = o_j[None, :] - o_i[:, None]
    p_products = products + ((i_split * D + i_d) * num_k + i_k) * (C * C) + (o_i[:, None] * C + o_l)
    tl.store(p_products, b_sum, mask=(o_l >= 0) & (o_l < C))


@triton.jit(do_not_specialize=["lags", "num_k", "num_splits"])
def _diagonals_kernel(products, dtaps, D, lags, num_k, num_splits, C: tl.constexpr):
    """dtaps [D, lags], the sums over splits and i of products [splits, D, num_k, C (i), C (l)]."""
    i_k, i_d = tl.program_id(0) % num_k, (tl.program_id(0) // num_k).to(tl.int64)
    o_i, o_l = tl.arange(0, C), tl.arange(0, C)
    p_products = products + (i_d * num_k + i_k) * (C * C) + (o_i[:, None] * C + o_l[None, :])
    b_sum = tl.load(p_products)
    for _ in range(1, num_splits):
        p_products += D.to(tl.int64) * num_k * (C * C)
        b_sum += tl.load(p_products)
    tl.store(dtaps + i_d * lags + i_k * C + o_l, tl.sum(b_sum, 0), mask=i_k * C + o_l < lags)


def few_taps_bwd(x: Tensor, g: Tensor, length: int, lags: int) -> Tensor:
    """The gradient of taps [D, lags] in float32, from x and g [B, length or more, D] in bfloat16, time contiguous."""
    batch, _, width = x.shape
    num_chunks, num_k = cdiv(length, CONFIG.chunk), cdiv(lags, CONFIG.chunk)
    tile_chunks = min(CONFIG.rows, power_of_2(num_chunks))
    num_tiles = cdiv(num_chunks, tile_chunks) * cdiv(batch, CONFIG.rows // tile_chunks)
    # programs enough for every multiprocessor
    num_splits = min(num_tiles, cdiv(6 * num_processors(x.device), width * num_k))
    products = torch.empty((num_splits, width, num_k, CONFIG.chunk, CONFIG.chunk), dtype=torch.float32, device=x.device)
    launch(
        _products_kernel,
        num_splits * width * num_k,
        x,
        g,
        products,
        batch,
        width,
        x.shape[1],
        g.shape[1],
        num_k,
        num_tiles,
        num_splits,
        num_chunks,
        tile_chunks.bit_length() - 1,
        x.stride(0),
        x.stride(2),
        g.stride(0),
        g.stride(2),
        C=CONFIG.chunk,
        ROWS=CONFIG.rows,
        NUM_STAGES=CONFIG.stages,
        num_warps=CONFIG.warps,
    )
    dtaps = torch.empty((width, lags), dtype=torch.float32, device=x.device)
    launch(
        _diagonals_kernel, width * num_k, products, dtaps, width, lags, num_k, num_splits, C=CONFIG.chunk, num_warps=4
    )
    return dtaps
