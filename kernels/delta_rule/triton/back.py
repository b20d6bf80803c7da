"""`_back_kernel`: gradients of the values and of the states behind every chunk, in one walk from the last chunk on."""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.delta_rule.triton import hopper
from subquad.kernels.delta_rule.triton.plan import ChunkFactors, Plan
from subquad.kernels.delta_rule.triton.segments import (
    ENDS,
    cut_time,
    first_state,
    near_chunks,
    new_ends,
    segment_starts,
    store_last_state,
)
from subquad.kernels.delta_rule.triton.tiles import load_row, load_rows, solve, store_rows, store_state, two_term_dot
from subquad.kernels.delta_rule.triton.walk import walk_plan
from subquad.kernels.gated_linear_attention.triton.plan import EndStates, PositionStrides
from subquad.kernels.gated_linear_attention.triton.tiles import as_operand, chunk_span
from subquad.kernels.launch import launch

_ENDS = tl.constexpr(ENDS)


@triton.jit
def _back_kernel(
    q, k, do, inverse, inverse_low, scores, decay, row_in, row_out, k_out, reach, plain_scores, plain_system, plain_out,
    drest, dv, dstates, ends, first, last, table, bounds,
    T, num_t, scale, num_walked, num_v,
    q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_t, k_stride_h, do_stride_b, do_stride_t, do_stride_h,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    GROUP: tl.constexpr, PART: tl.constexpr, PRECISION: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """One chunk after the other from the last to the first, with dM the gradient of the state [K, BV] behind the chunk:

        dv = (I + L)^-T (A^T do + k_out dM),    dM <- decay dM + q_in^T do - k_in^T dv

    With plain_scores, plain_system and plain_out, the first of these is drest, the gradient of
    -plain_system v - k_in M, which takes the place of dv in the second, and

        dv = plain_scores^T do + plain_out dM - plain_system^T drest

    The arguments are those of `_walk_kernel` without delta, states, transitions, transposes and vanished, with do and
    dv in place of v and o, and dM of every chunk in dstates [B, H, chunks, V, K]. Here, too, everything is transposed,
    and the first segment is the last one in time.
    """
    i_v, i_bh = tl.program_id(0) % num_v, (tl.program_id(0) // num_v).to(tl.int64)
    i_b, i_h = i_bh // H, i_bh % H
    i_segment, num_bh = tl.program_id(1), (tl.num_programs(0) // num_v).to(tl.int64)
    o_k, o_v, o_c = tl.arange(0, BK), i_v * BV + tl.arange(0, BV), tl.arange(0, C)
    if table is None:
        i_first, num_own, o_chunks = 0, num_t, i_bh * num_t
    else:
        i_first = tl.load(bounds + i_b)
        num_own, o_chunks = tl.load(bounds + i_b + 1) - i_first, i_h * num_t
    b_dstate = first_state(first, ends, i_v, i_bh, i_segment, num_bh, K, V, BK, BV, PART)
    if table is not None:
        i_b *= 0
    q += i_b * q_stride_b + i_h // GROUP * q_stride_h
    k += i_b * k_stride_b + i_h // GROUP * k_stride_h
    do += i_b * do_stride_b + i_h * do_stride_h
    o_head = i_b * T * H + i_h
    inverse += o_head * C
    if inverse_low is not None:
        inverse_low += o_head * C
    scores += o_head * C
    dtype = inverse.dtype.element_ty
    BY_ROWS: tl.constexpr = k_out is None
    o_row = (i_b * H + i_h) * T
    # the segments are those of `_walk_kernel`, of which the last one may be shorter
    begin = (tl.cdiv(num_own, num_walked) - 1 - i_segment) * num_walked
    stop = tl.minimum(begin + num_walked, num_own)
    if PART == _ENDS and reach is not None:
        num_near, vanishes = near_chunks(reach + i_bh * num_t, begin, stop, True)
        # NaN where the gradient is infinite or NaN, which does not vanish
        b_dstate = tl.where(vanishes, 0.0 * b_dstate, b_dstate)
        stop = begin + num_near
    for i in range(begin, stop):
        i_t = i_first + begin + stop - 1 - i
        start, end = chunk_span(table, i_t, T, C)
        if BY_ROWS:
            b_row = load_row(row_out + o_row, start, o_c, end, WHOLE)
            if decay is not None:
                b_decay = tl.load(decay + o_chunks + i_t)
        b_k = load_rows(k, k_stride_t, start, o_c, o_k, end, K, WHOLE).to(dtype)
        b_do = tl.trans(load_rows(do, do_stride_t, start, o_c, o_v, end, V, WHOLE)).to(dtype)
        b_scores = load_rows(scores, H * C, start, o_c, o_c, end, C, WHOLE)
        b_inverse = load_rows(inverse, H * C, start, o_c, o_c, end, C, WHOLE)
        b_inverse_low = None
        if inverse_low is not None:
            b_inverse_low = load_rows(inverse_low, H * C, start, o_c, o_c, end, C, WHOLE)
        b_left = as_operand(b_dstate, dtype, PRECISION)
        if BY_ROWS:
            b_ddelta = tl.dot(b_left, tl.trans(b_k), input_precision=PRECISION)
            b_ddelta *= b_row[None, :]
        else:
            b_out = load_rows(k_out + o_head * K, H * K, start, o_c, o_k, end, K, WHOLE)
            b_ddelta = tl.dot(b_left, tl.trans(b_out), input_precision=PRECISION)
        b_ddelta = tl.dot(b_do, b_scores, b_ddelta, input_precision=PRECISION)
        b_dv = solve(b_ddelta, b_inverse, b_inverse_low, PRECISION, BY_ROWS)
        if PART != _ENDS:
            if plain_out is not None:
                b_drest = as_operand(b_dv, dtype, PRECISION)
                store_rows(drest + o_head * V, H * V, start, o_c, o_v, end, V, tl.trans(b_drest), WHOLE)
                b_plain = load_rows(plain_system + o_head * C, H * C, start, o_c, o_c, end, C, WHOLE)
                b_dplain = -tl.dot(b_drest, b_plain, input_precision=PRECISION)
                b_plain = load_rows(plain_scores + o_head * C, H * C, start, o_c, o_c, end, C, WHOLE)
                b_dplain = tl.dot(b_do, b_plain, b_dplain, input_precision=PRECISION)
                b_plain = load_rows(plain_out + o_head * K, H * K, start, o_c, o_k, end, K, WHOLE)
                b_dplain = tl.dot(b_left, tl.trans(b_plain), b_dplain, input_precision=PRECISION)
                store_rows(dv + o_head * V, H * V, start, o_c, o_v, end, V, tl.trans(b_dplain), WHOLE)
            else:
                store_rows(dv + o_head * V, H * V, start, o_c, o_v, end, V, tl.trans(b_dv), WHOLE)
            p_state = dstates + (o_chunks + i_t) * (K * V)
            if BY_ROWS and dtype == tl.bfloat16:
                # the halves of the columns go through the same shared memory, which leaves room for a third stage
                o_half = tl.arange(0, BK // 2)
                b_halves = tl.permute(tl.reshape(b_left, (BV, 2, BK // 2)), (0, 2, 1))
                b_first, b_second = tl.split(b_halves)
                store_state(p_state, o_v, o_half, b_first, V, K, WHOLE)
                store_state(p_state, o_v, BK // 2 + o_half, b_second, V, K, WHOLE)
            else:
                store_state(p_state, o_v, o_k, b_left, V, K, WHOLE)
        if not BY_ROWS:
            b_dstate *= tl.load(decay + (o_chunks + i_t) * K + o_k, mask=o_k < K, other=0.0)[None, :]
        elif decay is not None:
            b_dstate *= b_decay
        if row_in is not None:
            b_in = load_row(row_in + o_row, start, o_c, end, WHOLE)
            b_dv *= b_in[None, :]
        b_q = load_rows(q, q_stride_t, start, o_c, o_k, end, K, WHOLE).to(dtype)
        if not BY_ROWS:
            b_dstate = tl.dot(b_do, b_q, b_dstate, input_precision=PRECISION)
        else:
            b_left = (
                b_do.to(tl.float32) * (b_in * scale)[None, :] if row_in is not None else b_do.to(tl.float32) * scale
            )
            b_dstate = two_term_dot(b_left, b_q, b_dstate, PRECISION, BY_ROWS)
        b_dstate = two_term_dot(-b_dv, b_k, b_dstate, PRECISION, BY_ROWS)
    store_last_state(b_dstate, ends, last, i_v, i_bh, i_segment, num_bh, K, V, BK, BV, PART)


def delta_back(
    plan: Plan,
    *,
    q: Tensor,
    k: Tensor,
    do: Tensor,
    factors: ChunkFactors,
    transposes: Tensor | None,
    vanished: Tensor | None,
    boundary: EndStates,
    pairs: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """dv and drest [B, T, H, V], which are one unless v has keys of its own, and the gradients of the states behind
    every chunk, in `plan.work`; see `_back_kernel`.

    transposes, vanished: what `delta_walk` returns of the matrices of segments.
    boundary:   the gradient of the final state, and memory for that of the initial state.
    pairs:      the gradients of states are those behind every second chunk, and `hopper.takes` is true of the call.
    """
    (batch, length, heads, value_dim), key_dim = do.shape, k.shape[-1]
    shape = batch, length, heads, key_dim
    num_kept = plan.num_chunks(length) // 2 if pairs else plan.num_chunks(length)
    dv = do.new_empty((batch, length, heads, value_dim), dtype=plan.work)
    drest = dv if factors.plain_out is None else torch.empty_like(dv)
    dstates = do.new_empty((batch, heads, num_kept, value_dim, key_dim), dtype=plan.work)
    if factors.q_in is not None and factors.k_in is not None:
        q, k = factors.q_in, factors.k_in
    by_rows, plain = factors.k_out is None, factors.plain_out is not None
    segments = cut_time(plan, shape, value_dim, factors.kind)
    ends = new_ends(segments, k, shape, value_dim)
    first, last = boundary
    strides = PositionStrides.of(q, k, do)
    for part in segments.parts:
        writes = part != ENDS
        if writes and pairs:
            hopper.hopper_back(
                plan, q=q, k=k, do=do, factors=factors, dv=dv, dstates=dstates, ends=ends, boundary=boundary,
                segments=segments,
            )  # fmt: skip
            continue
        launch(
            _back_kernel, walk_plan(plan, shape, k.shape[2], value_dim, strides, segments, part, by_rows, plain, True),
            q=q, k=k, do=do, inverse=factors.inverse, inverse_low=factors.inverse_low, scores=factors.scores,
            decay=factors.decay, row_in=factors.row_in, row_out=factors.row_out, k_out=factors.k_out,
            reach=None if writes else factors.reach, plain_scores=factors.plain_scores if writes else None,
            plain_system=factors.plain_system if writes else None, plain_out=factors.plain_out if writes else None,
            drest=drest if writes and factors.plain_out is not None else None, dv=dv if writes else None,
            dstates=dstates if writes else None, ends=ends, first=first, last=last if writes else None,
            table=plan.table, bounds=plan.bounds,
        )  # fmt: skip
        if part == ENDS:
            segment_starts(plan, ends, transposes, vanished, back=True)
    return dv, drest, dstates
