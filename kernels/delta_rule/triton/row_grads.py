"""`_row_grads_kernel`: gradients of q, k, beta and the log-decays of a head, where no decay is that of a channel."""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.delta_rule.triton.plan import ChunkFactors, Plan, is_whole
from subquad.kernels.delta_rule.triton.tiles import load_row, load_rows, load_state, store_rows
from subquad.kernels.gated_linear_attention.triton.decays import (
    HEAD_DECAY,
    decay_matrix,
    exponential,
    load_head_decays,
)
from subquad.kernels.gated_linear_attention.triton.plan import HEAD, PositionStrides, decay_kind, group_size, planned
from subquad.kernels.gated_linear_attention.triton.tiles import as_operand, chunk_span
from subquad.kernels.launch import LaunchPlan, cdiv, launch


@triton.jit
def load_column(p, stride_t, start, o_c, end, WHOLE: tl.constexpr):
    """Loads one number for each position start + o_c, from p, which points at the first; zero from `end` on."""
    if WHOLE:
        b_x = tl.load(p + o_c * stride_t)
    else:
        b_x = tl.load(p + o_c.to(tl.int64) * stride_t, mask=start + o_c < end, other=0.0)
    return b_x


@triton.jit
def store_column(p, stride_t, start, o_c, end, b_x, WHOLE: tl.constexpr):
    """Writes b_x to what `load_column` reads."""
    if WHOLE:
        tl.store(p + o_c * stride_t, b_x)
    else:
        tl.store(p + o_c.to(tl.int64) * stride_t, b_x, mask=start + o_c < end)


