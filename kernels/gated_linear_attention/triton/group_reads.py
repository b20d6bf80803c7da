"""Reads of heads with decays of a position: outputs of a chunk, and in the backward pass the gradients of its values.

With A_ij = scale q_i k_j, D_ij the sum of the log-decays in (j, i], P_i from the start of the chunk up to i, R_j from
after j to its end, S the state before the chunk and dS the gradient of that after it:

    o_i  = exp(P_i) scale q_i S + sum_{j < i} A_ij exp(D_ij) w_j v_j + (A_ii n_i + d) v_i
    u_j  = exp(R_j) k_j dS + sum_{i > j} A_ij exp(D_ij) do_i
    dv_j = w_j u_j + (A_jj n_j + d) do_j
    dw_j = u_j v_j,   dn_j = A_jj (do_j v_j),   dd = sum_j do_j v_j

The decay at l acts on what enters the chunk and is read at i >= l, on what is written at j < l and leaves the chunk, on
what enters and leaves it, and on pairs j < l <= i:

    dg_l = sum_{i >= l} exp(P_i) scale (q_i S) do_i + sum_{j < l} w_j exp(R_j) (k_j dS) v_j + exp(P_C) sum S dS
           + sum_{j < l <= i} A_ij exp(D_ij) w_j v_j do_i

w is the weight with which a position writes its value, n that with which it reads its own (None: w), and d a factor of
a head; gated linear attention has none of them, which stands for w = n = 1 and d = 0.
"""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

from typing import NamedTuple

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


class Weights(NamedTuple):
    """Weights of positions and heads, in any strides; `gated_linear_attention` has none of them."""

    write: Tensor | None = None
    """w [B, T, H]."""
    own: Tensor | None = None
    """n [B, T, H]; None stands for w."""
    skip: Tensor | None = None
    """d [H]."""


NO_WEIGHTS = Weights()


class StateParts(NamedTuple):
    """States add this to the gradient of log-decays, in float32, as parts by blocks of keys; see `Plan.is_lone`.

    The kernel of dq and dk has all that they take. `_group_values_kernel` would read queries and states for nothing
    else.
    """

    net: Tensor | None = None
    """exp(P_i) scale (q_i S) do_i, [B, H, blocks, T]."""
    past: Tensor | None = None
    """sum S dS, [B, H, chunks, blocks]."""


@triton.jit
def load_row(p, stride_t, o_t, end):
    """One number a position of a head, in float32; zero behind the end."""
    return tl.load(p + o_t.to(tl.int64) * stride_t, mask=o_t < end, other=0.0).to(tl.float32)


