"""`_scores_kernel`: scores within a chunk, and queries and keys with the decays between them and the chunk's ends."""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.gated_linear_attention.triton.decays import (
    HEAD_DECAY,
    at_least_lowest,
    decay_matrix,
    exponential,
    from_middle,
    half_totals,
    head_prefix_suffix,
    load_head_decays,
    masked_sums,
    tree_level,
)
from subquad.kernels.gated_linear_attention.triton.plan import Plan, PositionStrides, decay_kind, planned
from subquad.kernels.gated_linear_attention.triton.tiles import as_operand, chunk_span, load_tile, store_tile
from subquad.kernels.launch import LaunchPlan, launch


@triton.jit
def _scores_kernel(
    q, k, g, q_in, k_out, decay, scores, table,
    T, num_t, scale,
    q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_t, k_stride_h, g_stride_b, g_stride_t, g_stride_h,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, BK: tl.constexpr, DECAY: tl.constexpr,
    LIMIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """For one chunk: scores A [C, C], q_in = scale q exp(P), k_out = k exp(R) [C, K], decay = exp(P_C) [K].

    Without q it writes only k_out and decay; without k_out it writes neither of the two.
    """
    i_t, i_bh = tl.program_id(0) % num_t, (tl.program_id(0) // num_t).to(tl.int64)
    i_b, i_h = i_bh // H, i_bh % H
    dtype = q_in.dtype.element_ty if k_out is None else k_out.dtype.element_ty
    NARROW: tl.constexpr = g.dtype.element_ty == tl.bfloat16
    o_c = tl.arange(0, C)
    k += i_b * k_stride_b + i_h * k_stride_h
    g += i_b * g_stride_b + i_h * g_stride_h
    o_dense, o_scores = (i_b * T * H + i_h) * K, (i_b * T * H + i_h) * C
    start, end = chunk_span(table, i_t, T, C)
    o_t = start + o_c
    b_middle = from_middle(o_c, C)
    b_scores = tl.zeros([C, C], tl.float32)
    if DECAY == HEAD_DECAY:
        b_prefix, b_suffix = head_prefix_suffix(g, g_stride_t, o_t, o_c, end, C)
        b_g_head = load_head_decays(g, g_stride_t, o_t, o_t < end)
        b_in_head, b_out_head = exponential(b_prefix, PRECISION)[:, None], exponential(b_suffix, PRECISION)[:, None]
        b_all = exponential(tl.sum(b_g_head, 0), PRECISION)
    for i_k in range(0, K, BK):
        o_k = i_k + tl.arange(0, BK)
        p_decay = decay + (i_bh * num_t + i_t) * K + o_k
        b_k = load_tile(k, k_stride_t, o_t, o_k, end, K)
        if q is not None:
            b_q = load_tile(q + i_b * q_stride_b + i_h * q_stride_h, q_stride_t, o_t, o_k, end, K)
        if DECAY == HEAD_DECAY:
            tl.store(p_decay, tl.zeros([BK], tl.float32) + b_all, mask=o_k < K)
            b_out, b_in = b_k.to(tl.float32) * b_out_head, b_q.to(tl.float32) * (b_in_head * scale)
            store_tile(k_out + o_dense, H * K, o_t, o_k, end, K, as_operand(b_out, dtype, PRECISION))
            store_tile(q_in + o_dense, H * K, o_t, o_k, end, K, as_operand(b_in, dtype, PRECISION))
            b_scores += tl.dot(b_q.to(dtype), tl.trans(b_k.to(dtype)), input_precision=PRECISION)
        else:
            b_g = at_least_lowest(load_tile(g, g_stride_t, o_t, o_k, end, K))
            b_first, b_second = half_totals(b_g, o_c, C)
            if k_out is not None:
                tl.store(p_decay, exponential(b_first + b_second, PRECISION), mask=o_k < K)
            # outside of the branch, so that the matrix is moved to its layout once and not in every iteration
            b_exponent = masked_sums(b_middle, b_g, NARROW, PRECISION)
            if tl.min(tl.minimum(b_first, b_second), 0) > -LIMIT:
                b_k_factored = b_k.to(tl.float32) * exponential(-b_exponent, PRECISION)
                if k_out is not None:
                    b_scaled = as_operand(b_k_factored * exponential(b_second, PRECISION)[None, :], dtype, PRECISION)
                    store_tile(k_out + o_dense, H * K, o_t, o_k, end, K, b_scaled)
                if q is not None:
                    b_right = tl.trans(as_operand(b_k_factored, dtype, PRECISION))
                    b_q_factored = b_q.to(tl.float32) * (exponential(b_exponent, PRECISION) * scale)
                    b_scaled = as_operand(b_q_factored * exponential(b_first, PRECISION)[None, :], dtype, PRECISION)
                    store_tile(q_in + o_dense, H * K, o_t, o_k, end, K, b_scaled)
                    b_pairs = tl.dot(as_operand(b_q_factored, dtype, PRECISION), b_right, input_precision=PRECISION)
                    b_scores += tl.where(o_c[:, None] >= o_c[None, :], b_pairs, 0.0)
            else:
                b_k32 = b_k.to(tl.float32)
                if k_out is not None:
                    b_suffix = masked_sums(o_c[:, None] < o_c[None, :], b_g, NARROW, PRECISION)
                    b_out = b_k32 * exponential(b_suffix, PRECISION)
                    store_tile(k_out + o_dense, H * K, o_t, o_k, end, K, as_operand(b_out, dtype, PRECISION))
                if q is not None:
                    b_q32 = b_q.to(tl.float32) * scale
                    b_prefix = masked_sums(o_c[:, None] >= o_c[None, :], b_g, NARROW, PRECISION)
                    b_in = b_q32 * exponential(b_prefix, PRECISION)
                    store_tile(q_in + o_dense, H * K, o_t, o_k, end, K, as_operand(b_in, dtype, PRECISION))
                    b_scores += tl.where(o_c[:, None] == o_c[None, :], tl.sum(b_q32 * b_k32, 1)[:, None], 0.0)
                    for level in range(LEVELS):
                        b_factor, m_pair = tree_level(b_g, o_c, level, NARROW, PRECISION)
                        b_left = as_operand(b_q32 * b_factor, dtype, PRECISION)
                        b_right = tl.trans(as_operand(b_k32 * b_factor, dtype, PRECISION))
                        b_scores += tl.where(m_pair, tl.dot(b_left, b_right, input_precision=PRECISION), 0.0)
    if q is not None:
        if DECAY == HEAD_DECAY:
            b_scores *= decay_matrix(b_g_head, b_prefix, o_c, PRECISION) * scale
        store_tile(scores + o_scores, H * C, o_t, o_c, end, C, as_operand(b_scores, dtype, PRECISION))


class ChunkFactors(NamedTuple):
    """Outputs of `_scores_kernel`. Those that are not computed are None; without decay all of them are.

    Where heads share queries and keys (`groups.py`), k_out and q_in are the factors of keys and queries alone,
    [B, H, T], decay is [B, H, chunks], and scores [B, T, G, C] have no decays.
    """

    k_out: Tensor | None = None
    """Keys times the decay from after their position to the end of the chunk, [B, T, H, K]."""
    decay: Tensor | None = None
    """Decay over a whole chunk, [B, H, chunks, K], float32."""
    q_in: Tensor | None = None
    """Scaled queries times the decay from the start of the chunk to their position, [B, T, H, K]."""
    scores: Tensor | None = None
    """[B, T, H, C]: row i holds the scores of position i with all keys of its chunk."""
    log_decay: Tensor | None = None
    """The log-decays of heads that share queries and keys, [B, H, T], float32."""
    same: Tensor | None = None
    """The scores of positions with their own keys before they are rounded, [B, G, T], float32; only with weights."""


NO_FACTORS = ChunkFactors()


@planned
def _scores_plan(plan: Plan, kind: int, shape: tuple[int, ...], strides: PositionStrides) -> LaunchPlan:
    batch, length, heads, key_dim = shape
    tile, num_chunks = plan.tuning.scores[kind], plan.num_chunks(length)
    return LaunchPlan(
        batch * heads * num_chunks,
        T=length,
        num_t=num_chunks,
        scale=plan.scale,
        **strides.arguments("q k g"),
        H=heads,
        K=key_dim,
        C=plan.chunk,
        LEVELS=plan.chunk.bit_length() - 1,
        BK=plan.width(tile.block_k, key_dim),
        DECAY=kind,
        LIMIT=plan.mild,
        PRECISION=plan.precision,
        **tile.options.keywords(),
    )


def gla_scores(plan: Plan, q: Tensor | None, k: Tensor, g: Tensor, known: ChunkFactors = NO_FACTORS) -> ChunkFactors:
    """Factors of all chunks; q_in and scores only for a given q. `known` may hold k_out and decay of the same k and g.

    q, k: [B, T, H, K], g: log-decays [B, T, H] or [B, T, H, K].
    """
    batch, length, heads, key_dim = k.shape
    num_chunks = plan.num_chunks(length)
    k_out, decay = known.k_out, known.decay
    makes_k_out = k_out is None
    if makes_k_out:
        k_out = k.new_empty((batch, length, heads, key_dim), dtype=plan.work)
        decay = k.new_empty((batch, heads, num_chunks, key_dim), dtype=torch.float32)
    q_in = scores = None
    if q is not None:
        q_in = k.new_empty((batch, length, heads, key_dim), dtype=plan.work)
        scores = k.new_empty((batch, length, heads, plan.chunk), dtype=plan.work)
    launch(
        _scores_kernel, _scores_plan(plan, decay_kind(g), k.shape, PositionStrides.of(q, k, g)), q=q, k=k, g=g,
        q_in=q_in, k_out=k_out if makes_k_out else None, decay=decay, scores=scores, table=plan.table,
    )  # fmt: skip
    return ChunkFactors(k_out, decay, q_in, scores)
