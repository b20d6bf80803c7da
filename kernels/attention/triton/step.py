"""`_attend_kernel` and `_combine_kernel`: one query for each head against a cache of keys and values.

    o = sum_{j <= n} softmax_j(scale q k_j) v_j,     q and k_n rotated by the angles of position n

The cache has a fixed capacity, of which the first n positions of a row are filled; n lies on the device, so that a
recorded graph serves every position. A program takes a part of the positions of one head. Every row of its tile keeps
a maximum, a sum of exponentials and a sum of values of its own, so that nothing is reduced inside the loop. The first
part also takes the new key and value and writes them into the cache. `_combine_kernel` joins the parts.

Layout:  q, k, v [B, H, K] with contiguous channels; caches [B, capacity, H, K] with contiguous channels; cos, sin
         [positions, K / 2]; window [H], int64, or None;
         sums [B H, S, K] and maxima with their sums of exponentials [B H, S, 2]; o [B, H, K] dense.
float32: everything but the caches.
Cost:    reads 2 B n H K elements of the caches, or those of the windows; 4 B n H K FLOPs.
"""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.launch import cdiv, launch, power_of_2
from subquad.kernels.layout import dense

LOG2E = tl.constexpr(1.4426950408889634)
# a number and not -inf, because the difference of two of them is used
LOWEST = tl.constexpr(-1e30)


class Tuning(NamedTuple):
    """Tile of a program."""

    tile: int = 2048
    """Elements of the keys that a program loads at once."""
    programs: int = 4096
    """Number of programs from which the positions of a head are not split further."""
    num_warps: int = 2
    num_stages: int = 4
    """Tiles in work: one is computed while the others are on their way from memory."""


@triton.jit
def _rotated(p_x, p_cos, p_sin, o_k, m_k, K: tl.constexpr):
    """One head in float32, rotated where there is a table: channel i is paired with i + K / 2."""
    b_x = tl.load(p_x + o_k, mask=m_k, other=0.0).to(tl.float32)
    if p_cos is not None:
        HALF: tl.constexpr = K // 2
        b_pair = tl.load(p_x + (o_k + HALF) % K, mask=m_k, other=0.0).to(tl.float32)
        b_cos = tl.load(p_cos + o_k % HALF, mask=m_k, other=0.0).to(tl.float32)
        b_sin = tl.load(p_sin + o_k % HALF, mask=m_k, other=0.0).to(tl.float32)
        b_x = b_x * b_cos + tl.where(o_k < HALF, -b_pair, b_pair) * b_sin
    return b_x


