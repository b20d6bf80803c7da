"""Outputs from states and scores."""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gated_linear_attention.triton.decays import NO_DECAY
from kernels.gated_linear_attention.triton.plan import READ, Plan, block_size, launch_options, strides
from kernels.gated_linear_attention.triton.tiles import (
    as_operand,
    chunk_span,
    load_state,
    load_tile,
    load_transposed,
    store_tile,
)
from kernels.launch import cdiv


@triton.jit
def _read_kernel(
    x,
    y,
    z,
    states,
    out,
    table,
    T,
    num_t,
    scale,
    x_stride_b,
    x_stride_t,
    x_stride_h,
    y_stride_b,
    y_stride_t,
    y_stride_h,
    z_stride_b,
    z_stride_t,
    z_stride_h,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    DECAY: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """out [C, V] = x S + A z of one chunk, with x = q_in and z = v.

    TRANSPOSED: A^T for A, x = k_out, z = do and S the gradient of the state after the chunk.
    With a decay y is A [B, T, H, C]; without, x is q, y is k (TRANSPOSED: k and q), and A is formed here.
    """
    num_v = tl.cdiv(V, BV)
    i_v, i_c = tl.program_id(0) % num_v, (tl.program_id(0) // num_v).to(tl.int64)
    i_t, i_bh = i_c % num_t, i_c // num_t
    i_b, i_h = i_bh // H, i_bh % H
    dtype = states.dtype.element_ty
    o_c = tl.arange(0, C)
    out += (i_b * T * H + i_h) * V
    start, T = chunk_span(table, i_t, T, C)
    o_t = start + o_c
    o_v = i_v * BV + tl.arange(0, BV)
    x += i_b * x_stride_b + i_h * x_stride_h
    y += i_b * y_stride_b + i_h * y_stride_h
    z += i_b * z_stride_b + i_h * z_stride_h
    states += i_c * K * V
    b_o = tl.zeros([C, BV], tl.float32)
    b_a = tl.zeros([C, C], tl.float32)
    for i_k in range(0, K, BK):
        o_k = i_k + tl.arange(0, BK)
        b_x = load_tile(x, x_stride_t, o_t, o_k, T, K).to(dtype)
        b_s = load_state(states, o_k, o_v, K, V)
        b_o += tl.dot(b_x, b_s, input_precision=PRECISION)
        if DECAY == NO_DECAY:
            b_y = load_transposed(y, y_stride_t, o_t, o_k, T, K).to(dtype)
            b_a += tl.dot(b_x, b_y, input_precision=PRECISION)
    if DECAY == NO_DECAY:
        m_pair = (o_c[:, None] <= o_c[None, :]) if TRANSPOSED else (o_c[:, None] >= o_c[None, :])
        b_a = tl.where(m_pair, b_a * scale, 0.0)
        if not TRANSPOSED:
            b_o *= scale
    else:
        b_a = load_transposed(y, y_stride_t, o_t, o_c, T, C) if TRANSPOSED else load_tile(y, y_stride_t, o_t, o_c, T, C)
    b_z = load_tile(z, z_stride_t, o_t, o_v, T, V).to(dtype)
    b_o += tl.dot(as_operand(b_a, dtype, PRECISION), b_z, input_precision=PRECISION)
    store_tile(out, H * V, o_t, o_v, T, V, b_o)


def gla_read(
    plan: Plan, x: Tensor, y: Tensor, z: Tensor, states: Tensor, kind: int, dtype: torch.dtype, transposed: bool
) -> Tensor:
    """[B, T, H, V], see `_read_kernel`."""
    batch, length, heads, key_dim = x.shape
    value_dim = z.shape[-1]
    config, num_chunks = READ[kind], plan.num_chunks(length)
    out = z.new_empty((batch, length, heads, value_dim), dtype=dtype)

    def arguments() -> tuple[Any, ...]:
        block_v = block_size(config.block_v, value_dim)
        numbers = length, num_chunks, plan.scale, *strides(x), *strides(y), *strides(z)
        constants = {
            "H": heads,
            "K": key_dim,
            "V": value_dim,
            "C": plan.chunk,
            "BK": block_size(config.block_k, key_dim),
            "BV": block_v,
            "DECAY": kind,
            "TRANSPOSED": transposed,
            "PRECISION": plan.precision,
            **launch_options(config),
        }
        return _read_kernel, batch * heads * num_chunks * cdiv(value_dim, block_v), numbers, constants

    key = "read", config, dtype, transposed, x.stride(), y.stride(), z.stride(), value_dim
    plan.launch(key, arguments, x, y, z, states, out, plan.table)
    return out
