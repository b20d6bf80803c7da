"""Gradients of q, k, beta, the log-decays and what else is given, with a decay of a key channel.

`_grads_kernel` has the chunks that are factored by a tree, `_mild_grads_kernel` the others.
"""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.delta_rule.triton.mild_grads import _mild_grads_kernel
from subquad.kernels.delta_rule.triton.pairs import chunk_pairs
from subquad.kernels.delta_rule.triton.plan import Plan, is_whole
from subquad.kernels.delta_rule.triton.tiles import bounded_decays, load_rows, load_state, store_rows
from subquad.kernels.device import interpreted, is_hopper
from subquad.kernels.gated_linear_attention.triton.decays import (
    exponential,
    half_totals,
    masked_sums,
    tree_level,
)
from subquad.kernels.gated_linear_attention.triton.plan import CHANNEL, PositionStrides, Tile, planned
from subquad.kernels.gated_linear_attention.triton.tiles import as_operand, chunk_span
from subquad.kernels.launch import LaunchPlan, cdiv, launch


@triton.jit
def _grads_kernel(
    q, k, beta, g, write, plain, v, delta, do, dv, states, dstates, da, dl, da_plain, dl_plain, diagonals, dq, dk,
    dbeta, dg, dwrite, dplain, steep, table,
    T, num_t, end_v, scale,
    q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_t, k_stride_h, beta_stride_b, beta_stride_t, beta_stride_h,
    g_stride_b, g_stride_t, g_stride_h, write_stride_b, write_stride_t, write_stride_h,
    plain_stride_b, plain_stride_t, plain_stride_h, v_stride_b, v_stride_t, v_stride_h,
    do_stride_b, do_stride_t, do_stride_h,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq, dk, dg [C, BK] of one chunk that is factored by a tree; dbeta is a sum over channels, [B, T, H, K / BK].

    `_mild_grads_kernel` is launched for the other chunks with the same arguments, so the parameters of both must agree,
    in their names and their order, up to those that only one of them has: the diagonals, which are part of dA there,
    and how each is compiled. `steep` names the chunks of each; `_factors_kernel` gives the reason.

    A position reads what is held for q (with the gradient do) and before it writes what is held for k (with the
    gradient -dv). It writes delta under the key w = beta k. With S the state before the chunk and dS the gradient of
    the state behind it,

        dA_ij = scale <do_i, delta_j>, j <= i;               dL_ij = -<dv_i, delta_j>, j < i
        dq_i = scale exp(P_i) do_i S^T + sum_j dA_ij exp(D_ij) w_j
        dr_i =      -exp(P_i) dv_i S^T + sum_j dL_ij exp(D_ij) w_j
        dw_j = exp(R_j) delta_j dS^T + sum_i exp(D_ij) (dA_ij q_i + dL_ij k_i)
        dk = dr + beta dw,    dbeta = <k, dw>

    with the sums P, R and D of log-decays of gated linear attention. Where `write` is given, w = beta write, dk = dr,
    dwrite = beta dw and dbeta = <write, dw>. Where `plain` is given, dv is the drest of `_back_kernel`, and pairs of
    its keys e with v, which is added under them, are treated as those of w with delta; their parts of dq and dr are
    added.
    dA, dL and the diagonal of dA are read from `ChunkPairs`.
    As in gated linear attention, dg_l is the sum of what passes position l, in which what does not pass it cancels, as
    both sides consist of the same rounded factors; the diagonal of A passes nothing and is left out.
    """
    num_k = tl.cdiv(K, BK)
    i_k, i_c = tl.program_id(0) % num_k, (tl.program_id(0) // num_k).to(tl.int64)
    i_t, i_bh = i_c % num_t, i_c // num_t
    i_b, i_h = i_bh // H, i_bh % H
    if tl.load(steep + i_c) == 0:
        return
    dtype = states.dtype.element_ty
    o_c, o_k = tl.arange(0, C), i_k * BK + tl.arange(0, BK)
    o_head = i_b * T * H + i_h
    do += i_b * do_stride_b + i_h * do_stride_h
    start, end = chunk_span(table, i_t, T, C)
    o_t = start + o_c
    o_rows, m_t = o_t.to(tl.int64), o_t < end

    p_beta = beta + i_b * beta_stride_b + i_h * beta_stride_h + o_rows * beta_stride_t
    b_beta = tl.load(p_beta, mask=m_t, other=0.0).to(tl.float32)
    m_past = o_c[:, None] > o_c[None, :]
    if plain is not None:
        plain += i_b * plain_stride_b + i_h * plain_stride_h
        v += i_b * v_stride_b + i_h * v_stride_h
    b_da = load_rows(da + o_head * C, H * C, start, o_c, o_c, end, C, False)
    b_dl = load_rows(dl + o_head * C, H * C, start, o_c, o_c, end, C, False)
    p_diagonals = diagonals + o_head + o_rows * H
    b_diagonal = tl.load(p_diagonals, mask=m_t, other=0.0)
    q += i_b * q_stride_b + i_h * q_stride_h
    k += i_b * k_stride_b + i_h * k_stride_h
    if plain is not None:
        b_da_plain = load_rows(da_plain + o_head * C, H * C, start, o_c, o_c, end, C, False)
        b_dl_plain = load_rows(dl_plain + o_head * C, H * C, start, o_c, o_c, end, C, False)
        p_diagonals += (tl.num_programs(0) // (num_t * num_k)).to(tl.int64) * T
        b_diagonal_plain = tl.load(p_diagonals, mask=m_t, other=0.0)
        b_de = tl.zeros([C, BK], tl.float32)

    b_dq, b_dr = tl.zeros([C, BK], tl.float32), tl.zeros([C, BK], tl.float32)
    b_dw = tl.zeros([C, BK], tl.float32)
    b_through = tl.zeros([BK], tl.float32)
    # the end of the loop is an argument, so that it remains where it has one iteration (see LOG.md of
    # gated_linear_attention)
    for i_v in range(0, end_v, BV):
        o_v = i_v + tl.arange(0, BV)
        b_delta = load_rows(delta + o_head * V, H * V, start, o_c, o_v, end, V, False)
        b_do = load_rows(do, do_stride_t, start, o_c, o_v, end, V, False).to(dtype)
        b_dv = load_rows(dv + o_head * V, H * V, start, o_c, o_v, end, V, False)
        b_state = load_state(states + i_c * K * V, o_v, o_k, V, K, False)
        b_dstate = load_state(dstates + i_c * K * V, o_v, o_k, V, K, False)
        b_dq = tl.dot(b_do, b_state, b_dq, input_precision=PRECISION)
        b_dr = tl.dot(b_dv, b_state, b_dr, input_precision=PRECISION)
        b_dw = tl.dot(b_delta, b_dstate, b_dw, input_precision=PRECISION)
        if plain is not None:
            b_v = load_rows(v, v_stride_t, start, o_c, o_v, end, V, False).to(dtype)
            b_de = tl.dot(b_v, b_dstate, b_de, input_precision=PRECISION)
        if dg is not None:
            b_through += tl.sum(b_state.to(tl.float32) * b_dstate.to(tl.float32), 0)
    b_dq *= scale
    b_dr = -b_dr
    b_q = load_rows(q, q_stride_t, start, o_c, o_k, end, K, False).to(tl.float32)
    b_k = load_rows(k, k_stride_t, start, o_c, o_k, end, K, False).to(tl.float32)
    b_write = b_k
    if write is not None:
        p_write = write + i_b * write_stride_b + i_h * write_stride_h
        b_write = load_rows(p_write, write_stride_t, start, o_c, o_k, end, K, False).to(tl.float32)
    b_w = b_write * b_beta[:, None]
    if plain is not None:
        b_e = load_rows(plain, plain_stride_t, start, o_c, o_k, end, K, False).to(tl.float32)
    p_g = g + i_b * g_stride_b + i_h * g_stride_h
    b_g = bounded_decays(load_rows(p_g, g_stride_t, start, o_c, o_k, end, K, False), plain)
    b_first, b_second = half_totals(b_g, o_c, C)
    b_dg = tl.zeros([C, BK], tl.float32)
    # for each position, the gradient that arrives at it minus the one that leaves from it, within the chunk
    b_net = tl.zeros([C, BK], tl.float32)
    if dg is not None:
        b_dg += (b_through * exponential(b_first + b_second, PRECISION))[None, :]
    b_prefix = exponential(masked_sums(o_c[:, None] >= o_c[None, :], b_g, False, PRECISION), PRECISION)
    b_dq *= b_prefix
    b_dr *= b_prefix
    b_suffix = exponential(masked_sums(o_c[:, None] < o_c[None, :], b_g, False, PRECISION), PRECISION)
    b_dw *= b_suffix
    b_leaving = b_w * b_dw
    if plain is not None:
        b_de *= b_suffix
        b_leaving += b_e * b_de
    # only what enters the chunk from before and what leaves it: pairs within the chunk are added below
    if dg is not None:
        b_net += b_q * b_dq + b_k * b_dr
        b_dg += masked_sums(m_past, b_leaving, False, PRECISION)
    for level in range(LEVELS):
        b_factor, m_pair = tree_level(b_g, o_c, level, False, PRECISION)
        b_written = as_operand(b_w * b_factor, dtype, PRECISION)
        b_pairs = tl.where(m_pair, b_da, 0.0).to(dtype)
        b_read = as_operand(b_q * b_factor, dtype, PRECISION)
        b_inside = tl.dot(b_pairs, b_written, input_precision=PRECISION)
        b_dw_inside = tl.dot(tl.trans(b_pairs), b_read, input_precision=PRECISION)
        if plain is not None:
            b_plain = as_operand(b_e * b_factor, dtype, PRECISION)
            b_pairs = tl.where(m_pair, b_da_plain, 0.0).to(dtype)
            b_inside = tl.dot(b_pairs, b_plain, b_inside, input_precision=PRECISION)
            b_de_inside = tl.dot(tl.trans(b_pairs), b_read, input_precision=PRECISION)
        b_dq += b_inside * b_factor
        if dg is not None:
            b_net += b_read.to(tl.float32) * b_inside
        b_pairs = tl.where(m_pair, b_dl, 0.0).to(dtype)
        b_read = as_operand(b_k * b_factor, dtype, PRECISION)
        b_inside = tl.dot(b_pairs, b_written, input_precision=PRECISION)
        b_dw_inside = tl.dot(tl.trans(b_pairs), b_read, b_dw_inside, input_precision=PRECISION)
        if plain is not None:
            b_pairs = tl.where(m_pair, b_dl_plain, 0.0).to(dtype)
            b_inside = tl.dot(b_pairs, b_plain, b_inside, input_precision=PRECISION)
            b_de_inside = tl.dot(tl.trans(b_pairs), b_read, b_de_inside, input_precision=PRECISION)
            b_de += b_de_inside * b_factor
        b_dr += b_inside * b_factor
        b_dw += b_dw_inside * b_factor
        if dg is not None:
            b_net += b_read.to(tl.float32) * b_inside - b_written.to(tl.float32) * b_dw_inside
            if plain is not None:
                b_net -= b_plain.to(tl.float32) * b_de_inside
    if dg is not None:
        b_dg += masked_sums(o_c[None, :] >= o_c[:, None], b_net, False, PRECISION)
        store_rows(dg + o_head * K, H * K, start, o_c, o_k, end, K, b_dg, False)
    b_dbeta = tl.sum(b_write * b_dw, 1)
    b_dbeta += b_diagonal * tl.sum(b_q * b_write, 1)
    b_dw += b_diagonal[:, None] * b_q
    b_dq += b_diagonal[:, None] * b_w
    if plain is not None:
        b_dq += b_diagonal_plain[:, None] * b_e
        b_de += b_diagonal_plain[:, None] * b_q
        store_rows(dplain + o_head * K, H * K, start, o_c, o_k, end, K, b_de, False)
    store_rows(dq + o_head * K, H * K, start, o_c, o_k, end, K, b_dq, False)
    if write is None:
        store_rows(dk + o_head * K, H * K, start, o_c, o_k, end, K, b_dr + b_beta[:, None] * b_dw, False)
    else:
        store_rows(dk + o_head * K, H * K, start, o_c, o_k, end, K, b_dr, False)
        store_rows(dwrite + o_head * K, H * K, start, o_c, o_k, end, K, b_beta[:, None] * b_dw, False)
    tl.store(dbeta + (o_head + o_rows * H) * num_k + i_k, b_dbeta, mask=m_t)


def _steep_tile(plan: Plan, key_dim: int) -> Tile:
    """The tile of `_grads_kernel`. 32 keys may be narrower than the minimum (see the loop of the kernel)."""
    tile = plan.tuning.grads[CHANNEL]
    return tile._replace(block_k=min(32, plan.width(tile.block_k, key_dim)), block_v=min(64, tile.block_v))


@planned
def _grads_plan(
    plan: Plan,
    shape: tuple[int, ...],
    value_dim: int,
    strides: PositionStrides,
    plain: bool,
    steep: bool,
    wide: bool,
) -> LaunchPlan:
    """The plan of `_grads_kernel` (`steep`) or of `_mild_grads_kernel`.

    plain: there are keys of `plain`.
    wide:  matrix units take operands from shared memory. Elsewhere 64 keys would spill thousands of registers; here,
           with 32 keys, ptxas 12.8 makes wrong code of `_mild_grads_kernel` (LOG.md).
    """
    batch, length, heads, key_dim = shape
    tile, narrow = plan.tuning.grads[CHANNEL], _steep_tile(plan, key_dim)
    choices: dict[str, Any]
    if steep:
        tile = narrow
        block_k, choices = tile.block_k, {"LEVELS": plan.chunk.bit_length() - 1}
    else:
        if plain:
            # shared memory holds twice as many operands for each channel of values
            tile = tile._replace(block_v=min(64, tile.block_v))
        block_k = plan.width(tile.block_k, key_dim) if wide else narrow.block_k
        sizes = (key_dim, block_k), (value_dim, plan.width(tile.block_v, value_dim))
        choices = {"PARTS": block_k // narrow.block_k, "WHOLE": is_whole(plan, length, *sizes, strides=strides)}
    num_chunks, block_v = plan.num_chunks(length), plan.width(tile.block_v, value_dim)
    return LaunchPlan(
        batch * heads * num_chunks * cdiv(key_dim, block_k),
        T=length,
        num_t=num_chunks,
        **({"end_v": cdiv(value_dim, block_v) * block_v} if steep else {}),
        scale=plan.scale,
        **strides.arguments("q k beta g write plain v do"),
        **choices,
        **(plan.constants(tile, heads, key_dim, value_dim) | {"BK": block_k}),
    )


def delta_grads(
    plan: Plan,
    *,
    q: Tensor,
    k: Tensor,
    beta: Tensor,
    g: Tensor,
    write: Tensor | None,
    plain: Tensor | None,
    v: Tensor | None,
    delta: Tensor,
    do: Tensor,
    dv: Tensor,
    states: Tensor,
    dstates: Tensor,
    steep: Tensor,
    needs_dg: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of q, k, beta, where it is needed of g, and where they are given of write and plain.

    See `_grads_kernel`. v is read only where plain is given. The gradient of beta is float32 and has a last axis of
    blocks of K, over which it is to be summed.

    steep: as in `ChunkFactors`.
    """
    (batch, length, heads, value_dim), key_dim = do.shape, k.shape[-1]
    num_k = cdiv(key_dim, _steep_tile(plan, key_dim).block_k)
    dq, dk = q.new_empty(k.shape), k.new_empty(k.shape)
    dg, dwrite, dplain = (None if x is None else x.new_empty(k.shape) for x in (g if needs_dg else None, write, plain))
    dbeta = k.new_empty((batch, length, heads, num_k), dtype=torch.float32)
    shape = batch, length, heads, key_dim
    pairs = chunk_pairs(plan, delta=delta, do=do, dv=dv, v=v)._asdict()
    strides = PositionStrides.of(q, k, beta, g, write, plain, v, do)
    wide = interpreted() or is_hopper()
    for kernel, for_steep in (_mild_grads_kernel, False), (_grads_kernel, True):
        own = pairs if for_steep else {name: x for name, x in pairs.items() if name != "diagonals"}
        launch(
            kernel, _grads_plan(plan, shape, value_dim, strides, plain is not None, for_steep, wide), q=q, k=k,
            beta=beta, g=g, write=write, plain=plain, v=v, delta=delta, do=do, dv=dv, states=states, dstates=dstates,
            **own, dq=dq, dk=dk, dbeta=dbeta, dg=dg, dwrite=dwrite, dplain=dplain, steep=steep, table=plan.table,
        )  # fmt: skip
    return dq, dk, dbeta, dg, dwrite, dplain
