"""`_grads_kernel`: gradients of q, k and the log-decays; for decays on values also the outputs of the forward pass."""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.gated_linear_attention.triton.decays import (
    CHANNEL_DECAY,
    HEAD_DECAY,
    NO_DECAY,
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
from subquad.kernels.gated_linear_attention.triton.plan import HEAD, Plan, PositionStrides, decay_kind, planned
from subquad.kernels.gated_linear_attention.triton.tiles import (
    as_operand,
    chunk_span,
    load_state,
    load_tile,
    store_tile,
)
from subquad.kernels.launch import LaunchPlan, cdiv, launch


@triton.jit
def _grads_kernel(
    q, k, v, g, do, states, dstates, dq, dk, dg, dk_more, dg_more, table,
    T, num_t, end_v, scale,
    q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_t, k_stride_h, v_stride_b, v_stride_t, v_stride_h,
    g_stride_b, g_stride_t, g_stride_h, do_stride_b, do_stride_t, do_stride_h,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, DECAY: tl.constexpr, LIMIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq, dk, dg [C, BK] of one chunk; dg of a decay of a head is a sum over channels, [B, T, H, K / BK].

    dA_ij = scale <do_i, v_j>,   dq_i = scale exp(P_i) do_i S^T + sum_j dA_ij exp(D_ij) k_j
    dk_j = exp(R_j) v_j dS^T + sum_i dA_ij exp(D_ij) q_i
    with S the state before the chunk and dS the gradient of the state after it

    dg_l is the sum of what passes position l: from before the chunk to after it, exp(P_C) <S, dS>; from before it to
    i >= l; from j < l to after it; and from j < l to i >= l. The last is a sum over i >= l of what arrives at i less
    what leaves from i. Both consist of the same rounded factors, so that what does not pass l cancels. The diagonal
    passes nothing and is left out.

    dq, or dk and dg, may be None; dk and dg need q. dk_more and dg_more are added to dk and dg.
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
    start, end = chunk_span(table, i_t, T, C)
    o_t = start + o_c

    b_da = tl.zeros([C, C], tl.float32)
    b_dq = tl.zeros([C, BK], tl.float32)
    b_dk = tl.zeros([C, BK], tl.float32)
    b_through = tl.zeros([BK], tl.float32)
    # the end is an argument, not a constant: with a single iteration Triton would remove the loop, and outside of one
    # ptxas 12.8 miscompiles tiles of 32 keys (see LOG.md)
    for i_v in range(0, end_v, BV):
        o_v = i_v + tl.arange(0, BV)
        b_do = load_tile(do, do_stride_t, o_t, o_v, end, V).to(dtype)
        b_v = load_tile(v, v_stride_t, o_t, o_v, end, V).to(dtype)
        b_da += tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
        if dq is not None or DECAY != NO_DECAY:
            b_state = load_state(states + i_c * K * V, o_k, o_v, K, V)
            b_dq += tl.dot(b_do, tl.trans(b_state), input_precision=PRECISION)
        if dk is not None:
            b_dstate = load_state(dstates + i_c * K * V, o_k, o_v, K, V)
            b_dk += tl.dot(b_v, tl.trans(b_dstate), input_precision=PRECISION)
            if DECAY != NO_DECAY:
                b_through += tl.sum(b_state.to(tl.float32) * b_dstate.to(tl.float32), 1)

    b_da *= scale
    b_dq *= scale
    b_k = load_tile(k + i_b * k_stride_b + i_h * k_stride_h, k_stride_t, o_t, o_k, end, K).to(tl.float32)
    b_q = tl.zeros([C, BK], tl.float32)
    if q is not None:
        b_q += load_tile(q + i_b * q_stride_b + i_h * q_stride_h, q_stride_t, o_t, o_k, end, K).to(tl.float32)
    m_past = o_c[:, None] > o_c[None, :]
    # for each position, the gradient that arrives at it minus the one that leaves from it, within the chunk
    b_net = tl.zeros([C, BK], tl.float32)
    if DECAY == CHANNEL_DECAY:
        NARROW: tl.constexpr = g.dtype.element_ty == tl.bfloat16
        p_g = g + i_b * g_stride_b + i_h * g_stride_h
        b_g = at_least_lowest(load_tile(p_g, g_stride_t, o_t, o_k, end, K))
        b_first, b_second = half_totals(b_g, o_c, C)
        b_dg = tl.zeros([C, BK], tl.float32)
        if dg is not None:
            b_dg += (b_through * exponential(b_first + b_second, PRECISION))[None, :]
        if tl.min(tl.minimum(b_first, b_second), 0) > -LIMIT:
            b_exponent = masked_sums(from_middle(o_c, C), b_g, NARROW, PRECISION)
            b_factor, b_inverse = exponential(b_exponent, PRECISION), exponential(-b_exponent, PRECISION)
            b_pairs = as_operand(tl.where(m_past, b_da, 0.0), dtype, PRECISION)
            b_k_factored = as_operand(b_k * b_inverse, dtype, PRECISION)
            b_dq_factored = tl.dot(b_pairs, b_k_factored, input_precision=PRECISION)
            b_dq *= exponential(b_first, PRECISION)[None, :]
            if dk is not None:
                b_q_factored = as_operand(b_q * b_factor, dtype, PRECISION)
                b_dk_factored = tl.dot(tl.trans(b_pairs), b_q_factored, input_precision=PRECISION)
                b_dk *= exponential(b_second, PRECISION)[None, :]
                if dg is not None:
                    # the part that leaves the chunk from j < l is all that leaves it minus that from j >= l
                    b_leaving = b_k * b_inverse * b_dk
                    b_dg += tl.sum(b_leaving, 0)[None, :]
                    b_net += b_q_factored.to(tl.float32) * b_dq_factored - b_k_factored.to(tl.float32) * b_dk_factored
                    b_net += b_q * b_factor * b_dq - b_leaving
                b_dk = (b_dk + b_dk_factored) * b_inverse
            b_dq = (b_dq + b_dq_factored) * b_factor
        else:
            b_dq *= exponential(masked_sums(o_c[:, None] >= o_c[None, :], b_g, NARROW, PRECISION), PRECISION)
            if dk is not None:
                b_dk *= exponential(masked_sums(o_c[:, None] < o_c[None, :], b_g, NARROW, PRECISION), PRECISION)
            # only what enters the chunk from before and what leaves it: pairs within the chunk are added below
            if dg is not None:
                b_net += b_q * b_dq
                b_dg += masked_sums(m_past, b_k * b_dk, False, PRECISION)
            for level in range(LEVELS):
                b_factor, m_pair = tree_level(b_g, o_c, level, NARROW, PRECISION)
                b_pairs = as_operand(tl.where(m_pair, b_da, 0.0), dtype, PRECISION)
                b_k_factored = as_operand(b_k * b_factor, dtype, PRECISION)
                b_dq_factored = tl.dot(b_pairs, b_k_factored, input_precision=PRECISION)
                b_dq += b_dq_factored * b_factor
                if dk is not None:
                    b_q_factored = as_operand(b_q * b_factor, dtype, PRECISION)
                    b_dk_factored = tl.dot(tl.trans(b_pairs), b_q_factored, input_precision=PRECISION)
                    b_dk += b_dk_factored * b_factor
                    if dg is not None:
                        b_net += (
                            b_q_factored.to(tl.float32) * b_dq_factored - b_k_factored.to(tl.float32) * b_dk_factored
                        )
    else:
        b_pairs = tl.where(m_past, b_da, 0.0)
        b_leaving = b_net
        if DECAY == HEAD_DECAY:
            p_g = g + i_b * g_stride_b + i_h * g_stride_h
            b_g = load_head_decays(p_g, g_stride_t, o_t, o_t < end)
            b_prefix, b_suffix = head_prefix_suffix(p_g, g_stride_t, o_t, o_c, end, C)
            b_dq *= exponential(b_prefix, PRECISION)[:, None]
            b_dk *= exponential(b_suffix, PRECISION)[:, None]
            b_net, b_leaving = b_q * b_dq, b_k * b_dk
            b_pairs *= decay_matrix(b_g, b_prefix, o_c, PRECISION)
        b_pairs = as_operand(b_pairs, dtype, PRECISION)
        b_dq_inside = tl.dot(b_pairs, b_k.to(dtype), input_precision=PRECISION)
        b_dk_inside = tl.dot(tl.trans(b_pairs), b_q.to(dtype), input_precision=PRECISION)
        b_dq += b_dq_inside
        b_dk += b_dk_inside
        if DECAY == HEAD_DECAY:
            if PRECISION == "tf32":
                b_net += b_q * b_dq_inside - b_k * b_dk_inside
            else:
                # in float32 rounding errors of what cancels would be visible after a sum over time, so the pairs
                # themselves are summed: over i >= l and j < l
                b_pairs *= tl.dot(b_q.to(dtype), tl.trans(b_k.to(dtype)), input_precision=PRECISION)
                b_pairs = tl.dot(b_pairs, tl.trans(m_past.to(tl.float32)), input_precision=PRECISION)
                b_dg_inside = tl.sum(tl.where(o_c[:, None] >= o_c[None, :], b_pairs, 0.0), 0)

    b_diagonal = tl.sum(tl.where(o_c[:, None] == o_c[None, :], b_da, 0.0), 1)[:, None]
    if dq is not None:
        store_tile(dq + o_dense, H * K, o_t, o_k, end, K, b_dq + b_diagonal * b_k)
    if dk is not None:
        b_dk += b_diagonal * b_q
        if dk_more is not None:
            b_dk += load_tile(dk_more + o_dense, H * K, o_t, o_k, end, K)
        store_tile(dk + o_dense, H * K, o_t, o_k, end, K, b_dk)
    if dg is not None:
        if DECAY == CHANNEL_DECAY:
            b_dg += masked_sums(o_c[None, :] >= o_c[:, None], b_net, False, PRECISION)
            if dg_more is not None:
                b_dg += load_tile(dg_more + o_dense, H * K, o_t, o_k, end, K)
            store_tile(dg + o_dense, H * K, o_t, o_k, end, K, b_dg)
        else:
            b_net_sum = tl.sum(b_net, 1)
            b_leaving_sum = tl.sum(b_leaving, 1)
            b_dg_head = tl.sum(tl.where(o_c[:, None] <= o_c[None, :], b_net_sum[None, :], 0.0), 1)
            b_dg_head += tl.sum(tl.where(m_past, b_leaving_sum[None, :], 0.0), 1)
            if PRECISION != "tf32":
                b_dg_head += b_dg_inside
            b_dg_head += tl.sum(b_through, 0) * exponential(tl.sum(b_g, 0), PRECISION)
            tl.store(dg + (o_head + o_t.to(tl.int64) * H) * num_k + i_k, b_dg_head, mask=o_t < end)


def _block_k(plan: Plan, kind: int, key_dim: int) -> int:
    block_k = plan.tuning.grads[kind].block_k
    # 32 keys may be narrower than the minimum (see the loop of the kernel)
    return min(block_k, plan.width(block_k, key_dim))


@planned
def _grads_plan(plan: Plan, kind: int, shape: tuple[int, ...], value_dim: int, strides: PositionStrides) -> LaunchPlan:
    batch, length, heads, key_dim = shape
    tile = plan.tuning.grads[kind]
    block_k, block_v = _block_k(plan, kind, key_dim), plan.width(tile.block_v, value_dim)
    num_chunks = plan.num_chunks(length)
    return LaunchPlan(
        batch * heads * num_chunks * cdiv(key_dim, block_k),
        T=length,
        num_t=num_chunks,
        end_v=cdiv(value_dim, block_v) * block_v,
        scale=plan.scale,
        **strides.arguments("q k v g do"),
        LEVELS=plan.chunk.bit_length() - 1,
        DECAY=kind,
        LIMIT=plan.mild,
        **(plan.constants(tile, heads, key_dim, value_dim) | {"BK": block_k}),
    )


def gla_grads(
    plan: Plan,
    *,
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    do: Tensor,
    states: Tensor,
    dstates: Tensor | None,
    dq_dtype: torch.dtype | None = None,
    dk_dtype: torch.dtype | None = None,
    dg_dtype: torch.dtype | None = None,
    more: tuple[Tensor | None, Tensor | None] = (None, None),
) -> tuple[Any, Any, Any]:
    """Gradients of q, k and g, each None where it has no dtype; see `_grads_kernel`.

    That of a decay of a head is float32 [B, T, H, blocks of K], of which the sums over the blocks are the gradient.
    more: float32 tensors that are added to the gradients of k and g.
    """
    (batch, length, heads, key_dim), kind = k.shape, decay_kind(g)

    def new(dtype: torch.dtype | None, channels: int) -> Tensor | None:
        return None if dtype is None else k.new_empty((batch, length, heads, channels), dtype=dtype)

    dq, dk = new(dq_dtype, key_dim), new(dk_dtype, key_dim)
    partial = dg_dtype is not None and kind == HEAD
    dg = new(torch.float32, cdiv(key_dim, _block_k(plan, kind, key_dim))) if partial else new(dg_dtype, key_dim)
    dk_more, dg_more = more
    launch(
        _grads_kernel, _grads_plan(plan, kind, k.shape, v.shape[-1], PositionStrides.of(q, k, v, g, do)), q=q, k=k, v=v,
        g=g, do=do, states=states, dstates=dstates, dq=dq, dk=dk, dg=dg, dk_more=dk_more, dg_more=dg_more,
        table=plan.table,
    )  # fmt: skip
    return dq, dk, dg
