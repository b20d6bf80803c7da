"""Gradients of a chunk."""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gated_linear_attention.triton.decays import (
    CHANNEL_DECAY,
    HEAD_DECAY,
    LOWEST,
    NO_DECAY,
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
    GRADS,
    HEAD,
    Plan,
    block_size,
    decay_kind,
    launch_options,
    mild_limit,
    strides,
)
from kernels.gated_linear_attention.triton.tiles import as_operand, chunk_span, load_state, load_tile, store_tile
from kernels.launch import cdiv


@triton.jit
def _grads_kernel(
    q,
    k,
    v,
    g,
    do,
    states,
    dstates,
    dq,
    dk,
    dg,
    dk_more,
    dg_more,
    table,
    T,
    num_t,
    end_v,
    scale,
    q_stride_b,
    q_stride_t,
    q_stride_h,
    k_stride_b,
    k_stride_t,
    k_stride_h,
    v_stride_b,
    v_stride_t,
    v_stride_h,
    g_stride_b,
    g_stride_t,
    g_stride_h,
    do_stride_b,
    do_stride_t,
    do_stride_h,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    LEVELS: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    DECAY: tl.constexpr,
    LIMIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dq, dk, dg [C, BK] of one chunk; dg of a decay a head is a sum over channels, [B, T, H, K / BK].

    dA_ij = scale <do_i, v_j>,   dq_i = scale exp(P_i) do_i S^T + sum_j dA_ij exp(D_ij) k_j
    dk_j = exp(R_j) v_j dS^T + sum_i dA_ij exp(D_ij) q_i,   S from before the chunk, dS the gradient of that after it

    dg_l is the sum of what passes l: from before the chunk to after it, exp(P_C) <S, dS>; from before it to i >= l;
    from j < l to after it; and from j < l to i >= l, which is a sum over i >= l of what arrives less what leaves. Both
    have the same rounded factors, so that what stays after l cancels. The diagonal passes nothing and is left out.

    dq, or dk and dg, may be None; q is needed for the latter. dk_more and dg_more are added to dk and dg.
    """
    num_k = tl.cdiv(K, BK)
    i_k, i_c = tl.program_id(0) % num_k, (tl.program_id(0) // num_k).to(tl.int64)
    i_t, i_bh = i_c % num_t, i_c // num_t
    i_b, i_h = i_bh // H, i_bh % H
    dtype = states.dtype.element_ty
    o_c = tl.arange(0, C)
    o_k = i_k * BK + tl.arange(0, BK)
    v += i_b * v_stride_b + i_h * v_stride_h
    do += i_b * do_stride_b + i_h * do_stride_h
    o_dense, o_head = (i_b * T * H + i_h) * K, i_b * T * H + i_h
    start, T = chunk_span(table, i_t, T, C)
    o_t = start + o_c

    b_da = tl.zeros([C, C], tl.float32)
    b_dq = tl.zeros([C, BK], tl.float32)
    b_dk = tl.zeros([C, BK], tl.float32)
    b_through = tl.zeros([BK], tl.float32)
    # no constant: of a single step there would be no loop, and 32 keys would be a narrow tile (module docstring)
    for i_v in range(0, end_v, BV):
        o_v = i_v + tl.arange(0, BV)
        b_do = load_tile(do, do_stride_t, o_t, o_v, T, V).to(dtype)
        b_v = load_tile(v, v_stride_t, o_t, o_v, T, V).to(dtype)
        b_da += tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
        if dq is not None or DECAY != NO_DECAY:
            b_s = load_state(states + i_c * K * V, o_k, o_v, K, V)
            b_dq += tl.dot(b_do, tl.trans(b_s), input_precision=PRECISION)
        if dk is not None:
            b_ds = load_state(dstates + i_c * K * V, o_k, o_v, K, V)
            b_dk += tl.dot(b_v, tl.trans(b_ds), input_precision=PRECISION)
            if DECAY != NO_DECAY:
                b_through += tl.sum(b_s.to(tl.float32) * b_ds.to(tl.float32), 1)

    b_da *= scale
    b_dq *= scale
    b_k = load_tile(k + i_b * k_stride_b + i_h * k_stride_h, k_stride_t, o_t, o_k, T, K).to(tl.float32)
    b_q = tl.zeros([C, BK], tl.float32)
    if q is not None:
        b_q += load_tile(q + i_b * q_stride_b + i_h * q_stride_h, q_stride_t, o_t, o_k, T, K).to(tl.float32)
    m_past = o_c[:, None] > o_c[None, :]
    # arrived less left
    b_net = tl.zeros([C, BK], tl.float32)
    if DECAY == CHANNEL_DECAY:
        NARROW: tl.constexpr = g.dtype.element_ty == tl.bfloat16
        p_g = g + i_b * g_stride_b + i_h * g_stride_h
        b_g = tl.maximum(load_tile(p_g, g_stride_t, o_t, o_k, T, K).to(tl.float32), LOWEST)
        b_1, b_2 = half_totals(b_g, o_c, C)
        b_dg = tl.zeros([C, BK], tl.float32)
        if dg is not None:
            b_dg += (b_through * exponential(b_1 + b_2, PRECISION))[None, :]
        if tl.min(tl.minimum(b_1, b_2), 0) > -LIMIT:
            b_e = masked_sums(from_middle(o_c, C), b_g, NARROW, PRECISION)
            b_f, b_inverse = exponential(b_e, PRECISION), exponential(-b_e, PRECISION)
            b_p = as_operand(tl.where(m_past, b_da, 0.0), dtype, PRECISION)
            b_kf = as_operand(b_k * b_inverse, dtype, PRECISION)
            b_dqf = tl.dot(b_p, b_kf, input_precision=PRECISION)
            b_dq *= exponential(b_1, PRECISION)[None, :]
            if dk is not None:
                b_qf = as_operand(b_q * b_f, dtype, PRECISION)
                b_dkf = tl.dot(tl.trans(b_p), b_qf, input_precision=PRECISION)
                b_dk *= exponential(b_2, PRECISION)[None, :]
                if dg is not None:
                    # what leaves the chunk from j < l is all that does less that from j >= l
                    b_leaves = b_k * b_inverse * b_dk
                    b_dg += tl.sum(b_leaves, 0)[None, :]
                    b_net += b_qf.to(tl.float32) * b_dqf - b_kf.to(tl.float32) * b_dkf
                    b_net += b_q * b_f * b_dq - b_leaves
                b_dk = (b_dk + b_dkf) * b_inverse
            b_dq = (b_dq + b_dqf) * b_f
        else:
            b_dq *= exponential(masked_sums(o_c[:, None] >= o_c[None, :], b_g, NARROW, PRECISION), PRECISION)
            if dk is not None:
                b_dk *= exponential(masked_sums(o_c[:, None] < o_c[None, :], b_g, NARROW, PRECISION), PRECISION)
            # before the inside is added: what enters the chunk and what leaves it
            if dg is not None:
                b_net += b_q * b_dq
                b_dg += masked_sums(m_past, b_k * b_dk, False, PRECISION)
            for level in range(LEVELS):
                b_f, m_pair = tree_level(b_g, o_c, level, NARROW, PRECISION)
                b_p = as_operand(tl.where(m_pair, b_da, 0.0), dtype, PRECISION)
                b_kf = as_operand(b_k * b_f, dtype, PRECISION)
                b_dqf = tl.dot(b_p, b_kf, input_precision=PRECISION)
                b_dq += b_dqf * b_f
                if dk is not None:
                    b_qf = as_operand(b_q * b_f, dtype, PRECISION)
                    b_dkf = tl.dot(tl.trans(b_p), b_qf, input_precision=PRECISION)
                    b_dk += b_dkf * b_f
                    if dg is not None:
                        b_net += b_qf.to(tl.float32) * b_dqf - b_kf.to(tl.float32) * b_dkf
    else:
        b_p = tl.where(m_past, b_da, 0.0)
        b_leaves = b_net
        if DECAY == HEAD_DECAY:
            p_g = g + i_b * g_stride_b + i_h * g_stride_h
            b_g = load_head_decays(p_g, g_stride_t, o_t, o_t < T)
            b_in, b_out = head_prefix_suffix(p_g, g_stride_t, o_t, o_c, T, C)
            b_dq *= exponential(b_in, PRECISION)[:, None]
            b_dk *= exponential(b_out, PRECISION)[:, None]
            b_net, b_leaves = b_q * b_dq, b_k * b_dk
            b_p *= decay_matrix(b_g, b_in, o_c, PRECISION)
        b_p = as_operand(b_p, dtype, PRECISION)
        b_dq_in = tl.dot(b_p, b_k.to(dtype), input_precision=PRECISION)
        b_dk_in = tl.dot(tl.trans(b_p), b_q.to(dtype), input_precision=PRECISION)
        b_dq += b_dq_in
        b_dk += b_dk_in
        if DECAY == HEAD_DECAY:
            if PRECISION == "tf32":
                b_net += b_q * b_dq_in - b_k * b_dk_in
            else:
                # sums over time of what cancels would show in float32: sum_{i >= l} sum_{j < l} of the pairs themselves
                b_p *= tl.dot(b_q.to(dtype), tl.trans(b_k.to(dtype)), input_precision=PRECISION)
                b_p = tl.dot(b_p, tl.trans(m_past.to(tl.float32)), input_precision=PRECISION)
                b_inside = tl.sum(tl.where(o_c[:, None] >= o_c[None, :], b_p, 0.0), 0)

    b_diagonal = tl.sum(tl.where(o_c[:, None] == o_c[None, :], b_da, 0.0), 1)[:, None]
    if dq is not None:
        store_tile(dq + o_dense, H * K, o_t, o_k, T, K, b_dq + b_diagonal * b_k)
    if dk is not None:
        b_dk += b_diagonal * b_q
        if dk_more is not None:
            b_dk += load_tile(dk_more + o_dense, H * K, o_t, o_k, T, K)
        store_tile(dk + o_dense, H * K, o_t, o_k, T, K, b_dk)
    if dg is not None:
        if DECAY == CHANNEL_DECAY:
            b_dg += masked_sums(o_c[None, :] >= o_c[:, None], b_net, False, PRECISION)
            if dg_more is not None:
                b_dg += load_tile(dg_more + o_dense, H * K, o_t, o_k, T, K)
            store_tile(dg + o_dense, H * K, o_t, o_k, T, K, b_dg)
        else:
            b_1 = tl.sum(b_net, 1)
            b_2 = tl.sum(b_leaves, 1)
            b_dg_head = tl.sum(tl.where(o_c[:, None] <= o_c[None, :], b_1[None, :], 0.0), 1)
            b_dg_head += tl.sum(tl.where(m_past, b_2[None, :], 0.0), 1)
            if PRECISION != "tf32":
                b_dg_head += b_inside
            b_dg_head += tl.sum(b_through, 0) * exponential(tl.sum(b_g, 0), PRECISION)
            tl.store(dg + (o_head + o_t.to(tl.int64) * H) * num_k + i_k, b_dg_head, mask=o_t < T)


def gla_grads(
    plan: Plan,
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    do: Tensor,
    states: Tensor,
    dstates: Tensor | None,
    *,
    dq_dtype: torch.dtype | None,
    dk_dtype: torch.dtype | None,
    dg_dtype: torch.dtype | None,
    more: tuple[Tensor | None, Tensor | None] = (None, None),
) -> tuple[Any, Any, Any]:
    """Gradients of q, k, g, each None where it has no dtype, those of k and g plus `more`; see `_grads_kernel`."""
    batch, length, heads, key_dim = k.shape
    value_dim, kind = v.shape[-1], decay_kind(g)
    config, limit, num_chunks = GRADS[kind], mild_limit(plan.precision), plan.num_chunks(length)
    block_k = min(config.block_k, block_size(config.block_k, key_dim))
    num_k = cdiv(key_dim, block_k)

    def new(dtype: torch.dtype | None, channels: int) -> Tensor | None:
        return None if dtype is None else k.new_empty((batch, length, heads, channels), dtype=dtype)

    dq, dk = new(dq_dtype, key_dim), new(dk_dtype, key_dim)
    partial = dg_dtype is not None and kind == HEAD
    dg = new(torch.float32, num_k) if partial else new(dg_dtype, key_dim)

    def arguments() -> tuple[Any, ...]:
        block_v = block_size(config.block_v, value_dim)
        numbers = length, num_chunks, cdiv(value_dim, block_v) * block_v, plan.scale
        constants = {
            "H": heads,
            "K": key_dim,
            "V": value_dim,
            "C": plan.chunk,
            "LEVELS": plan.chunk.bit_length() - 1,
            "BK": block_k,
            "BV": block_v,
            "DECAY": kind,
            "LIMIT": limit,
            "PRECISION": plan.precision,
            **launch_options(config, plan.larger),
        }
        numbers = *numbers, *strides(q), *strides(k), *strides(v), *strides(g), *strides(do)
        return _grads_kernel, batch * heads * num_chunks * num_k, numbers, constants

    key = "grads", config, limit, dq_dtype, dk_dtype, dg_dtype, more[0] is None, do.stride()
    key = *key, q if q is None else q.stride(), v.stride()
    plan.launch(key, arguments, q, k, v, g, do, states, dstates, dq, dk, dg, *more, plan.table)
    if partial and dg is not None:
        dg = dg.sum(-1).to(dg_dtype)
    return dq, dk, dg
