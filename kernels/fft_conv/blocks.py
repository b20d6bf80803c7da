"""Convolutions by spectra (`spectra.py`) of more blocks than registers hold: their spectra pass through memory.

With X_c the spectrum of block c of a sequence and W_k those of the taps, c of num_chunks and k of num_k,

    P_c = sum_k W_k X_(c-k)  forward,    sum_k conj(W_k) X_(c+k)  for the gradient of x (X that of dy),
    S_k = sum over sequences and c of conj(X_c) G_(c+k)           for that of the taps

are sums at each frequency alone. `_block_spectra_kernel` writes X in float16, each block over the scale that its sum of
magnitudes asks for. `_conv_blocks_kernel` takes GROUP neighbouring blocks of y, so that each X it reads meets as many
W, and goes back to steps. `_correlate_kernel` takes FREQUENCIES and NUM_K neighbouring k.

float16: spectra, products and the sums of UNROLL of them; float32: the sums of those, and all of S. Channels are taken
in slices, so that spectra need SLICE_BYTES at a time. Bytes: 4 for each number of x written, and read once for each
group (in part from cache). Multiply-adds: 4 for each pair of blocks and frequency, and a transform a block. No atomics.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.fft_conv.spectra import (
    LARGEST,
    RADIX,
    TapsSpectra,
    add_product,
    conv_plan,
    finish,
    half_tables,
    inverse,
    lags_of_spectra,
    load_part,
    spectrum,
    store_part,
    strides,
    tables,
    times_at_most,
)
from kernels.launch import cdiv, launch, power_of_2, speaks_ptx
from kernels.turn import empty_time_last

GROUP, UNROLL = 2, 4
BLOCKS = 8
"""Of x that a program transforms."""
FREQUENCIES, NUM_K = 512, 8
REGISTERS = 168
SLICE_BYTES = 2**27


@triton.jit(do_not_specialize=["B", "num_chunks"])
def _block_spectra_kernel(
    x,
    inner,
    turns,
    outer,
    spectra,
    sums,
    B,
    num_chunks,
    x_T,
    x_stride_b,
    x_stride_d,
    R: tl.constexpr,
    N: tl.constexpr,
    BLOCKS: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """spectra [D, B, num_chunks, 2, R N]: both parts of X over its scale; sums [D, B, num_chunks] of magnitudes."""
    SIZE: tl.constexpr = R * N
    num_groups = tl.cdiv(num_chunks, BLOCKS)
    i_row, i_group = (tl.program_id(0) // num_groups).to(tl.int64), tl.program_id(0) % num_groups
    i_d, i_b = i_row // B, i_row % B
    o_r, o_n = tl.arange(0, R), tl.arange(0, N)
    o_t = o_r[:, None] * N + o_n[None, :]
    p_inner = inner + (o_r[:, None] * R + o_r[None, :])
    b_re, b_im = tl.load(p_inner), tl.load(p_inner + R * R)
    b_cos, b_sin = tl.load(turns + o_t), tl.load(turns + SIZE + o_t)
    p_outer = outer + (o_n[:, None] * N + o_n[None, :])
    b_wr, b_wi, b_minus_wi = tl.load(p_outer), tl.load(p_outer + N * N), tl.load(p_outer + 2 * N * N)
    p_x = x + (i_b * x_stride_b + i_d * x_stride_d)
    for i_c in range(i_group * BLOCKS, tl.minimum((i_group + 1) * BLOCKS, num_chunks)):
        o_x = i_c * SIZE + o_t
        b_x = tl.load(p_x + o_x, mask=o_x < x_T, other=0.0).to(tl.float32)
        total = tl.sum(tl.sum(tl.abs(b_x), 1), 0)
        b_x = (b_x * times_at_most(total, LARGEST)).to(tl.float16)
        b_xr, b_xi = spectrum(b_x, b_re, b_im, b_cos, b_sin, b_wr, b_wi, b_minus_wi)
        i_block = i_row * num_chunks + i_c
        tl.store(sums + i_block, total)
        store_part(spectra + i_block * (2 * SIZE), b_xr, R, N)
        store_part(spectra + (i_block * (2 * SIZE) + SIZE), b_xi, R, N)


@triton.jit(do_not_specialize=["B", "num_chunks", "num_k"])
def _conv_blocks_kernel(
    x_spectra,
    x_sums,
    spectra,
    factors,
    inner,
    turns,
    outer,
    skip,
    direct,
    direct_gate,
    scale,
    other,
    y,
    plain,
    product,
    B,
    D,
    T,
    num_chunks,
    num_k,
    direct_stride_b,
    direct_stride_d,
    direct_gate_stride_b,
    direct_gate_stride_d,
    scale_stride_b,
    scale_stride_d,
    other_stride_b,
    other_stride_d,
    REVERSE: tl.constexpr,
    R: tl.constexpr,
    N: tl.constexpr,
    GROUP: tl.constexpr,
    UNROLL: tl.constexpr,
    BLOCK_C: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """What `_conv_kernel` of `triton.py` computes, for GROUP blocks of one sequence; D is that of y, to step by."""
    SIZE: tl.constexpr = R * N
    num_groups = tl.cdiv(num_chunks, GROUP)
    i_row = (tl.program_id(0) // num_groups).to(tl.int64)
    i_d, i_b = i_row // B, i_row % B
    # those that take longest first
    i_group = tl.program_id(0) % num_groups
    if not REVERSE:
        i_group = num_groups - 1 - i_group
    low = i_group * GROUP
    high = tl.minimum(low + GROUP, num_chunks) - 1
    # slot s is block high - s, of W_(m-s) X_(high-m); in reverse low + s, of W_(m-s) X_(low+m)
    if REVERSE:
        origin, num_x = low, num_chunks - low
    else:
        origin, num_x = high, high + 1
    num_m = tl.minimum(num_x, num_k + GROUP - 1)
    p_sums = x_sums + i_row * num_chunks
    o_c = tl.arange(0, BLOCK_C)
    o_m = (o_c - origin) if REVERSE else (origin - o_c)
    b_sums = tl.load(p_sums + o_c, mask=(o_c < num_chunks) & (o_m >= 0) & (o_m < num_m), other=0.0)
    factor, back = tl.load(factors + 2 * i_d), tl.load(factors + 2 * i_d + 1)
    # no number of a sum of W X is larger than the largest of X; the inverse multiplies by N at most
    times = times_at_most(tl.max(b_sums, 0), factor * (LARGEST / N))
    p_x = x_spectra + i_row * num_chunks * (2 * SIZE)
    p_w = spectra + i_d * num_k * (2 * SIZE)
    all_x, all_w = num_chunks * (2 * SIZE), num_k * (2 * SIZE)
    b_zero = tl.zeros([R, N], tl.float16)
    total_r, total_i = (), ()
    for _ in tl.static_range(GROUP):
        total_r, total_i = total_r + (tl.zeros([R, N], tl.float32),), total_i + (tl.zeros([R, N], tl.float32),)
    for m_0 in range(0, num_m, UNROLL):
        part_r, part_i = (), ()
        for _ in tl.static_range(GROUP):
            part_r, part_i = part_r + (b_zero,), part_i + (b_zero,)
        for i in tl.static_range(UNROLL):
            i_m = m_0 + i
            i_c = (origin + i_m) if REVERSE else (origin - i_m)
            total = tl.load(p_sums + tl.minimum(tl.maximum(i_c, 0), num_chunks - 1))
            # both are powers of two; blocks that no tap reaches may be too large
            scale_x = tl.where(i_m < num_m, times / times_at_most(total, LARGEST), 0.0).to(tl.float16)
            b_xr = load_part(p_x, R, N, 2 * SIZE * i_c, all_x) * scale_x
            b_xi = load_part(p_x, R, N, 2 * SIZE * i_c + SIZE, all_x) * scale_x
            next_r, next_i = (), ()
            for s in tl.static_range(GROUP):
                b_hr = load_part(p_w, R, N, 2 * SIZE * (i_m - s), all_w)
                b_hi = load_part(p_w, R, N, 2 * SIZE * (i_m - s) + SIZE, all_w)
                b_pr, b_pi = add_product(part_r[s], part_i[s], b_hr, b_hi, b_xr, b_xi, REVERSE)
                next_r, next_i = next_r + (b_pr,), next_i + (b_pi,)
            part_r, part_i = next_r, next_i
        sum_r, sum_i = (), ()
        for s in tl.static_range(GROUP):
            sum_r = sum_r + (total_r[s] + part_r[s].to(tl.float32),)
            sum_i = sum_i + (total_i[s] + part_i[s].to(tl.float32),)
        total_r, total_i = sum_r, sum_i

    o_r, o_n = tl.arange(0, R), tl.arange(0, N)
    o_t = o_r[:, None] * N + o_n[None, :]
    p_inner = inner + (o_r[:, None] * R + o_r[None, :])
    b_re, b_im = tl.load(p_inner), tl.load(p_inner + R * R)
    b_cos, b_sin = tl.load(turns + o_t), tl.load(turns + SIZE + o_t)
    p_outer = outer + (o_n[:, None] * N + o_n[None, :])
    b_wr, b_wi, b_minus_wi = tl.load(p_outer), tl.load(p_outer + N * N), tl.load(p_outer + 2 * N * N)
    for s in tl.static_range(GROUP):
        i_c = (low + s) if REVERSE else (high - s)
        o_x = i_c * SIZE + o_t
        b_y = inverse(
            total_r[s].to(tl.float16), total_i[s].to(tl.float16), b_re, b_im, b_cos, b_sin, b_wr, b_wi, b_minus_wi
        )
        finish(
            b_y * (back / times),
            i_b + o_r * 0,
            o_x,
            # a last group may have fewer blocks
            (o_x >= low * SIZE) & (o_x < tl.minimum(T, (high + 1) * SIZE)),
            i_d,
            skip,
            direct,
            direct_gate,
            scale,
            other,
            y,
            plain,
            product,
            D,
            T,
            direct_stride_b,
            direct_stride_d,
            direct_gate_stride_b,
            direct_gate_stride_d,
            scale_stride_b,
            scale_stride_d,
            other_stride_b,
            other_stride_d,
        )


@triton.jit(do_not_specialize=["B", "num_chunks", "num_k"])
def _correlate_kernel(
    x_spectra,
    x_sums,
    g_spectra,
    g_sums,
    spectra,
    B,
    num_chunks,
    num_k,
    R: tl.constexpr,
    N: tl.constexpr,
    FREQUENCIES: tl.constexpr,
    NUM_K: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """spectra [D, num_k, R N, 2]: S_k, at FREQUENCIES as `store_part` orders them, for NUM_K neighbouring k."""
    SIZE: tl.constexpr = R * N
    TILES: tl.constexpr = SIZE // FREQUENCIES
    num_groups = tl.cdiv(num_k, NUM_K)
    i_tile, i_row = tl.program_id(0) % TILES, tl.program_id(0) // TILES
    first, i_d = i_row % num_groups * NUM_K, (i_row // num_groups).to(tl.int64)
    o_f = i_tile * FREQUENCIES + tl.arange(0, FREQUENCIES)
    total_r, total_i = (), ()
    for _ in tl.static_range(NUM_K):
        total_r = total_r + (tl.zeros([FREQUENCIES], tl.float32),)
        total_i = total_i + (tl.zeros([FREQUENCIES], tl.float32),)
    all_g = num_chunks * (2 * SIZE)
    for i_b in range(B):
        i_block = (i_d * B + i_b) * num_chunks
        p_x, p_g = x_spectra + i_block * (2 * SIZE), g_spectra + i_block * (2 * SIZE)
        for i_c in range(num_chunks - first):
            o_x = i_c * (2 * SIZE) + o_f
            scale = 1.0 / times_at_most(tl.load(x_sums + i_block + i_c), LARGEST)
            b_xr, b_xi = tl.load(p_x + o_x).to(tl.float32) * scale, tl.load(p_x + o_x + SIZE).to(tl.float32) * scale
            sum_r, sum_i = (), ()
            for k in tl.static_range(NUM_K):
                i_g = i_c + first + k
                scale = 1.0 / times_at_most(tl.load(g_sums + i_block + tl.minimum(i_g, num_chunks - 1)), LARGEST)
                o_g = i_g * (2 * SIZE) + o_f
                b_gr = tl.load(p_g + o_g, mask=o_g < all_g, other=0.0).to(tl.float32) * scale
                b_gi = tl.load(p_g + o_g + SIZE, mask=o_g < all_g, other=0.0).to(tl.float32) * scale
                sum_r = sum_r + (total_r[k] + b_xr * b_gr + b_xi * b_gi,)
                sum_i = sum_i + (total_i[k] + b_xr * b_gi - b_xi * b_gr,)
            total_r, total_i = sum_r, sum_i
    # where `store_part` put row and column
    o_r = o_f // 256 % (R // 16) * 16 + o_f // 4 % 2 * 8 + o_f // 32 % 8
    o_n = o_f // (16 * R) * 16 + o_f // 2 % 2 * 8 + o_f // 8 % 4 * 2 + o_f % 2
    for k in tl.static_range(NUM_K):
        o_s = (first + k) * SIZE + o_n * R + o_r
        p_spectra = spectra + i_d * num_k * (2 * SIZE) + 2 * o_s
        tl.store(p_spectra, total_r[k], mask=o_s < num_k * SIZE)
        tl.store(p_spectra + 1, total_i[k], mask=o_s < num_k * SIZE)


def _slices(width: int, batch: int, num_chunks: int, size: int) -> Iterator[tuple[int, int]]:
    """First channel and number of those whose spectra fit SLICE_BYTES."""
    step = max(1, SLICE_BYTES // (4 * batch * num_chunks * size))
    for first in range(0, width, step):
        yield first, min(step, width - first)


def _block_spectra(x: Tensor, num_chunks: int, n: int) -> tuple[Tensor, Tensor]:
    """spectra and sums of `_block_spectra_kernel`."""
    batch, length, width = x.shape
    spectra = torch.empty((width, batch, num_chunks, 2, RADIX * n), dtype=torch.float16, device=x.device)
    sums = torch.empty((width, batch, num_chunks), dtype=torch.float32, device=x.device)
    launch(
        _block_spectra_kernel,
        width * batch * cdiv(num_chunks, BLOCKS),
        x,
        *half_tables(n, x.device),
        spectra,
        sums,
        batch,
        num_chunks,
        length,
        *strides(x),
        R=RADIX,
        N=n,
        BLOCKS=BLOCKS,
        LARGEST=LARGEST,
        num_warps=4,
        num_stages=1,
    )
    return spectra, sums


def conv_blocks(
    source: tuple[Tensor, Tensor, Tensor | None],
    taps: TapsSpectra,
    skip: Tensor | None = None,
    reverse: bool = False,
    scale: Tensor | None = None,
    other: Tensor | None = None,
    with_plain: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """`conv_spectra` for any number of blocks."""
    x, direct, direct_gate = source
    batch, length, width = direct.shape
    n, num_chunks, num_k = taps.plan
    y = empty_time_last(direct)
    plain = empty_time_last(direct, torch.float32) if with_plain else None
    product = None if other is None else empty_time_last(direct)
    for first, count in _slices(width, batch, num_chunks, RADIX * n):

        def part(m: Tensor | None, first: int = first, count: int = count) -> Tensor | None:
            return None if m is None else m.narrow(2, first, count)

        spectra, sums = _block_spectra(x.narrow(2, first, count), num_chunks, n)
        launch(
            _conv_blocks_kernel,
            count * batch * cdiv(num_chunks, GROUP),
            spectra,
            sums,
            taps.spectra.narrow(0, first, count),
            taps.factors.narrow(0, first, count),
            *half_tables(n, x.device),
            None if skip is None else skip.narrow(0, first, count),
            part(direct) if skip is not None else None,
            part(direct_gate) if skip is not None else None,
            part(scale),
            part(other),
            part(y),
            part(plain),
            part(product),
            batch,
            width,
            length,
            num_chunks,
            num_k,
            *strides(direct),
            *strides(direct_gate),
            *strides(scale),
            *strides(other),
            REVERSE=reverse,
            R=RADIX,
            N=n,
            GROUP=GROUP,
            UNROLL=UNROLL,
            BLOCK_C=power_of_2(num_chunks),
            LARGEST=LARGEST,
            num_warps=4,
            num_stages=1,
            # which AMD's compiler does not know
            **({"maxnreg": REGISTERS} if speaks_ptx() else {}),
        )
    return y, plain, product


def taps_bwd_blocks(x: Tensor, g: Tensor, length: int, lags: int) -> Tensor:
    """The gradient of taps [D, lags] in float32, from x and g of `gated` in bfloat16."""
    batch, _, width = x.shape
    n, num_chunks, num_k = conv_plan(length, lags)
    size = RADIX * n
    spectra = torch.empty((width, num_k, size, 2), dtype=torch.float32, device=x.device)
    # of x and of g
    for first, count in _slices(width, 2 * batch, num_chunks, size):
        x_spectra, g_spectra = (_block_spectra(m.narrow(2, first, count), num_chunks, n) for m in (x, g))
        launch(
            _correlate_kernel,
            count * cdiv(num_k, NUM_K) * (size // FREQUENCIES),
            *x_spectra,
            *g_spectra,
            spectra.narrow(0, first, count),
            batch,
            num_chunks,
            num_k,
            R=RADIX,
            N=n,
            FREQUENCIES=FREQUENCIES,
            NUM_K=NUM_K,
            LARGEST=LARGEST,
            num_warps=4,
        )
    return lags_of_spectra(spectra, tables(n, x.device)[3], lags)
