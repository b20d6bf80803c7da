"""`_hopper_back_kernel`: `_back_kernel` in warps that copy and warps that compute."""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from subquad.kernels.delta_rule.triton.hopper.tiles import (
    COPY_WARPS,
    FLOATS,
    LONG,
    copy_rows,
    copy_to_shared,
    first_state,
    row_layout,
    state_layout,
    store_last,
    two_terms,
)
from subquad.kernels.delta_rule.triton.plan import ChunkFactors, Plan
from subquad.kernels.delta_rule.triton.segments import Segments
from subquad.kernels.gated_linear_attention.triton.plan import EndStates, PositionStrides, planned
from subquad.kernels.launch import LaunchPlan, launch

STAGES = gl.constexpr(6)
"""Chunks in shared memory."""


@gluon.jit
def copier(
    s_k, s_q, s_do, s_inverse, s_low, s_scores, s_in, s_out, ready, free,
    k, q, do, inverse, inverse_low, scores, row_in, row_out, begin, stop, q_stride_t, k_stride_t, do_stride_t,
    H: gl.constexpr,
):  # fmt: skip
    """Copies one chunk after the other, from the last on, as soon as both walkers have read what was in its place."""
    C: gl.constexpr = s_k.shape[1]
    BV: gl.constexpr = s_do.shape[2]
    ROW: gl.constexpr = gl.BlockedLayout([4], [32], [COPY_WARPS], [0])
    o_c = gl.arange(0, C, ROW)
    for i in range(stop - begin):
        stage = i % STAGES
        mbarrier.wait(free.index(stage), ((i // STAGES) & 1) ^ 1)
        start = ((stop - 1 - i) * C).to(gl.int64)
        copy_rows(s_k.index(stage), k + start * k_stride_t, k_stride_t)
        copy_rows(s_do.index(stage * 2), do + start * do_stride_t, do_stride_t)
        copy_rows(s_do.index(stage * 2 + 1), do + start * do_stride_t + BV, do_stride_t)
        copy_rows(s_inverse.index(stage), inverse + start * (H * C), H * C)
        copy_rows(s_low.index(stage), inverse_low + start * (H * C), H * C)
        copy_to_shared(s_in.index(stage), row_in + start + o_c)
        copy_to_shared(s_out.index(stage), row_out + start + o_c)
        copy_rows(s_q.index(stage), q + start * q_stride_t, q_stride_t)
        copy_rows(s_scores.index(stage), scores + start * (H * C), H * C)
        async_copy.mbarrier_arrive(ready.index(stage), increment_count=False)
    async_copy.wait_group(0)


@gluon.jit
def walker(
    s_k, s_q, s_do, s_inverse, s_low, s_scores, s_in, s_out, ready, free, row_in, dv, dstates, ends, first, last,
    i_bh, num_bh, begin, stop, scale, HALF: gl.constexpr, H: gl.constexpr, V: gl.constexpr,
):  # fmt: skip
    """Walks back with the gradient of the state [K, BV] of the values HALF * BV and on, as `_back_kernel` does."""
    C: gl.constexpr = s_k.shape[1]
    K: gl.constexpr = s_k.shape[2]
    BV: gl.constexpr = s_do.shape[2]
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [BV // 16, 1], [16, K, 16])
    NARROW: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [BV // 16, 1], [16, C, 16])
    A_WIDE: gl.constexpr = gl.DotOperandLayout(0, WIDE, 2)
    A_NARROW: gl.constexpr = gl.DotOperandLayout(0, NARROW, 2)
    ROWS: gl.constexpr = row_layout(C, BV)
    STATE: gl.constexpr = state_layout(BV, K)
    COLUMN: gl.constexpr = gl.SliceLayout(0, NARROW)
    i_segment = gl.program_id(1)
    b_dstate = first_state(first, ends, HALF, i_bh, i_segment, num_bh, K, V, BV, WIDE)
    zero = gl.zeros([BV, C], gl.float32, NARROW)
    # the decay over a chunk is that of its last position
    b_next_decay = gl.load(row_in + stop * C - 1)
    o_v = HALF * BV + gl.arange(0, BV, gl.SliceLayout(1, ROWS))
    o_c = gl.arange(0, C, gl.SliceLayout(0, ROWS))
    o_rows = o_v[:, None] + (o_c * (H * V))[None, :]
    o_state_v = HALF * BV + gl.arange(0, BV, gl.SliceLayout(1, STATE))
    o_k = gl.arange(0, K, gl.SliceLayout(0, STATE))
    o_state = (o_state_v * K)[:, None] + o_k[None, :]
    for i in range(stop - begin):
        stage = i % STAGES
        i_t = stop - 1 - i
        b_decay = b_next_decay
        b_next_decay = gl.load(row_in + gl.maximum(i_t * C - 1, 0))
        b_left16 = b_dstate.to(gl.bfloat16)
        b_left = gl.convert_layout(b_left16, A_NARROW)
        mbarrier.wait(ready.index(stage), (i // STAGES) & 1)
        b_held = warpgroup_mma(b_left, s_k.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        b_do16 = s_do.index(stage * 2 + HALF).permute((1, 0)).load(NARROW)
        b_do = gl.convert_layout(b_do16, A_NARROW)
        b_own = warpgroup_mma(b_do, s_scores.index(stage), zero, use_acc=False, is_async=True)
        if i_t % LONG == LONG - 1:
            gl.store(dstates + (i_t // LONG).to(gl.int64) * (K * V) + o_state, gl.convert_layout(b_left16, STATE))
        b_held, b_own, b_dstate = warpgroup_mma_wait(0, deps=(b_held, b_own, b_dstate))
        b_rest = b_own + b_held * s_out.index(stage).load(COLUMN)[None, :]
        b_high, b_low = two_terms(b_rest, A_NARROW)
        b_dv = warpgroup_mma(b_high, s_inverse.index(stage), b_rest, is_async=True)
        b_dv = warpgroup_mma(b_low, s_inverse.index(stage), b_dv, is_async=True)
        b_dv = warpgroup_mma(b_high, s_low.index(stage), b_dv, is_async=True)
        # these products with the gradients of outputs wait for no other one
        b_dstate *= b_decay
        b_scaled = b_do16.to(gl.float32) * (s_in.index(stage).load(COLUMN) * scale)[None, :]
        b_high, b_low = two_terms(b_scaled, A_WIDE)
        b_next = warpgroup_mma(b_high, s_q.index(stage), b_dstate, is_async=True)
        b_next = warpgroup_mma(b_low, s_q.index(stage), b_next, is_async=True)
        b_dv = warpgroup_mma_wait(2, deps=(b_dv,))
        b_new16 = b_dv.to(gl.bfloat16)
        b_scaled = -b_dv * s_in.index(stage).load(COLUMN)[None, :]
        b_high, b_low = two_terms(b_scaled, A_WIDE)
        b_next = warpgroup_mma(b_high, s_k.index(stage), b_next, is_async=True)
        b_next = warpgroup_mma(b_low, s_k.index(stage), b_next, is_async=True)
        gl.store(dv + (i_t * C).to(gl.int64) * (H * V) + o_rows, gl.convert_layout(b_new16, ROWS))
        b_dstate = warpgroup_mma_wait(0, deps=(b_next,))
        mbarrier.arrive(free.index(stage), count=1)
    if last is not None:
        store_last(last, b_dstate, HALF, i_bh, i_segment, K, V, BV, WIDE)


@gluon.jit
def _hopper_back_kernel(
    q, k, do, inverse, inverse_low, scores, row_in, row_out, dv, dstates, ends, first, last,
    T, num_t, scale, num_walked,
    q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_t, k_stride_h, do_stride_b, do_stride_t, do_stride_h,
    H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """`_back_kernel` for one segment of a head: two walkers with half of the values each, and warps that copy.

    The arguments are those of that kernel; dM is written behind every LONG-th chunk.
    """
    BV: gl.constexpr = V // 2
    i_bh, num_bh = gl.program_id(0).to(gl.int64), gl.num_programs(0).to(gl.int64)
    i_b, i_h = i_bh // H, i_bh % H
    # the segments are those of the walk, of which the last one may be shorter
    begin = (gl.num_programs(1) - 1 - gl.program_id(1)) * num_walked
    stop = gl.minimum(begin + num_walked, num_t)
    S_K: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, K], gl.bfloat16)
    S_V: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BV], gl.bfloat16)
    S_C: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], gl.bfloat16)
    s_k = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, K], S_K)
    s_q = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, K], S_K)
    s_do = gl.allocate_shared_memory(gl.bfloat16, [STAGES * 2, C, BV], S_V)
    s_inverse = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, C], S_C)
    s_low = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, C], S_C)
    s_scores = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, C], S_C)
    s_in = gl.allocate_shared_memory(gl.float32, [STAGES, C], FLOATS)
    s_out = gl.allocate_shared_memory(gl.float32, [STAGES, C], FLOATS)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    # every thread that copies arrives for itself, and every walker once
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=COPY_WARPS * 32)
        mbarrier.init(free.index(i), count=2)
    q += i_b * q_stride_b + i_h // GROUP * q_stride_h
    k += i_b * k_stride_b + i_h // GROUP * k_stride_h
    do += i_b * do_stride_b + i_h * do_stride_h
    o_head = i_b * T * H + i_h
    inverse += o_head * C
    inverse_low += o_head * C
    scores += o_head * C
    row_in += i_bh * T
    row_out += i_bh * T
    dv += o_head * V
    dstates += i_bh * (num_t // LONG) * (K * V)
    gl.warp_specialize(
        [
            (walker, (s_k, s_q, s_do, s_inverse, s_low, s_scores, s_in, s_out, ready, free, row_in, dv, dstates, ends,
                      first, last, i_bh, num_bh, begin, stop, scale, 0, H, V)),
            (walker, (s_k, s_q, s_do, s_inverse, s_low, s_scores, s_in, s_out, ready, free, row_in, dv, dstates, ends,
                      first, last, i_bh, num_bh, begin, stop, scale, 1, H, V)),
            (copier, (s_k, s_q, s_do, s_inverse, s_low, s_scores, s_in, s_out, ready, free, k, q, do, inverse,
                      inverse_low, scores, row_in, row_out, begin, stop, q_stride_t, k_stride_t, do_stride_t, H)),
        ],
        [4, COPY_WARPS],
        # the registers of a thread that walks and of one that copies
        [232, 40],
    )  # fmt: skip


@planned
def _back_plan(
    plan: Plan, shape: tuple[int, ...], groups: int, value_dim: int, strides: PositionStrides, segments: Segments
) -> LaunchPlan:
    batch, length, heads, key_dim = shape
    return LaunchPlan(
        (batch * heads, segments.count),
        T=length,
        num_t=length // plan.chunk,
        scale=plan.scale,
        num_walked=segments.num_walked,
        **strides.arguments("q k do"),
        H=heads,
        K=key_dim,
        V=value_dim,
        C=plan.chunk,
        GROUP=heads // groups,
        num_warps=4,
    )


def hopper_back(
    plan: Plan,
    *,
    q: Tensor,
    k: Tensor,
    do: Tensor,
    factors: ChunkFactors,
    dv: Tensor,
    dstates: Tensor,
    ends: Tensor | None,
    boundary: EndStates,
    segments: Segments,
) -> None:
    """Writes dv, the gradients of the states behind every LONG-th chunk of the plan, and that of the initial state by a
    walk over all of time or from the gradients `ends` at the ends of segments; see `_hopper_back_kernel`."""
    (batch, length, heads, value_dim), (*_, groups, key_dim) = do.shape, k.shape
    first, last = boundary
    launch(
        _hopper_back_kernel,
        _back_plan(plan, (batch, length, heads, key_dim), groups, value_dim, PositionStrides.of(q, k, do), segments),
        q=q, k=k, do=do, inverse=factors.inverse, inverse_low=factors.inverse_low, scores=factors.scores,
        row_in=factors.row_in, row_out=factors.row_out, dv=dv, dstates=dstates, ends=ends, first=first, last=last,
    )  # fmt: skip
