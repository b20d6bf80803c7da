"""States before every chunk."""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gated_linear_attention.triton.plan import (
    FEW_STATES,
    SHORTEST,
    STATES,
    Ends,
    Plan,
    block_size,
    launch_options,
    strides,
)
from kernels.gated_linear_attention.triton.tiles import as_operand, chunk_span, load_tile, load_transposed
from kernels.launch import cdiv

WHOLE, ENDS, REST = 0, 1, 2
ENDS_ONLY, FROM_ENDS = tl.constexpr(ENDS), tl.constexpr(REST)


@triton.jit
def _states_kernel(
    x,
    y,
    decay,
    states,
    ends,
    end_decays,
    first,
    last,
    table,
    bounds,
    T,
    num_t,
    scale,
    num_walked,
    x_stride_b,
    x_stride_t,
    x_stride_h,
    y_stride_b,
    y_stride_t,
    y_stride_h,
    end_stride_k,
    end_stride_v,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PART: tl.constexpr,
    REVERSE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """states [B, H, T / C, K, V], each from before its chunk: S <- decay S + x^T y, x = k_out and y = v.

    REVERSE: gradients of the states after their chunks, last chunk first; x = q_in (without decay q) and y = do.
    PART WHOLE: a program walks all chunks. ENDS: a segment of `num_walked` from zeros, writing no states but what it
    ends with to `ends` [segments, B, H, K, V] and its decay to `end_decays`. REST: from what those before it add up to.
    """
    num_k, num_v = tl.cdiv(K, BK), tl.cdiv(V, BV)
    i_kv, i_bh = tl.program_id(0) % (num_k * num_v), (tl.program_id(0) // (num_k * num_v)).to(tl.int64)
    i_b, i_h = i_bh // H, i_bh % H
    i_s, num_bh = tl.program_id(1), (tl.num_programs(0) // (num_k * num_v)).to(tl.int64)
    o_k = i_kv // num_v * BK + tl.arange(0, BK)
    o_v = i_kv % num_v * BV + tl.arange(0, BV)
    o_c = tl.arange(0, C)
    m_s = (o_k < K)[:, None] & (o_v < V)[None, :]
    if table is None:
        i_first, num_own, o_chunks = 0, num_t, i_bh * num_t
        x += i_b * x_stride_b
        y += i_b * y_stride_b
    else:
        i_first = tl.load(bounds + i_b)
        num_own, o_chunks = tl.load(bounds + i_b + 1) - i_first, i_h * num_t
    x += i_h * x_stride_h
    y += i_h * y_stride_h
    o_end = i_bh * K * V + o_k[:, None] * end_stride_k + o_v[None, :] * end_stride_v
    o_dense = o_k[:, None] * V + o_v[None, :]
    dtype = x.dtype.element_ty if states is None else states.dtype.element_ty
    b_s = tl.zeros([BK, BV], tl.float32)
    b_walked = tl.full([BK], 1.0, tl.float32)
    if first is not None and PART != ENDS_ONLY:
        b_s += tl.load(first + o_end, mask=m_s, other=0.0).to(tl.float32)
    if PART == FROM_ENDS:
        for i in range(i_s):
            if decay is not None:
                b_s *= tl.load(end_decays + (i * num_bh + i_bh) * K + o_k, mask=o_k < K, other=0.0)[:, None]
            b_s += tl.load(ends + (i * num_bh + i_bh) * K * V + o_dense, mask=m_s, other=0.0)
    for i in range(i_s * num_walked, tl.minimum((i_s + 1) * num_walked, num_own)):
        i_t = i_first + (num_own - 1 - i if REVERSE else i)
        start, end = chunk_span(table, i_t, T, C)
        o_t = start + o_c
        if PART != ENDS_ONLY:
            p_s = states + (o_chunks + i_t) * (K * V) + o_dense
            tl.store(p_s, as_operand(b_s, dtype, PRECISION), mask=m_s)
        b_x = load_transposed(x, x_stride_t, o_t, o_k, end, K).to(dtype)
        b_y = load_tile(y, y_stride_t, o_t, o_v, end, V).to(dtype)
        if decay is not None:
            b_decay = tl.load(decay + (o_chunks + i_t) * K + o_k, mask=o_k < K, other=0.0)
            b_s *= b_decay[:, None]
            b_walked *= b_decay
        b_new = tl.dot(b_x, b_y, input_precision=PRECISION)
        if REVERSE and decay is None:
            b_new *= scale
        b_s += b_new
    if PART == ENDS_ONLY:
        tl.store(ends + (i_s * num_bh + i_bh) * K * V + o_dense, b_s, mask=m_s)
        if decay is not None:
            # the same of all blocks of values
            tl.store(end_decays + (i_s * num_bh + i_bh) * K + o_k, b_walked, mask=o_k < K)
    elif last is not None:
        # of several segments, the last
        o_walked = (i_s + 1) * num_walked + o_v * 0
        tl.store(last + o_end, b_s.to(last.dtype.element_ty), mask=m_s & (o_walked >= num_t)[None, :])


class Segments(NamedTuple):
    """Of a walk over time: how many, chunks of one, and what all but the last end with (see `_states_kernel`)."""

    count: int
    num_walked: int
    ends: Tensor | None
    decays: Tensor | None


def make_segments(
    plan: Plan, x: Tensor, y: Tensor, decay: Tensor | None, programs: int, below: int, most: int
) -> Segments:
    """Fewer programs than `below` become up to `most`."""
    batch, length, heads, key_dim = x.shape
    num_chunks = plan.num_chunks(length)
    if programs >= below or plan.table is not None or num_chunks < 2 * SHORTEST:
        return Segments(1, num_chunks, None, None)
    num_walked = cdiv(num_chunks, min(num_chunks // SHORTEST, cdiv(most, programs)))
    count = cdiv(num_chunks, num_walked)
    if count == 1:
        return Segments(1, num_chunks, None, None)
    ends = x.new_empty((count - 1, batch, heads, key_dim, y.shape[-1]), dtype=torch.float32)
    decays = None
    if decay is not None:
        decays = x.new_empty((count - 1, batch, heads, key_dim), dtype=torch.float32)
    return Segments(count, num_walked, ends, decays)


def launch_states(
    plan: Plan,
    kind: int,
    part: int,
    x: Tensor,
    y: Tensor,
    decay: Tensor | None,
    states: Tensor | None,
    segments: Segments,
    boundary: Ends,
    reverse: bool,
) -> None:
    _, length, heads, key_dim = x.shape
    value_dim, config = y.shape[-1], STATES[kind]
    first, last = boundary
    given = last if first is None else first
    end_strides = (0, 0) if given is None else given.stride()[2:]

    def arguments() -> tuple[Any, ...]:
        block_k, block_v = block_size(config.block_k, key_dim), block_size(config.block_v, value_dim)
        programs = plan.num_sequences(x) * heads * cdiv(key_dim, block_k) * cdiv(value_dim, block_v)
        constants = {
            "H": heads,
            "K": key_dim,
            "V": value_dim,
            "C": plan.chunk,
            "BK": block_k,
            "BV": block_v,
            "PART": part,
            "REVERSE": reverse,
            "PRECISION": plan.precision,
            **launch_options(config),
        }
        numbers = length, plan.num_chunks(length), plan.scale, segments.num_walked
        numbers = *numbers, *strides(x), *strides(y), *end_strides
        return _states_kernel, (programs, segments.count - (part == ENDS)), numbers, constants

    key = "states", config, part, reverse, segments[:2], x.stride(), y.stride(), end_strides, first is None
    key = *key, last if last is None else last.dtype
    tensors = x, y, decay, states, segments.ends, segments.decays, first, last, plan.table, plan.bounds
    plan.launch(key, arguments, *tensors)


def gla_states(
    plan: Plan,
    x: Tensor,
    y: Tensor,
    decay: Tensor | None,
    kind: int,
    first: Tensor | None,
    last: Tensor | None,
    reverse: bool,
) -> Tensor:
    """States [B, H, T / C, K, V], see `_states_kernel`; `first` is read, `last` written, both [B, H, K, V]."""
    batch, length, heads, key_dim = x.shape
    value_dim, config = y.shape[-1], STATES[kind]
    states = x.new_empty((batch, heads, plan.num_chunks(length), key_dim, value_dim), dtype=plan.work)
    tiles = cdiv(key_dim, config.block_k) * cdiv(value_dim, config.block_v)
    segments = make_segments(plan, x, y, decay, batch * heads * tiles, *FEW_STATES)
    for part in (WHOLE,) if segments.ends is None else (ENDS, REST):
        launch_states(plan, kind, part, x, y, decay, states, segments, (first, last), reverse)
    return states
