"""`_reading_kernel` and `_reading_back_kernel`: the keys with which RWKV-7 reads its state, and their gradients.

    k = -z exp(-L),    dz = -dk exp(-L),    dL = dL' - dk k,    L = max(log_decay, LOWEST_PLAIN)

z is what is removed, and dL' the gradient of L from the delta rule, which is added here, so that it is read and written
once. Where L is not the log-decay that was given, the gradient of that one is zero.

Layout:  z, the log-decays and k are dense and of the same shape; everything is computed in float32.
Bytes:   an element of z and k of n bytes takes 2 n + 4 forward and 3 n + 12 backward. By count, PyTorch's casts,
         exponentials and products would move four to five times as much.
"""

# mypy: disable-error-code="misc"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.autograd import OnceDifferentiable, needs_gradient, save, saved
from subquad.kernels.delta_rule.triton.tiles import LOWEST_PLAIN
from subquad.kernels.launch import cdiv, launch
from subquad.kernels.layout import dense

ELEMENTS = 4096
NUM_WARPS = 8


@triton.jit
def _growth(b_log):
    """exp(-L). NaN stays."""
    return tl.exp(-tl.maximum(b_log, LOWEST_PLAIN, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def _reading_kernel(remove, log_decay, reading, N, BLOCK: tl.constexpr):
    """BLOCK elements of k."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m = o < N
    b_z = tl.load(remove + o, mask=m, other=0.0).to(tl.float32)
    b_log = tl.load(log_decay + o, mask=m, other=0.0).to(tl.float32)
    tl.store(reading + o, (-b_z * _growth(b_log)).to(reading.dtype.element_ty), mask=m)


@triton.jit
def _reading_back_kernel(remove, log_decay, dreading, dlog, dremove, dlog_decay, N, BLOCK: tl.constexpr):
    """BLOCK elements of dz and dL. dlog is None where the delta rule gives L no gradient."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m = o < N
    b_z = tl.load(remove + o, mask=m, other=0.0).to(tl.float32)
    b_log = tl.load(log_decay + o, mask=m, other=0.0).to(tl.float32)
    b_dk = -tl.load(dreading + o, mask=m, other=0.0).to(tl.float32) * _growth(b_log)
    tl.store(dremove + o, b_dk.to(dremove.dtype.element_ty), mask=m)
    # -dk k = dk z exp(-L)
    b_dlog = -b_dk * b_z
    if dlog is not None:
        b_dlog += tl.load(dlog + o, mask=m, other=0.0).to(tl.float32)
    b_dlog = tl.where(b_log < LOWEST_PLAIN, 0.0, b_dlog)
    tl.store(dlog_decay + o, b_dlog.to(dlog_decay.dtype.element_ty), mask=m)


def _read(remove: Tensor, log_decay: Tensor, dtype: torch.dtype) -> Tensor:
    reading = torch.empty_like(remove, dtype=dtype)
    grid = cdiv(remove.numel(), ELEMENTS)
    launch(
        _reading_kernel, grid, remove=remove, log_decay=log_decay, reading=reading, N=remove.numel(), BLOCK=ELEMENTS,
        num_warps=NUM_WARPS,
    )  # fmt: skip
    return reading


class ReadingKeys(OnceDifferentiable):
    """z, L and the dtype of k to k and L, whose gradient from the delta rule arrives in `backward`."""

    @staticmethod
    def forward(ctx: Any, remove: Tensor, log_decay: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        save(ctx, remove, log_decay)
        ctx.set_materialize_grads(False)
        return _read(remove, log_decay, dtype), log_decay

    @staticmethod
    def backward(ctx: Any, dreading: Tensor | None, dlog: Tensor | None) -> tuple[Tensor | None, ...]:
        remove, log_decay = saved(ctx)
        if dreading is None:
            return None, dlog, None
        dremove, dlog_decay = torch.empty_like(remove), torch.empty_like(log_decay)
        grid = cdiv(remove.numel(), ELEMENTS)
        launch(
            _reading_back_kernel, grid, remove=remove, log_decay=log_decay, dreading=dense(dreading), dlog=dense(dlog),
            dremove=dremove, dlog_decay=dlog_decay, N=remove.numel(), BLOCK=ELEMENTS, num_warps=NUM_WARPS,
        )  # fmt: skip
        return dremove, dlog_decay, None


def reading_keys(remove: Tensor, log_decay: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """k = -remove exp(-log_decay) in dtype, and log_decay, which the delta rule has to be given in place of its own."""
    remove, log_decay = dense(remove), dense(log_decay)
    if needs_gradient(remove, log_decay):
        reading, passed = ReadingKeys.apply(remove, log_decay, dtype)
        # otherwise the delta rule would compute a gradient that nobody asked for
        return reading, passed if log_decay.requires_grad else log_decay
    return _read(remove, log_decay, dtype), log_decay
