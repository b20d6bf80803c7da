"""From the ends of the segments of time, each from a zero start, to their true starts.

With end_s the state at the end of segment s after a zero start,

    start_{s+1} = exp(A sum_{t in s} dt_t) start_s + end_s
"""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import functools

import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.launch import LaunchPlan, cdiv, launch, power_of_2
from subquad.kernels.selective_scan.triton.arithmetic import LOG2E
from subquad.kernels.selective_scan.triton.inputs import Plan


@triton.jit(do_not_specialize=["splits"])
def _pass_kernel(
    A, total_dt, ends, first_state, D, splits, N: tl.constexpr, BLOCK_D: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Replaces the ends [batch, splits, N, D] of the segments by their starts, in place.

    total_dt:    [batch, splits, D], the sum of dt over each segment.
    first_state: [batch, D, N], the start of the first segment, or None for zero.
    REVERSE:     the recurrence of the gradients, which starts behind the last segment.
    """
    num_d = tl.cdiv(D, BLOCK_D)
    o_d = tl.program_id(0) % num_d * BLOCK_D + tl.arange(0, BLOCK_D)
    i_n = tl.program_id(0) // num_d % N
    i_b = (tl.program_id(0) // num_d // N).to(tl.int64)
    m_d = o_d < D
    b_a = tl.load(A + o_d * N + i_n, mask=m_d, other=0.0).to(tl.float32) * LOG2E
    b_h = tl.zeros([BLOCK_D], tl.float32)
    if first_state is not None:
        b_h = tl.load(first_state + (i_b * D + o_d) * N + i_n, mask=m_d, other=0.0).to(tl.float32)
    for i in range(splits - 1):
        i_s = i_b * splits + (splits - 1 - i if REVERSE else i)
        p_end = ends + (i_s * N + i_n) * D + o_d
        b_end = tl.load(p_end, mask=m_d, other=0.0)
        b_dt = tl.load(total_dt + i_s * D + o_d, mask=m_d, other=0.0)
        tl.store(p_end, b_h, mask=m_d)
        b_h = tl.exp2(b_dt * b_a) * b_h + b_end
    i_last = i_b * splits + (0 if REVERSE else splits - 1)
    tl.store(ends + (i_last * N + i_n) * D + o_d, b_h, mask=m_d)


def ends_to_starts(
    plan: Plan, splits: int, A: Tensor, total_dt: Tensor, ends: Tensor, first: Tensor | None, *, reverse: bool
) -> None:
    """Replaces `ends` by the starts of the segments in place; first is `first_state` of `_pass_kernel`."""
    launch_plan = _pass_plan(plan, splits, reverse)
    launch(_pass_kernel, launch_plan, A=A, total_dt=total_dt, ends=ends, first_state=first)


@functools.lru_cache(512)
def _pass_plan(plan: Plan, splits: int, reverse: bool) -> LaunchPlan:
    (batch, _, width), num_states = plan.shape, plan.num_states
    block_d = min(128, power_of_2(width))
    programs = batch * num_states * cdiv(width, block_d)
    return LaunchPlan(programs, D=width, splits=splits, N=num_states, BLOCK_D=block_d, REVERSE=reverse, num_warps=4)
