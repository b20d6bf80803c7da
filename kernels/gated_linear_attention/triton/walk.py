"""States and outputs in one walk."""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gated_linear_attention.triton.plan import CHUNK, WALK, WARPS, Plan, block_size, launch_options, strides
from kernels.gated_linear_attention.triton.states import ENDS, launch_states, make_segments
from kernels.gated_linear_attention.triton.tiles import chunk_span, load_tile, store_tile
from kernels.launch import cdiv, power_of_2


@triton.jit
def _walk_kernel(
    x,
    y,
    v,
    scores,
    decay,
    o,
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
    v_stride_b,
    v_stride_t,
    v_stride_h,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """o [C, BV] of one chunk after the other, the state of all K at hand: `_states_kernel` and `_read_kernel` in one.

    x = q_in, y = k_out; without decay (and scores) q and k. A segment starts from what those before it add up to.
    The state is kept transposed, so that as the left operand of o^T = S^T q_in^T + v^T A^T it never leaves registers.
    o of a chunk is written when the next one begins, so that tiles are asked for while the state is updated.
    """
    num_v = tl.cdiv(V, BV)
    i_v, i_bh = tl.program_id(0) % num_v, (tl.program_id(0) // num_v).to(tl.int64)
    i_b, i_h = i_bh // H, i_bh % H
    i_s, num_bh = tl.program_id(1), (tl.num_programs(0) // num_v).to(tl.int64)
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
    m_k, m_s = o_k < K, (o_v < V)[:, None] & (o_k < K)[None, :]
    o_s = i_bh * K * V + o_k[None, :] * V + o_v[:, None]
    b_s = tl.zeros([BV, BK], tl.float32)
    if first is not None:
        b_s += tl.load(first + o_s, mask=m_s, other=0.0).to(tl.float32)
    if ends is not None:
        for i in range(i_s):
            if decay is not None:
                b_s *= tl.load(end_decays + (i * num_bh + i_bh) * K + o_k, mask=m_k, other=0.0)[None, :]
            b_s += tl.load(ends + i * num_bh * K * V + o_s, mask=m_s, other=0.0)
    i_begin = i_first + i_s * num_walked
    i_last = i_first + tl.minimum((i_s + 1) * num_walked, num_own) - 1
    b_o = tl.zeros([BV, C], o.dtype.element_ty)
    if decay is not None:
        b_decay = tl.load(decay + (o_chunks + i_begin) * K + o_k, mask=m_k, other=0.0)
    for i_t in range(i_begin, i_last + 1):
        o_start, o_end = chunk_span(table, tl.maximum(i_t - 1, i_begin), T, C)
        store_tile(o, H * V, o_start + o_c, o_v, tl.where(i_t > i_begin, o_end, 0), V, tl.trans(b_o))
        start, end = chunk_span(table, i_t, T, C)
        o_t = start + o_c
        b_x = tl.trans(load_tile(x, x_stride_t, o_t, o_k, end, K))
        b_y = load_tile(y, y_stride_t, o_t, o_k, end, K)
        b_v = tl.trans(load_tile(v, v_stride_t, o_t, o_v, end, V))
        if decay is not None:
            b_a = tl.trans(load_tile(scores + (i_b * T * H + i_h) * C, H * C, o_t, o_c, end, C))
            b_sum = tl.dot(b_v, b_a, input_precision=PRECISION)
            b_sum = tl.dot(b_s.to(dtype), b_x, b_sum, input_precision=PRECISION)
            b_s *= b_decay[None, :]
            b_decay = tl.load(decay + (o_chunks + tl.minimum(i_t + 1, i_last)) * K + o_k, mask=m_k, other=0.0)
        else:
            b_a = tl.dot(b_y, b_x, input_precision=PRECISION)
            b_a = tl.where(o_c[:, None] <= o_c[None, :], b_a, 0.0).to(dtype)
            b_sum = tl.dot(b_s.to(dtype), b_x, input_precision=PRECISION)
            b_sum = tl.dot(b_v, b_a, b_sum, input_precision=PRECISION) * scale
        b_s = tl.dot(b_v, b_y, b_s, input_precision=PRECISION)
        b_o = b_sum.to(o.dtype.element_ty)
    o_start, o_end = chunk_span(table, i_last, T, C)
    store_tile(o, H * V, o_start + o_c, o_v, o_end, V, tl.trans(b_o))
    if last is not None:
        # of several segments, the last
        o_walked = (i_s + 1) * num_walked + o_v * 0
        tl.store(last + o_s, b_s, mask=m_s & (o_walked >= num_t)[:, None])


def can_walk(plan: Plan, key_dim: int) -> bool:
    """Whether a program of `_walk_kernel` fits: on Hopper; others hold less or have not been looked at."""
    if plan.work != torch.bfloat16 or key_dim > max(WALK):
        return False
    return bool(triton.knobs.runtime.interpret) or _is_hopper(triton.runtime.driver.active)


@functools.cache
def _is_hopper(driver: Any) -> bool:
    """Asking takes the host some microseconds."""
    target = driver.get_current_target()
    return bool(target.backend == "cuda" and target.arch == 90)


def gla_walk(
    plan: Plan,
    x: Tensor,
    y: Tensor,
    v: Tensor,
    decay: Tensor | None,
    scores: Tensor | None,
    kind: int,
    first: Tensor | None,
    last: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """o [B, T, H, V], see `_walk_kernel`; `first` is read, `last` written, both [B, H, K, V]."""
    batch, length, heads, key_dim = x.shape
    value_dim, config = v.shape[-1], WALK[max(CHUNK, power_of_2(key_dim))]
    block_v = block_size(config.block_v, value_dim)
    o = v.new_empty((batch, length, heads, value_dim), dtype=dtype)
    programs, at_once = plan.num_sequences(x) * heads * cdiv(value_dim, block_v), WARPS // config.num_warps
    segments = make_segments(plan, x, v, decay, programs, at_once // 2, at_once)
    if segments.ends is not None:
        launch_states(plan, kind, ENDS, y, v, decay, None, segments, (None, None), False)

    def arguments() -> tuple[Any, ...]:
        numbers = length, plan.num_chunks(length), plan.scale, segments.num_walked
        constants = {
            "H": heads,
            "K": key_dim,
            "V": value_dim,
            "C": plan.chunk,
            "BK": block_size(config.block_k, key_dim),
            "BV": block_v,
            "PRECISION": plan.precision,
            **launch_options(config),
        }
        numbers = *numbers, *strides(x), *strides(y), *strides(v)
        return _walk_kernel, (programs, segments.count), numbers, constants

    key = "walk", config, dtype, segments[:2], x.stride(), y.stride(), v.stride(), first is None, last is None
    tensors = x, y, v, scores, decay, o, segments.ends, segments.decays, first, last, plan.table, plan.bounds
    plan.launch(key, arguments, *tensors)
    return o
