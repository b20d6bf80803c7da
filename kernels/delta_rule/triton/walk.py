"""`_walk_kernel`: what is written at every position, the outputs and the states, in one walk over the chunks.

Where few programs would walk over a long sequence, time is cut into segments that are walked at the same time: first
from zeros, to find what each segment adds to the state at its end, and from the columns of the identity, to find the
matrix with which it multiplies the state at its start; then from the states that follow from these. The gradient of
the state at the start of a segment is the transpose of that matrix times the gradient at its end, plus what the segment
adds. So the walk back over the same segments needs no matrices of its own.
"""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.delta_rule.triton.plan import ChunkFactors, Plan, ends_tile, is_whole, walk_tile
from kernels.delta_rule.triton.tiles import load_row, load_rows, solve, store_rows, store_state, two_term_dot
from kernels.gated_linear_attention.triton.plan import EndStates, position_strides
from kernels.gated_linear_attention.triton.tiles import as_operand, chunk_span
from kernels.launch import KeptLaunch, cdiv

ALL, ENDS, REST = 0, 1, 2
"""Parts that a launch walks over: all of time, all segments but the last from zeros and from the identity, or all
segments from their states."""
_ENDS, _REST = tl.constexpr(ENDS), tl.constexpr(REST)


@triton.jit
def first_state(
    first,
    ends,
    transitions,
    i_v,
    i_bh,
    i_segment,
    num_bh,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PART: tl.constexpr,
    PRECISION: tl.constexpr,
    BACK: tl.constexpr,
):
    """The transposed state [BV, BK] from which a program starts to walk.

    first: a state [B, H, K, V] or None, that of the first segment. For ENDS the other segments start from zeros, and
    the blocks behind those of V from columns of the identity. For REST the state at the end of the first segment is
    its `ends`; at the end of another one, its `ends` plus its `transitions` times the state at its start.
    BACK: segments count from the end of time, and matrices are transposed.
    """
    o_k, o_v = tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    b_state = tl.zeros([BV, BK], tl.float32)
    m_state = (o_v < V)[:, None] & (o_k < K)[None, :]
    if PART == _ENDS and not BACK:
        o_column = o_v - tl.cdiv(V, BV) * BV
        b_state += (o_column[:, None] == o_k[None, :]).to(tl.float32)
    if first is not None:
        o_state = i_bh * K * V + o_k[None, :] * V + o_v[:, None]
        b_state += tl.load(first + o_state, mask=m_state & (o_v * 0 + i_segment == 0)[:, None], other=0.0).to(
            tl.float32
        )
    if PART == _REST:
        m_pair = (o_k < K)[:, None] & (o_k < K)[None, :]
        for i in tl.range(i_segment, num_stages=1):
            i_end = i * num_bh + i_bh
            b_end = tl.load(ends + i_end * K * V + o_v[:, None] * K + o_k[None, :], mask=m_state, other=0.0)
            if transitions is not None:
                if BACK:
                    i_end = (tl.num_programs(1) - 1 - i) * num_bh + i_bh
                p_matrix = transitions + i_end * K * K + o_k[:, None] * K + o_k[None, :]
                # the first segment has no matrix: what it does to the state at its start is part of its end
                b_matrix = tl.load(p_matrix, mask=m_pair & (o_k * 0 + i > 0)[:, None], other=0.0)
                b_matrix = as_operand(b_matrix, tl.float32, PRECISION)
                if not BACK:
                    b_matrix = tl.trans(b_matrix)
                b_left = as_operand(b_state, tl.float32, PRECISION)
                b_end = tl.dot(b_left, b_matrix, b_end, input_precision=PRECISION)
            b_state = b_end
    return b_state


@triton.jit
def store_last_state(
    b_state,
    ends,
    transitions,
    last,
    i_v,
    i_bh,
    i_segment,
    num_bh,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PART: tl.constexpr,
    BACK: tl.constexpr,
):
    """Writes the transposed state [BV, BK] behind the last chunk of a program to where `first_state` reads it."""
    o_k, o_v = tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    m_k = (o_k < K)[None, :]
    if PART == _ENDS:
        i_end, o_column = i_segment * num_bh + i_bh, o_v - tl.cdiv(V, BV) * BV
        p_end = ends + i_end * K * V + o_v[:, None] * K + o_k[None, :]
        tl.store(p_end, b_state, mask=(o_v < V)[:, None] & m_k)
        if not BACK and transitions is not None:
            p_matrix = transitions + i_end * K * K + o_k[None, :] * K + o_column[:, None]
            tl.store(p_matrix, b_state, mask=((o_column >= 0) & (o_column < K))[:, None] & m_k)
    elif last is not None:
        # only the last segment writes the final state
        p_last = last + i_bh * K * V + o_k[None, :] * V + o_v[:, None]
        m_state = ((o_v < V) & (o_v * 0 + i_segment + 1 == tl.num_programs(1)))[:, None] & m_k
        tl.store(p_last, b_state.to(last.dtype.element_ty), mask=m_state)


