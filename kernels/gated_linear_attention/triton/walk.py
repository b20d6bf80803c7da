"""`_walk_kernel`: states and outputs in one walk over time, for calls without gradients; states are never written."""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.gated_linear_attention.triton.plan import EndStates, Plan, PositionStrides, Tile, planned
from subquad.kernels.gated_linear_attention.triton.states import ENDS, cut_time, launch_states
from subquad.kernels.gated_linear_attention.triton.tiles import chunk_span, load_tile, store_tile
from subquad.kernels.launch import LaunchPlan, cdiv, launch, power_of_2


@triton.jit
def _walk_kernel(
    x, y, v, scores, decay, o, ends, end_decays, first, last, table, bounds,
    T, num_t, scale, num_walked,
    x_stride_b, x_stride_t, x_stride_h, y_stride_b, y_stride_t, y_stride_h, v_stride_b, v_stride_t, v_stride_h,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """o [C, BV] of one chunk after the other, from a state of all K channels.

    It is `_states_kernel` and `_read_kernel` in one.

    x = q_in and y = k_out; without decay (and then without scores) q and k. A segment starts from the state that all
    segments before it add up to, see `_states_kernel`.
    The state is transposed: as the left operand of o^T = S^T q_in^T + v^T A^T it never leaves the registers.
    The outputs of a chunk are stored when the next chunk begins, so that tiles are loaded while the state is updated.
    """
    num_v = tl.cdiv(V, BV)
    i_v, i_bh = tl.program_id(0) % num_v, (tl.program_id(0) // num_v).to(tl.int64)
    i_b, i_h = i_bh // H, i_bh % H
    i_segment, num_bh = tl.program_id(1), (tl.num_programs(0) // num_v).to(tl.int64)
    o_k, o_v, o_c = tl.arange(0, BK), i_v * BV + tl.arange(0, BV), tl.arange(0, C)
    if table is None:
        i_first, num_own, o_chunks = 0, num_t, i_bh * num_t
    else:
        i_first = tl.load(bounds + i_b)
        num_own, o_chunks = tl.load(bounds + i_b + 1) - i_first, i_h * num_t
        i_b *= 0
    x += i_b * x_stride_b + i_h * x_stride_h
    y += i_b * y_stride_b + i_h * y_stride_h
    v += i_b * v_stride_b + i_h * v_stride_h
    o += (i_b * T * H + i_h) * V
    dtype = x.dtype.element_ty
    m_k, m_state = o_k < K, (o_v < V)[:, None] & (o_k < K)[None, :]
    o_state = i_bh * K * V + o_k[None, :] * V + o_v[:, None]
    b_state = tl.zeros([BV, BK], tl.float32)
    if first is not None:
        b_state += tl.load(first + o_state, mask=m_state, other=0.0).to(tl.float32)
    if ends is not None:
        for i in range(i_segment):
            if decay is not None:
                b_state *= tl.load(end_decays + (i * num_bh + i_bh) * K + o_k, mask=m_k, other=0.0)[None, :]
            b_state += tl.load(ends + i * num_bh * K * V + o_state, mask=m_state, other=0.0)
    i_begin = i_first + i_segment * num_walked
    i_last = i_first + tl.minimum((i_segment + 1) * num_walked, num_own) - 1
    b_o = tl.zeros([BV, C], o.dtype.element_ty)
    if decay is not None:
        b_decay = tl.load(decay + (o_chunks + i_begin) * K + o_k, mask=m_k, other=0.0)
    for i_t in range(i_begin, i_last + 1):
        before_start, before_end = chunk_span(table, tl.maximum(i_t - 1, i_begin), T, C)
        store_tile(o, H * V, before_start + o_c, o_v, tl.where(i_t > i_begin, before_end, 0), V, tl.trans(b_o))
        start, end = chunk_span(table, i_t, T, C)
        o_t = start + o_c
        b_x = tl.trans(load_tile(x, x_stride_t, o_t, o_k, end, K))
        b_y = load_tile(y, y_stride_t, o_t, o_k, end, K)
        b_v = tl.trans(load_tile(v, v_stride_t, o_t, o_v, end, V))
        if decay is not None:
            b_scores = tl.trans(load_tile(scores + (i_b * T * H + i_h) * C, H * C, o_t, o_c, end, C))
            b_sum = tl.dot(b_v, b_scores, input_precision=PRECISION)
            b_sum = tl.dot(b_state.to(dtype), b_x, b_sum, input_precision=PRECISION)
            b_state *= b_decay[None, :]
            b_decay = tl.load(decay + (o_chunks + tl.minimum(i_t + 1, i_last)) * K + o_k, mask=m_k, other=0.0)
        else:
            b_scores = tl.dot(b_y, b_x, input_precision=PRECISION)
            b_scores = tl.where(o_c[:, None] <= o_c[None, :], b_scores, 0.0).to(dtype)
            b_sum = tl.dot(b_state.to(dtype), b_x, input_precision=PRECISION)
            b_sum = tl.dot(b_v, b_scores, b_sum, input_precision=PRECISION) * scale
        b_state = tl.dot(b_v, b_y, b_state, input_precision=PRECISION)
        b_o = b_sum.to(o.dtype.element_ty)
    before_start, before_end = chunk_span(table, i_last, T, C)
    store_tile(o, H * V, before_start + o_c, o_v, before_end, V, tl.trans(b_o))
    if last is not None:
        # only the last segment writes the final state
        o_walked = (i_segment + 1) * num_walked + o_v * 0
        tl.store(last + o_state, b_state, mask=m_state & (o_walked >= num_t)[:, None])


def _walk_tile(plan: Plan, key_dim: int) -> Tile:
    walk = plan.tuning.walk
    return walk[max(min(walk), power_of_2(key_dim))]


@planned
def _walk_plan(
    plan: Plan, shape: tuple[int, ...], value_dim: int, strides: PositionStrides, count: int, num_walked: int
) -> LaunchPlan:
    """The plan for `count` segments of time."""
    batch, length, heads, key_dim = shape
    tile = _walk_tile(plan, key_dim)
    return LaunchPlan(
        (plan.num_sequences(batch) * heads * cdiv(value_dim, plan.width(tile.block_v, value_dim)), count),
        T=length,
        num_t=plan.num_chunks(length),
        scale=plan.scale,
        num_walked=num_walked,
        **strides.arguments("x y v"),
        **plan.constants(tile, heads, key_dim, value_dim),
    )


def gla_walk(
    plan: Plan,
    kind: int,
    *,
    x: Tensor,
    y: Tensor,
    v: Tensor,
    decay: Tensor | None,
    scores: Tensor | None,
    boundary: EndStates,
    dtype: torch.dtype,
) -> Tensor:
    """o [B, T, H, V] in `dtype`, see `_walk_kernel`; kind is the kind of decay."""
    (*_, heads, key_dim), value_dim = x.shape, v.shape[-1]
    o = v.new_empty((*x.shape[:3], value_dim), dtype=dtype)
    tile = _walk_tile(plan, key_dim)
    num_programs = plan.num_sequences(x.shape[0]) * heads * cdiv(value_dim, plan.width(tile.block_v, value_dim))
    enough = plan.tuning.walk_warps // tile.options.num_warps
    segments = cut_time(plan, x, v, decay, num_programs=num_programs, few=enough // 2, enough=enough)
    if segments.ends is not None:
        launch_states(
            plan,
            kind,
            ENDS,
            x=y,
            y=v,
            decay=decay,
            states=None,
            segments=segments,
            boundary=EndStates(None, None),
            reverse=False,
        )
    first, last = boundary
    launch(
        _walk_kernel,
        _walk_plan(plan, x.shape, value_dim, PositionStrides.of(x, y, v), segments.count, segments.num_walked), x=x,
        y=y, v=v, scores=scores, decay=decay, o=o, ends=segments.ends, end_decays=segments.decays, first=first,
        last=last, table=plan.table, bounds=plan.bounds,
    )  # fmt: skip
    return o
