"""`_hopper_forward_kernel`: the whole forward pass in one kernel."""

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
    LONG,
    NOTHING,
    add,
    at_least_lowest,
    barrier_of_warps,
    copy_rows,
    cut_to_bfloat16,
    row_layout,
    seen_as,
    state_layout,
    two_terms,
)
from subquad.kernels.delta_rule.triton.plan import ChunkFactors, Plan
from subquad.kernels.gated_linear_attention.triton.plan import PositionStrides, planned
from subquad.kernels.launch import LaunchPlan, launch

CHUNK = 32
"""Positions in a chunk of the walks."""
NUM = gl.constexpr(4)
"""Chunks whose factors are computed side by side, each by a warp where it is inverted."""
VALUE_SLOTS = gl.constexpr(3)
"""Chunks of values in shared memory."""
BY_ROWS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
BY_TILES = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
_IN_A_TILE = [(0, 1), (0, 2), (0, 4), (0, 8), (0, 16), (1, 0), (2, 8), (4, 16), (8, 0), (16, 0)]
TILES = gl.constexpr(gl.SharedLinearLayout([*([0, i, j] for i, j in _IN_A_TILE), [1, 0, 0], [2, 0, 0]], [], 1024))
"""NUM tiles [32, 32] of bfloat16, each as `NVMMASharedLayout` puts it in memory (64 bytes of swizzle)."""