@triton.jit
def _walk_kernel(
    q,
    k,
    v,
    inverse,
    inverse_low,
    scores,
    decay,
    row_in,
    row_out,
    k_out,
    o,
    delta,
    states,
    ends,
    transitions,
    first,
    last,
    table,
    bounds,
    T,
    num_t,
    scale,
    num_walked,
    num_v,
    q_stride_b,
    q_stride_t,
    q_stride_h,
    k_stride_b,
    k_stride_t,
    k_stride_h,
    v_stride_b,
    v_stride_t,
    v_stride_h,
    row_stride_b,
    row_stride_t,
    row_stride_h,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PART: tl.constexpr,
    PRECISION: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """One chunk after the other, with M the state [K, BV] of all keys before the chunk:

        delta = (I + L)^-1 (v - k_in M),    o = q_in M + A delta,    M <- decay M + k_out^T delta

    For a decay of a channel q, k are q_in, k_in. Otherwise q, k are the inputs, and rows of the products are scaled:
    q_in M = scale row_in (q M), k_in M = row_in (k M), k_out^T delta = k^T (row_out delta).

    delta [B, T, H, V] and the states before every chunk [B, H, chunks, V, K] are written where they are given.
    Everything is transposed: as left operands delta^T and M^T [BV, BK] never leave the registers.
    num_v is the number of blocks of V; for ENDS there are blocks of the identity behind them, whose v is zero, if a
    segment needs its matrix. The first one does not, because it starts from the given state.
    WHOLE: no chunk and no tile of keys or values reaches beyond its end, so that nothing is masked.
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
    b_state = first_state(first, ends, transitions, i_v, i_bh, i_segment, num_bh, K, V, BK, BV, PART, PRECISION, False)
    if table is not None:
        i_b *= 0
    q += i_b * q_stride_b + i_h * q_stride_h
    k += i_b * k_stride_b + i_h * k_stride_h
    v += i_b * v_stride_b + i_h * v_stride_h
    o_head = i_b * T * H + i_h
    inverse += o_head * C
    if inverse_low is not None:
        inverse_low += o_head * C
    scores += o_head * C
    dtype = inverse.dtype.element_ty
    BY_ROWS: tl.constexpr = k_out is None
    if BY_ROWS:
        row_out += i_b * row_stride_b + i_h * row_stride_h
    for i in range(i_segment * num_walked, tl.minimum((i_segment + 1) * num_walked, num_own)):
        i_t = i_first + i
        start, end = chunk_span(table, i_t, T, C)
        o_t = start + o_c
        m_t, o_rows = o_t < end, o_t.to(tl.int64)
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
            b_in = load_row(row_in + o_head, H, o_rows, m_t, WHOLE)
            b_held *= b_in[None, :]
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
            store_rows(o + o_head * V, H * V, start, o_c, o_v, end, V, tl.trans(b_o), WHOLE)
            if delta is not None:
                store_rows(delta + o_head * V, H * V, start, o_c, o_v, end, V, tl.trans(b_new), WHOLE)
            if states is not None:
                store_state(states + (o_chunks + i_t) * (K * V), o_v, o_k, b_left, V, K, WHOLE)
        if BY_ROWS:
            if decay is not None:
                b_state *= b_decay
            b_row = load_row(row_out, row_stride_t, o_rows, m_t, WHOLE)
            b_delta *= b_row.to(tl.float32)[None, :]
        else:
            b_state *= tl.load(decay + (o_chunks + i_t) * K + o_k, mask=o_k < K, other=0.0)[None, :]
            b_k = load_rows(k_out + o_head * K, H * K, start, o_c, o_k, end, K, WHOLE)
        b_state = two_term_dot(b_delta, b_k, b_state, PRECISION, BY_ROWS)
    store_last_state(b_state, ends, transitions, last, i_v, i_bh, i_segment, num_bh, K, V, BK, BV, PART, False)


class Segments(NamedTuple):
    """Segments of time that are walked at the same time."""

    count: int
    num_walked: int
    """Number of chunks in a segment; the last one may have fewer."""

    @property
    def parts(self) -> tuple[int, ...]:
        """The launches of a walk."""
        return (ALL,) if self.count == 1 else (ENDS, REST)


ENDS_COST = 0.75
"""Products of a chunk in the walk to the ends of segments, relative to those of the other walk."""


@functools.cache
def best_segments(
    num_heads: int, num_chunks: int, most: int, blocks: int, walks: int, ends: tuple[int, int], side_by_side: int
) -> Segments:
    """The number of segments with which the two walks take the fewest chunks one after the other.

    In the second walk a segment begins with one product for each segment before it, each of which counts as a chunk.

    num_heads: of all sequences.   most: maximum number of segments.   blocks: of values for each head.
    walks:     number of programs of a walk that run at the same time.
    ends:      blocks of values and of columns of the identity for each head in the walk to the ends of segments.
    side_by_side: number of programs of that walk that run at the same time.
    """

    def cost(count: int) -> float:
        num_walked = cdiv(num_chunks, count)
        whole = cdiv(num_heads * blocks * count, walks)
        if count == 1:
            return num_walked * whole
        values, columns = ends
        num_ends = num_heads * (values * (count - 1) + columns * (count - 2))
        return whole * (num_walked + count) + ENDS_COST * num_walked * cdiv(num_ends, side_by_side)

    count = min(range(1, max(1, most) + 1), key=cost)
    num_walked = cdiv(num_chunks, count)
    return Segments(cdiv(num_chunks, num_walked), num_walked)


def cut_time(plan: Plan, x: Tensor, value_dim: int, *, by_rows: bool) -> Segments:
    """Segments for the walks over x [B, T, H, K] with values of `value_dim` channels.

    Packed sequences are never cut, and neither are walks with so many keys that a program has no room for a matrix.
    by_rows: no decay is that of a channel.
    """
    batch, length, heads, key_dim = x.shape
    tuning, num_chunks = plan.tuning, plan.num_chunks(length)
    blocks = cdiv(value_dim, walk_tile(plan, key_dim, value_dim).block_v)
    if plan.table is not None or key_dim > 128 or 2 * batch * heads * blocks > tuning.few_programs:
        return Segments(1, num_chunks)
    tile, side_by_side = ends_tile(plan, key_dim, value_dim, by_rows=by_rows)
    ends = cdiv(value_dim, tile.block_v), cdiv(key_dim, tile.block_v)
    most = num_chunks // tuning.min_segment
    return best_segments(batch * heads, num_chunks, most, blocks, tuning.few_programs, ends, side_by_side)


def delta_walk(
    plan: Plan,
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    factors: ChunkFactors,
    boundary: EndStates,
    keep: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """o [B, T, H, V] in the dtype of v, and for a walk back, which `keep` asks for, delta, the states before all chunks
    and the matrices of the segments, [segments - 1, B, H, K, K] in float32; see `_walk_kernel`.
    """
    batch, length, heads, key_dim = k.shape
    value_dim = v.shape[-1]
    num_chunks = plan.num_chunks(length)
    o = v.new_empty((batch, length, heads, value_dim))
    delta = states = None
    if keep:
        delta = v.new_empty((batch, length, heads, value_dim), dtype=plan.work)
        states = v.new_empty((batch, heads, num_chunks, value_dim, key_dim), dtype=plan.work)
    if factors.q_in is not None and factors.k_in is not None:
        q, k = factors.q_in, factors.k_in
    by_rows = factors.k_out is None
    segments = cut_time(plan, k, value_dim, by_rows=by_rows)
    ends = transitions = None
    if segments.count > 1:
        ends = k.new_empty((segments.count - 1, batch, heads, value_dim, key_dim), dtype=torch.float32)
    if segments.count > 2:
        # the first segment needs none, so its place stays empty
        transitions = k.new_empty((segments.count - 1, batch, heads, key_dim, key_dim), dtype=torch.float32)
    first, last = boundary
    row = factors.row_out

    for part in segments.parts:
        writes = part != ENDS

        def make(part: int = part) -> KeptLaunch:
            if part == ENDS:
                block_k, block_v, options = ends_tile(plan, key_dim, value_dim, by_rows=by_rows).tile
            else:
                block_k, block_v, options = walk_tile(plan, key_dim, value_dim)
            num_v = cdiv(value_dim, block_v)
            if part == ENDS and segments.count > 2:
                num_v += cdiv(key_dim, block_v)
            return KeptLaunch(
                _walk_kernel,
                (plan.num_sequences(k) * heads * num_v, segments.count - (part == ENDS)),
                T=length,
                num_t=num_chunks,
                scale=plan.scale,
                num_walked=segments.num_walked,
                num_v=num_v,
                **position_strides(q=q, k=k, v=v, row=row),
                H=heads,
                K=key_dim,
                V=value_dim,
                C=plan.chunk,
                BK=block_k,
                BV=block_v,
                PART=part,
                PRECISION=plan.precision,
                WHOLE=by_rows and is_whole(plan, length, (key_dim, block_k), (value_dim, block_v)),
                **options.keywords(),
            )

        key = "walk", part, keep, segments.count, segments.num_walked, first is None, last is None
        plan.launches.get(key, make)(
            q,
            k,
            v,
            factors.inverse,
            factors.inverse_low,
            factors.scores,
            factors.decay,
            factors.row_in,
            factors.row_out,
            factors.k_out,
            o if writes else None,
            delta if writes else None,
            states if writes else None,
            ends,
            transitions,
            first,
            last if writes else None,
            plan.table,
            plan.bounds,
        )
    return o, delta, states, transitions if keep else None
