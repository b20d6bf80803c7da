"""Kernels for heads that share queries and keys: scores of a group, and gradients summed over its heads.

Without decays of channels, q_in = q exp(P) and k_out = k exp(R) are rows of q and k times factors of a head, so neither
is written: the factors [B, H, T] multiply rows of products instead. The scores of a group have no decays, which
`_read_kernel` and `_group_grads_kernel` apply to a tile of them.
"""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.gated_linear_attention.triton.decays import (
    HEAD_DECAY,
    decay_matrix,
    exponential,
    head_prefix_suffix,
    load_head_decays,
)
from subquad.kernels.gated_linear_attention.triton.plan import (
    HEAD,
    Plan,
    Strides,
    group_size,
    planned,
    position_strides,
    strides_of,
)
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
    q,
    k,
    g,
    scores,
    log_decay,
    q_in,
    k_out,
    decay,
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
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """For one chunk of a group: its scores scale q k^T [C, C], and with a decay what other kernels need of its heads.

    log_decay is g with adjacent positions, q_in = scale exp(P), k_out = exp(R), all [B, H, T]; decay = exp(P_C).
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
    if g is not None:
        m_t = o_t < end
        for i_h in range(i_g * GROUP, (i_g + 1) * GROUP):
            p_g = g + i_b * g_stride_b + i_h * g_stride_h
            b_g = load_head_decays(p_g, g_stride_t, o_t, m_t)
            b_prefix, b_suffix = head_prefix_suffix(p_g, g_stride_t, o_t, o_c, end, C)
            o_row = (i_b * H + i_h) * T + o_t
            tl.store(log_decay + o_row, b_g, mask=m_t)
            tl.store(q_in + o_row, exponential(b_prefix, PRECISION) * scale, mask=m_t)
            tl.store(k_out + o_row, exponential(b_suffix, PRECISION), mask=m_t)
            tl.store(decay + (i_b * H + i_h) * num_t + i_t, exponential(tl.sum(b_g, 0), PRECISION))


@planned
def _group_scores_plan(
    plan: Plan, heads: int, shape: tuple[int, ...], q: Strides, k: Strides, g: Strides | None
) -> LaunchPlan:
    batch, length, groups, key_dim = shape
    tile, num_chunks = plan.tuning.groups, plan.num_chunks(length)
    return LaunchPlan(
        batch * groups * num_chunks,
        T=length,
        num_t=num_chunks,
        scale=plan.scale,
        **position_strides(q=q, k=k, g=g),
        H=heads,
        K=key_dim,
        C=plan.chunk,
        BK=plan.width(tile.block_k, key_dim),
        GROUP=group_size(heads, groups),
        PRECISION=plan.precision,
        **plan.tuning.scores[HEAD].options.keywords(),
    )


def gla_group_scores(plan: Plan, q: Tensor, k: Tensor, g: Tensor | None, heads: int) -> ChunkFactors:
    """Factors of all chunks for q and k [B, T, G, K] and g [B, T, H] or None; see `ChunkFactors`."""
    batch, length, groups, _ = q.shape
    num_chunks = plan.num_chunks(length)
    scores = q.new_empty((batch, length, groups, plan.chunk), dtype=plan.work)
    log_decay = q_in = k_out = decay = None
    if g is not None:
        log_decay, q_in, k_out = (q.new_empty((batch, heads, length), dtype=torch.float32) for _ in range(3))
        decay = q.new_empty((batch, heads, num_chunks), dtype=torch.float32)
    launch(
        _group_scores_kernel,
        _group_scores_plan(plan, heads, q.shape, q.stride(), k.stride(), strides_of(g)),
        q=q,
        k=k,
        g=g,
        scores=scores,
        log_decay=log_decay,
        q_in=q_in,
        k_out=k_out,
        decay=decay,
        table=plan.table,
    )
    return ChunkFactors(k_out, decay, q_in, scores, log_decay)


@triton.jit
def _group_grads_kernel(
    q,
    k,
    v,
    log_decay,
    do,
    states,
    dstates,
    dq,
    dk,
    dg,
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
    do_stride_b,
    do_stride_t,
    do_stride_h,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    GROUP: tl.constexpr,
    SLICES: tl.constexpr,
    DECAY: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dq and dk [C, BK] of one chunk, summed over the heads of a slice of a group, and dg of these heads.

    The letters are those of `_grads_kernel`. The pairs of a head are dA_ij exp(D_ij), and since its heads share q and k
    so are the products of their sum with both. What the pairs within the chunk give to dg_l is the sum of
    pairs_ij q_i k_j over i >= l and j < l, so dg takes no products of its own.

    dq and dk are [B, T, SLICES G, K], dg is a sum over channels [B, T, H, K / BK] or None.
    """
    HEADS: tl.constexpr = GROUP // SLICES
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
    m_past = o_c[:, None] > o_c[None, :]
    m_not_after = o_c[:, None] >= o_c[None, :]
    b_q = load_tile(q + i_b * q_stride_b + i_s // SLICES * q_stride_h, q_stride_t, o_t, o_k, end, K)
    b_k = load_tile(k + i_b * k_stride_b + i_s // SLICES * k_stride_h, k_stride_t, o_t, o_k, end, K)
    if dg is not None:
        b_scores = tl.dot(b_q.to(dtype), tl.trans(b_k.to(dtype)), input_precision=PRECISION)
    b_sum = tl.zeros([C, C], tl.float32)
    b_dq = tl.zeros([C, BK], tl.float32)
    b_dk = tl.zeros([C, BK], tl.float32)
    for i_h in range(i_s * HEADS, (i_s + 1) * HEADS):
        p_v = v + i_b * v_stride_b + i_h * v_stride_h
        p_do = do + i_b * do_stride_b + i_h * do_stride_h
        o_state = ((i_b * H + i_h) * num_t + i_t) * K * V
        b_pairs = tl.zeros([C, C], tl.float32)
        b_in = tl.zeros([C, BK], tl.float32)
        b_out = tl.zeros([C, BK], tl.float32)
        b_through = tl.zeros([BK], tl.float32)
        for i_v in range(0, end_v, BV):
            o_v = i_v + tl.arange(0, BV)
            b_do = load_tile(p_do, do_stride_t, o_t, o_v, end, V).to(dtype)
            b_v = load_tile(p_v, v_stride_t, o_t, o_v, end, V).to(dtype)
            b_state = load_state(states + o_state, o_k, o_v, K, V)
            b_dstate = load_state(dstates + o_state, o_k, o_v, K, V)
            b_pairs += tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
            b_in += tl.dot(b_do, tl.trans(b_state), input_precision=PRECISION)
            b_out += tl.dot(b_v, tl.trans(b_dstate), input_precision=PRECISION)
            if dg is not None:
                b_through += tl.sum(b_state.to(tl.float32) * b_dstate.to(tl.float32), 1)
        b_pairs = tl.where(m_not_after, b_pairs * scale, 0.0)
        b_in *= scale
        if DECAY == HEAD_DECAY:
            p_g = log_decay + (i_b * H + i_h) * T
            b_g = load_head_decays(p_g, 1, o_t, o_t < end)
            b_prefix, b_suffix = head_prefix_suffix(p_g, 1, o_t, o_c, end, C)
            b_in *= exponential(b_prefix, PRECISION)[:, None]
            b_out *= exponential(b_suffix, PRECISION)[:, None]
            b_pairs *= decay_matrix(b_g, b_prefix, o_c, PRECISION)
            if dg is not None:
                b_inside = tl.where(m_past, b_pairs * b_scores, 0.0)
                b_net = tl.sum(b_q.to(tl.float32) * b_in, 1)
                b_leaving = tl.sum(b_k.to(tl.float32) * b_out, 1)
                b_dg = tl.zeros([C], tl.float32)
                if PRECISION == "tf32":
                    b_net += tl.sum(b_inside, 1) - tl.sum(b_inside, 0)
                else:
                    # differences of sums would be visible in float32 (see `_grads_kernel`)
                    b_before = tl.dot(b_inside, tl.trans(m_past.to(tl.float32)), input_precision=PRECISION)
                    b_dg += tl.sum(tl.where(m_not_after, b_before, 0.0), 0)
                b_dg += tl.sum(tl.where(m_not_after, b_net[:, None], 0.0), 0)
                b_dg += tl.sum(tl.where(m_past, b_leaving[None, :], 0.0), 1)
                b_dg += tl.sum(b_through, 0) * exponential(tl.sum(b_g, 0), PRECISION)
                o_row = i_b * T * H + i_h + o_t.to(tl.int64) * H
                tl.store(dg + o_row * num_k + i_k, b_dg, mask=o_t < end)
        b_sum += b_pairs
        b_dq += b_in
        b_dk += b_out
    b_all = as_operand(b_sum, dtype, PRECISION)
    b_dq += tl.dot(b_all, b_k.to(dtype), input_precision=PRECISION)
    b_dk += tl.dot(tl.trans(b_all), b_q.to(dtype), input_precision=PRECISION)
    o_dense = (i_b * T * N + i_s) * K
    store_tile(dq + o_dense, N * K, o_t, o_k, end, K, b_dq)
    store_tile(dk + o_dense, N * K, o_t, o_k, end, K, b_dk)


def num_slices(plan: Plan, group: int, num_programs: int) -> int:
    """Slices into which the heads of a group are divided: the fewest that give enough programs, a divisor of `group`.

    Without slices there are `num_programs` programs.
    """
    wanted = min(group, cdiv(plan.tuning.enough_programs, num_programs))
    return next(count for count in range(wanted, group + 1) if group % count == 0)


@planned
def _group_grads_plan(
    plan: Plan,
    kind: int,
    slices: int,
    shape: tuple[int, ...],
    key_shape: tuple[int, ...],
    q: Strides,
    k: Strides,
    v: Strides,
    do: Strides,
) -> LaunchPlan:
    (batch, length, heads, value_dim), (*_, groups, key_dim) = shape, key_shape
    tile, num_chunks = plan.tuning.groups, plan.num_chunks(length)
    block_k, block_v = plan.width(tile.block_k, key_dim), plan.width(tile.block_v, value_dim)
    return LaunchPlan(
        batch * groups * slices * num_chunks * cdiv(key_dim, block_k),
        T=length,
        num_t=num_chunks,
        end_v=cdiv(value_dim, block_v) * block_v,
        scale=plan.scale,
        **position_strides(q=q, k=k, v=v, do=do),
        H=heads,
        K=key_dim,
        V=value_dim,
        C=plan.chunk,
        BK=block_k,
        BV=block_v,
        GROUP=group_size(heads, groups),
        SLICES=slices,
        DECAY=kind,
        PRECISION=plan.precision,
        **tile.options.keywords(),
    )


def gla_group_grads(
    plan: Plan,
    kind: int,
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    do: Tensor,
    states: Tensor,
    dstates: Tensor,
    dq_dtype: torch.dtype,
    dk_dtype: torch.dtype,
    dg_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of q and k [B, T, G, K], and of g [B, T, H], which is None where it has no dtype."""
    (batch, length, heads, _), (*_, groups, key_dim) = v.shape, q.shape
    num_k = cdiv(key_dim, plan.width(plan.tuning.groups.block_k, key_dim))
    slices = num_slices(plan, heads // groups, batch * groups * plan.num_chunks(length) * num_k)
    # sums over some heads stay float32 until they are added
    dq, dk = (
        q.new_empty((batch, length, groups * slices, key_dim), dtype=torch.float32 if slices > 1 else dtype)
        for dtype in (dq_dtype, dk_dtype)
    )
    dg = None if dg_dtype is None else q.new_empty((batch, length, heads, num_k), dtype=torch.float32)
    strides = q.stride(), k.stride(), v.stride(), do.stride()
    launch(
        _group_grads_kernel,
        _group_grads_plan(plan, kind, slices, v.shape, q.shape, *strides),
        q=q,
        k=k,
        v=v,
        log_decay=log_decay,
        do=do,
        states=states,
        dstates=dstates,
        dq=dq,
        dk=dk,
        dg=dg,
        table=plan.table,
    )
    if slices > 1:
        dq, dk = (x.unflatten(2, (groups, slices)).sum(3).to(d) for x, d in ((dq, dq_dtype), (dk, dk_dtype)))
    return dq, dk, None if dg is None else dg.sum(-1).to(dg_dtype)