@triton.jit
def _group_read_kernel(
    q, v, scores, log_decay, q_in, write, own, skip, states, out, table,
    T, num_t,
    q_stride_b, q_stride_t, q_stride_h, v_stride_b, v_stride_t, v_stride_h,
    write_stride_b, write_stride_t, write_stride_h, own_stride_b, own_stride_t, own_stride_h,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """o [B, T, H, V] of one chunk, head and block of V.

    scores [B, T, H / GROUP, C] are A, log_decay and q_in = scale exp(P) are [B, H, T], and states [B, H, chunks, K, V].
    """
    num_v = tl.cdiv(V, BV)
    i_v, i_c = tl.program_id(0) % num_v, (tl.program_id(0) // num_v).to(tl.int64)
    i_t, i_bh = i_c % num_t, i_c // num_t
    i_b, i_h = i_bh // H, i_bh % H
    dtype = states.dtype.element_ty
    o_c = tl.arange(0, C)
    start, end = chunk_span(table, i_t, T, C)
    o_t = start + o_c
    o_v = i_v * BV + tl.arange(0, BV)
    p_q = q + i_b * q_stride_b + i_h // GROUP * q_stride_h
    b_out = tl.zeros([C, BV], tl.float32)
    for i_k in range(0, K, BK):
        o_k = i_k + tl.arange(0, BK)
        b_q = load_tile(p_q, q_stride_t, o_t, o_k, end, K).to(dtype)
        b_state = load_state(states + i_c * K * V, o_k, o_v, K, V)
        b_out += tl.dot(b_q, b_state, input_precision=PRECISION)
    G: tl.constexpr = H // GROUP
    b_raw = load_tile(scores + (i_b * T * G + i_h // GROUP) * C, G * C, o_t, o_c, end, C).to(tl.float32)
    b_scores = b_raw
    b_out *= load_row(q_in + i_bh * T, 1, o_t, end)[:, None]
    b_g = load_head_decays(log_decay + i_bh * T, 1, o_t, o_t < end)
    b_scores *= decay_matrix(b_g, tl.cumsum(b_g, 0), o_c, PRECISION)
    if write is not None:
        b_scores *= load_row(write + i_b * write_stride_b + i_h * write_stride_h, write_stride_t, o_t, end)[None, :]
    if own is not None:
        b_own = load_row(own + i_b * own_stride_b + i_h * own_stride_h, own_stride_t, o_t, end)
        b_scores = tl.where(o_c[:, None] == o_c[None, :], b_raw * b_own[None, :], b_scores)
    b_v = load_tile(v + i_b * v_stride_b + i_h * v_stride_h, v_stride_t, o_t, o_v, end, V).to(dtype)
    b_out += tl.dot(as_operand(b_scores, dtype, PRECISION), b_v, input_precision=PRECISION)
    if skip is not None:
        b_out += tl.load(skip + i_h).to(tl.float32) * b_v.to(tl.float32)
    store_tile(out + (i_b * T * H + i_h) * V, H * V, o_t, o_v, end, V, b_out)


@triton.jit
def _group_values_kernel(
    q, k, v, do, scores, same, log_decay, q_in, write, own, skip, states, dstates, dv, dg, dwrite, down, dskip, net,
    past, table,
    T, num_t,
    q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_t, k_stride_h, v_stride_b, v_stride_t, v_stride_h,
    do_stride_b, do_stride_t, do_stride_h, write_stride_b, write_stride_t, write_stride_h,
    own_stride_b, own_stride_t, own_stride_h, dv_stride_t,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dv [B, T, H, V] of one chunk, head and block of V, and the gradients of log-decays and weights for each block.

    Positions of dv lie dv_stride_t apart, in all sequences.

    dg, dwrite and down are [B, T, H, V / BV] and dskip [B, chunks, H, V / BV], sums over the block and its chunk. net
    and past are None, or `StateParts` in blocks of BK keys.
    """
    num_v = tl.cdiv(V, BV)
    i_v, i_c = tl.program_id(0) % num_v, (tl.program_id(0) // num_v).to(tl.int64)
    i_t, i_bh = i_c % num_t, i_c // num_t
    i_b, i_h = i_bh // H, i_bh % H
    dtype = dstates.dtype.element_ty
    o_c = tl.arange(0, C)
    start, end = chunk_span(table, i_t, T, C)
    o_t = start + o_c
    o_v = i_v * BV + tl.arange(0, BV)
    o_row = ((i_b * T + o_t) * H + i_h) * num_v + i_v
    m_own = o_c[:, None] == o_c[None, :]
    p_k = k + i_b * k_stride_b + i_h // GROUP * k_stride_h
    b_do = load_tile(do + i_b * do_stride_b + i_h * do_stride_h, do_stride_t, o_t, o_v, end, V).to(dtype)
    b_v = load_tile(v + i_b * v_stride_b + i_h * v_stride_h, v_stride_t, o_t, o_v, end, V).to(dtype)
    if net is not None:
        NUM_K: tl.constexpr = (K + BK - 1) // BK
        b_net = tl.zeros([C], tl.float32)
        b_past = 0.0
        for i_k in tl.static_range(NUM_K):
            b_net += load_row(net + (i_bh * NUM_K + i_k) * T, 1, o_t, end)
            b_past += tl.load(past + i_c * NUM_K + i_k)
    elif dg is not None:
        p_q = q + i_b * q_stride_b + i_h // GROUP * q_stride_h
        b_in = tl.zeros([C, BV], tl.float32)
        b_through = tl.zeros([BV], tl.float32)
        for i_k in range(0, K, BK):
            o_k = i_k + tl.arange(0, BK)
            b_q = load_tile(p_q, q_stride_t, o_t, o_k, end, K).to(dtype)
            b_state = load_state(states + i_c * K * V, o_k, o_v, K, V)
            b_in += tl.dot(b_q, b_state, input_precision=PRECISION)
            b_dstate = load_state(dstates + i_c * K * V, o_k, o_v, K, V)
            b_through += tl.sum(b_state.to(tl.float32) * b_dstate.to(tl.float32), 0)
        b_net = tl.sum(b_in * b_do.to(tl.float32), 1) * load_row(q_in + i_bh * T, 1, o_t, end)
        b_past = tl.sum(b_through, 0)
    G: tl.constexpr = H // GROUP
    b_scores = load_tile(scores + (i_b * T * G + i_h // GROUP) * C, G * C, o_t, o_c, end, C).to(tl.float32)
    b_write = tl.full([C], 1.0, tl.float32)
    if write is not None:
        b_write = load_row(write + i_b * write_stride_b + i_h * write_stride_h, write_stride_t, o_t, end)
        b_same = load_row(same + (i_b * G + i_h // GROUP) * T, 1, o_t, end)
        b_scores = tl.where(m_own, 0.0, b_scores)
    p_g = log_decay + i_bh * T
    b_g = load_head_decays(p_g, 1, o_t, o_t < end)
    b_prefix, b_suffix = head_prefix_suffix(p_g, 1, o_t, o_c, end, C)
    b_scores *= decay_matrix(b_g, b_prefix, o_c, PRECISION)
    b_scores = as_operand(b_scores, dtype, PRECISION)
    if dg is not None:
        # pairs and, below, their sums over i consist of the same rounded factors, so that what is in both cancels
        b_pairs = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION) * b_scores.to(tl.float32) * b_write[None, :]
        if PRECISION == "tf32":
            b_net += tl.sum(b_pairs, 1)
        else:
            # differences of sums would be visible in float32 (see `_grads_kernel`)
            m_past = o_c[:, None] > o_c[None, :]
            b_pairs = tl.where(m_past, b_pairs, 0.0)
            b_before = tl.dot(b_pairs, tl.trans(m_past.to(tl.float32)), input_precision=PRECISION)
            b_inside = tl.sum(tl.where(o_c[:, None] >= o_c[None, :], b_before, 0.0), 0)
    b_dv = tl.zeros([C, BV], tl.float32)
    for i_k in range(0, K, BK):
        o_k = i_k + tl.arange(0, BK)
        b_k = load_tile(p_k, k_stride_t, o_t, o_k, end, K).to(dtype)
        b_dstate = load_state(dstates + i_c * K * V, o_k, o_v, K, V)
        b_dv += tl.dot(b_k, b_dstate, input_precision=PRECISION)
    b_values = b_v.to(tl.float32)
    b_dv *= exponential(b_suffix, PRECISION)[:, None]
    if dg is not None:
        b_leaving = tl.sum(b_dv * b_values, 1)
    b_dv += tl.dot(tl.trans(b_scores), b_do, input_precision=PRECISION)
    if write is not None or dg is not None:
        b_dwrite = tl.sum(b_dv * b_values, 1)
    if dg is not None:
        b_dg = tl.zeros([C], tl.float32) + b_past * exponential(tl.sum(b_g, 0), PRECISION)
        if PRECISION == "tf32":
            b_net -= (b_dwrite - b_leaving) * b_write
        else:
            b_dg += b_inside
        b_leaving *= b_write
        b_dg += tl.cumsum(b_net, 0, reverse=True) + (tl.cumsum(b_leaving, 0) - b_leaving)
        tl.store(dg + o_row, b_dg, mask=o_t < end)
    if write is not None:
        b_wide = b_do.to(tl.float32)
        b_met = tl.sum(b_wide * b_values, 1)
        if own is not None:
            b_own = load_row(own + i_b * own_stride_b + i_h * own_stride_h, own_stride_t, o_t, end)
            tl.store(down + o_row, b_same * b_met, mask=o_t < end)
        else:
            b_own = b_write
            b_dwrite += b_same * b_met
        tl.store(dwrite + o_row, b_dwrite, mask=o_t < end)
        b_factor = b_same * b_own
        if skip is not None:
            b_factor += tl.load(skip + i_h).to(tl.float32)
            tl.store(dskip + ((i_b * num_t + i_t) * H + i_h) * num_v + i_v, tl.sum(b_met, 0))
        b_dv = b_dv * b_write[:, None] + b_factor[:, None] * b_wide
    store_tile(dv + i_b * T * dv_stride_t + i_h * V, dv_stride_t, o_t, o_v, end, V, b_dv)


@planned
def _group_reads_plan(
    plan: Plan,
    tile: Tile,
    shape: tuple[int, ...],
    key_shape: tuple[int, ...],
    strides: PositionStrides,
    dv_stride_t: int | None = None,
) -> LaunchPlan:
    (batch, length, heads, value_dim), (*_, groups, key_dim) = shape, key_shape
    num_chunks = plan.num_chunks(length)
    names = "q v write own" if dv_stride_t is None else "q k v do write own"
    return LaunchPlan(
        batch * heads * num_chunks * cdiv(value_dim, plan.width(tile.block_v, value_dim)),
        T=length,
        num_t=num_chunks,
        **strides.arguments(names),
        **({} if dv_stride_t is None else {"dv_stride_t": dv_stride_t}),
        GROUP=group_size(heads, groups),
        **plan.constants(tile, heads, key_dim, value_dim),
    )


def gla_group_read(
    plan: Plan,
    *,
    q: Tensor,
    v: Tensor,
    factors: ChunkFactors,
    states: Tensor,
    dtype: torch.dtype,
    weights: Weights = NO_WEIGHTS,
) -> Tensor:
    """o [B, T, H, V] in `dtype`."""
    out = v.new_empty(v.shape, dtype=dtype)
    strides = PositionStrides.of(q, v, weights.write, weights.own)
    launch(
        _group_read_kernel, _group_reads_plan(plan, plan.tuning.read[HEAD], v.shape, q.shape, strides), q=q, v=v,
        scores=factors.scores, log_decay=factors.log_decay, q_in=factors.q_in, **weights._asdict(), states=states,
        out=out, table=plan.table,
    )  # fmt: skip
    return out


def gla_group_values(
    plan: Plan,
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    factors: ChunkFactors,
    states: Tensor,
    dstates: Tensor,
    dv: Tensor,
    dg_dtype: torch.dtype | None,
    of_heads: StateParts,
    weights: Weights = NO_WEIGHTS,
) -> tuple[Tensor | None, Weights]:
    """dg [B, T, H], None where it has no dtype, and float32 gradients of the weights; dv is written.

    dv: [B, T, H, V], heads side by side, and sequences one behind the other.
    """
    batch, length, heads, value_dim = v.shape
    tile = plan.tuning.lone if plan.is_lone(q.shape, v.shape) else plan.tuning.group_values
    num_v = cdiv(value_dim, plan.width(tile.block_v, value_dim))
    at_chunks = batch, plan.num_chunks(length), heads, num_v
    dwrite, down, dskip = (
        None if x is None else v.new_empty(at_chunks if x.dim() == 1 else (*v.shape[:3], num_v), dtype=torch.float32)
        for x in weights
    )
    dg = None if dg_dtype is None else v.new_empty((*v.shape[:3], num_v), dtype=torch.float32)
    strides = PositionStrides.of(q, k, v, do, weights.write, weights.own)
    launch(
        _group_values_kernel, _group_reads_plan(plan, tile, v.shape, k.shape, strides, dv.stride(1)), q=q, k=k, v=v,
        do=do, scores=factors.scores, same=factors.same, log_decay=factors.log_decay, q_in=factors.q_in,
        **weights._asdict(), states=states, dstates=dstates, dv=dv, dg=dg, dwrite=dwrite, down=down, dskip=dskip,
        **of_heads._asdict(), table=plan.table,
    )  # fmt: skip
    dg, dwrite, down = (None if x is None else x.squeeze(-1) if num_v == 1 else x.sum(-1) for x in (dg, dwrite, down))
    dweights = Weights(dwrite, down, None if dskip is None else dskip.sum((0, 1, 3)))
    return None if dg is None else dg.to(dg_dtype), dweights
