"""Backward: the sums of what the programs of the gradient kernel have left, in a fixed order."""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.launch import LaunchPlan, cdiv, launch
from subquad.kernels.selective_scan.triton.inputs import Plan, ScanInputs
from subquad.kernels.sums import COLUMNS, ROWS, column_sums


@triton.jit
def _add_parts(
    partial, dB, dC, i_r, rows, num_d, N: tl.constexpr, NP: tl.constexpr, BLOCK: tl.constexpr, TOGETHER: tl.constexpr
):
    """BLOCK rows of dB and dC [rows, N] as sums of the num_d parts in partial [num_d, rows, NP or 2 NP].

    Either may be None. TOGETHER parts are loaded at once. The rows are those of batch and time.
    """
    o_r = i_r * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    o_n = tl.arange(0, NP)
    m = (o_r < rows)[:, None] & (o_n < N)[None, :]
    WIDTH: tl.constexpr = NP * ((dB is not None) + (dC is not None))
    p = partial + o_r[:, None] * WIDTH + o_n[None, :]
    b_first = tl.zeros([BLOCK, NP], tl.float32)
    b_second = tl.zeros([BLOCK, NP], tl.float32)
    for i in range(0, num_d, TOGETHER):
        for j in tl.static_range(TOGETHER):
            m_j = m & (i + j + 0 * o_n < num_d)[None, :]
            b_first += tl.load(p, mask=m_j, other=0.0)
            if WIDTH > NP:
                b_second += tl.load(p + NP, mask=m_j, other=0.0)
            p += rows.to(tl.int64) * WIDTH
    o_out = o_r[:, None] * N + o_n[None, :]
    if dB is not None:
        tl.store(dB + o_out, b_first.to(dB.dtype.element_ty), mask=m)
    if dC is not None:
        b_last = b_second if WIDTH > NP else b_first
        tl.store(dC + o_out, b_last.to(dC.dtype.element_ty), mask=m)


@triton.jit
def _add_totals(
    totals, dA, dbias, dskip, i_p, num_totals, D, N: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """A block of dA [D, N], dbias [D] or dskip [D], from totals [num_totals, N + 2, D]; the last two may be None."""
    i_n = i_p % (N + 2)
    o_d = i_p // (N + 2) * BLOCK_D + tl.arange(0, BLOCK_D)
    m_d = o_d < D
    b_sum = column_sums(totals, i_n * D + o_d, m_d, num_totals, (N + 2) * D, ROWS)
    if i_n < N:
        tl.store(dA + o_d * N + i_n, b_sum.to(dA.dtype.element_ty), mask=m_d)
    elif i_n == N:
        if dbias is not None:
            tl.store(dbias + o_d, b_sum.to(dbias.dtype.element_ty), mask=m_d)
    else:
        if dskip is not None:
            tl.store(dskip + o_d, b_sum.to(dskip.dtype.element_ty), mask=m_d)


@triton.jit(do_not_specialize=["rows", "num_d", "num_totals"])
def _add_sums_kernel(
    partial, totals, dB, dC, dA, dbias, dskip, rows, num_d, num_totals, D,
    N: tl.constexpr, NP: tl.constexpr, BLOCK: tl.constexpr, TOGETHER: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The first programs add `totals`, the others `partial`, which may be None; see `_add_totals` and `_add_parts`."""
    num_programs = tl.cdiv(D, BLOCK_D) * (N + 2)
    i_p = tl.program_id(0)
    if i_p < num_programs:
        _add_totals(totals, dA, dbias, dskip, i_p, num_totals, D, N, ROWS, BLOCK_D)
    elif partial is not None:
        _add_parts(partial, dB, dC, i_p - num_programs, rows, num_d, N, NP, BLOCK, TOGETHER)


def add_sums(
    inputs: ScanInputs, parts: Tensor | None, totals: Tensor, b_dtype: torch.dtype, c_dtype: torch.dtype
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """dA [D, N], dB and dC [batch, T, N] of the maps that depend on time, dskip [D] and dbias [D].

    parts:  the sums over the channels of each program, None where no map depends on time.
    totals: the sums over each segment [batch splits, N + 2, D].
    """
    plan, A, skip, bias = inputs.plan, inputs.A, inputs.skip, inputs.bias
    (batch, length, _), num_states, device = plan.shape, plan.num_states, A.device
    dB, dC = [
        torch.empty(batch, length, num_states, dtype=dtype, device=device) if in_time else None
        for dtype, in_time in zip((b_dtype, c_dtype), plan.in_time, strict=True)
    ]
    dA = torch.empty_like(A)
    dskip = None if skip is None else torch.empty_like(skip)
    dbias = None if bias is None else torch.empty_like(bias)
    launch(
        _add_sums_kernel, _sums_plan(plan), partial=parts, totals=totals, dB=dB, dC=dC, dA=dA, dbias=dbias, dskip=dskip,
    )  # fmt: skip
    return dA, dB, dC, dskip, dbias


@functools.lru_cache(256)
def _sums_plan(plan: Plan) -> LaunchPlan:
    (batch, length, width), num_states = plan.shape, plan.num_states
    block = max(4, 512 // plan.padded)
    blocks = cdiv(batch * length, block) if any(plan.in_time) else 0
    return LaunchPlan(
        (num_states + 2) * cdiv(width, COLUMNS) + blocks, rows=batch * length,
        num_d=cdiv(width, plan.backward_division.block_d), num_totals=batch * plan.backward_division.splits, D=width,
        N=num_states, NP=plan.padded, BLOCK=block, TOGETHER=4, ROWS=ROWS, BLOCK_D=COLUMNS, num_warps=4,
    )  # fmt: skip
