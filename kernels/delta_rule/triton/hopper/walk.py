"""`_hopper_walk_kernel`: `_walk_kernel` with copies several chunks ahead, for any number of heads."""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

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

VALUES = 64
"""Values of a program, whose four warps also copy."""
STAGES = gl.constexpr(4)
"""Chunks in shared memory."""


@gluon.jit
def copy_chunk(
    s_k, s_q, s_v, s_inverse, s_low, s_scores, s_in, s_out, k, q, v, inverse, inverse_low, scores, row_in, row_out,
    i, stage, q_stride_t, k_stride_t, v_stride_t, H: gl.constexpr,
):  # fmt: skip
    """Begins to copy chunk i, what is needed first before the rest."""
    C: gl.constexpr = s_k.shape[1]
    ROW: gl.constexpr = gl.BlockedLayout([4], [32], [COPY_WARPS], [0])
    o_c = gl.arange(0, C, ROW)
    start = (i * C).to(gl.int64)
    copy_rows(s_k.index(stage), k + start * k_stride_t, k_stride_t)
    copy_rows(s_v.index(stage), v + start * v_stride_t, v_stride_t)
    copy_rows(s_inverse.index(stage), inverse + start * (H * C), H * C)
    copy_rows(s_low.index(stage), inverse_low + start * (H * C), H * C)
    if row_in is not None:
        copy_to_shared(s_in.index(stage), row_in + start + o_c)
    copy_to_shared(s_out.index(stage), row_out + start + o_c)
    copy_rows(s_q.index(stage), q + start * q_stride_t, q_stride_t)
    copy_rows(s_scores.index(stage), scores + start * (H * C), H * C)


