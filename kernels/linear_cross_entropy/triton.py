"""Losses of a chunk of logits, and their gradient in place of the logits, by one Triton kernel.

    loss_i = m_i + log s_i - l_{i, target_i},   m_i = max_v l_iv,   s_i = sum_v exp(l_iv - m_i)
    dl_iv  = exp(l_iv - m_i) / s_i - [v = target_i];   0 and loss 0 without a label

Layout: logits [M, P] with the classes 0 .. V - 1 contiguous and a padding up to P, one program a row. A row of at most
`Tuning.whole` classes stays in registers; a longer one is read twice, in tiles, the second time mostly from the second
cache. Exponentials and sums are float32 (one rounding, of dl), no atomics. Limits: none on M and V.
With PARTS the logits are float32 and dl is written as float16 parts (`kernels/float32_matmul/parts.py`): elements in
[-1, 1] need no maximum, their scale is 2^-14. The P logits of a row give way to P first and P second parts.
Bytes: 2 elements for each of M V. Exponentials: 2 for each of M V, 1 where a row is whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.float16_parts import halves
from subquad.kernels.float32_matmul import takes_parts
from subquad.kernels.launch import launch, power_of_2
from subquad.kernels.linear_cross_entropy.by_parts import loss_and_gradients_by_parts
from subquad.kernels.linear_cross_entropy.chunked import CHUNK_BYTES, Plan, chunk_rows, compute, product_dtype
from subquad.kernels.linear_cross_entropy.padding import padded_size

LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
UNIT = tl.constexpr(2.0**14)
"""The inverse of the scale of `Parts` without one."""


@dataclass(frozen=True)
class Tuning:
    """Tiles of the kernel."""

    whole: int = 16384
    """Largest number of classes, a power of two, of which a program holds all logits of a row."""
    block: int = 8192
    """Number of classes in a tile of a longer row."""
    per_warp: int = 1024
    """Number of classes of a tile that one warp works on."""
    max_warps: int = 16


TUNING = Tuning()


@triton.jit
def _load_logits(p_row, o_v, V, P):
    """The logits of classes o_v in float32, minus infinity beyond the last class.

    The mask of the load is that of the padded row, whose size is aligned, because that of the classes alone would make
    each load two bytes wide.
    """
    b_l = tl.load(p_row + o_v, mask=o_v < P, other=0.0).to(tl.float32)
    return tl.where(o_v < V, b_l, float("-inf"))


@triton.jit
def _store_gradient(p_row, o_v, b_dl, P, PARTS: tl.constexpr):
    """dl of the classes o_v in place of the logits, with PARTS as float16 parts."""
    if PARTS:
        b_1, b_2 = halves(b_dl * UNIT)
        p_parts = p_row.to(tl.pointer_type(tl.float16))
        tl.store(p_parts + o_v, b_1, mask=o_v < P)
        tl.store(p_parts + P + o_v, b_2, mask=o_v < P)
    else:
        tl.store(p_row + o_v, b_dl.to(p_row.dtype.element_ty), mask=o_v < P)


@triton.jit(do_not_specialize=["V", "ignore_index"])
def _softmax_gradient_kernel(
    logits, targets, losses,
    V, P, ignore_index,
    GRADIENT: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The formulas of this module for one row of logits [M, P]. dl is zero in the padding.

    Parts take the place of other logits than their own, so a row in PARTS is WHOLE: no thread passes the reductions,
    and stores, before all have read.
    """
    i_m = tl.program_id(0).to(tl.int64)
    o_v = tl.arange(0, BLOCK)
    p_row = logits + i_m * P
    dtype = logits.dtype.element_ty
    target = tl.load(targets + i_m)
    if target == ignore_index:
        tl.store(losses + i_m, 0.0)
        if GRADIENT:
            for i in range(0, P, BLOCK):
                tl.store(p_row + i + o_v, tl.zeros([BLOCK], dtype), mask=i + o_v < P)
    else:
        # before the reductions, which no thread passes until all have read it, because dl takes its place
        of_target = tl.load(p_row + target, mask=(target >= 0) & (target < V), other=float("nan")).to(tl.float32)
        if WHOLE:
            b_l = _load_logits(p_row, o_v, V, P)
            largest = tl.max(b_l, 0)
            b_e = tl.exp(b_l - largest)
            total = tl.sum(b_e, 0)
            if GRADIENT:
                b_p = b_e * (1.0 / total)
                _store_gradient(p_row, o_v, tl.where(o_v == target, b_p - 1.0, b_p), P, PARTS)
        else:
            # finite, so that a first tile of minus infinity gives no NaN
            largest = LOWEST
            total = 0.0
            for i in range(0, V, BLOCK):
                b_l = _load_logits(p_row, i + o_v, V, P)
                larger = tl.maximum(largest, tl.max(b_l, 0))
                total = total * tl.exp(largest - larger) + tl.sum(tl.exp(b_l - larger), 0)
                largest = larger
            if GRADIENT:
                scale = 1.0 / total
                for i in range(0, P, BLOCK):
                    b_p = tl.exp(_load_logits(p_row, i + o_v, V, P) - largest) * scale
                    tl.store(p_row + i + o_v, tl.where(i + o_v == target, b_p - 1.0, b_p).to(dtype), mask=i + o_v < P)
        tl.store(losses + i_m, largest + tl.log(total) - of_target)


def softmax_gradient(
    logits: Tensor,
    targets: Tensor,
    losses: Tensor,
    num_classes: int,
    ignore_index: int,
    gradient: bool,
    tuning: Tuning = TUNING,
    parts: bool = False,
) -> None:
    """`kernels.linear_cross_entropy.chunked.SoftmaxGradient` by the kernel; `parts` as in this module's docstring."""
    assert logits.is_contiguous()
    block = power_of_2(logits.shape[1])
    whole = block <= tuning.whole
    assert not parts or (whole and logits.dtype == torch.float32)
    block = block if whole else tuning.block
    launch(
        _softmax_gradient_kernel, len(logits), logits=logits, targets=targets, losses=losses, V=num_classes,
        P=logits.shape[1], ignore_index=ignore_index, GRADIENT=gradient, WHOLE=whole, BLOCK=block, PARTS=parts,
        num_warps=min(tuning.max_warps, max(1, block // tuning.per_warp)),
    )  # fmt: skip


def linear_cross_entropy_triton(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    *,
    chunk_bytes: int = CHUNK_BYTES,
    tuning: Tuning = TUNING,
    by_parts: bool | None = None,
) -> Tensor:
    """The loss. x [N, D], targets [N]. chunk_bytes: largest size of the logits of a chunk.

    by_parts: whether products are those of float16 parts, for float32 and `Tuning.whole` rows; None: where they are
    faster.
    """
    dtype = product_dtype(x)
    rows = chunk_rows(len(x), len(weight), dtype.itemsize, chunk_bytes)
    if by_parts is None:
        fits = dtype == torch.float32 and power_of_2(padded_size(len(weight))) <= tuning.whole
        by_parts = fits and takes_parts(x[:rows], weight)
    softmax = partial(softmax_gradient, tuning=tuning, parts=by_parts)
    plan = Plan(dtype, rows, ignore_index, softmax, loss_and_gradients_by_parts if by_parts else None)
    return compute(x, weight, bias, targets.contiguous(), plan)
