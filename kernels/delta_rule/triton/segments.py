"""Segments of time, which are walked at the same time where few programs would walk over a long sequence.

A first walk starts every segment but the last from zeros, which gives E_s, what the segment adds to the state at its
end, and every segment but the first and the last from the columns of the identity, which gives T_s, the matrix with
which it multiplies the state at its start. The first segment starts from the given state. Then

    state at the end of segment s = E_s + T_s (state at its start)

follows for one segment after the other (`_starts_kernel`), and a second walk starts all segments from these states. For
the gradients of the states the segments count from the end of time, and the matrices are the transposes of the same
T_s, so that the walk back finds no matrices of its own.

With a decay of a head, what a segment keeps of the state at its start often vanishes. `_factors_kernel` bounds the
norm of the matrix of every chunk, a product of a_t (I - b_t k_t k_t^T), by exp(`reach`), the product of
a_t max(1, |1 - b_t |k_t|^2|). Where the bounds of a segment multiply to at most exp(VANISHED), half a unit in the last
place of float32, T_s is taken as zero, no program walks over the columns of its identity, and E_s is found from as many
of the last chunks (of the first ones for gradients) as this takes. Where b, k or the decay is NaN or b or k infinite,
the bound is not finite, and nothing of the segment is left out. A state that is NaN or infinite does not vanish either:
it makes the states at the ends of later segments NaN. Only a value of v (or a gradient of o) that is NaN in a chunk
that is left out ends with its segment: no kernel reads it before the second walk, whose outputs show it.
"""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.delta_rule.triton.plan import Plan, ends_tile, walk_tile
from subquad.kernels.device import is_hopper
from subquad.kernels.gated_linear_attention.triton.plan import CHANNEL, HEAD, planned
from subquad.kernels.gated_linear_attention.triton.tiles import as_operand
from subquad.kernels.launch import LaunchPlan, cdiv, launch

ALL, ENDS, REST = 0, 1, 2
"""A launch of a walk covers all of time (ALL), all segments but the last to find E_s and T_s (ENDS), or all segments
from the states at their starts (REST)."""
_ENDS, _REST = tl.constexpr(ENDS), tl.constexpr(REST)
VANISHED = tl.constexpr(-25 * math.log(2))
"""A factor of at most exp(VANISHED) leaves less of a state than float32 rounds."""
SCANNED = tl.constexpr(64)
"""Number of chunks whose bounds are added side by side."""


@triton.jit
def near_chunks(reach, begin, stop, BACK: tl.constexpr):
    """The number of chunks in [begin, stop) that reach its end (BACK: its start), and whether others are left out.

    reach: the bounds of a head's chunks. One that is NaN compares as false, so that all chunks are near.
    """
    num_near, total, o_i = stop - begin, 0.0, tl.arange(0, SCANNED)
    for i in range(0, stop - begin, SCANNED):
        o_chunk = begin + i + o_i if BACK else stop - 1 - i - o_i
        b_reach = tl.load(reach + o_chunk, mask=i + o_i < stop - begin, other=0.0)
        b_sum = total + tl.cumsum(b_reach, 0)
        num_near = tl.minimum(num_near, tl.min(tl.where(b_sum <= VANISHED, i + o_i + 1, stop - begin), 0))
        total += tl.sum(b_reach, 0)
    vanishes = total <= VANISHED
    return tl.where(vanishes, num_near, stop - begin), vanishes


@triton.jit
def first_state(
    first,
    ends,
    i_v,
    i_bh,
    i_segment,
    num_bh,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PART: tl.constexpr,
):
    """The transposed state [BV, BK] from which a program starts to walk.

    first: a state [B, H, K, V] or None, that of the first segment. The other segments start from zeros for ENDS, and
    for REST from the state at the end of the segment before, which is in `ends`.
    """
    o_k, o_v = tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    b_state = tl.zeros([BV, BK], tl.float32)
    m_state = (o_v < V)[:, None] & (o_k < K)[None, :]
    if first is not None:
        m_first = m_state & (o_v * 0 + i_segment == 0)[:, None]
        p_first = first + i_bh * K * V + o_k[None, :] * V + o_v[:, None]
        b_state += tl.load(p_first, mask=m_first, other=0.0).to(tl.float32)
    if PART == _REST:
        m_end = m_state & (o_v * 0 + i_segment > 0)[:, None]
        p_end = ends + ((i_segment - 1) * num_bh + i_bh) * K * V + o_v[:, None] * K + o_k[None, :]
        b_state += tl.load(p_end, mask=m_end, other=0.0)
    return b_state


