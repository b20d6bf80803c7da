"""`_hopper_grads_kernel`: `_row_grads_kernel` in warps that copy and warps that compute, for chunks of 64 positions.

A program for each multiprocessor takes chunk after chunk, and for each of them the heads that share its keys, one after
the other. One warp group copies; each of two others computes the gradients of 64 keys, so that both read the same tiles
and exchange nothing: the warps that copy add their halves of sums over keys.
"""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from subquad.kernels.delta_rule.triton.hopper.tiles import (
    COPY_WARPS,
    FLOATS,
    NOTHING,
    add,
    at_least_lowest,
    barrier_of_warps,
    copy_rows,
)
from subquad.kernels.delta_rule.triton.plan import Plan
from subquad.kernels.device import num_processors
from subquad.kernels.gated_linear_attention.triton.plan import PositionStrides, planned
from subquad.kernels.launch import LaunchPlan, launch

C = gl.constexpr(64)
"""Positions of a chunk, and the rows and columns of every tile in shared memory."""
# groups of panels of two tiles, which arrive and are read together: do and dv, keys and queries, delta, the state
# before the chunk, and the gradient of the state behind it; of the first two, which are read until the end of a chunk
# or nearly so, there are two, so that those of the next chunk arrive meanwhile
OUTPUTS, KEYS, DELTA, STATE, DSTATE, GROUPS = (gl.constexpr(x) for x in (0, 2, 4, 5, 6, 7))
# the first tile of each
OUTPUT_TILES, KEY_TILES, DELTA_TILES, STATE_TILES, DSTATE_TILES, TILES = (
    gl.constexpr(x) for x in (0, 8, 16, 18, 22, 26)
)
ROWS = gl.constexpr(4)
"""Chunks whose numbers a position are in shared memory; the copies are less than three chunks ahead."""
LOG2E = gl.constexpr(1.4426950408889634)
LINE = gl.constexpr(gl.BlockedLayout([2], [32], [4], [0]))
"""The layout in which every warp has all positions."""


