"""`_read_kernel`: outputs from the states before every chunk and the scores within it; transposed, gradients of v."""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.gated_linear_attention.triton.decays import NO_DECAY
from subquad.kernels.gated_linear_attention.triton.plan import Plan, PositionStrides, planned
from subquad.kernels.gated_linear_attention.triton.tiles import (
    as_operand,
    chunk_span,
    load_state,
    load_tile,
    load_transposed,
    store_tile,
)
from subquad.kernels.launch import LaunchPlan, cdiv, launch


@triton.jit
def _read_kernel(
    x, y, z, states, out, table,
    T, num_t, scale,
    x_stride_b, x_stride_t, x_stride_h, y_stride_b, y_stride_t, y_stride_h, z_stride_b, z_stride_t, z_stride_h,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    DECAY: tl.constexpr, TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out [C, V] = x S + A z for one chunk, with x = q_in and z = v.

    With TRANSPOSED it is x S + A^T z with x = k_out, z = do and S the gradient of the state after the chunk.
    With a decay y is A [B, T, H, C]. Without one x is q and y is k (TRANSPOSED: k and q), and A is computed here.
    """
    num_v = tl.cdiv(V, BV)
    i_v, i_c = tl.program_id(0) % num_v, (tl.program_id(0) // num_v).to(tl.int64)
    i_t, i_bh = i_c % num_t, i_c // num_t
    i_b, i_h = i_bh // H, i_bh % H
    dtype = states.dtype.element_ty
    o_c = tl.arange(0, C)
    out += (i_b * T * H + i_h) * V
    start, end = chunk_span(table, i_t, T, C)
    o_t = start + o_c
    o_v = i_v * BV + tl.arange(0, BV)
    x += i_b * x_stride_b + i_h * x_stride_h
    y += i_b * y_stride_b + i_h * y_stride_h
    z += i_b * z_stride_b + i_h * z_stride_h
    states += i_c * K * V
    b_out = tl.zeros([C, BV], tl.float32)
    b_scores = tl.zeros([C, C], tl.float32)
    for i_k in range(0, K, BK):
        o_k = i_k + tl.arange(0, BK)
        b_x = load_tile(x, x_stride_t, o_t, o_k, end, K).to(dtype)
        b_state = load_state(states, o_k, o_v, K, V)
        b_out += tl.dot(b_x, b_state, input_precision=PRECISION)
        if DECAY == NO_DECAY:
            b_y = load_transposed(y, y_stride_t, o_t, o_k, end, K).to(dtype)
            b_scores += tl.dot(b_x, b_y, input_precision=PRECISION)
    if DECAY == NO_DECAY:
        m_pair = (o_c[:, None] <= o_c[None, :]) if TRANSPOSED else (o_c[:, None] >= o_c[None, :])
        b_scores = tl.where(m_pair, b_scores * scale, 0.0)
        if not TRANSPOSED:
            b_out *= scale
    else:
        b_scores = (
            load_transposed(y, y_stride_t, o_t, o_c, end, C)
            if TRANSPOSED
            else load_tile(y, y_stride_t, o_t, o_c, end, C)
        )
    b_z = load_tile(z, z_stride_t, o_t, o_v, end, V).to(dtype)
    b_out += tl.dot(as_operand(b_scores, dtype, PRECISION), b_z, input_precision=PRECISION)
    store_tile(out, H * V, o_t, o_v, end, V, b_out)


@planned
def _read_plan(
    plan: Plan, kind: int, shape: tuple[int, ...], value_dim: int, strides: PositionStrides, transposed: bool
) -> LaunchPlan:
    batch, length, heads, key_dim = shape
    tile, num_chunks = plan.tuning.read[kind], plan.num_chunks(length)
    return LaunchPlan(
        batch * heads * num_chunks * cdiv(value_dim, plan.width(tile.block_v, value_dim)),
        T=length,
        num_t=num_chunks,
        scale=plan.scale,
        **strides.arguments("x y z"),
        DECAY=kind,
        TRANSPOSED=transposed,
        **plan.constants(tile, heads, key_dim, value_dim),
    )


def gla_read(
    plan: Plan, kind: int, *, x: Tensor, y: Tensor, z: Tensor, states: Tensor, dtype: torch.dtype, transposed: bool
) -> Tensor:
    """[B, T, H, V] in `dtype`, see `_read_kernel`; kind is the kind of decay."""
    out = z.new_empty((*x.shape[:3], z.shape[-1]), dtype=dtype)
    launch_plan = _read_plan(plan, kind, x.shape, z.shape[-1], PositionStrides.of(x, y, z), transposed)
    launch(_read_kernel, launch_plan, x=x, y=y, z=z, states=states, out=out, table=plan.table)
    return out