@gluon.jit
def _hopper_walk_kernel(
    q, k, v, inverse, inverse_low, scores, decay, row_in, row_out, o, delta, states, ends, first, last,
    T, num_t, scale, num_walked,
    q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_t, k_stride_h, v_stride_b, v_stride_t, v_stride_h,
    H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, BV: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """`_walk_kernel` for one segment of BV values, where nothing is masked; its arguments.

    The states, where they are given, are those before every LONG-th chunk, [B, H, chunks / LONG, V, K].
    A wait stands where a result is used, o is stored while the products of the next chunk run, and copies of a chunk
    begin STAGES - 1 chunks before it is needed, while the state is updated.
    """
    num_v: gl.constexpr = V // BV
    i_v, i_bh = gl.program_id(0) % num_v, (gl.program_id(0) // num_v).to(gl.int64)
    i_b, i_h = i_bh // H, i_bh % H
    i_segment, num_bh = gl.program_id(1), (gl.num_programs(0) // num_v).to(gl.int64)
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [BV // 16, 1], [16, K, 16])
    NARROW: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [BV // 16, 1], [16, C, 16])
    A_WIDE: gl.constexpr = gl.DotOperandLayout(0, WIDE, 2)
    A_NARROW: gl.constexpr = gl.DotOperandLayout(0, NARROW, 2)
    S_K: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, K], gl.bfloat16)
    S_V: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BV], gl.bfloat16)
    S_C: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], gl.bfloat16)
    ROWS: gl.constexpr = row_layout(C, BV)
    HALF_STATE: gl.constexpr = state_layout(BV, K // 2)
    COLUMN: gl.constexpr = gl.SliceLayout(0, NARROW)
    s_k = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, K], S_K)
    s_q = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, K], S_K)
    s_v = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, BV], S_V)
    s_inverse = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, C], S_C)
    s_low = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, C], S_C)
    s_scores = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, C], S_C)
    s_in = gl.allocate_shared_memory(gl.float32, [STAGES, C], FLOATS)
    s_out = gl.allocate_shared_memory(gl.float32, [STAGES, C], FLOATS)

    b_state = first_state(first, ends, i_v, i_bh, i_segment, num_bh, K, V, BV, WIDE)

    q += i_b * q_stride_b + i_h // GROUP * q_stride_h
    k += i_b * k_stride_b + i_h // GROUP * k_stride_h
    v += i_b * v_stride_b + i_h * v_stride_h + i_v * BV
    o_head = i_b * T * H + i_h
    inverse += o_head * C
    inverse_low += o_head * C
    scores += o_head * C
    if row_in is not None:
        row_in += i_bh * T
        decay += i_bh * num_t
    row_out += i_bh * T
    o += o_head * V + i_v * BV
    if states is not None:
        delta += o_head * V + i_v * BV
        o_half_v = i_v * BV + gl.arange(0, BV, gl.SliceLayout(1, HALF_STATE))
        o_half_k = gl.arange(0, K // 2, gl.SliceLayout(0, HALF_STATE))
        o_half = (o_half_v * K)[:, None] + o_half_k[None, :]
        states += i_bh * (num_t // LONG) * (K * V)
    begin, stop = i_segment * num_walked, gl.minimum((i_segment + 1) * num_walked, num_t)
    for i in gl.static_range(STAGES - 1):
        if begin + i < stop:
            copy_chunk(
                s_k, s_q, s_v, s_inverse, s_low, s_scores, s_in, s_out, k, q, v, inverse, inverse_low, scores, row_in,
                row_out, begin + i, i, q_stride_t, k_stride_t, v_stride_t, H,
            )  # fmt: skip
        async_copy.commit_group()
    zero = gl.zeros([BV, C], gl.float32, NARROW)
    o_v = gl.arange(0, BV, gl.SliceLayout(1, ROWS))
    o_c = gl.arange(0, C, gl.SliceLayout(0, ROWS))
    o_rows = o_v[:, None] + (o_c * (H * V))[None, :]
    b_last_o = zero
    if decay is not None:
        b_next_decay = gl.load(decay + begin)
    for i in range(begin, stop):
        async_copy.wait_group(STAGES - 2)
        stage = (i - begin) % STAGES
        start = (i * C).to(gl.int64)
        if decay is not None:
            b_decay = b_next_decay
            b_next_decay = gl.load(decay + gl.minimum(i + 1, stop - 1))
        b_left16 = b_state.to(gl.bfloat16)
        b_left = gl.convert_layout(b_left16, A_NARROW)
        b_held = warpgroup_mma(b_left, s_k.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        b_o = warpgroup_mma(b_left, s_q.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        b_v = s_v.index(stage).permute((1, 0)).load(NARROW).to(gl.float32)
        b_out = s_out.index(stage).load(COLUMN)
        if states is not None:  # noqa: SIM102 (Triton decides this condition when it compiles)
            if i % LONG == 0:
                # one half of the keys after the other in the same shared memory, so that two programs have room
                b_first, b_second = gl.split(b_left16.reshape([BV, 2, K // 2]).permute([0, 2, 1]))
                p_state = states + (i // LONG).to(gl.int64) * (K * V) + o_half
                gl.store(p_state, gl.convert_layout(b_first, HALF_STATE))
                gl.store(p_state + K // 2, gl.convert_layout(b_second, HALF_STATE))
        # the state is named because the products read it
        b_held, b_state = warpgroup_mma_wait(1, deps=(b_held, b_state))
        if row_in is not None:
            b_in = s_in.index(stage).load(COLUMN)
            b_rest = b_v - b_held * b_in[None, :]
        else:
            b_rest = b_v - b_held
        b_high, b_low = two_terms(b_rest, A_NARROW)
        s_right = s_inverse.index(stage).permute((1, 0))
        b_delta = warpgroup_mma(b_high, s_right, b_rest, is_async=True)
        b_delta = warpgroup_mma(b_low, s_right, b_delta, is_async=True)
        b_delta = warpgroup_mma(b_high, s_low.index(stage).permute((1, 0)), b_delta, is_async=True)
        if decay is not None:
            b_state *= b_decay
        if i > begin:
            gl.store(o + (start - C) * (H * V) + o_rows, gl.convert_layout(b_last_o.to(gl.bfloat16), ROWS))
        b_delta, b_o = warpgroup_mma_wait(0, deps=(b_delta, b_o))
        b_new16 = b_delta.to(gl.bfloat16)
        b_new = gl.convert_layout(b_new16, A_NARROW)
        b_delta *= b_out[None, :]
        b_high, b_low = two_terms(b_delta, A_WIDE)
        b_next = warpgroup_mma(b_high, s_k.index(stage), b_state, is_async=True)
        b_next = warpgroup_mma(b_low, s_k.index(stage), b_next, is_async=True)
        if row_in is not None:
            b_o *= (b_in * scale)[None, :]
        else:
            b_o *= scale
        b_o = warpgroup_mma(b_new, s_scores.index(stage).permute((1, 0)), b_o, is_async=True)
        if delta is not None:
            gl.store(delta + start * (H * V) + o_rows, gl.convert_layout(b_new16, ROWS))
        # in place of the chunk before, whose products have ended
        ahead = i + STAGES - 1
        if ahead < stop:
            copy_chunk(
                s_k, s_q, s_v, s_inverse, s_low, s_scores, s_in, s_out, k, q, v, inverse, inverse_low, scores, row_in,
                row_out, ahead, (ahead - begin) % STAGES, q_stride_t, k_stride_t, v_stride_t, H,
            )  # fmt: skip
        async_copy.commit_group()
        b_state, b_last_o = warpgroup_mma_wait(0, deps=(b_next, b_o))
    p_last = o + ((stop - 1) * C).to(gl.int64) * (H * V)
    gl.store(p_last + o_rows, gl.convert_layout(b_last_o.to(gl.bfloat16), ROWS))
    if last is not None:
        store_last(last, b_state, i_v, i_bh, i_segment, K, V, BV, WIDE)


@planned
def _walk_plan(
    plan: Plan,
    shape: tuple[int, ...],
    groups: int,
    value_dim: int,
    strides: PositionStrides,
    segments: Segments,
) -> LaunchPlan:
    batch, length, heads, key_dim = shape
    return LaunchPlan(
        (batch * heads * (value_dim // VALUES), segments.count),
        T=length,
        num_t=length // plan.chunk,
        scale=plan.scale,
        num_walked=segments.num_walked,
        **strides.arguments("q k v"),
        H=heads,
        K=key_dim,
        V=value_dim,
        C=plan.chunk,
        BV=VALUES,
        GROUP=heads // groups,
        num_warps=VALUES // 16,
    )


def hopper_walk(
    plan: Plan,
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    factors: ChunkFactors,
    o: Tensor,
    delta: Tensor | None,
    states: Tensor | None,
    ends: Tensor | None,
    boundary: EndStates,
    segments: Segments,
) -> None:
    """Writes o, the final state and, for a backward pass, delta and the states before every LONG-th chunk, walking over
    all of time or from the states `ends` at the ends of segments; see `_hopper_walk_kernel`."""
    (batch, length, heads, value_dim), (*_, groups, key_dim) = v.shape, k.shape
    first, last = boundary
    launch(
        _hopper_walk_kernel,
        _walk_plan(plan, (batch, length, heads, key_dim), groups, value_dim, PositionStrides.of(q, k, v), segments),
        q=q, k=k, v=v, inverse=factors.inverse, inverse_low=factors.inverse_low, scores=factors.scores,
        decay=factors.decay, row_in=factors.row_in, row_out=factors.row_out, o=o, delta=delta, states=states,
        ends=ends, first=first, last=last,
    )  # fmt: skip