@triton.jit
def store_last_state(
    b_state,
    ends,
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
):
    """Writes the transposed state [BV, BK] behind the last chunk of a program to `ends` or `last`."""
    o_k, o_v = tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    m_state = (o_v < V)[:, None] & (o_k < K)[None, :]
    if PART == _ENDS:
        p_end = ends + (i_segment * num_bh + i_bh) * K * V + o_v[:, None] * K + o_k[None, :]
        tl.store(p_end, b_state, mask=m_state)
    elif last is not None:
        # only the last segment writes the final state
        m_last = m_state & (o_v * 0 + i_segment + 1 == tl.num_programs(1))[:, None]
        p_last = last + i_bh * K * V + o_k[None, :] * V + o_v[:, None]
        tl.store(p_last, b_state.to(last.dtype.element_ty), mask=m_last)


@triton.jit
def _starts_kernel(
    ends,
    transitions,
    vanished,
    num_ends,
    num_v,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
    BACK: tl.constexpr,
):
    """Replaces what every segment adds to the state at its end by that state, for one head and BV values.

    ends: [segments - 1, B, H, V, K], at least two; transitions: [segments - 1, B, H, K, K], rounded to PRECISION, of
    which the first is not read.
    vanished: [segments - 1, B, H], 1 where a matrix is taken as zero, or None.
    BACK: segments count from the end of time, but in transitions, which are the transposes.
    """
    i_v, i_bh = tl.program_id(0) % num_v, (tl.program_id(0) // num_v).to(tl.int64)
    num_bh = (tl.num_programs(0) // num_v).to(tl.int64)
    o_k, o_v = tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    m_state, m_pair = (o_k < K)[:, None] & (o_v < V)[None, :], (o_k < K)[:, None] & (o_k < K)[None, :]
    o_state = i_bh * K * V + o_v[None, :] * K + o_k[:, None]
    b_state = tl.load(ends + o_state, mask=m_state, other=0.0)
    ends += o_state
    # a program loads what the next segment adds one step early, so that no product waits for it
    b_end = tl.load(ends + num_bh * K * V, mask=m_state, other=0.0)
    for i in range(1, num_ends):
        i_matrix = num_ends - i if BACK else i
        p_matrix = transitions + (i_matrix * num_bh + i_bh) * K * K
        m_next = m_state & (o_k * 0 + i + 1 < num_ends)[:, None]
        b_next = tl.load(ends + (i + 1) * num_bh * K * V, mask=m_next, other=0.0)
        is_zero = tl.load(vanished + i_matrix * num_bh + i_bh) if vanished is not None else 0
        if is_zero == 0:
            # element [k, j] takes the state of key j to key k
            b_matrix = tl.load(p_matrix + (o_k[:, None] * K + o_k[None, :]), mask=m_pair, other=0.0)
            b_right = as_operand(b_state, tl.float32, PRECISION)
            b_state = tl.dot(b_matrix, b_right, b_end, input_precision=PRECISION)
        else:
            # infinity and NaN do not vanish: zero times either is NaN
            b_state = b_end + 0.0 * b_state
        tl.store(ends + i * num_bh * K * V, b_state, mask=m_state)
        b_end = b_next


class Segments(NamedTuple):
    """Segments of time that are walked at the same time."""

    count: int
    num_walked: int
    """Number of chunks in a segment; the last one may have fewer."""

    @property
    def parts(self) -> tuple[int, ...]:
        """A walk consists of these launches, one after the other."""
        return (ALL,) if self.count == 1 else (ENDS, REST)


FADED = 512
"""Number of positions within which the state of a head is expected to vanish; it only decides how time is cut."""
ENDS_COST = 0.75
"""A chunk takes this share of the matrix products in the walk to the ends of segments, compared with the other walk."""


@functools.cache
def best_segments(
    num_heads: int,
    num_chunks: int,
    most: int,
    blocks: int,
    walks: int,
    ends: tuple[int, int],
    side_by_side: int,
    near: int | None = None,
) -> Segments:
    """Chooses the number of segments with which the two walks take the fewest chunks one after the other.

    The product that gives the state at the end of a segment counts as a chunk.

    num_heads: of all sequences.   most: maximum number of segments.   blocks: of values for each head.
    walks:     number of programs of a walk that run at the same time.
    ends:      blocks of values and of columns of the identity for each head in the walk to the ends of segments.
    side_by_side: number of programs of that walk that run at the same time.
    near:      the most chunks that one of them walks over; None for those of a segment.
    """

    def cost(count: int) -> float:
        num_walked = cdiv(num_chunks, count)
        whole = cdiv(num_heads * blocks * count, walks)
        if count == 1:
            return num_walked * whole
        values, columns = ends
        num_ends = num_heads * (values * (count - 1) + columns * (count - 2))
        num_near = num_walked if near is None else min(near, num_walked)
        return num_walked * whole + ENDS_COST * num_near * cdiv(num_ends, side_by_side) + count

    count = min(range(1, max(1, most) + 1), key=cost)
    num_walked = cdiv(num_chunks, count)
    return Segments(cdiv(num_chunks, num_walked), num_walked)


@planned
def cut_time(plan: Plan, shape: tuple[int, ...], value_dim: int, kind: int) -> Segments:
    """Returns the segments of the walks over [B, T, H, K], which is `shape`, with values of `value_dim` channels.

    There is one segment for packed sequences, where a program has no room for a matrix of so many keys, and where two
    segments would not run at the same time.

    kind: that of the decay. With a decay of a head, states are expected to vanish within FADED positions.
    """
    batch, length, heads, key_dim = shape
    tuning, num_chunks = plan.tuning, plan.num_chunks(length)
    choose: dict[str, Any] = {"by_rows": kind != CHANNEL, "num_heads": batch * heads}
    blocks = cdiv(value_dim, walk_tile(plan, key_dim, value_dim, **choose).block_v)
    if plan.table is not None or key_dim > 128 or 2 * batch * heads * blocks > tuning.few_programs:
        return Segments(1, num_chunks)
    tile, side_by_side = ends_tile(plan, key_dim, value_dim, **choose)
    ends, near = (cdiv(value_dim, tile.block_v), cdiv(key_dim, tile.block_v)), None
    if kind == HEAD:
        ends, near = (ends[0], 0), cdiv(FADED, plan.chunk)
    most = num_chunks // tuning.min_segment
    return best_segments(batch * heads, num_chunks, most, blocks, tuning.few_programs, ends, side_by_side, near)


def new_ends(segments: Segments, x: Tensor, shape: tuple[int, ...], value_dim: int) -> Tensor | None:
    """Allocates the states at the ends of all segments but the last, beside x; None for one segment.

    shape: B, T, H, K.
    """
    batch, _, heads, key_dim = shape
    if segments.count == 1:
        return None
    return x.new_empty((segments.count - 1, batch, heads, value_dim, key_dim), dtype=torch.float32)


def new_transitions(segments: Segments, x: Tensor, shape: tuple[int, ...]) -> Tensor | None:
    """Allocates the matrices of all segments but the last, for B, T, H, K in `shape`, in float32 beside x.

    The matrix of the first segment is never written. None where no segment needs a matrix.
    """
    batch, _, heads, key_dim = shape
    if segments.count <= 2:
        return None
    return x.new_empty((segments.count - 1, batch, heads, key_dim, key_dim), dtype=torch.float32)


@planned
def _starts_plan(plan: Plan, shape: tuple[int, ...], back: bool) -> LaunchPlan:
    num_ends, batch, heads, value_dim, key_dim = shape
    block_k, block_v = plan.width(128, key_dim), plan.width(64, value_dim)
    num_v = cdiv(value_dim, block_v)
    return LaunchPlan(
        batch * heads * num_v,
        num_ends=num_ends,
        num_v=num_v,
        K=key_dim,
        V=value_dim,
        BK=block_k,
        BV=block_v,
        PRECISION=plan.precision,
        BACK=back,
        # a matrix of 128 keys takes 64 kB, of which Hopper has room for two
        num_warps=8,
        num_stages=2 if is_hopper() else 1,
    )


def segment_starts(
    plan: Plan,
    ends: Tensor | None,
    transitions: Tensor | None,
    vanished: Tensor | None,
    *,
    back: bool,
) -> None:
    """Adds to `ends` what segments keep of the states at their starts; see `_starts_kernel`.

    back: `ends` are gradients, and segments count from the end of time.
    """
    if ends is None or transitions is None:
        return
    plan_of_starts = _starts_plan(plan, ends.shape, back)
    launch(_starts_kernel, plan_of_starts, ends=ends, transitions=transitions, vanished=vanished)
