"""The states at the starts of segments of time, from the ends of the segments before them."""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import cdiv, launch, power_of_2
from kernels.selective_scan.triton.arithmetic import LOG2E


@triton.jit(do_not_specialize=["splits"])
def _pass_kernel(
    A, total_dt, ends, first_state, D, splits, N: tl.constexpr, BLOCK_D: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """ends [B, splits, N, D]: from the end of each segment but the last after a zero start to each's true start.

    In place. first_state: [B, D, N] or None. In reverse, starts are at later times, and the last is at the beginning.
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


def _pass(A: Tensor, total_dt: Tensor, ends: Tensor, first: Tensor | None, *, reverse: bool) -> None:
    batch, splits, state, width = ends.shape
    block = min(128, power_of_2(width))
    launch(
        _pass_kernel, batch * state * cdiv(width, block),
        A, total_dt, ends, first, width, splits, N=state, BLOCK_D=block, REVERSE=reverse, num_warps=4,
    )  # fmt: skip
