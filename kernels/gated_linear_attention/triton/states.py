"""`_states_kernel`: the state before every chunk, or in reverse its gradient after every chunk.

Where few programs would walk over a long sequence, time is cut into segments that are walked at the same time: first
from zeros, to find what each segment adds to the state at its end, then from what all segments before it add up to.
"""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.gated_linear_attention.triton.plan import (
    EndStates,
    Plan,
    PositionStrides,
    Strides,
    group_size,
    planned,
    strides_of,
)
from subquad.kernels.gated_linear_attention.triton.tiles import as_operand, chunk_span, load_tile, load_transposed
from subquad.kernels.launch import LaunchPlan, cdiv, launch

WHOLE, ENDS, REST = 0, 1, 2
"""Parts that a launch walks over: all of time, all segments but the last from zeros, or all from their states."""
_ENDS, _REST = tl.constexpr(ENDS), tl.constexpr(REST)


@triton.jit
def _states_kernel(
    x, y, rows, decay, states, ends, end_decays, first, last, table, bounds,
    T, num_t, scale, num_walked,
    x_stride_b, x_stride_t, x_stride_h, y_stride_b, y_stride_t, y_stride_h, end_stride_k, end_stride_v,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    GROUP: tl.constexpr, PART: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """states [B, H, chunks, K, V], each from before its chunk: S <- decay S + x^T y with x = k_out and y = v.

    Without decay x is k. With REVERSE the states are gradients of those after their chunks and the last chunk comes
    first; then x = q_in (without decay q) and y = do.

    Where GROUP heads share x = k (with REVERSE q), y is multiplied with `rows` [B, H, T], the factors that take k to
    k_out (q to q_in), and `decay` is [B, H, chunks].

    PART says what a program walks over. WHOLE: all chunks. ENDS: a segment of `num_walked` chunks from zeros, of which
    it writes the last state to `ends` [segments, B, H, K, V] and the decay over the segment to `end_decays`.
    REST: a segment from the state that all segments before it add up to.
    """
    num_k, num_v = tl.cdiv(K, BK), tl.cdiv(V, BV)
    i_kv, i_bh = tl.program_id(0) % (num_k * num_v), (tl.program_id(0) // (num_k * num_v)).to(tl.int64)
    i_b, i_h = i_bh // H, i_bh % H
    i_segment, num_bh = tl.program_id(1), (tl.num_programs(0) // (num_k * num_v)).to(tl.int64)
    o_k = i_kv // num_v * BK + tl.arange(0, BK)
    o_v = i_kv % num_v * BV + tl.arange(0, BV)
    o_c = tl.arange(0, C)
    m_state = (o_k < K)[:, None] & (o_v < V)[None, :]
    if table is None:
        i_first, num_own, o_chunks = 0, num_t, i_bh * num_t
        x += i_b * x_stride_b
        y += i_b * y_stride_b
        if rows is not None:
            rows += i_b * H * T
    else:
        i_first = tl.load(bounds + i_b)
        num_own, o_chunks = tl.load(bounds + i_b + 1) - i_first, i_h * num_t
    x += i_h // GROUP * x_stride_h
    y += i_h * y_stride_h
    o_end = i_bh * K * V + o_k[:, None] * end_stride_k + o_v[None, :] * end_stride_v
    o_dense = o_k[:, None] * V + o_v[None, :]
    dtype = x.dtype.element_ty if states is None else states.dtype.element_ty
    b_state = tl.zeros([BK, BV], tl.float32)
    b_walked = tl.full([BK], 1.0, tl.float32)
    if first is not None and PART != _ENDS:
        b_state += tl.load(first + o_end, mask=m_state, other=0.0).to(tl.float32)
    if PART == _REST:
        for i in range(i_segment):
            if decay is not None:
                b_state *= tl.load(end_decays + (i * num_bh + i_bh) * K + o_k, mask=o_k < K, other=0.0)[:, None]
            b_state += tl.load(ends + (i * num_bh + i_bh) * K * V + o_dense, mask=m_state, other=0.0)
    for i in range(i_segment * num_walked, tl.minimum((i_segment + 1) * num_walked, num_own)):
        i_t = i_first + (num_own - 1 - i if REVERSE else i)
        start, end = chunk_span(table, i_t, T, C)
        o_t = start + o_c
        if PART != _ENDS:
            p_state = states + (o_chunks + i_t) * (K * V) + o_dense
            tl.store(p_state, as_operand(b_state, dtype, PRECISION), mask=m_state)
        b_x = load_transposed(x, x_stride_t, o_t, o_k, end, K).to(dtype)
        b_y = load_tile(y, y_stride_t, o_t, o_v, end, V).to(dtype)
        if rows is not None:
            b_rows = tl.load(rows + i_h * T + o_t, mask=o_t < end, other=0.0)
            b_y = as_operand(b_y.to(tl.float32) * b_rows[:, None], dtype, PRECISION)
        if decay is not None:
            if rows is None:
                b_decay = tl.load(decay + (o_chunks + i_t) * K + o_k, mask=o_k < K, other=0.0)
            else:
                b_decay = tl.zeros([BK], tl.float32) + tl.load(decay + o_chunks + i_t)
            b_state *= b_decay[:, None]
            b_walked *= b_decay
        b_new = tl.dot(b_x, b_y, input_precision=PRECISION)
        if REVERSE and decay is None:
            b_new *= scale
        b_state += b_new
    if PART == _ENDS:
        tl.store(ends + (i_segment * num_bh + i_bh) * K * V + o_dense, b_state, mask=m_state)
        if decay is not None:
            # programs of other blocks of values write the same values
            tl.store(end_decays + (i_segment * num_bh + i_bh) * K + o_k, b_walked, mask=o_k < K)
    elif last is not None:
        # only the last segment writes the final state
        o_walked = (i_segment + 1) * num_walked + o_v * 0
        tl.store(last + o_end, b_state.to(last.dtype.element_ty), mask=m_state & (o_walked >= num_t)[None, :])


class Segments(NamedTuple):
    """Segments of time, and memory for the states at the ends of all segments but the last."""

    count: int
    num_walked: int
    """Number of chunks in a segment."""
    ends: Tensor | None
    """[segments - 1, B, H, K, V], float32; None where there is one segment."""
    decays: Tensor | None
    """Decay over each segment, [segments - 1, B, H, K], float32; None without decay."""


def cut_time(
    plan: Plan, x: Tensor, y: Tensor, decay: Tensor | None, *, num_programs: int, few: int, enough: int
) -> Segments:
    """Segments for a walk over x [B, T, G, K] and y [B, T, H, V].

    Without segments it would have `num_programs` programs; where these are fewer than `few`, segments make them up to
    `enough`. Packed sequences are never cut.
    """
    (batch, length, heads, _), key_dim = y.shape, x.shape[-1]
    num_chunks, min_segment = plan.num_chunks(length), plan.tuning.min_segment
    if num_programs >= few or plan.table is not None or num_chunks < 2 * min_segment:
        return Segments(1, num_chunks, None, None)
    num_walked = cdiv(num_chunks, min(num_chunks // min_segment, cdiv(enough, num_programs)))
    count = cdiv(num_chunks, num_walked)
    if count == 1:
        return Segments(1, num_chunks, None, None)
    ends = x.new_empty((count - 1, batch, heads, key_dim, y.shape[-1]), dtype=torch.float32)
    decays = None
    if decay is not None:
        decays = x.new_empty((count - 1, batch, heads, key_dim), dtype=torch.float32)
    return Segments(count, num_walked, ends, decays)


@planned
def _states_plan(
    plan: Plan,
    kind: int,
    part: int,
    shape: tuple[int, ...],
    key_shape: tuple[int, ...],
    strides: PositionStrides,
    state: Strides | None,
    count: int,
    num_walked: int,
    reverse: bool,
) -> LaunchPlan:
    """The plan of one part of `count` segments. state: the strides of the states at both ends of the walk."""
    (batch, length, heads, value_dim), (*_, groups, key_dim) = shape, key_shape
    tile = plan.tuning.states[kind]
    block_k, block_v = plan.width(tile.block_k, key_dim), plan.width(tile.block_v, value_dim)
    end_stride_k, end_stride_v = (0, 0) if state is None else state[2:]
    programs = plan.num_sequences(batch) * heads * cdiv(key_dim, block_k) * cdiv(value_dim, block_v)
    return LaunchPlan(
        (programs, count - (part == ENDS)),
        T=length,
        num_t=plan.num_chunks(length),
        scale=plan.scale,
        num_walked=num_walked,
        **strides.arguments("x y"),
        end_stride_k=end_stride_k,
        end_stride_v=end_stride_v,
        GROUP=group_size(heads, groups),
        PART=part,
        REVERSE=reverse,
        **plan.constants(tile, heads, key_dim, value_dim),
    )


def launch_states(
    plan: Plan,
    kind: int,
    part: int,
    *,
    x: Tensor,
    y: Tensor,
    decay: Tensor | None,
    states: Tensor | None,
    segments: Segments,
    boundary: EndStates,
    reverse: bool,
    rows: Tensor | None = None,
) -> None:
    """Launches one part of `_states_kernel`, which writes `states` or, for ENDS, `segments.ends` and `.decays`."""
    first, last = boundary
    given = last if first is None else first
    strides, cut = (PositionStrides.of(x, y), strides_of(given)), (segments.count, segments.num_walked)
    launch(
        _states_kernel, _states_plan(plan, kind, part, y.shape, x.shape, *strides, *cut, reverse), x=x, y=y, rows=rows,
        decay=decay, states=states, ends=segments.ends, end_decays=segments.decays, first=first, last=last,
        table=plan.table, bounds=plan.bounds,
    )  # fmt: skip


def gla_states(
    plan: Plan,
    kind: int,
    *,
    x: Tensor,
    y: Tensor,
    decay: Tensor | None,
    boundary: EndStates,
    reverse: bool,
    rows: Tensor | None = None,
) -> Tensor:
    """States [B, H, chunks, K, V] in `plan.work`, see `_states_kernel`; kind is the kind of decay."""
    (batch, length, heads, value_dim), key_dim, tuning = y.shape, x.shape[-1], plan.tuning
    tile = tuning.states[kind]
    states = x.new_empty((batch, heads, plan.num_chunks(length), key_dim, value_dim), dtype=plan.work)
    num_programs = batch * heads * cdiv(key_dim, tile.block_k) * cdiv(value_dim, tile.block_v)
    segments = cut_time(
        plan, x, y, decay, num_programs=num_programs, few=tuning.few_programs, enough=tuning.enough_programs
    )
    for part in (WHOLE,) if segments.ends is None else (ENDS, REST):
        launch_states(
            plan,
            kind,
            part,
            x=x,
            y=y,
            decay=decay,
            states=states,
            segments=segments,
            boundary=boundary,
            reverse=reverse,
            rows=rows,
        )
    return states
