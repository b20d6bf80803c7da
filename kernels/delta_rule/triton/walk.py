"""`_walk_kernel`: what is written at every position, the outputs and the states, in one walk over the chunks."""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.delta_rule.triton import hopper
from subquad.kernels.delta_rule.triton.plan import ChunkFactors, Plan, back_tile, ends_tile, is_whole, walk_tile
from subquad.kernels.delta_rule.triton.segments import (
    ENDS,
    Segments,
    cut_time,
    first_state,
    near_chunks,
    new_ends,
    new_transitions,
    segment_starts,
    store_last_state,
)
from subquad.kernels.delta_rule.triton.tiles import load_row, load_rows, solve, store_rows, store_state, two_term_dot
from subquad.kernels.gated_linear_attention.triton.plan import EndStates, PositionStrides, group_size, planned
from subquad.kernels.gated_linear_attention.triton.tiles import as_operand, chunk_span
from subquad.kernels.launch import LaunchPlan, cdiv, launch

_ENDS = tl.constexpr(ENDS)


@triton.jit
def _walk_kernel(
    q, k, v, inverse, inverse_low, scores, decay, row_in, row_out, k_out, reach, plain_scores, plain_system, plain_out,
    o, delta, states, ends, transitions, transposes, vanished, first, last, table, bounds,
    T, num_t, scale, num_walked, num_v,
    q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_t, k_stride_h, v_stride_b, v_stride_t, v_stride_h,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    GROUP: tl.constexpr, PART: tl.constexpr, PRECISION: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """One chunk after the other, with M the state [K, BV] of all keys before the chunk:

        delta = (I + L)^-1 (v - k_in M),    o = q_in M + A delta,    M <- decay M + k_out^T delta

    For a decay of a channel q, k are q_in, k_in. Otherwise q, k are the inputs, and rows of the products are scaled:
    q_in M = scale row_in (q M), k_in M = row_in (k M), k_out^T delta = k^T (row_out delta).

    With plain_scores, plain_system and plain_out, v is added under keys of its own, and delta is what is written
    besides it: v - k_in M becomes -plain_system v - k_in M, plain_scores v is added to o, and plain_out^T v to M.

    delta [B, T, H, V] and the states before every chunk [B, H, chunks, V, K] are written where they are given.
    For ENDS, where `reach` is given, the walk begins at the first chunk that the end of the segment still notices (see
    segments.py), and vanished [segments - 1, B, H] says where this is not the first one of the segment.
    Everything is transposed: as left operands delta^T and M^T [BV, BK] never leave the registers.
    num_v is the number of blocks of V; for ENDS there are blocks of the identity behind them, whose v is zero, if a
    segment needs its matrix. The first one does not, because it starts from the given state.
    WHOLE: no chunk and no tile of keys or values reaches beyond its end, so that nothing is masked.
    GROUP heads share q and k.
    """
    i_v, i_bh = tl.program_id(0) % num_v, (tl.program_id(0) // num_v).to(tl.int64)
    i_b, i_h = i_bh // H, i_bh % H
    i_segment, num_bh = tl.program_id(1), (tl.num_programs(0) // num_v).to(tl.int64)
    if PART == _ENDS:  # noqa: SIM102 (Triton decides this condition when it compiles, and the inner one at run time)
        if (i_segment == 0) & (i_v * BV >= V):
            return
    o_k, o_v, o_c = tl.arange(0, BK), i_v * BV + tl.arange(0, BV), tl.arange(0, C)
    if table is None:
        i_first, num_own, o_chunks = 0, num_t, i_bh * num_t
    else:
        i_first = tl.load(bounds + i_b)
        num_own, o_chunks = tl.load(bounds + i_b + 1) - i_first, i_h * num_t
    b_state = first_state(first, ends, i_v, i_bh, i_segment, num_bh, K, V, BK, BV, PART)
    begin, stop = i_segment * num_walked, tl.minimum((i_segment + 1) * num_walked, num_own)
    if PART == _ENDS:
        if reach is not None:
            num_near, vanishes = near_chunks(reach + i_bh * num_t, begin, stop, False)
            if i_v == 0:
                tl.store(vanished + i_segment * num_bh + i_bh, vanishes.to(tl.int32))
            if vanishes & (i_v * BV >= V):
                return
            # NaN where the state is infinite or NaN, which does not vanish
            b_state = tl.where(vanishes, 0.0 * b_state, b_state)
            begin = stop - num_near
        # the blocks behind those of V start from columns of the identity
        b_state += (o_v[:, None] - tl.cdiv(V, BV) * BV == o_k[None, :]).to(tl.float32)
    if table is not None:
        i_b *= 0
    q += i_b * q_stride_b + i_h // GROUP * q_stride_h
    k += i_b * k_stride_b + i_h // GROUP * k_stride_h
    v += i_b * v_stride_b + i_h * v_stride_h
    o_head = i_b * T * H + i_h
    inverse += o_head * C
    if inverse_low is not None:
        inverse_low += o_head * C
    scores += o_head * C
    dtype = inverse.dtype.element_ty
    BY_ROWS: tl.constexpr = k_out is None
    o_row = (i_b * H + i_h) * T
    for i in range(begin, stop):
        i_t = i_first + i
        start, end = chunk_span(table, i_t, T, C)
        # loaded first, so that nothing waits for it; decays of channels would take registers until they are used
        if BY_ROWS and decay is not None:
            b_decay = tl.load(decay + o_chunks + i_t)
        b_k = load_rows(k, k_stride_t, start, o_c, o_k, end, K, WHOLE).to(dtype)
        b_v = tl.trans(load_rows(v, v_stride_t, start, o_c, o_v, end, V, WHOLE and PART != _ENDS))
        b_inverse = tl.trans(load_rows(inverse, H * C, start, o_c, o_c, end, C, WHOLE))
        b_inverse_low = None
        if inverse_low is not None:
            b_inverse_low = tl.trans(load_rows(inverse_low, H * C, start, o_c, o_c, end, C, WHOLE))
        b_left = as_operand(b_state, dtype, PRECISION)
        # early, except where decays of channels leave no registers for them
        if PART != _ENDS and BY_ROWS:
            b_scores = tl.trans(load_rows(scores, H * C, start, o_c, o_c, end, C, WHOLE))
            b_q = load_rows(q, q_stride_t, start, o_c, o_k, end, K, WHOLE).to(dtype)
        b_held = tl.dot(b_left, tl.trans(b_k), input_precision=PRECISION)
        if row_in is not None:
            b_in = load_row(row_in + o_row, start, o_c, end, WHOLE)
            b_held *= b_in[None, :]
        if plain_system is not None:
            b_v = as_operand(b_v, dtype, PRECISION)
            b_plain = tl.trans(load_rows(plain_system + o_head * C, H * C, start, o_c, o_c, end, C, WHOLE))
            b_rest = -tl.dot(b_v, b_plain, b_held, input_precision=PRECISION)
        else:
            b_rest = b_v.to(tl.float32) - b_held
        b_delta = solve(b_rest, b_inverse, b_inverse_low, PRECISION, BY_ROWS)
        if PART != _ENDS:
            if not BY_ROWS:
                b_q = load_rows(q, q_stride_t, start, o_c, o_k, end, K, WHOLE).to(dtype)
                b_scores = tl.trans(load_rows(scores, H * C, start, o_c, o_c, end, C, WHOLE))
            b_new = as_operand(b_delta, dtype, PRECISION)
            b_o = tl.dot(b_left, tl.trans(b_q), input_precision=PRECISION)
            if row_in is not None:
                b_o *= (b_in * scale)[None, :]
            elif row_out is not None:
                b_o *= scale
            b_o = tl.dot(b_new, b_scores, b_o, input_precision=PRECISION)
            if plain_scores is not None:
                b_plain = tl.trans(load_rows(plain_scores + o_head * C, H * C, start, o_c, o_c, end, C, WHOLE))
                b_o = tl.dot(b_v, b_plain, b_o, input_precision=PRECISION)
            store_rows(o + o_head * V, H * V, start, o_c, o_v, end, V, tl.trans(b_o), WHOLE)
            if delta is not None:
                store_rows(delta + o_head * V, H * V, start, o_c, o_v, end, V, tl.trans(b_new), WHOLE)
            if states is not None:
                store_state(states + (o_chunks + i_t) * (K * V), o_v, o_k, b_left, V, K, WHOLE)
        if BY_ROWS:
            if decay is not None:
                b_state *= b_decay
            b_delta *= load_row(row_out + o_row, start, o_c, end, WHOLE)[None, :]
        else:
            b_state *= tl.load(decay + (o_chunks + i_t) * K + o_k, mask=o_k < K, other=0.0)[None, :]
            b_k = load_rows(k_out + o_head * K, H * K, start, o_c, o_k, end, K, WHOLE)
        b_state = two_term_dot(b_delta, b_k, b_state, PRECISION, BY_ROWS)
        if plain_out is not None:
            b_plain = load_rows(plain_out + o_head * K, H * K, start, o_c, o_k, end, K, WHOLE)
            b_state = tl.dot(b_v, b_plain, b_state, input_precision=PRECISION)
    store_last_state(b_state, ends, last, i_v, i_bh, i_segment, num_bh, K, V, BK, BV, PART)
    if PART == _ENDS and transitions is not None:
        o_column = o_v - tl.cdiv(V, BV) * BV
        m_matrix = ((o_column >= 0) & (o_column < K))[:, None] & (o_k < K)[None, :]
        o_matrix = (i_segment * num_bh + i_bh) * K * K
        b_matrix = as_operand(b_state, tl.float32, PRECISION)
        tl.store(transitions + o_matrix + o_k[None, :] * K + o_column[:, None], b_matrix, mask=m_matrix)
        # for the walk back, which would load a transpose one number at a time
        if transposes is not None:
            tl.store(transposes + o_matrix + o_column[:, None] * K + o_k[None, :], b_matrix, mask=m_matrix)


@planned
def walk_plan(
    plan: Plan,
    shape: tuple[int, ...],
    groups: int,
    value_dim: int,
    strides: PositionStrides,
    segments: Segments,
    part: int,
    by_rows: bool,
    plain: bool,
    back: bool,
) -> LaunchPlan:
    """The plan of one part of `_walk_kernel` or, with `back`, of `_back_kernel`.

    by_rows: no decay is that of a channel.   plain: values have keys of their own.
    """
    batch, length, heads, key_dim = shape
    choose: dict[str, Any] = {"by_rows": by_rows, "plain": plain, "num_heads": plan.num_sequences(batch) * heads}
    if back:
        tile = back_tile(plan, key_dim, value_dim, **choose)
    elif part == ENDS:
        tile = ends_tile(plan, key_dim, value_dim, **choose).tile
    else:
        tile = walk_tile(plan, key_dim, value_dim, **choose)
    num_v = cdiv(value_dim, tile.block_v)
    if part == ENDS and segments.count > 2 and not back:
        num_v += cdiv(key_dim, tile.block_v)
    sizes = (key_dim, tile.block_k), (value_dim, tile.block_v)
    return LaunchPlan(
        (plan.num_sequences(batch) * heads * num_v, segments.count - (part == ENDS)),
        T=length,
        num_t=plan.num_chunks(length),
        scale=plan.scale,
        num_walked=segments.num_walked,
        num_v=num_v,
        **strides.arguments("q k do" if back else "q k v"),
        GROUP=group_size(heads, groups),
        PART=part,
        WHOLE=by_rows and is_whole(plan, length, *sizes, strides=strides),
        **plan.constants(tile, heads, key_dim, value_dim),
    )


def delta_walk(
    plan: Plan,
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    factors: ChunkFactors,
    boundary: EndStates,
    keep: bool,
    pairs: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """o [B, T, H, V] in the dtype of v, and for a walk back, which `keep` asks for, delta, the states before all chunks
    and the transposes of the matrices of the segments, [segments - 1, B, H, K, K] in float32, and which of these are
    zero and not written; see `_walk_kernel`.

    pairs: the states are those before every second chunk; `hopper.takes` is true of the call.
    """
    (batch, length, heads, value_dim), key_dim = v.shape, k.shape[-1]
    shape = batch, length, heads, key_dim
    num_chunks = plan.num_chunks(length)
    o = v.new_empty((batch, length, heads, value_dim))
    delta = states = None
    if keep:
        delta = v.new_empty((batch, length, heads, value_dim), dtype=plan.work)
        num_kept = num_chunks // 2 if pairs else num_chunks
        states = v.new_empty((batch, heads, num_kept, value_dim, key_dim), dtype=plan.work)
    if factors.q_in is not None and factors.k_in is not None:
        q, k = factors.q_in, factors.k_in
    by_rows, plain = factors.k_out is None, factors.plain_out is not None
    segments = cut_time(plan, shape, value_dim, factors.kind)
    ends, transitions = new_ends(segments, k, shape, value_dim), new_transitions(segments, k, shape)
    transposes = new_transitions(segments, k, shape) if keep else None
    vanished = None
    if factors.reach is not None:
        vanished = k.new_empty((segments.count - 1, batch, heads), dtype=torch.int32)
    first, last = boundary
    strides = PositionStrides.of(q, k, v)
    by_hopper = pairs or (not keep and hopper.takes_walk(plan, q, k, v, factors))
    for part in segments.parts:
        writes = part != ENDS
        if writes and by_hopper:
            hopper.hopper_walk(
                plan, q=q, k=k, v=v, factors=factors, o=o, delta=delta, states=states, ends=ends, boundary=boundary,
                segments=segments,
            )  # fmt: skip
            continue
        launch(
            _walk_kernel, walk_plan(plan, shape, k.shape[2], value_dim, strides, segments, part, by_rows, plain, False),
            q=q, k=k, v=v, inverse=factors.inverse, inverse_low=factors.inverse_low, scores=factors.scores,
            decay=factors.decay, row_in=factors.row_in, row_out=factors.row_out, k_out=factors.k_out,
            reach=None if writes else factors.reach, plain_scores=factors.plain_scores if writes else None,
            plain_system=factors.plain_system, plain_out=factors.plain_out, o=o if writes else None,
            delta=delta if writes else None, states=states if writes else None, ends=ends, transitions=transitions,
            transposes=transposes, vanished=None if writes else vanished, first=first, last=last if writes else None,
            table=plan.table, bounds=plan.bounds,
        )  # fmt: skip
        if part == ENDS:
            segment_starts(plan, ends, transitions, vanished, back=False)
    return o, delta, states, transposes, vanished
