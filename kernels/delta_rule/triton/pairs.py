"""`_pairs_kernel`: with a decay of a channel, the gradients of the scores of every chunk.

All blocks of keys of `_mild_grads_kernel` and `_grads_kernel` read them. Computing them there, once for each block,
would repeat the products and take the registers of both.
"""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.delta_rule.triton.plan import Plan
from subquad.kernels.delta_rule.triton.tiles import load_rows, store_rows
from subquad.kernels.gated_linear_attention.triton.plan import CHANNEL, PositionStrides, planned
from subquad.kernels.gated_linear_attention.triton.tiles import as_operand, chunk_span
from subquad.kernels.launch import LaunchPlan, cdiv, launch


class ChunkPairs(NamedTuple):
    """Outputs of `_pairs_kernel`, of all pairs of positions i > j of a chunk (in dA also i = j) and zero elsewhere, as
    operands of matrix products."""

    da: Tensor
    """dA, the gradient of the scores of queries with written keys before they are scaled, [B, T, H, C]: row i belongs
    to position i."""
    dl: Tensor
    """dL, likewise the gradient of the scores of keys that are read with written keys."""
    da_plain: Tensor | None
    """Likewise of the scores of queries with the keys of `plain`, where it is given."""
    dl_plain: Tensor | None
    """Likewise of keys that are read with the keys of `plain`."""
    diagonals: Tensor
    """The diagonal of dA and, where `plain` is given, that of da_plain, [1 or 2, B, T, H], float32."""


@triton.jit
def _pairs_kernel(
    delta, do, dv, v, da, dl, da_plain, dl_plain, diagonals, table,
    T, num_t, end_v, scale,
    v_stride_b, v_stride_t, v_stride_h, do_stride_b, do_stride_t, do_stride_h,
    H: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`ChunkPairs` of one chunk:

    dA_ij = scale <do_i, delta_j>    dL_ij = -<dv_i, delta_j>    and with v in place of delta where it is given
    """
    i_c = tl.program_id(0).to(tl.int64)
    i_t, i_bh = i_c % num_t, i_c // num_t
    i_b, i_h = i_bh // H, i_bh % H
    dtype = da.dtype.element_ty
    o_c = tl.arange(0, C)
    o_head = i_b * T * H + i_h
    do += i_b * do_stride_b + i_h * do_stride_h
    start, end = chunk_span(table, i_t, T, C)
    b_da, b_dl = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    if v is not None:
        v += i_b * v_stride_b + i_h * v_stride_h
        b_da_plain, b_dl_plain = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    for i_v in range(0, end_v, BV):
        o_v = i_v + tl.arange(0, BV)
        b_delta = tl.trans(load_rows(delta + o_head * V, H * V, start, o_c, o_v, end, V, False))
        b_do = load_rows(do, do_stride_t, start, o_c, o_v, end, V, False).to(dtype)
        b_dv = load_rows(dv + o_head * V, H * V, start, o_c, o_v, end, V, False)
        b_da = tl.dot(b_do, b_delta, b_da, input_precision=PRECISION)
        b_dl = tl.dot(b_dv, b_delta, b_dl, input_precision=PRECISION)
        if v is not None:
            b_v = tl.trans(load_rows(v, v_stride_t, start, o_c, o_v, end, V, False)).to(dtype)
            b_da_plain = tl.dot(b_do, b_v, b_da_plain, input_precision=PRECISION)
            b_dl_plain = tl.dot(b_dv, b_v, b_dl_plain, input_precision=PRECISION)
    o_t = start + o_c
    p_diagonals = diagonals + o_head + o_t.to(tl.int64) * H
    m_past, m_same = o_c[:, None] > o_c[None, :], o_c[:, None] == o_c[None, :]
    m_upto = o_c[:, None] >= o_c[None, :]
    b_da *= scale
    tl.store(p_diagonals, tl.sum(tl.where(m_same, b_da, 0.0), 1), mask=o_t < end)
    b_da = as_operand(tl.where(m_upto, b_da, 0.0), dtype, PRECISION)
    b_dl = as_operand(tl.where(m_past, -b_dl, 0.0), dtype, PRECISION)
    store_rows(da + o_head * C, H * C, start, o_c, o_c, end, C, b_da, False)
    store_rows(dl + o_head * C, H * C, start, o_c, o_c, end, C, b_dl, False)
    if v is not None:
        b_da_plain *= scale
        p_diagonals += (tl.num_programs(0) // num_t).to(tl.int64) * T
        tl.store(p_diagonals, tl.sum(tl.where(m_same, b_da_plain, 0.0), 1), mask=o_t < end)
        b_da_plain = as_operand(tl.where(m_upto, b_da_plain, 0.0), dtype, PRECISION)
        b_dl_plain = as_operand(tl.where(m_past, -b_dl_plain, 0.0), dtype, PRECISION)
        store_rows(da_plain + o_head * C, H * C, start, o_c, o_c, end, C, b_da_plain, False)
        store_rows(dl_plain + o_head * C, H * C, start, o_c, o_c, end, C, b_dl_plain, False)


@planned
def _pairs_plan(plan: Plan, shape: tuple[int, ...], strides: PositionStrides) -> LaunchPlan:
    batch, length, heads, value_dim = shape
    tile, num_chunks = plan.tuning.grads[CHANNEL], plan.num_chunks(length)
    block_v = plan.width(min(64, tile.block_v), value_dim)
    return LaunchPlan(
        batch * heads * num_chunks,
        T=length,
        num_t=num_chunks,
        end_v=cdiv(value_dim, block_v) * block_v,
        scale=plan.scale,
        **strides.arguments("v do"),
        H=heads,
        V=value_dim,
        C=plan.chunk,
        BV=block_v,
        PRECISION=plan.precision,
        **tile.options.keywords(),
    )


def chunk_pairs(plan: Plan, *, delta: Tensor, do: Tensor, dv: Tensor, v: Tensor | None) -> ChunkPairs:
    """See `_pairs_kernel`. v is given where values are added under keys of their own (`plain`)."""
    batch, length, heads, _ = do.shape
    da = do.new_empty((batch, length, heads, plan.chunk), dtype=delta.dtype)
    dl = torch.empty_like(da)
    da_plain, dl_plain = (None if v is None else torch.empty_like(da) for _ in range(2))
    diagonals = do.new_empty((1 if v is None else 2, batch, length, heads), dtype=torch.float32)
    pairs = ChunkPairs(da, dl, da_plain, dl_plain, diagonals)
    launch(
        _pairs_kernel, _pairs_plan(plan, do.shape, PositionStrides.of(v, do)), delta=delta, do=do, dv=dv, v=v,
        **pairs._asdict(), table=plan.table,
    )  # fmt: skip
    return pairs