@gluon.jit
def place(i_c, i_own, num_t, H: gl.constexpr, ADDED: gl.constexpr):
    """Batch, head and chunk of the i_c-th chunk of ADDED heads and the i_own-th of these; all chunks of the same heads
    follow each other."""
    i_t, i_bg = i_c % num_t, i_c // num_t
    i_h = i_bg % (H // ADDED) * ADDED + i_own
    return (i_bg // (H // ADDED)).to(gl.int64), i_h.to(gl.int64), i_t.to(gl.int64)


@gluon.jit
def fill(s_tiles, tile, p, stride):
    """Begins to copy 64 rows of 128 columns to two tiles."""
    copy_rows(s_tiles.index(tile), p, stride)
    copy_rows(s_tiles.index(tile + 1), p + C, stride)


@gluon.jit
def numbers(
    beta, g, i_c, i_own, num_t, beta_stride_b, beta_stride_t, beta_stride_h, g_stride_b, g_stride_t, g_stride_h,
    H: gl.constexpr, ADDED: gl.constexpr,
):  # fmt: skip
    """The log-decays of a chunk, those of the positions behind, of which the last one has none in the chunk, and the
    betas; every warp has all positions."""
    o_c = gl.arange(0, C, LINE)
    i_b, i_h, i_t = place(i_c, i_own, num_t, H, ADDED)
    o_t = i_t * C + o_c
    p_g = g + i_b * g_stride_b + i_h * g_stride_h
    b_g = gl.load(p_g + o_t * g_stride_t)
    b_after = gl.load(p_g + (o_t + 1) * g_stride_t, mask=o_c < C - 1, other=0.0)
    b_beta = gl.load(beta + i_b * beta_stride_b + i_h * beta_stride_h + o_t * beta_stride_t)
    return b_g, b_after, b_beta


@gluon.jit
def add_halves(s_half, dbeta, dg, i, o_head, H: gl.constexpr):
    """Stores dbeta and dg of the i-th chunk of a program, which begins at o_head; each half of the keys has a part."""
    o_row = o_head + gl.arange(0, C, LINE) * H
    slot = (i & 1) * 4
    b_dbeta = s_half.index(slot).load(LINE) + s_half.index(slot + 1).load(LINE)
    gl.store(dbeta + o_row, b_dbeta.to(dbeta.dtype.element_ty))
    if dg is not None:
        b_dg = s_half.index(slot + 2).load(LINE) + s_half.index(slot + 3).load(LINE)
        gl.store(dg + o_row, b_dg.to(dg.dtype.element_ty))


@gluon.jit
def copier(
    s_tiles, s_prefix, s_suffix, s_beta, s_half, ready, free, rows_ready,
    q, k, beta, g, delta, do, dv, states, dstates, dbeta, dg, T, num_t, num_chunks,
    q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_t, k_stride_h, beta_stride_b, beta_stride_t, beta_stride_h,
    g_stride_b, g_stride_t, g_stride_h, do_stride_b, do_stride_t, do_stride_h,
    H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, GROUP: gl.constexpr, ADDED: gl.constexpr,
):  # fmt: skip
    """Copies what one chunk after the other needs, and stores the sums over keys of the chunk before."""
    step = gl.num_programs(0)
    first = gl.program_id(0)
    b_g, b_after, b_beta = numbers(
        beta, g, first, 0, num_t, beta_stride_b, beta_stride_t, beta_stride_h, g_stride_b, g_stride_t, g_stride_h,
        H, ADDED,
    )  # fmt: skip
    i = first * 0
    o_before = i.to(gl.int64)
    for i_c in range(first, num_chunks, step):
        for i_own in range(ADDED):
            i_b, i_h, i_t = place(i_c, i_own, num_t, H, ADDED)
            start = i_t * C
            o_head = (i_b * T + start) * H + i_h
            o_v = o_head * V
            o_state = ((i_b * H + i_h) * num_t + i_t) * (K * V)
            i_g = i_h // GROUP
            two, turn = i & 1, i >> 1
            p_do = do + i_b * do_stride_b + i_h * do_stride_h + start * do_stride_t
            p_k = k + i_b * k_stride_b + i_g * k_stride_h + start * k_stride_t
            p_q = q + i_b * q_stride_b + i_g * q_stride_h + start * q_stride_t
            mbarrier.wait(free.index(OUTPUTS + two), (turn & 1) ^ 1)
            fill(s_tiles, OUTPUT_TILES + two * 4, p_do, do_stride_t)
            fill(s_tiles, OUTPUT_TILES + two * 4 + 2, dv + o_v, H * V)
            async_copy.mbarrier_arrive(ready.index(OUTPUTS + two), increment_count=False)
            # both warp groups have read do and dv of the last chunk but one, and everything of the chunks before it
            s_prefix.index(i % ROWS).store(gl.associative_scan(at_least_lowest(b_g), 0, add))
            # a sum of its own, so that nothing is subtracted
            s_suffix.index(i % ROWS).store(gl.associative_scan(at_least_lowest(b_after), 0, add, reverse=True))
            s_beta.index(i % ROWS).store(b_beta.to(gl.float32))
            barrier_of_warps()
            mbarrier.arrive(rows_ready.index(i % ROWS), count=1)
            mbarrier.wait(free.index(KEYS + two), (turn & 1) ^ 1)
            fill(s_tiles, KEY_TILES + two * 4, p_k, k_stride_t)
            fill(s_tiles, KEY_TILES + two * 4 + 2, p_q, q_stride_t)
            async_copy.mbarrier_arrive(ready.index(KEYS + two), increment_count=False)
            mbarrier.wait(free.index(DELTA), (i & 1) ^ 1)
            fill(s_tiles, DELTA_TILES, delta + o_v, H * V)
            async_copy.mbarrier_arrive(ready.index(DELTA), increment_count=False)
            # the numbers of the next chunk arrive while the panels are awaited
            i_next = gl.minimum(i_c + (i_own + 1) // ADDED * step, num_chunks - 1)
            b_g, b_after, b_beta = numbers(
                beta, g, i_next, (i_own + 1) % ADDED, num_t, beta_stride_b, beta_stride_t, beta_stride_h, g_stride_b,
                g_stride_t, g_stride_h, H, ADDED,
            )  # fmt: skip
            mbarrier.wait(free.index(STATE), (i & 1) ^ 1)
            fill(s_tiles, STATE_TILES, states + o_state, K)
            fill(s_tiles, STATE_TILES + 2, states + o_state + C * K, K)
            async_copy.mbarrier_arrive(ready.index(STATE), increment_count=False)
            mbarrier.wait(free.index(DSTATE), (i & 1) ^ 1)
            fill(s_tiles, DSTATE_TILES, dstates + o_state, K)
            fill(s_tiles, DSTATE_TILES + 2, dstates + o_state + C * K, K)
            async_copy.mbarrier_arrive(ready.index(DSTATE), increment_count=False)
            # the memory of this tile was given back behind the sums
            if i > 0:
                add_halves(s_half, dbeta, dg, i - 1, o_before, H)
            o_before = o_head
            i += 1
    async_copy.wait_group(0)
    mbarrier.wait(free.index(DSTATE), (i & 1) ^ 1)
    add_halves(s_half, dbeta, dg, i - 1, o_before, H)


@gluon.jit
def half_of_keys(
    s_tiles, s_prefix, s_suffix, s_beta, s_half, ready, free, rows_ready, dq, dk, dg, sums, T, num_t, num_chunks, scale,
    PART: gl.constexpr, H: gl.constexpr, K: gl.constexpr, ADDED: gl.constexpr,
):  # fmt: skip
    """Gradients of keys 64 PART and on."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, ACC)
    COLUMN: gl.constexpr = gl.SliceLayout(0, ACC)
    # a thread has eight neighbouring columns of a row; rows stay in their warp
    OUT: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0], [0, 32]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 64],
    )
    o_i = gl.arange(0, C, ROW)
    o_l = gl.arange(0, C, COLUMN)
    o_row = gl.arange(0, C, gl.SliceLayout(1, OUT))
    o_column = gl.arange(0, C, gl.SliceLayout(0, OUT))
    o_out = o_row[:, None] * (H // ADDED * K) + o_column[None, :]
    zero = gl.zeros([C, C], gl.float32, ACC)
    i = gl.program_id(0) * 0
    for i_c in range(gl.program_id(0), num_chunks, gl.num_programs(0)):
        for i_own in range(ADDED):
            i_b, i_h, i_t = place(i_c, i_own, num_t, H, ADDED)
            two, turn = i & 1, (i >> 1) & 1
            # zeros, which no compiler knows, so that neither descriptors of tiles nor masks are kept in registers
            none = i >> 30
            s_do_0, s_do_1 = s_tiles.index(OUTPUT_TILES + two * 4), s_tiles.index(OUTPUT_TILES + two * 4 + 1)
            s_dv_0, s_dv_1 = s_tiles.index(OUTPUT_TILES + two * 4 + 2), s_tiles.index(OUTPUT_TILES + two * 4 + 3)
            s_k, s_q = s_tiles.index(KEY_TILES + two * 4 + PART), s_tiles.index(KEY_TILES + two * 4 + 2 + PART)
            s_delta_0, s_delta_1 = s_tiles.index(DELTA_TILES + none), s_tiles.index(DELTA_TILES + 1 + none)
            s_state_0, s_state_1 = (
                s_tiles.index(STATE_TILES + PART + none),
                s_tiles.index(STATE_TILES + 2 + PART + none),
            )
            # no other warp group reads these two, which are written below
            s_dstate_0, s_dstate_1 = (
                s_tiles.index(DSTATE_TILES + PART + none),
                s_tiles.index(DSTATE_TILES + 2 + PART + none),
            )
            # the products of all pairs of positions
            mbarrier.wait(ready.index(OUTPUTS + two), turn)
            mbarrier.wait(ready.index(KEYS + two), turn)
            mbarrier.wait(ready.index(DELTA), i & 1)
            fence_async_shared()
            b_da = warpgroup_mma(s_do_0, s_delta_0.permute((1, 0)), zero, use_acc=False, is_async=True)
            b_da = warpgroup_mma(s_do_1, s_delta_1.permute((1, 0)), b_da, is_async=True)
            b_dl = warpgroup_mma(s_dv_0, s_delta_0.permute((1, 0)), zero, use_acc=False, is_async=True)
            b_dl = warpgroup_mma(s_dv_1, s_delta_1.permute((1, 0)), b_dl, is_async=True)
            b_qk = warpgroup_mma(s_q, s_k.permute((1, 0)), zero, use_acc=False, is_async=True)
            b_kk = warpgroup_mma(s_k, s_k.permute((1, 0)), zero, use_acc=False, is_async=True)
            mbarrier.wait(rows_ready.index(i % ROWS), (i // ROWS) & 1)
            b_upto = s_prefix.index(i % ROWS).load(ROW) * LOG2E
            b_before = s_prefix.index(i % ROWS).load(COLUMN) * LOG2E
            b_behind = s_suffix.index(i % ROWS).load(ROW) * LOG2E
            b_by = s_beta.index(i % ROWS).load(COLUMN)
            b_beta = s_beta.index(i % ROWS).load(ROW)
            b_decays = gl.exp2(
                gl.where((o_i + none)[:, None] >= o_l[None, :], b_upto[:, None] - b_before[None, :], NOTHING)
            )
            b_da, b_dl, b_qk, b_kk = warpgroup_mma_wait(0, deps=(b_da, b_dl, b_qk, b_kk))
            b_da *= b_decays * scale
            b_dl *= gl.where((o_i + none)[:, None] > o_l[None, :], -b_decays, 0.0)
            b_pairs = b_da * b_qk + b_dl * b_kk
            # by rows, as all other sums over keys are, since a thread has few of them
            b_dbeta = gl.convert_layout(gl.sum(b_pairs, 0), ROW)
            # with the betas of the keys, which the gradients of keys need also
            b_net = gl.sum(b_pairs * b_by[None, :], 1) - b_beta * b_dbeta
            b_da16 = (b_da * b_by[None, :]).to(gl.bfloat16)
            b_dl16 = (b_dl * b_by[None, :]).to(gl.bfloat16)

            # the products with the gradient of the state, and the sum of its products with the state, which is a trace
            mbarrier.wait(ready.index(STATE), i & 1)
            mbarrier.wait(ready.index(DSTATE), i & 1)
            fence_async_shared()
            b_dw = warpgroup_mma(s_delta_0, s_dstate_0, zero, use_acc=False, is_async=True)
            b_dw = warpgroup_mma(s_delta_1, s_dstate_1, b_dw, is_async=True)
            if dg is not None:
                b_trace = warpgroup_mma(s_state_0.permute((1, 0)), s_dstate_0, zero, use_acc=False, is_async=True)
                b_trace = warpgroup_mma(s_state_1.permute((1, 0)), s_dstate_1, b_trace, is_async=True)
                b_dw, b_trace = warpgroup_mma_wait(0, deps=(b_dw, b_trace))
                b_decay = gl.exp2(s_prefix.index(i % ROWS).slice(C - 1, 1, 0).load(ROW) * LOG2E)
                b_through = gl.sum(gl.where((o_i + none)[:, None] == o_l[None, :], b_trace, 0.0), 1) * b_decay
            else:
                b_dw = warpgroup_mma_wait(0, deps=(b_dw,))
            b_out = gl.exp2(b_behind)
            b_written = gl.sum(s_k.load(ACC).to(gl.float32) * b_dw, 1) * b_out
            b_dk = b_dw * (b_beta * b_out)[:, None]
            # the products with the state, while the matrices of pairs are written
            b_dq = warpgroup_mma(s_do_0, s_state_0, zero, use_acc=False, is_async=True)
            b_dq = warpgroup_mma(s_do_1, s_state_1, b_dq, is_async=True)
            b_dr = warpgroup_mma(s_dv_0, s_state_0, zero, use_acc=False, is_async=True)
            b_dr = warpgroup_mma(s_dv_1, s_state_1, b_dr, is_async=True)
            barrier_of_warps()
            mbarrier.arrive(free.index(DELTA), count=1)
            s_dstate_0.store(b_da16)
            s_dstate_1.store(b_dl16)
            b_in = gl.exp2(b_upto)
            b_dq, b_dr = warpgroup_mma_wait(0, deps=(b_dq, b_dr))
            barrier_of_warps()
            mbarrier.arrive(free.index(OUTPUTS + two), count=1)
            mbarrier.arrive(free.index(STATE), count=1)
            if dg is not None:
                b_net += gl.sum(s_q.load(ACC).to(gl.float32) * b_dq, 1) * (b_in * scale)
                b_net -= gl.sum(s_k.load(ACC).to(gl.float32) * b_dr, 1) * b_in
            b_dq *= (b_in * scale)[:, None]
            b_dk -= b_dr * b_in[:, None]
            fence_async_shared()
            barrier_of_warps()
            b_dq = warpgroup_mma(gl.convert_layout(b_da16, LEFT), s_k, b_dq, is_async=True)
            b_dk = warpgroup_mma(gl.convert_layout(b_dl16, LEFT), s_k, b_dk, is_async=True)
            b_dk = warpgroup_mma(s_dstate_0.permute((1, 0)), s_q, b_dk, is_async=True)
            b_dk = warpgroup_mma(s_dstate_1.permute((1, 0)), s_k, b_dk, is_async=True)
            # sums over positions, while these products run
            s_half.index(two * 4 + PART).store(b_dbeta + b_written)
            if dg is not None:
                # the log-decay of a position moves what leaves for it from positions before, and what is read from it
                # on
                b_here = gl.convert_layout(b_net + b_through, LINE)
                b_leaving = gl.convert_layout(b_beta * b_written + b_through, LINE)
                b_dg = gl.associative_scan(b_here, 0, add, reverse=True)
                b_dg += gl.associative_scan(b_leaving, 0, add) - b_leaving
                s_half.index(two * 4 + 2 + PART).store(b_dg)
            b_dq, b_dk = warpgroup_mma_wait(0, deps=(b_dq, b_dk))
            barrier_of_warps()
            mbarrier.arrive(free.index(KEYS + two), count=1)
            mbarrier.arrive(free.index(DSTATE), count=1)
            if ADDED > 1:
                # a thread reads what it has written itself
                p_sum = sums + (gl.program_id(0) * 2 + PART) * (2 * C * C) + (o_i + none)[:, None] * C + o_l[None, :]
                if i_own > 0:
                    b_dq += gl.load(p_sum)
                    b_dk += gl.load(p_sum + C * C)
                if i_own < ADDED - 1:
                    gl.store(p_sum, b_dq)
                    gl.store(p_sum + C * C, b_dk)
            if i_own == ADDED - 1:
                o_grad = ((i_b * T + i_t * C) * (H // ADDED) + i_h // ADDED) * K + PART * C
                gl.store(dq + o_grad + o_out, gl.convert_layout(b_dq.to(dq.dtype.element_ty), OUT))
                gl.store(dk + o_grad + o_out, gl.convert_layout(b_dk.to(dk.dtype.element_ty), OUT))
            i += 1


@gluon.jit
def _hopper_grads_kernel(
    q, k, beta, g, delta, do, dv, states, dstates, dq, dk, dbeta, dg, sums,
    T, num_t, num_chunks, scale,
    q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_t, k_stride_h, beta_stride_b, beta_stride_t, beta_stride_h,
    g_stride_b, g_stride_t, g_stride_h, do_stride_b, do_stride_t, do_stride_h,
    H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, GROUP: gl.constexpr, ADDED: gl.constexpr,
):  # fmt: skip
    """dq, dk [B, T, H, K], and dbeta and dg, which are sums over channels, [B, T, H], as of `_row_grads_kernel`.

    The betas of keys are in the matrices of pairs, so that all of the gradient of a key is one sum.
    ADDED: GROUP, where dq and dk [B, T, H / GROUP, K] are sums over the heads that share keys, or 1.
    sums: [programs, 2, 2, C, C], float32, in which the two warp groups keep them from head to head.
    """
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
    s_tiles = gl.allocate_shared_memory(gl.bfloat16, [TILES, 64, 64], TILE)
    s_prefix = gl.allocate_shared_memory(gl.float32, [ROWS, 64], FLOATS)
    s_suffix = gl.allocate_shared_memory(gl.float32, [ROWS, 64], FLOATS)
    s_beta = gl.allocate_shared_memory(gl.float32, [ROWS, 64], FLOATS)
    # both halves of the keys store dbeta and dg here, of the chunk and of the one before
    s_half = gl.allocate_shared_memory(gl.float32, [8, 64], FLOATS)
    ready = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    rows_ready = gl.allocate_shared_memory(gl.int64, [ROWS, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(GROUPS):
        mbarrier.init(ready.index(n), count=COPY_WARPS * 32)
        mbarrier.init(free.index(n), count=2)
    for n in gl.static_range(ROWS):
        mbarrier.init(rows_ready.index(n), count=1)
    gl.warp_specialize(
        [
            (half_of_keys, (s_tiles, s_prefix, s_suffix, s_beta, s_half, ready, free, rows_ready, dq, dk, dg, sums, T,
                            num_t, num_chunks, scale, 0, H, K, ADDED)),
            (half_of_keys, (s_tiles, s_prefix, s_suffix, s_beta, s_half, ready, free, rows_ready, dq, dk, dg, sums, T,
                            num_t, num_chunks, scale, 1, H, K, ADDED)),
            (copier, (s_tiles, s_prefix, s_suffix, s_beta, s_half, ready, free, rows_ready, q, k, beta, g, delta, do,
                      dv, states, dstates, dbeta, dg, T, num_t, num_chunks, q_stride_b, q_stride_t, q_stride_h,
                      k_stride_b, k_stride_t, k_stride_h, beta_stride_b, beta_stride_t, beta_stride_h, g_stride_b,
                      g_stride_t, g_stride_h, do_stride_b, do_stride_t, do_stride_h, H, K, V, GROUP, ADDED)),
        ],
        [4, COPY_WARPS],
        # the registers of a thread that computes and of one that copies
        [232, 40],
    )  # fmt: skip


@planned
def _grads_plan(
    plan: Plan, programs: int, shape: tuple[int, ...], groups: int, value_dim: int, strides: PositionStrides
) -> LaunchPlan:
    batch, length, heads, key_dim = shape
    num_t = length // plan.chunk
    # with few chunks, the heads of a group keep more programs busy
    added = heads // groups if batch * groups * num_t >= 4 * programs else 1
    num_chunks = batch * heads // added * num_t
    return LaunchPlan(
        min(programs, num_chunks),
        T=length,
        num_t=num_t,
        num_chunks=num_chunks,
        scale=plan.scale,
        **strides.arguments("q k beta g do"),
        H=heads,
        K=key_dim,
        V=value_dim,
        GROUP=heads // groups,
        ADDED=added,
        num_warps=4,
    )


def hopper_grads(
    plan: Plan,
    *,
    q: Tensor,
    k: Tensor,
    beta: Tensor,
    g: Tensor,
    delta: Tensor,
    do: Tensor,
    dv: Tensor,
    states: Tensor,
    dstates: Tensor,
    needs_dg: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, beta and, where it is needed, of g; see `_hopper_grads_kernel`."""
    (batch, length, heads, value_dim), (*_, groups, key_dim) = do.shape, k.shape
    shape, strides = (batch, length, heads, key_dim), PositionStrides.of(q, k, beta, g, do)
    grads_plan = _grads_plan(plan, num_processors(q.device), shape, groups, value_dim, strides)
    added = grads_plan.named["ADDED"]
    # the gradients of heads that share q and k are float32 until they are added
    summed = heads // added == groups
    dq, dk = (
        x.new_empty((batch, length, heads // added, key_dim), dtype=x.dtype if summed else torch.float32)
        for x in (q, k)
    )
    dbeta, dg = beta.new_empty(beta.shape), g.new_empty(g.shape) if needs_dg else None
    sums = k.new_empty((grads_plan.axes[0], 2, 2, C, C), dtype=torch.float32) if added > 1 else None
    launch(
        _hopper_grads_kernel, grads_plan,
        q=q, k=k, beta=beta, g=g, delta=delta, do=do, dv=dv, states=states, dstates=dstates, dq=dq, dk=dk, dbeta=dbeta,
        dg=dg, sums=sums,
    )  # fmt: skip
    return dq, dk, dbeta, dg
