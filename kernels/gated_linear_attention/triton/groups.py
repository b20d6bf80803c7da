"""Kernels for heads that share queries and keys: scores of a group, and gradients summed over its heads.

With a decay of a head, q_in = q exp(P) and k_out = k exp(R) are rows of q and k times factors of a head, so neither is
written: the factors [B, H, T] multiply rows of products instead. The scores of a group have no decays, which
`group_reads` and `_group_grads_kernel` apply to a tile of them.
"""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.gated_linear_attention.triton.decays import (
    decay_matrix,
    exponential,
    head_prefix_suffix,
    load_head_decays,
)
from subquad.kernels.gated_linear_attention.triton.group_reads import NO_WEIGHTS, StateParts, Weights, load_row
from subquad.kernels.gated_linear_attention.triton.plan import HEAD, Plan, PositionStrides, Tile, group_size, planned
from subquad.kernels.gated_linear_attention.triton.scores import ChunkFactors
from subquad.kernels.gated_linear_attention.triton.tiles import (
    as_operand,
    chunk_span,
    load_state,
    load_tile,
    store_tile,
)
from subquad.kernels.launch import LaunchPlan, cdiv, launch


@triton.jit
def _group_scores_kernel(
    q, k, g, write, scores, same, log_decay, q_in, k_out, decay, table,
    T, num_t, scale,
    q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_t, k_stride_h, g_stride_b, g_stride_t, g_stride_h,
    write_stride_b, write_stride_t, write_stride_h,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """For one chunk of a group: its scores scale q k^T [C, C], and what other kernels need of the decays of its heads.

    log_decay is g with adjacent positions, q_in = scale exp(P), k_out = exp(R) w, all [B, H, T]; decay = exp(P_C). w is
    1 where `write` is None. same is the diagonal of the scores, [B, G, T], or None: weights of positions have gradients
    in float32, of which it is a factor, so it is not rounded as the operand of a product.
    """
    G: tl.constexpr = H // GROUP
    i_t, i_bg = tl.program_id(0) % num_t, (tl.program_id(0) // num_t).to(tl.int64)
    i_b, i_g = i_bg // G, i_bg % G
    dtype = scores.dtype.element_ty
    o_c = tl.arange(0, C)
    q += i_b * q_stride_b + i_g * q_stride_h
    k += i_b * k_stride_b + i_g * k_stride_h
    start, end = chunk_span(table, i_t, T, C)
    o_t = start + o_c
    b_scores = tl.zeros([C, C], tl.float32)
    for i_k in range(0, K, BK):
        o_k = i_k + tl.arange(0, BK)
        b_q = load_tile(q, q_stride_t, o_t, o_k, end, K).to(dtype)
        b_k = load_tile(k, k_stride_t, o_t, o_k, end, K).to(dtype)
        b_scores += tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
    b_scores = tl.where(o_c[:, None] >= o_c[None, :], b_scores * scale, 0.0)
    store_tile(scores + (i_b * T * G + i_g) * C, G * C, o_t, o_c, end, C, as_operand(b_scores, dtype, PRECISION))
    m_t = o_t < end
    if same is not None:
        tl.store(same + i_bg * T + o_t, tl.sum(tl.where(o_c[:, None] == o_c[None, :], b_scores, 0.0), 1), mask=m_t)
    for i_h in range(i_g * GROUP, (i_g + 1) * GROUP):
        p_g = g + i_b * g_stride_b + i_h * g_stride_h
        b_g = load_head_decays(p_g, g_stride_t, o_t, m_t)
        b_prefix, b_suffix = head_prefix_suffix(p_g, g_stride_t, o_t, o_c, end, C)
        o_row = (i_b * H + i_h) * T + o_t
        tl.store(log_decay + o_row, b_g, mask=m_t)
        tl.store(q_in + o_row, exponential(b_prefix, PRECISION) * scale, mask=m_t)
        b_out = exponential(b_suffix, PRECISION)
        if write is not None:
            b_out *= load_row(write + i_b * write_stride_b + i_h * write_stride_h, write_stride_t, o_t, end)
        tl.store(k_out + o_row, b_out, mask=m_t)
        tl.store(decay + (i_b * H + i_h) * num_t + i_t, exponential(tl.sum(b_g, 0), PRECISION))


@planned
def _group_scores_plan(plan: Plan, heads: int, shape: tuple[int, ...], strides: PositionStrides) -> LaunchPlan:
    batch, length, groups, key_dim = shape
    tile, num_chunks = plan.tuning.groups, plan.num_chunks(length)
    return LaunchPlan(
        batch * groups * num_chunks,
        T=length,
        num_t=num_chunks,
        scale=plan.scale,
        **strides.arguments("q k g write"),
        H=heads,
        K=key_dim,
        C=plan.chunk,
        BK=plan.width(tile.block_k, key_dim),
        GROUP=group_size(heads, groups),
        PRECISION=plan.precision,
        **plan.tuning.scores[HEAD].options.keywords(),
    )


def gla_group_scores(plan: Plan, q: Tensor, k: Tensor, g: Tensor, write: Tensor | None = None) -> ChunkFactors:
    """Factors of all chunks for q and k [B, T, G, K], g [B, T, H], and write [B, T, H] or None; see `ChunkFactors`."""
    (batch, length, groups, _), heads = q.shape, g.shape[2]
    scores = q.new_empty((batch, length, groups, plan.chunk), dtype=plan.work)
    log_decay, q_in, k_out = (q.new_empty((batch, heads, length), dtype=torch.float32) for _ in range(3))
    same = None if write is None else q.new_empty((batch, groups, length), dtype=torch.float32)
    decay = q.new_empty((batch, heads, plan.num_chunks(length)), dtype=torch.float32)
    launch(
        _group_scores_kernel, _group_scores_plan(plan, heads, q.shape, PositionStrides.of(q, k, g, write)), q=q, k=k,
        g=g, write=write, scores=scores, same=same, log_decay=log_decay, q_in=q_in, k_out=k_out, decay=decay,
        table=plan.table,
    )  # fmt: skip
    return ChunkFactors(k_out, decay, q_in, scores, log_decay, same)


@triton.jit
def _group_grads_kernel(
    q, k, v, log_decay, q_in, k_out, write, own, do, states, dstates, dq, dk, net, past, table,
    T, num_t, num_steps, scale,
    q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_t, k_stride_h, v_stride_b, v_stride_t, v_stride_h,
    do_stride_b, do_stride_t, do_stride_h, write_stride_b, write_stride_t, write_stride_h,
    own_stride_b, own_stride_t, own_stride_h, d_stride_t,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    GROUP: tl.constexpr, SLICES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq and dk [C, BK] of one chunk, summed over the heads of a slice of a group.

    With do_i exp(P_i) scale and v_j w_j exp(R_j) as rows, products with states add up over the heads where they are
    accumulated. The pairs of a head are dA_ij exp(D_ij) w_j, or n_j where i = j; since its heads share q and k, so are
    the products of their sum with both. One loop goes over heads and blocks of values, so that all of its loads run
    ahead. The letters are those of `group_reads`.

    dq and dk are [B, T, SLICES G, K], with positions d_stride_t apart in all sequences. net and past are None, or for
    lone heads get `StateParts`.
    """
    HEADS: tl.constexpr = GROUP // SLICES
    NUM_V: tl.constexpr = (V + BV - 1) // BV
    N: tl.constexpr = H // HEADS
    num_k = tl.cdiv(K, BK)
    i_k, i_c = tl.program_id(0) % num_k, (tl.program_id(0) // num_k).to(tl.int64)
    i_t, i_bs = i_c % num_t, i_c // num_t
    i_b, i_s = i_bs // N, i_bs % N
    dtype = states.dtype.element_ty
    o_c = tl.arange(0, C)
    o_k = i_k * BK + tl.arange(0, BK)
    start, end = chunk_span(table, i_t, T, C)
    o_t = start + o_c
    m_not_after = o_c[:, None] >= o_c[None, :]
    b_sum = tl.zeros([C, C], tl.float32)
    b_dq = tl.zeros([C, BK], tl.float32)
    b_dk = tl.zeros([C, BK], tl.float32)
    b_past = 0.0
    for i in range(num_steps):
        i_h, o_v = i_s * HEADS + i // NUM_V, i % NUM_V * BV + tl.arange(0, BV)
        o_state = ((i_b * H + i_h) * num_t + i_t) * K * V
        o_head = (i_b * H + i_h) * T
        b_do = load_tile(do + i_b * do_stride_b + i_h * do_stride_h, do_stride_t, o_t, o_v, end, V).to(dtype)
        b_v = load_tile(v + i_b * v_stride_b + i_h * v_stride_h, v_stride_t, o_t, o_v, end, V).to(dtype)
        b_state = load_state(states + o_state, o_k, o_v, K, V)
        b_dstate = load_state(dstates + o_state, o_k, o_v, K, V)
        if past is not None:
            b_past += tl.sum(b_state.to(tl.float32) * b_dstate.to(tl.float32))
        b_pairs = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
        b_into, b_out_of = load_row(q_in + o_head, 1, o_t, end), load_row(k_out + o_head, 1, o_t, end)
        b_do = as_operand(b_do.to(tl.float32) * b_into[:, None], dtype, PRECISION)
        b_v = as_operand(b_v.to(tl.float32) * b_out_of[:, None], dtype, PRECISION)
        b_g = load_head_decays(log_decay + o_head, 1, o_t, o_t < end)
        b_decays = decay_matrix(b_g, tl.cumsum(b_g, 0), o_c, PRECISION)
        if write is not None:
            p_write = write + i_b * write_stride_b + i_h * write_stride_h
            b_decays *= load_row(p_write, write_stride_t, o_t, end)[None, :]
        if own is not None:
            b_own = load_row(own + i_b * own_stride_b + i_h * own_stride_h, own_stride_t, o_t, end)
            b_decays = tl.where(o_c[:, None] == o_c[None, :], b_own[None, :], b_decays)
        b_pairs *= b_decays
        b_dq += tl.dot(b_do, tl.trans(b_state), input_precision=PRECISION)
        b_dk += tl.dot(b_v, tl.trans(b_dstate), input_precision=PRECISION)
        b_sum += b_pairs
    b_all = as_operand(tl.where(m_not_after, b_sum * scale, 0.0), dtype, PRECISION)
    b_k = load_tile(k + i_b * k_stride_b + i_s // SLICES * k_stride_h, k_stride_t, o_t, o_k, end, K).to(dtype)
    b_q = load_tile(q + i_b * q_stride_b + i_s // SLICES * q_stride_h, q_stride_t, o_t, o_k, end, K).to(dtype)
    if net is not None:
        o_part = (i_bs * num_k + i_k) * T + o_t
        tl.store(net + o_part, tl.sum(b_q.to(tl.float32) * b_dq, 1), mask=o_t < end)
        tl.store(past + i_c * num_k + i_k, b_past)
    b_dq += tl.dot(b_all, b_k, input_precision=PRECISION)
    b_dk += tl.dot(tl.trans(b_all), b_q, input_precision=PRECISION)
    o_d = i_b * T * d_stride_t + i_s * K
    store_tile(dq + o_d, d_stride_t, o_t, o_k, end, K, b_dq)
    store_tile(dk + o_d, d_stride_t, o_t, o_k, end, K, b_dk)


def num_slices(plan: Plan, group: int, num_programs: int) -> int:
    """Slices into which the heads of a group are divided: the fewest that give enough programs, a divisor of `group`.

    Without slices there are `num_programs` programs.
    """
    wanted = min(group, cdiv(plan.tuning.enough_programs, max(1, num_programs)))
    return next(count for count in range(wanted, group + 1) if group % count == 0)


@planned
def _group_grads_plan(
    plan: Plan,
    tile: Tile,
    slices: int,
    shape: tuple[int, ...],
    key_shape: tuple[int, ...],
    strides: PositionStrides,
    d_stride_t: int,
) -> LaunchPlan:
    (batch, length, heads, value_dim), (*_, groups, key_dim) = shape, key_shape
    num_chunks = plan.num_chunks(length)
    block_k, block_v = plan.width(tile.block_k, key_dim), plan.width(tile.block_v, value_dim)
    return LaunchPlan(
        batch * groups * slices * num_chunks * cdiv(key_dim, block_k),
        T=length,
        num_t=num_chunks,
        num_steps=group_size(heads, groups) // slices * cdiv(value_dim, block_v),
        scale=plan.scale,
        **strides.arguments("q k v do write own"),
        d_stride_t=d_stride_t,
        GROUP=group_size(heads, groups),
        SLICES=slices,
        **plan.constants(tile, heads, key_dim, value_dim),
    )


def gla_group_grads(
    plan: Plan,
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    factors: ChunkFactors,
    states: Tensor,
    dstates: Tensor,
    dq: Tensor,
    dk: Tensor,
    of_states: bool,
    weights: Weights = NO_WEIGHTS,
) -> StateParts:
    """Writes the gradients of q and k [B, T, G, K], whose heads are side by side, and sequences one behind the other.

    Their positions are the same distance apart. of_states: whether `StateParts` are wanted, which lone heads have.
    """
    (batch, length, heads, _), (*_, groups, key_dim) = v.shape, q.shape
    lone = plan.is_lone(q.shape, v.shape)
    tile = plan.tuning.lone if lone else plan.tuning.groups
    num_k = cdiv(key_dim, plan.width(tile.block_k, key_dim))
    slices = num_slices(plan, heads // groups, batch * groups * plan.num_chunks(length) * num_k)
    # sums over some heads stay float32 until they are added
    parts = dq, dk
    if slices > 1:
        dq, dk = (q.new_empty((batch, length, groups * slices, key_dim), dtype=torch.float32) for _ in "qk")
    of_heads = StateParts()
    if of_states and lone:
        at_chunks = batch, heads, plan.num_chunks(length), num_k
        net, past = (q.new_empty(x, dtype=torch.float32) for x in ((batch, heads, num_k, length), at_chunks))
        of_heads = StateParts(net, past)
    strides = PositionStrides.of(q, k, v, do, weights.write, weights.own)
    launch(
        _group_grads_kernel, _group_grads_plan(plan, tile, slices, v.shape, q.shape, strides, dq.stride(1)), q=q, k=k,
        v=v, log_decay=factors.log_decay, q_in=factors.q_in, k_out=factors.k_out, write=weights.write,
        own=weights.own, do=do, states=states, dstates=dstates, dq=dq, dk=dk, **of_heads._asdict(), table=plan.table,
    )  # fmt: skip
    for whole, x in zip(parts, (dq, dk), strict=True) if slices > 1 else ():
        whole.copy_(x.unflatten(2, (groups, slices)).sum(3))
    return of_heads