@triton.jit
def _row_grads_kernel(
    q, k, beta, g, prefix, suffix, decay, delta, do, dv, states, dstates, dq, dk, dbeta, dg, table,
    T, num_t, end_v, scale,
    q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_t, k_stride_h, beta_stride_b, beta_stride_t, beta_stride_h,
    g_stride_b, g_stride_t, g_stride_h, do_stride_b, do_stride_t, do_stride_h,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    GROUP: tl.constexpr, DECAY: tl.constexpr, PRECISION: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """dq, dk [C, BK] of one chunk and head, [B, T, H, K], and dbeta and dg, which are sums over channels,
    [B, T, H, K / BK]. The equations are those of `_grads_kernel`, without `write` and `plain`; the pair of a position
    with itself is one of the others here.

    GROUP heads share q and k.
    """
    num_k = tl.cdiv(K, BK)
    i_k, i_c = tl.program_id(0) % num_k, (tl.program_id(0) // num_k).to(tl.int64)
    i_t, i_bh = i_c % num_t, i_c // num_t
    i_b, i_h = i_bh // H, i_bh % H
    dtype = states.dtype.element_ty
    o_c, o_k = tl.arange(0, C), i_k * BK + tl.arange(0, BK)
    o_head = i_b * T * H + i_h
    start, end = chunk_span(table, i_t, T, C)
    m_past = o_c[:, None] > o_c[None, :]
    q += i_b * q_stride_b + i_h // GROUP * q_stride_h
    k += i_b * k_stride_b + i_h // GROUP * k_stride_h
    do += i_b * do_stride_b + i_h * do_stride_h
    dbeta += (o_head + start.to(tl.int64) * H) * num_k + i_k
    if dg is not None:
        dg += (o_head + start.to(tl.int64) * H) * num_k + i_k
    # these tiles are loaded before the first loop, which does not need them, so that nothing waits for them afterwards
    b_q = load_rows(q, q_stride_t, start, o_c, o_k, end, K, WHOLE).to(dtype)
    b_k = load_rows(k, k_stride_t, start, o_c, o_k, end, K, WHOLE).to(dtype)
    beta += i_b * beta_stride_b + i_h * beta_stride_h + start.to(tl.int64) * beta_stride_t
    b_beta = load_column(beta, beta_stride_t, start, o_c, end, WHOLE).to(tl.float32)
    if DECAY == HEAD_DECAY:
        # a position behind the end has the sum of the last one, so that no exponent is positive
        b_prefix = tl.load(prefix + i_bh * T + start + (o_c if WHOLE else tl.minimum(o_c, end - 1 - start)))
        b_suffix = load_row(suffix + i_bh * T, start, o_c, end, WHOLE)
        # in float32 the matrix of decays is that of sums of their own, not of differences of `prefix`
        b_g = b_prefix
        if PRECISION != "tf32":
            o_t = start + o_c
            b_g = load_head_decays(g + i_b * g_stride_b + i_h * g_stride_h, g_stride_t, o_t, o_t < end)
    # the ends of the loops are an argument, so that they remain where they have one iteration (see LOG.md of
    # gated_linear_attention)
    b_da, b_dl = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    for i_v in range(0, end_v, BV):
        o_v = i_v + tl.arange(0, BV)
        b_delta = tl.trans(load_rows(delta + o_head * V, H * V, start, o_c, o_v, end, V, WHOLE))
        b_do = load_rows(do, do_stride_t, start, o_c, o_v, end, V, WHOLE).to(dtype)
        b_dv = load_rows(dv + o_head * V, H * V, start, o_c, o_v, end, V, WHOLE)
        b_da = tl.dot(b_do, b_delta, b_da, input_precision=PRECISION)
        b_dl = tl.dot(b_dv, b_delta, b_dl, input_precision=PRECISION)
    b_da *= scale
    if DECAY == HEAD_DECAY:
        b_decays = decay_matrix(b_g, b_prefix, o_c, PRECISION)
        b_da *= b_decays
        b_dl *= tl.where(m_past, -b_decays, 0.0)
    else:
        b_da = tl.where(o_c[:, None] >= o_c[None, :], b_da, 0.0)
        b_dl = tl.where(m_past, -b_dl, 0.0)
    # each pair of a query or key with a written key, without the beta of the latter: sums of them give dbeta and dg
    # more accurately than the rounded factors of dw
    b_pairs = b_da * tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
    b_pairs += b_dl * tl.dot(b_k, tl.trans(b_k), input_precision=PRECISION)
    b_dbeta = tl.sum(b_pairs, 0)
    if DECAY == HEAD_DECAY and dg is not None:
        b_pairs *= b_beta[None, :]
        if PRECISION == "tf32":
            b_net = tl.sum(b_pairs, 1) - b_beta * b_dbeta
        else:
            # in float32 rounding errors of what cancels would be visible after a sum over time, so only the pairs with
            # i >= l and j < l are summed
            b_net = tl.zeros([C], tl.float32)
            b_pairs = tl.dot(b_pairs, tl.trans(m_past.to(tl.float32)), input_precision=PRECISION)
            b_dg_inside = tl.sum(tl.where(o_c[:, None] >= o_c[None, :], b_pairs, 0.0), 0)
    b_da, b_dl = as_operand(b_da, dtype, PRECISION), as_operand(b_dl, dtype, PRECISION)

    b_dq, b_dr = tl.zeros([C, BK], tl.float32), tl.zeros([C, BK], tl.float32)
    b_dw = tl.zeros([C, BK], tl.float32)
    # sums of rows stay within a warp
    b_through = tl.zeros([BV], tl.float32)
    for i_v in range(0, end_v, BV):
        o_v = i_v + tl.arange(0, BV)
        b_delta = load_rows(delta + o_head * V, H * V, start, o_c, o_v, end, V, WHOLE)
        b_do = load_rows(do, do_stride_t, start, o_c, o_v, end, V, WHOLE).to(dtype)
        b_dv = load_rows(dv + o_head * V, H * V, start, o_c, o_v, end, V, WHOLE)
        b_state = load_state(states + i_c * K * V, o_v, o_k, V, K, WHOLE)
        b_dstate = load_state(dstates + i_c * K * V, o_v, o_k, V, K, WHOLE)
        b_dq = tl.dot(b_do, b_state, b_dq, input_precision=PRECISION)
        b_dr = tl.dot(b_dv, b_state, b_dr, input_precision=PRECISION)
        b_dw = tl.dot(b_delta, b_dstate, b_dw, input_precision=PRECISION)
        if DECAY == HEAD_DECAY and dg is not None:
            b_through += tl.sum(b_state.to(tl.float32) * b_dstate.to(tl.float32), 1)
    if DECAY == HEAD_DECAY:
        b_in = exponential(b_prefix, PRECISION)
        b_dq *= (b_in * scale)[:, None]
        b_dr *= -b_in[:, None]
        b_dw *= exponential(b_suffix, PRECISION)[:, None]
    else:
        b_dq *= scale
        b_dr = -b_dr
    b_k32 = b_k.to(tl.float32)
    b_written_dw = tl.sum(b_k32 * b_dw, 1)
    if DECAY == HEAD_DECAY and dg is not None:
        b_net += tl.sum(b_q.to(tl.float32) * b_dq + b_k32 * b_dr, 1)
        b_leaving = b_beta * b_written_dw
        b_dg = tl.sum(tl.where(m_past, b_leaving[None, :], b_net[None, :]), 1)
        if PRECISION != "tf32":
            b_dg += b_dg_inside
        b_dg += tl.sum(b_through, 0) * tl.load(decay + i_c)
        store_column(dg, H * num_k, start, o_c, end, b_dg, WHOLE)
    b_written = as_operand(b_k32 * b_beta[:, None], dtype, PRECISION)
    b_dq = tl.dot(b_da, b_written, b_dq, input_precision=PRECISION)
    b_dr = tl.dot(b_dl, b_written, b_dr, input_precision=PRECISION)
    b_dw = tl.dot(tl.trans(b_da), b_q, b_dw, input_precision=PRECISION)
    # a sum of its own: a chain of products would take other layouts
    b_dw += tl.dot(tl.trans(b_dl), b_k, input_precision=PRECISION)
    store_column(dbeta, H * num_k, start, o_c, end, b_dbeta + b_written_dw, WHOLE)
    store_rows(dq + o_head * K, H * K, start, o_c, o_k, end, K, b_dq, WHOLE)
    store_rows(dk + o_head * K, H * K, start, o_c, o_k, end, K, b_dr + b_beta[:, None] * b_dw, WHOLE)


def _block_k(plan: Plan, kind: int, key_dim: int) -> int:
    return plan.width(plan.tuning.grads[kind].block_k, key_dim)


@planned
def _row_grads_plan(
    plan: Plan, kind: int, shape: tuple[int, ...], groups: int, value_dim: int, strides: PositionStrides
) -> LaunchPlan:
    batch, length, heads, key_dim = shape
    tile, num_chunks = plan.tuning.grads[kind], plan.num_chunks(length)
    block_k, block_v = _block_k(plan, kind, key_dim), plan.width(tile.block_v, value_dim)
    sizes = (key_dim, block_k), (value_dim, block_v)
    return LaunchPlan(
        batch * heads * num_chunks * cdiv(key_dim, block_k),
        T=length,
        num_t=num_chunks,
        end_v=cdiv(value_dim, block_v) * block_v,
        scale=plan.scale,
        **strides.arguments("q k beta g do"),
        GROUP=group_size(heads, groups),
        DECAY=kind,
        WHOLE=is_whole(plan, length, *sizes, strides=strides),
        **plan.constants(tile, heads, key_dim, value_dim),
    )


def row_grads(
    plan: Plan,
    *,
    q: Tensor,
    k: Tensor,
    beta: Tensor,
    g: Tensor | None,
    delta: Tensor,
    do: Tensor,
    dv: Tensor,
    states: Tensor,
    dstates: Tensor,
    factors: ChunkFactors,
    needs_dg: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, beta and, where it is needed, of g; see `_row_grads_kernel`.

    Those of q and k have the heads of v, and those of beta and g, in float32, a last axis of blocks of K. Their sums
    over heads that share q and k and over blocks are the gradients.
    """
    (batch, length, heads, value_dim), (*_, groups, key_dim), kind = do.shape, k.shape, decay_kind(g)
    num_k = cdiv(key_dim, _block_k(plan, kind, key_dim))
    # the gradients of heads that share q and k are float32 until they are added
    dq, dk = (
        x.new_empty((batch, length, heads, key_dim), dtype=x.dtype if groups == heads else torch.float32)
        for x in (q, k)
    )
    dbeta = k.new_empty((batch, length, heads, num_k), dtype=torch.float32)
    dg = torch.empty_like(dbeta) if kind == HEAD and needs_dg else None
    strides = PositionStrides.of(q, k, beta, g, do)
    launch(
        _row_grads_kernel, _row_grads_plan(plan, kind, (batch, length, heads, key_dim), groups, value_dim, strides),
        q=q, k=k, beta=beta, g=g, prefix=factors.prefix, suffix=factors.suffix, decay=factors.decay, delta=delta, do=do,
        dv=dv, states=states, dstates=dstates, dq=dq, dk=dk, dbeta=dbeta, dg=dg, table=plan.table,
    )  # fmt: skip
    return dq, dk, dbeta, dg
