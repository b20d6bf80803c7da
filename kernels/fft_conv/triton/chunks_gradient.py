"""The gradient of the taps from products of chunks and sums along their diagonals.

    G_k[i, j] = sum_c x[c C + i] g[(c + k) C + j],  0 <= j < 2 C,    dtaps[k C + l] = sum_i G_k[i, i + l],  l < C

over the chunks c of C steps of all sequences: for each k one product [C, chunks] x [chunks, 2 C] a channel, kept in
registers, and one pass over the part of x and g in which a chunk c + k exists. Half of G belongs to no lag; with few k
reading x and g costs more than products.

x and g are bfloat16, with a gate sums of two bfloat16 numbers, or float32 as halves (`gates.Gated`). Of the products of
two sums that of the rests is left out. Each sequence of halves has a scale of its own, but a sum is over sequences. So
halves of x are multiplied by a weight of their sequence: the product of the scales of x and g, divided by the largest
such product of the channel. Weights are powers of two of at most 1.

Sums are float32. Deterministic. Multiply-adds for each of B T D: 2 C for each k, times the part of x and g. Bytes: 2
elements for each of B T D and k, one of which is read once more from the second cache.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.device import num_processors
from subquad.kernels.fft_conv.triton.gates import Gated
from subquad.kernels.float16_parts import split_dot
from subquad.kernels.launch import CompileOptions, cdiv, launch, power_of_2
from subquad.kernels.layout import strides


class ChunkTile(NamedTuple):
    """A tile of `_products_kernel`: `rows` chunks of `chunk` steps (C)."""

    chunk: int
    rows: int
    options: CompileOptions


TILE = ChunkTile(64, 64, CompileOptions(num_warps=4, num_stages=3))
PAIRS_TILE = ChunkTile(64, 64, CompileOptions(num_warps=4, num_stages=2))
PROGRAMS_PER_PROCESSOR = 6
"""Target number of programs for each multiprocessor; to reach it, several programs share a sum G_k."""


@triton.jit(do_not_specialize=["B", "num_k", "num_splits", "num_chunks"])
def _products_kernel(
    x, x_rest, g, g_rest, weights, products,
    B, D, x_T, g_T, num_k, num_splits, num_chunks,
    x_stride_b, x_stride_d, g_stride_b, g_stride_d,
    C: tl.constexpr, ROWS: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """products [splits, D, num_k, C, C], whose sums over splits at [i, l] are G_k[i, i + l].

    A tile has 2^chunk_bits chunks of each of ROWS / 2^chunk_bits sequences. x_rest and g_rest: the second numbers of x
    and g, or None. weights [B, D], with halves: the factor of a sequence.
    """
    i_k, i_d = tl.program_id(0) % num_k, (tl.program_id(0) // num_k % D).to(tl.int64)
    i_split = tl.program_id(0) // num_k // D
    o_r, o_i, o_j = tl.arange(0, ROWS), tl.arange(0, C), tl.arange(0, 2 * C)
    i_x, i_g = i_d * x_stride_d, i_d * g_stride_d
    # the chunks that have a partner k chunks later
    num_chunks -= i_k
    chunk_bits = 0
    while ((1 << chunk_bits) < num_chunks) & ((1 << chunk_bits) < ROWS):
        chunk_bits += 1
    num_groups = tl.cdiv(num_chunks, 1 << chunk_bits)
    num_tiles = num_groups * tl.cdiv(B, ROWS >> chunk_bits)
    # tiles are numbered through, group of sequences by group; this program takes those from first to end
    first, end = num_tiles * i_split // num_splits, num_tiles * (i_split + 1) // num_splits
    i_c = first % num_groups << chunk_bits
    o_b = (first // num_groups * (ROWS >> chunk_bits) + (o_r >> chunk_bits)).to(tl.int64)
    o_c = o_r & ((1 << chunk_bits) - 1)
    b_sum = tl.zeros([C, 2 * C], tl.float32)
    for _ in tl.range(first, end, num_stages=NUM_STAGES):
        o_x = ((i_c + o_c) * C)[:, None] + o_i[None, :]
        o_g = ((i_c + o_c + i_k) * C)[:, None] + o_j[None, :]
        m_b = (o_b < B)[:, None]
        m_x, m_g = m_b & (o_x < x_T), m_b & (o_g < g_T)
        o_x, o_g = i_x + (o_b[:, None] * x_stride_b + o_x), i_g + (o_b[:, None] * g_stride_b + o_g)
        b_x, b_g = tl.load(x + o_x, mask=m_x, other=0.0), tl.load(g + o_g, mask=m_g, other=0.0)
        if x_rest is not None and g_rest is not None:
            b_x2, b_g2 = tl.load(x_rest + o_x, mask=m_x, other=0.0), tl.load(g_rest + o_g, mask=m_g, other=0.0)
            if weights is not None:
                b_w = tl.load(weights + (o_b * D + i_d), mask=o_b < B, other=0.0)[:, None]
                b_x, b_x2 = b_x * b_w, b_x2 * b_w
            b_sum += split_dot(tl.trans(b_x), tl.trans(b_x2), b_g, b_g2)
        elif x_rest is not None:
            b_x2 = tl.load(x_rest + o_x, mask=m_x, other=0.0)
            b_sum += tl.dot(tl.trans(b_x), b_g, tl.dot(tl.trans(b_x2), b_g))
        elif g_rest is not None:
            b_g2 = tl.load(g_rest + o_g, mask=m_g, other=0.0)
            b_sum += tl.dot(tl.trans(b_x), b_g, tl.dot(tl.trans(b_x), b_g2))
        else:
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
def _diagonals_kernel(products, scale, dtaps, D, lags, num_k, num_splits, C: tl.constexpr):
    """dtaps [D, lags]: the sums over splits and i of products [splits, D, num_k, C (i), C (l)], times scale [D]."""
    i_k, i_d = tl.program_id(0) % num_k, (tl.program_id(0) // num_k).to(tl.int64)
    o_i, o_l = tl.arange(0, C), tl.arange(0, C)
    p_products = products + (i_d * num_k + i_k) * (C * C) + (o_i[:, None] * C + o_l[None, :])
    b_sum = tl.load(p_products)
    for _ in range(1, num_splits):
        p_products += num_k.to(tl.int64) * D * (C * C)
        b_sum += tl.load(p_products)
    b_dtaps = tl.sum(b_sum, 0)
    if scale is not None:
        b_dtaps *= tl.load(scale + i_d)
    tl.store(dtaps + i_d * lags + i_k * C + o_l, b_dtaps, mask=i_k * C + o_l < lags)


def chunks_gradient(source: Gated, gradient: Gated, length: int, lags: int) -> Tensor:
    """The gradient of the taps [D, lags] in float32, from the inputs of the convolution and the gradient of y.

    Both are bfloat16 or sums of two such numbers, or both are halves.
    """
    x, g = source.product, gradient.product
    batch, _, width = x.shape
    tile = TILE if source.rest is None and gradient.rest is None else PAIRS_TILE
    weights, scale = _weights(source.scale, gradient.scale)
    num_chunks, num_k = cdiv(length, tile.chunk), cdiv(lags, tile.chunk)
    tile_chunks = min(tile.rows, power_of_2(num_chunks))
    num_tiles = cdiv(num_chunks, tile_chunks) * cdiv(batch, tile.rows // tile_chunks)
    num_splits = min(num_tiles, cdiv(PROGRAMS_PER_PROCESSOR * num_processors(x.device), width * num_k))
    products = torch.empty(num_splits, width, num_k, tile.chunk, tile.chunk, dtype=torch.float32, device=x.device)
    x_stride_b, x_stride_d = strides(x, 0, 2)
    g_stride_b, g_stride_d = strides(g, 0, 2)
    # NUM_STAGES is the depth of one loop alone, not an option of the whole kernel
    launch(
        _products_kernel, num_splits * width * num_k, x=x, x_rest=source.rest, g=g, g_rest=gradient.rest,
        weights=weights, products=products, B=batch, D=width, x_T=x.shape[1], g_T=g.shape[1], num_k=num_k,
        num_splits=num_splits, num_chunks=num_chunks, x_stride_b=x_stride_b, x_stride_d=x_stride_d,
        g_stride_b=g_stride_b, g_stride_d=g_stride_d, C=tile.chunk, ROWS=tile.rows, NUM_STAGES=tile.options.num_stages,
        num_warps=tile.options.num_warps,
    )  # fmt: skip
    dtaps = torch.empty(width, lags, dtype=torch.float32, device=x.device)
    launch(
        _diagonals_kernel, width * num_k, products=products, scale=scale, dtaps=dtaps, D=width, lags=lags, num_k=num_k,
        num_splits=num_splits, C=tile.chunk, num_warps=4,
    )  # fmt: skip
    return dtaps


def _weights(x_scale: Tensor | None, g_scale: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Weights [B, D] in float16 and scales [D] whose products are x_scale g_scale [B, D]; None without halves."""
    if x_scale is None or g_scale is None:
        return None, None
    both = x_scale * g_scale
    scale = both.amax(0)
    # a channel of zeros has no weights
    return (both / scale.clamp(min=torch.finfo(torch.float32).tiny)).half(), scale