@gluon.jit
def copier(
    s_q, s_k, s_v, kq_ready, kq_free, v_ready, v_free, k, q, v, num_t, q_stride_t, k_stride_t, v_stride_t,
    SLOTS: gl.constexpr,
):  # fmt: skip
    """Copies queries and keys of chunk i, and values of chunk i - LAG, which are needed later."""
    C: gl.constexpr = s_k.shape[1]
    BV: gl.constexpr = s_v.shape[2]
    LAG: gl.constexpr = NUM + 1
    for i in range(num_t + LAG):
        if i < num_t:
            slot = i % SLOTS
            mbarrier.wait(kq_free.index(slot), ((i // SLOTS) & 1) ^ 1)
            start = (i * C).to(gl.int64)
            copy_rows(s_q.index(slot), q + start * q_stride_t, q_stride_t)
            copy_rows(s_k.index(slot), k + start * k_stride_t, k_stride_t)
            async_copy.mbarrier_arrive(kq_ready.index(slot), increment_count=False)
        i_v = i - LAG
        if i_v >= 0:
            slot = i_v % VALUE_SLOTS
            mbarrier.wait(v_free.index(slot), ((i_v // VALUE_SLOTS) & 1) ^ 1)
            p_v = v + (i_v * C).to(gl.int64) * v_stride_t
            copy_rows(s_v.index(slot * 2), p_v, v_stride_t)
            copy_rows(s_v.index(slot * 2 + 1), p_v + BV, v_stride_t)
            async_copy.mbarrier_arrive(v_ready.index(slot), increment_count=False)
    async_copy.wait_group(0)


@gluon.jit
def row_of(b_x, i, o_r):
    """Row i of b_x [NUM, R, C], whose columns are in one thread each, so that no number is moved or rounded."""
    b_bits = gl.where(o_r[:, None][None, :, :] == i, b_x.to(gl.int32, bitcast=True), 0)
    return gl.xor_sum(b_bits, 1).to(gl.float32, bitcast=True)


@gluon.constexpr_function
def half_rows(columns):
    """A left operand [64, columns] less every second group of 8 rows, so that a thread holds rows of both groups."""
    registers = [[0, 1]] + [[0, 1 << x] for x in range(3, 10) if 1 << x < columns]
    lanes = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[8, 0], [16, 0]], [], [32, columns])


@gluon.jit
def factorizer(
    s_q, s_k, s_scores, s_inverse, s_low, s_in, s_out, s_system, s_prefix, s_beta, kq_ready, fac_ready, fac_free,
    g, beta, inverse, inverse_low, scores, row_in, row_out,
    num_t, scale, g_stride_t, beta_stride_t, H: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Computes scores, inverses and decays of NUM chunks after NUM chunks, as `_factors_kernel` defines them.

    The inverse is that of a substitution in float32, row after row: a warp has a chunk, and a thread a column of it.
    """
    C: gl.constexpr = s_k.shape[1]
    K: gl.constexpr = s_k.shape[2]
    HALF: gl.constexpr = C // 2
    MM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    A_MM: gl.constexpr = gl.DotOperandLayout(0, MM, 2)
    L_K: gl.constexpr = half_rows(K)
    L_C: gl.constexpr = half_rows(C)
    CHUNKS: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    COLUMNS: gl.constexpr = gl.BlockedLayout([1, HALF, 1], [1, 1, 32], [4, 1, 1], [1, 2, 0])
    OUT: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 8, 4], [4, 1, 1], [2, 1, 0])
    o_n = gl.arange(0, NUM, gl.SliceLayout(1, CHUNKS))
    o_c = gl.arange(0, C, gl.SliceLayout(0, CHUNKS))
    o_i = gl.arange(0, C, gl.SliceLayout(1, L_C))
    o_j = gl.arange(0, C, gl.SliceLayout(0, L_C))
    o_r = gl.arange(0, HALF, gl.SliceLayout(1, gl.SliceLayout(0, COLUMNS)))
    o_x = gl.arange(0, C, gl.SliceLayout(0, gl.SliceLayout(0, COLUMNS)))
    m_past = o_i[:, None] >= o_j[None, :]
    m_before = o_i[:, None] > o_j[None, :]
    zero = gl.zeros([2 * C, C], gl.float32, MM)
    r_system = seen_as(s_system, gl.float32, [C, NUM, C], BY_ROWS)
    r_prefix = seen_as(s_prefix, gl.float32, [NUM, C], FLOATS)
    r_beta = seen_as(s_beta, gl.float32, [NUM, C], FLOATS)
    o_t = o_n[:, None] * C + o_c[None, :]
    m_after = (o_c < C - 1)[None, :] & (o_t >= 0)
    b_g = gl.load(g + o_t * g_stride_t)
    b_after = gl.load(g + (o_t + 1) * g_stride_t, mask=m_after, other=0.0)
    b_beta = gl.load(beta + o_t * beta_stride_t)
    if inverse is not None:
        o_out_n = gl.arange(0, NUM, gl.SliceLayout(1, gl.SliceLayout(2, OUT)))
        o_out_i = gl.arange(0, C, gl.SliceLayout(0, gl.SliceLayout(2, OUT)))
        o_out_j = gl.arange(0, C, gl.SliceLayout(0, gl.SliceLayout(0, OUT)))
        o_rows = gl.expand_dims(o_out_n[:, None] * C + o_out_i[None, :], 2) * (H * C) + o_out_j[None, :][None, :, :]
        w_scores = seen_as(s_scores, gl.bfloat16, [2, NUM, C, C], TILES)
    for i_g in range(num_t // NUM):
        half = i_g & 1
        b_prefix = gl.associative_scan(at_least_lowest(b_g), 1, add)
        # a sum of its own, so that nothing is subtracted
        b_suffix = gl.associative_scan(at_least_lowest(b_after), 1, add, reverse=True)
        b_weight = b_beta.to(gl.float32)
        mbarrier.wait(fac_free.index(half), ((i_g >> 1) & 1) ^ 1)
        b_in = gl.exp(b_prefix)
        b_out = b_weight * gl.exp(b_suffix)
        s_in.index(half).store(b_in)
        s_out.index(half).store(b_out)
        s_prefix.store(b_prefix)
        s_beta.store(b_weight)
        if i_g + 1 < num_t // NUM:
            # loaded for the next chunks, so that nothing waits for it
            start = ((i_g + 1) * (NUM * C)).to(gl.int64)
            p_g = g + start * g_stride_t
            b_g = gl.load(p_g + o_t * g_stride_t)
            b_after = gl.load(p_g + (o_t + 1) * g_stride_t, mask=m_after, other=0.0)
            b_beta = gl.load(beta + start * beta_stride_t + o_t * beta_stride_t)
        for n in gl.static_range(NUM):
            i = i_g * NUM + n
            slot = i % SLOTS
            mbarrier.wait(kq_ready.index(slot), (i // SLOTS) & 1)
            # groups of 8 rows of queries and of keys in turn, so that a thread gets scores and system of the same pairs
            b_left = gl.join(s_q.index(slot).load(L_K), s_k.index(slot).load(L_K))
            b_left = b_left.reshape([C // 8, 8, K, 2]).permute([0, 3, 1, 2]).reshape([2 * C, K])
            b_left = gl.convert_layout(b_left, A_MM)
            b_both = warpgroup_mma(b_left, s_k.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
            b_rows = r_prefix.index(n).load(gl.SliceLayout(1, L_C))
            b_columns = r_prefix.index(n).load(gl.SliceLayout(0, L_C))
            b_by = r_beta.index(n).load(gl.SliceLayout(0, L_C))
            b_factor = gl.exp(gl.where(m_past, b_rows[:, None] - b_columns[None, :], NOTHING)) * b_by[None, :]
            b_both = warpgroup_mma_wait(0, deps=(b_both,))
            b_scores, b_system = gl.split(b_both.reshape([C // 8, 2, 8, C]).permute([0, 2, 3, 1]))
            b_scores = gl.convert_layout(b_scores.reshape([C, C]), L_C)
            b_system = gl.convert_layout(b_system.reshape([C, C]), L_C)
            b_scores *= b_factor * scale
            b_system = gl.where(m_before, b_system * b_factor, 0.0)
            s_scores.index(half * NUM + n).store(b_scores.to(gl.bfloat16))
            s_system.slice(n, 1, 1).store(b_system.permute([1, 0]).reshape([C, 1, C]))
        # the two halves of the rows, of which the upper one is finished after half of the steps
        m_top = (o_r[:, None] == o_x[None, :])[None, :, :]
        m_bottom = (o_r[:, None] + HALF == o_x[None, :])[None, :, :]
        b_top = gl.zeros([NUM, HALF, C], gl.float32, COLUMNS) + gl.where(m_top, 1.0, 0.0)
        b_bottom = gl.zeros([NUM, HALF, C], gl.float32, COLUMNS) + gl.where(m_bottom, 1.0, 0.0)
        for i in gl.static_range(C):
            b_column = r_system.index(i).slice(HALF, HALF, 1).load(gl.SliceLayout(2, COLUMNS))
            if i < HALF:
                b_row = gl.expand_dims(row_of(b_top, i, o_r), 1)
                b_upper = r_system.index(i).slice(0, HALF, 1).load(gl.SliceLayout(2, COLUMNS))
                b_top -= gl.expand_dims(b_upper, 2) * b_row
            else:
                b_row = gl.expand_dims(row_of(b_bottom, i - HALF, o_r), 1)
            b_bottom -= gl.expand_dims(b_column, 2) * b_row
        b_top = gl.where(m_top, 0.0, b_top)
        b_bottom = gl.where(m_bottom, 0.0, b_bottom)
        b_less = gl.join(b_top, b_bottom).permute([0, 3, 1, 2]).reshape([NUM, C, C])
        b_high = cut_to_bfloat16(b_less)
        s_inverse.index(half).store(b_high.to(gl.bfloat16))
        s_low.index(half).store((b_less - b_high).to(gl.bfloat16))
        # the products of the walkers read what these warps have stored
        fence_async_shared()
        barrier_of_warps()
        mbarrier.arrive(fac_ready.index(half), count=1)
        if inverse is not None:
            first = (i_g * (NUM * C)).to(gl.int64)
            gl.store(row_in + first + o_t, b_in)
            gl.store(row_out + first + o_t, b_out)
            gl.store(inverse + first * (H * C) + o_rows, s_inverse.index(half).load(OUT))
            gl.store(inverse_low + first * (H * C) + o_rows, s_low.index(half).load(OUT))
            gl.store(scores + first * (H * C) + o_rows, w_scores.index(half).load(OUT))


@gluon.jit
def walker(
    s_q, s_k, s_v, s_scores, s_inverse, s_low, s_in, s_out, kq_ready, kq_free, v_ready, v_free, fac_ready, fac_free,
    o, delta, states, num_t, scale, PART: gl.constexpr, H: gl.constexpr, V: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Walks over the chunks with the state [K, BV] of the values PART * BV and on, as `_walk_kernel` does."""
    C: gl.constexpr = s_scores.shape[1]
    K: gl.constexpr = s_k.shape[2]
    BV: gl.constexpr = s_v.shape[2]
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [BV // 16, 1], [16, K, 16])
    NARROW: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [BV // 16, 1], [16, C, 16])
    A_WIDE: gl.constexpr = gl.DotOperandLayout(0, WIDE, 2)
    A_NARROW: gl.constexpr = gl.DotOperandLayout(0, NARROW, 2)
    ROWS: gl.constexpr = row_layout(C, BV)
    STATE: gl.constexpr = state_layout(BV, K)
    COLUMN: gl.constexpr = gl.SliceLayout(0, NARROW)
    b_state = gl.zeros([BV, K], gl.float32, WIDE)
    zero = gl.zeros([BV, C], gl.float32, NARROW)
    o_v = PART * BV + gl.arange(0, BV, gl.SliceLayout(1, ROWS))
    o_c = gl.arange(0, C, gl.SliceLayout(0, ROWS))
    o_rows = o_v[:, None] + (o_c * (H * V))[None, :]
    o_state_v = PART * BV + gl.arange(0, BV, gl.SliceLayout(1, STATE))
    o_k = gl.arange(0, K, gl.SliceLayout(0, STATE))
    o_state = (o_state_v * K)[:, None] + o_k[None, :]
    for i in range(num_t):
        slot = i % SLOTS
        v_slot = i % VALUE_SLOTS
        f_slot = i % (2 * NUM)
        half = (i // NUM) & 1
        s_key = s_k.index(slot)
        b_left16 = b_state.to(gl.bfloat16)
        b_left = gl.convert_layout(b_left16, A_NARROW)
        mbarrier.wait(kq_ready.index(slot), (i // SLOTS) & 1)
        b_held = warpgroup_mma(b_left, s_key.permute((1, 0)), zero, use_acc=False, is_async=True)
        b_o = warpgroup_mma(b_left, s_q.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
        if states is not None:  # noqa: SIM102 (Triton decides this condition when it compiles)
            if i % LONG == 0:
                gl.store(states + i // LONG * (K * V) + o_state, gl.convert_layout(b_left16, STATE))
        mbarrier.wait(v_ready.index(v_slot), (i // VALUE_SLOTS) & 1)
        b_v = s_v.index(v_slot * 2 + PART).permute((1, 0)).load(NARROW).to(gl.float32)
        mbarrier.wait(fac_ready.index(half), (i // (2 * NUM)) & 1)
        b_in = s_in.index(f_slot).load(COLUMN)
        b_decay = s_in.index(f_slot).slice(C - 1, 1, 0).load(gl.SliceLayout(0, WIDE))
        # the scores of queries are not waited for; the state is named because the products read it
        b_held, b_state = warpgroup_mma_wait(1, deps=(b_held, b_state))
        b_rest = b_v - b_held * b_in[None, :]
        b_high, b_low = two_terms(b_rest, A_NARROW)
        s_right = s_inverse.index(f_slot).permute((1, 0))
        b_delta = warpgroup_mma(b_high, s_right, b_rest, is_async=True)
        b_delta = warpgroup_mma(b_low, s_right, b_delta, is_async=True)
        b_delta = warpgroup_mma(b_high, s_low.index(f_slot).permute((1, 0)), b_delta, is_async=True)
        b_state *= b_decay[None, :]
        b_delta, b_o = warpgroup_mma_wait(0, deps=(b_delta, b_o))
        b_new16 = b_delta.to(gl.bfloat16)
        b_new = gl.convert_layout(b_new16, A_NARROW)
        b_delta *= s_out.index(f_slot).load(COLUMN)[None, :]
        b_high, b_low = two_terms(b_delta, A_WIDE)
        b_next = warpgroup_mma(b_high, s_key, b_state, is_async=True)
        b_next = warpgroup_mma(b_low, s_key, b_next, is_async=True)
        b_o *= (s_in.index(f_slot).load(COLUMN) * scale)[None, :]
        b_o = warpgroup_mma(b_new, s_scores.index(f_slot).permute((1, 0)), b_o, is_async=True)
        p_start = (i * C).to(gl.int64) * (H * V)
        if delta is not None:
            gl.store(delta + p_start + o_rows, gl.convert_layout(b_new16, ROWS))
        b_state, b_o = warpgroup_mma_wait(0, deps=(b_next, b_o))
        mbarrier.arrive(kq_free.index(slot), count=1)
        mbarrier.arrive(v_free.index(v_slot), count=1)
        mbarrier.arrive(fac_free.index(half), count=1, pred=i % NUM == NUM - 1)
        gl.store(o + p_start + o_rows, gl.convert_layout(b_o.to(gl.bfloat16), ROWS))


@gluon.jit
def _hopper_forward_kernel(
    q, k, v, g, beta, o, delta, states, inverse, inverse_low, scores, row_in, row_out,
    T, num_t, scale,
    q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_t, k_stride_h, v_stride_b, v_stride_t, v_stride_h,
    g_stride_b, g_stride_t, g_stride_h, beta_stride_b, beta_stride_t, beta_stride_h,
    H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, GROUP: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """`_factors_kernel` and `_walk_kernel` for one head a program, in warps of their own (README.md, "On Hopper").

    Results behind o are written where they are given: what a position writes [B, T, H, V], the states before every
    LONG-th chunk, and the factors of all chunks.
    SLOTS chunks of queries and keys have room in shared memory.
    """
    BV: gl.constexpr = V // 2
    i_bh = gl.program_id(0)
    i_b, i_h = (i_bh // H).to(gl.int64), (i_bh % H).to(gl.int64)
    S_K: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, K], gl.bfloat16)
    S_V: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BV], gl.bfloat16)
    S_C: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], gl.bfloat16)
    s_q = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, C, K], S_K)
    s_k = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, C, K], S_K)
    s_v = gl.allocate_shared_memory(gl.bfloat16, [VALUE_SLOTS * 2, C, BV], S_V)
    s_scores = gl.allocate_shared_memory(gl.bfloat16, [2 * NUM, C, C], S_C)
    s_inverse = gl.allocate_shared_memory(gl.bfloat16, [2 * NUM, C, C], S_C)
    s_low = gl.allocate_shared_memory(gl.bfloat16, [2 * NUM, C, C], S_C)
    s_system = gl.allocate_shared_memory(gl.float32, [C, NUM, C], BY_TILES)
    s_in = gl.allocate_shared_memory(gl.float32, [2 * NUM, C], FLOATS)
    s_out = gl.allocate_shared_memory(gl.float32, [2 * NUM, C], FLOATS)
    s_prefix = gl.allocate_shared_memory(gl.float32, [NUM, C], BY_ROWS)
    s_beta = gl.allocate_shared_memory(gl.float32, [NUM, C], BY_ROWS)
    kq_ready = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    kq_free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [VALUE_SLOTS, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [VALUE_SLOTS, 1], mbarrier.MBarrierLayout())
    fac_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    fac_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    # every thread that copies arrives for itself, and every walker once
    for i in gl.static_range(SLOTS):
        mbarrier.init(kq_ready.index(i), count=COPY_WARPS * 32)
        mbarrier.init(kq_free.index(i), count=2)
    for i in gl.static_range(VALUE_SLOTS):
        mbarrier.init(v_ready.index(i), count=COPY_WARPS * 32)
        mbarrier.init(v_free.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(fac_ready.index(i), count=1)
        mbarrier.init(fac_free.index(i), count=2)
    q += i_b * q_stride_b + i_h // GROUP * q_stride_h
    k += i_b * k_stride_b + i_h // GROUP * k_stride_h
    v += i_b * v_stride_b + i_h * v_stride_h
    g += i_b * g_stride_b + i_h * g_stride_h
    beta += i_b * beta_stride_b + i_h * beta_stride_h
    o_head = i_b * T * H + i_h
    o_row = i_bh.to(gl.int64) * T
    o += o_head * V
    if delta is not None:
        delta += o_head * V
        states += i_bh.to(gl.int64) * (num_t // LONG) * (K * V)
        inverse += o_head * C
        inverse_low += o_head * C
        scores += o_head * C
        row_in += o_row
        row_out += o_row
    # NUM chunks side by side, as their factors are written
    w_inverse = seen_as(s_inverse, gl.bfloat16, [2, NUM, C, C], TILES)
    w_low = seen_as(s_low, gl.bfloat16, [2, NUM, C, C], TILES)
    w_in = seen_as(s_in, gl.float32, [2, NUM, C], BY_ROWS)
    w_out = seen_as(s_out, gl.float32, [2, NUM, C], BY_ROWS)
    gl.warp_specialize(
        [
            (walker, (s_q, s_k, s_v, s_scores, s_inverse, s_low, s_in, s_out, kq_ready, kq_free, v_ready, v_free,
                      fac_ready, fac_free, o, delta, states, num_t, scale, 0, H, V, SLOTS)),
            (walker, (s_q, s_k, s_v, s_scores, s_inverse, s_low, s_in, s_out, kq_ready, kq_free, v_ready, v_free,
                      fac_ready, fac_free, o, delta, states, num_t, scale, 1, H, V, SLOTS)),
            (factorizer, (s_q, s_k, s_scores, w_inverse, w_low, w_in, w_out, s_system, s_prefix, s_beta, kq_ready,
                          fac_ready, fac_free, g, beta, inverse, inverse_low, scores, row_in, row_out, num_t, scale,
                          g_stride_t, beta_stride_t, H, SLOTS)),
            (copier, (s_q, s_k, s_v, kq_ready, kq_free, v_ready, v_free, k, q, v, num_t, q_stride_t, k_stride_t,
                      v_stride_t, SLOTS)),
        ],
        [4, 4, COPY_WARPS],
        # the registers of a thread of each of them, of which four warps of every kind share 64 k
        [176, 128, 32],
    )  # fmt: skip


@planned
def _forward_plan(
    plan: Plan, shape: tuple[int, ...], groups: int, value_dim: int, strides: PositionStrides, keep: bool
) -> LaunchPlan:
    batch, length, heads, key_dim = shape
    return LaunchPlan(
        batch * heads,
        T=length,
        num_t=length // CHUNK,
        scale=plan.scale,
        **strides.arguments("q k v g beta"),
        H=heads,
        K=key_dim,
        V=value_dim,
        C=CHUNK,
        GROUP=heads // groups,
        # the results that a backward pass reads change their layout in shared memory, which takes the room of one slot
        SLOTS=7 if keep else 8,
        num_warps=4,
    )


def hopper_forward(
    plan: Plan, *, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, keep: bool
) -> tuple[Tensor, Tensor | None, Tensor | None, ChunkFactors | None]:
    """o, and for a backward pass, which `keep` asks for, delta, the states before the chunks of the plan, and what
    `hopper_back` reads of the factors of chunks of CHUNK positions.
    """
    (batch, length, heads, value_dim), (*_, groups, key_dim) = v.shape, k.shape
    o = v.new_empty(v.shape)
    delta = states = factors = None
    if keep:
        delta = v.new_empty(v.shape)
        states = v.new_empty((batch, heads, length // plan.chunk, value_dim, key_dim))
        inverse, inverse_low, scores = (v.new_empty((batch, length, heads, CHUNK)) for _ in range(3))
        row_in, row_out = (v.new_empty((batch, heads, length), dtype=torch.float32) for _ in range(2))
        factors = ChunkFactors(inverse, inverse_low, scores, None, row_in, row_out, *[None] * 7)
    names = "inverse", "inverse_low", "scores", "row_in", "row_out"
    launch(
        _hopper_forward_kernel,
        _forward_plan(
            plan, (batch, length, heads, key_dim), groups, value_dim, PositionStrides.of(q, k, v, g, beta), keep
        ),
        q=q, k=k, v=v, g=g, beta=beta, o=o, delta=delta, states=states,
        **{name: None if factors is None else getattr(factors, name) for name in names},
    )  # fmt: skip
    return o, delta, states, factors