@triton.jit
def _attend_kernel(
    q, k, v, keys, values, count, cos, sin, window, sums, maxima,
    scale, H, capacity, q_stride_b, q_stride_h, k_stride_b, k_stride_h, v_stride_b, v_stride_h,
    cache_stride_b, cache_stride_t, cache_stride_h,
    K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One of SPLITS parts of the positions of one head."""
    i_row = tl.program_id(0).to(tl.int64)
    i_s = tl.program_id(1)
    i_b, i_h = i_row // H, i_row % H
    o_k, o_t = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_T)
    m_k = o_k < K
    # beyond the capacity nothing may be written
    n = tl.minimum(tl.load(count + i_b), capacity - 1)
    p_cos, p_sin = cos, sin
    if cos is not None:
        p_cos, p_sin = cos + n * (K // 2), sin + n * (K // 2)
    b_q = _rotated(q + i_b * q_stride_b + i_h * q_stride_h, p_cos, p_sin, o_k, m_k, K) * (scale * LOG2E)
    p_keys = keys + i_b * cache_stride_b + i_h * cache_stride_h
    p_values = values + i_b * cache_stride_b + i_h * cache_stride_h
    b_max = tl.full([BLOCK_T], LOWEST, tl.float32)
    b_total = tl.zeros([BLOCK_T], tl.float32)
    b_sum = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
    if i_s == 0:
        # rounded as later steps will read them
        b_k = _rotated(k + i_b * k_stride_b + i_h * k_stride_h, p_cos, p_sin, o_k, m_k, K).to(keys.dtype.element_ty)
        b_v = tl.load(v + i_b * v_stride_b + i_h * v_stride_h + o_k, mask=m_k, other=0.0).to(values.dtype.element_ty)
        tl.store(p_keys + n * cache_stride_t + o_k, b_k, mask=m_k)
        tl.store(p_values + n * cache_stride_t + o_k, b_v, mask=m_k)
        m_first = o_t == 0
        b_max = tl.where(m_first, tl.sum(b_q * b_k.to(tl.float32)), b_max)
        b_total = tl.where(m_first, 1.0, b_total)
        b_sum = tl.where(m_first[:, None], b_v.to(tl.float32)[None, :], b_sum)
    first = 0
    if window is not None:
        # the new position is one of those that a head sees; a window may be longer than 2^31 positions
        first = tl.maximum(n + 1 - tl.load(window + i_h), 0)
    span = tl.cdiv(tl.cdiv(n - first, SPLITS), BLOCK_T) * BLOCK_T
    end = tl.minimum(first + (i_s + 1) * span, n)
    for t in tl.range(first + i_s * span, end, BLOCK_T, num_stages=STAGES):
        o_now = t + o_t
        m_t = o_now < end
        m = m_t[:, None] & m_k[None, :]
        o_cache = o_now.to(tl.int64)[:, None] * cache_stride_t + o_k[None, :]
        b_k = tl.load(p_keys + o_cache, mask=m, other=0.0)
        b_v = tl.load(p_values + o_cache, mask=m, other=0.0)
        b_score = tl.where(m_t, tl.sum(b_q[None, :] * b_k.to(tl.float32), 1), LOWEST)
        b_new = tl.maximum(b_max, b_score)
        b_keep = tl.exp2(b_max - b_new)
        b_weight = tl.where(m_t, tl.exp2(b_score - b_new), 0.0)
        b_total = b_total * b_keep + b_weight
        b_sum = b_sum * b_keep[:, None] + b_weight[:, None] * b_v.to(tl.float32)
        b_max = b_new
    b_most = tl.max(b_max, 0)
    b_keep = tl.exp2(b_max - b_most)
    i_part = i_row * SPLITS + i_s
    tl.store(sums + i_part * K + o_k, tl.sum(b_sum * b_keep[:, None], 0), mask=m_k)
    tl.store(maxima + i_part * 2, b_most)
    tl.store(maxima + i_part * 2 + 1, tl.sum(b_total * b_keep, 0))


@triton.jit
def _combine_kernel(sums, maxima, o, count, H, K: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr):
    """The output of one head from its parts. The first head of a row also counts the new position."""
    i_row = tl.program_id(0).to(tl.int64)
    o_k, o_s = tl.arange(0, BLOCK_K), tl.arange(0, SPLITS)
    m_k = o_k < K
    p_maxima = maxima + (i_row * SPLITS + o_s) * 2
    b_max = tl.load(p_maxima)
    b_keep = tl.exp2(b_max - tl.max(b_max, 0))
    b_total = tl.sum(b_keep * tl.load(p_maxima + 1), 0)
    p_sums = sums + (i_row * SPLITS + o_s)[:, None] * K + o_k[None, :]
    b_sum = tl.sum(tl.load(p_sums, mask=m_k[None, :], other=0.0) * b_keep[:, None], 0)
    tl.store(o + i_row * K + o_k, (b_sum / b_total).to(o.dtype.element_ty), mask=m_k)
    if i_row % H == 0:
        tl.store(count + i_row // H, tl.load(count + i_row // H) + 1)


def attention_step_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    count: Tensor,
    *,
    cos: Tensor | None,
    sin: Tensor | None,
    window: Tensor | None,
    scale: float,
    tuning: Tuning | None = None,
) -> Tensor:
    """`attention_step` for arguments that were checked; caches with equal strides and contiguous channels."""
    tuning = tuning or Tuning()
    batch, heads, size = q.shape
    block_k = power_of_2(size)
    block_t = max(16, tuning.tile // block_k)
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
    rows = batch * heads
    longest = power_of_2(cdiv(keys.shape[1], 4 * block_t))
    splits = min(power_of_2(cdiv(tuning.programs, rows)), longest, 64)
    sums = torch.empty(rows, splits, size, dtype=torch.float32, device=q.device)
    maxima = torch.empty(rows, splits, 2, dtype=torch.float32, device=q.device)
    o = torch.empty(batch, heads, size, dtype=v.dtype, device=q.device)
    launch(
        _attend_kernel, (rows, splits), q=q, k=k, v=v, keys=keys, values=values, count=count, cos=dense(cos),
        sin=dense(sin), window=dense(window), sums=sums, maxima=maxima, scale=scale, H=heads, capacity=keys.shape[1],
        q_stride_b=q.stride(0), q_stride_h=q.stride(1), k_stride_b=k.stride(0), k_stride_h=k.stride(1),
        v_stride_b=v.stride(0), v_stride_h=v.stride(1), cache_stride_b=keys.stride(0), cache_stride_t=keys.stride(1),
        cache_stride_h=keys.stride(2), K=size, BLOCK_K=block_k, BLOCK_T=block_t, SPLITS=splits,
        STAGES=tuning.num_stages, num_warps=tuning.num_warps,
    )  # fmt: skip
    launch(
        _combine_kernel, rows, sums=sums, maxima=maxima, o=o, count=count, H=heads, K=size, BLOCK_K=block_k,
        SPLITS=splits, num_warps=1,
    )  # fmt: skip
    return o
