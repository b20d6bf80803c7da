"""Scores of a chunk."""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gated_linear_attention.triton.decays import (
    HEAD_DECAY,
    LOWEST,
    decay_matrix,
    exponential,
    from_middle,
    half_totals,
    head_prefix_suffix,
    load_head_decays,
    masked_sums,
    tree_level,
)
from kernels.gated_linear_attention.triton.plan import (
    SCORES,
    Plan,
    block_size,
    decay_kind,
    launch_options,
    mild_limit,
    strides,
)
from kernels.gated_linear_attention.triton.tiles import as_operand, chunk_span, load_tile, store_tile


@triton.jit
def _scores_kernel(
    q,
    k,
    g,
    q_in,
    k_out,
    decay,
    scores,
    table,
    T,
    num_t,
    scale,
    q_stride_b,
    q_stride_t,
    q_stride_h,
    k_stride_b,
    k_stride_t,
    k_stride_h,
    g_stride_b,
    g_stride_t,
    g_stride_h,
    H: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    LEVELS: tl.constexpr,
    BK: tl.constexpr,
    DECAY: tl.constexpr,
    LIMIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Of one chunk: scores A [C, C], q_in = scale q exp(P), k_out = k exp(R) [C, K], decay = exp(P_C) [K].

    Without q only k_out and decay; without k_out neither of the two.
    """
    i_t, i_bh = tl.program_id(0) % num_t, (tl.program_id(0) // num_t).to(tl.int64)
    i_b, i_h = i_bh // H, i_bh % H
    dtype = q_in.dtype.element_ty if k_out is None else k_out.dtype.element_ty
    NARROW: tl.constexpr = g.dtype.element_ty == tl.bfloat16
    o_c = tl.arange(0, C)
    k += i_b * k_stride_b + i_h * k_stride_h
    g += i_b * g_stride_b + i_h * g_stride_h
    o_dense, o_scores = (i_b * T * H + i_h) * K, (i_b * T * H + i_h) * C
    start, T = chunk_span(table, i_t, T, C)
    o_t = start + o_c
    b_middle = from_middle(o_c, C)
    b_a = tl.zeros([C, C], tl.float32)
    if DECAY == HEAD_DECAY:
        b_p, b_r = head_prefix_suffix(g, g_stride_t, o_t, o_c, T, C)
        b_head = load_head_decays(g, g_stride_t, o_t, o_t < T)
        b_in_head, b_out_head = exponential(b_p, PRECISION)[:, None], exponential(b_r, PRECISION)[:, None]
        b_all = exponential(tl.sum(b_head, 0), PRECISION)
    for i_k in range(0, K, BK):
        o_k = i_k + tl.arange(0, BK)
        p_decay = decay + (i_bh * num_t + i_t) * K + o_k
        b_k = load_tile(k, k_stride_t, o_t, o_k, T, K)
        if q is not None:
            b_q = load_tile(q + i_b * q_stride_b + i_h * q_stride_h, q_stride_t, o_t, o_k, T, K)
        if DECAY == HEAD_DECAY:
            tl.store(p_decay, tl.zeros([BK], tl.float32) + b_all, mask=o_k < K)
            b_out, b_in = b_k.to(tl.float32) * b_out_head, b_q.to(tl.float32) * (b_in_head * scale)
            store_tile(k_out + o_dense, H * K, o_t, o_k, T, K, as_operand(b_out, dtype, PRECISION))
            store_tile(q_in + o_dense, H * K, o_t, o_k, T, K, as_operand(b_in, dtype, PRECISION))
            b_a += tl.dot(b_q.to(dtype), tl.trans(b_k.to(dtype)), input_precision=PRECISION)
        else:
            b_g = tl.maximum(load_tile(g, g_stride_t, o_t, o_k, T, K).to(tl.float32), LOWEST)
            b_1, b_2 = half_totals(b_g, o_c, C)
            if k_out is not None:
                tl.store(p_decay, exponential(b_1 + b_2, PRECISION), mask=o_k < K)
            # asked for in any case, so that the matrix is laid out once
            b_e = masked_sums(b_middle, b_g, NARROW, PRECISION)
            if tl.min(tl.minimum(b_1, b_2), 0) > -LIMIT:
                b_kf = b_k.to(tl.float32) * exponential(-b_e, PRECISION)
                if k_out is not None:
                    b_scaled = as_operand(b_kf * exponential(b_2, PRECISION)[None, :], dtype, PRECISION)
                    store_tile(k_out + o_dense, H * K, o_t, o_k, T, K, b_scaled)
                if q is not None:
                    b_right = tl.trans(as_operand(b_kf, dtype, PRECISION))
                    b_qf = b_q.to(tl.float32) * (exponential(b_e, PRECISION) * scale)
                    b_scaled = as_operand(b_qf * exponential(b_1, PRECISION)[None, :], dtype, PRECISION)
                    store_tile(q_in + o_dense, H * K, o_t, o_k, T, K, b_scaled)
                    b_pairs = tl.dot(as_operand(b_qf, dtype, PRECISION), b_right, input_precision=PRECISION)
                    b_a += tl.where(o_c[:, None] >= o_c[None, :], b_pairs, 0.0)
            else:
                b_k32 = b_k.to(tl.float32)
                if k_out is not None:
                    b_out = b_k32 * exponential(
                        masked_sums(o_c[:, None] < o_c[None, :], b_g, NARROW, PRECISION), PRECISION
                    )
                    store_tile(k_out + o_dense, H * K, o_t, o_k, T, K, as_operand(b_out, dtype, PRECISION))
                if q is not None:
                    b_q32 = b_q.to(tl.float32) * scale
                    b_in = b_q32 * exponential(
                        masked_sums(o_c[:, None] >= o_c[None, :], b_g, NARROW, PRECISION), PRECISION
                    )
                    store_tile(q_in + o_dense, H * K, o_t, o_k, T, K, as_operand(b_in, dtype, PRECISION))
                    b_a += tl.where(o_c[:, None] == o_c[None, :], tl.sum(b_q32 * b_k32, 1)[:, None], 0.0)
                    for level in range(LEVELS):
                        b_f, m_pair = tree_level(b_g, o_c, level, NARROW, PRECISION)
                        b_left = as_operand(b_q32 * b_f, dtype, PRECISION)
                        b_right = tl.trans(as_operand(b_k32 * b_f, dtype, PRECISION))
                        b_a += tl.where(m_pair, tl.dot(b_left, b_right, input_precision=PRECISION), 0.0)
    if q is not None:
        if DECAY == HEAD_DECAY:
            b_a *= decay_matrix(b_head, b_p, o_c, PRECISION) * scale
        store_tile(scores + o_scores, H * C, o_t, o_c, T, C, as_operand(b_a, dtype, PRECISION))


def gla_scores(
    plan: Plan, q: Tensor | None, k: Tensor, g: Tensor, outgoing: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, ...]:
    """k_out, decay, and with q also q_in and scores, see `_scores_kernel`; `outgoing` is k_out and decay if known."""
    batch, length, heads, key_dim = k.shape
    kind = decay_kind(g)
    config, limit, num_chunks = SCORES[kind], mild_limit(plan.precision), plan.num_chunks(length)
    dense = batch, length, heads, key_dim
    if q is None:
        q_in, scores = None, None
    else:
        q_in, scores = k.new_empty(dense, dtype=plan.work), k.new_empty((*dense[:3], plan.chunk), dtype=plan.work)
    if outgoing is None:
        decay = k.new_empty((batch, heads, num_chunks, key_dim), dtype=torch.float32)
        k_out = k.new_empty(dense, dtype=plan.work)
    else:
        k_out, decay = outgoing

    def arguments() -> tuple[Any, ...]:
        numbers = length, num_chunks, plan.scale, *strides(q), *strides(k), *strides(g)
        constants = {
            "H": heads,
            "K": key_dim,
            "C": plan.chunk,
            "LEVELS": plan.chunk.bit_length() - 1,
            "BK": block_size(config.block_k, key_dim),
            "DECAY": kind,
            "LIMIT": limit,
            "PRECISION": plan.precision,
            # of fp16, eight warps meet the error of ptxas 12.8, too (module docstring)
            **launch_options(config, 1 if plan.precision == "tf32" else plan.larger),
        }
        return _scores_kernel, batch * heads * num_chunks, numbers, constants

    key = "scores", config, limit, outgoing is None, q if q is None else q.stride()
    plan.launch(key, arguments, q, k, g, q_in, k_out if outgoing is None else None, decay, scores, plan.table)
    return (k_out, decay) if q_in is None or scores is None else (k_out, decay, q_in, scores)
