"""The scan as a function of PyTorch, with its gradient."""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.launch import save, saved
from kernels.selective_scan.triton.backward import scan_bwd
from kernels.selective_scan.triton.forward import scan_fwd
from kernels.selective_scan.triton.plan import TUNING, Tuning, _channel_last, _padded
from kernels.selective_scan.triton.rows import Maps, _maps


class SelectiveScan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        skip: Tensor | None,
        z: Tensor | None,
        bias: Tensor | None,
        initial_state: Tensor | None,
        softplus: bool,
        return_final_state: bool,
        tuning: Tuning,
    ) -> tuple[Tensor, Tensor | None]:
        maps = _maps(B, C, _padded(A.shape[1]))
        inputs = (skip, z, bias, softplus, initial_state, return_final_state)
        y, final_state, chunks = scan_fwd(x, dt, A, maps, *inputs, save=True, tuning=tuning)
        # words are views of B and C, or what would have to be made again
        save(ctx, x, dt, A, maps.B, maps.C, skip, z, bias, chunks)
        ctx.softplus, ctx.tuning, ctx.maps = softplus, tuning, maps[2:]
        ctx.initial_dtype = None if initial_state is None else initial_state.dtype
        ctx.set_materialize_grads(False)
        return y, final_state

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dfinal: Tensor | None) -> tuple[Tensor | None, ...]:
        x, dt, A, B, C, skip, z, bias, chunks = saved(ctx)
        maps = Maps(B, C, *ctx.maps)
        dy = torch.zeros_like(x) if dy is None else _channel_last(dy)
        dfinal = None if dfinal is None else dfinal.contiguous()
        gradients = scan_bwd(
            x, dt, A, maps, skip, z, bias, ctx.softplus, chunks, dy, dfinal, ctx.initial_dtype, ctx.tuning
        )
        return *gradients, None, None, None


def selective_scan_triton(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
    tuning: Tuning = TUNING,
) -> Tensor | tuple[Tensor, Tensor]:
    """`selective_scan` for arguments that it has checked; y in the dtype of x, the final state in float32."""
    wide = (None if m is None else _channel_last(m) for m in (x, dt, z))
    small = (m if m is None or m.ndim == 3 else m.contiguous() for m in (A, B, C, D, dt_bias))
    (x, dt, z), (A, B, C, skip, bias) = wide, small
    initial_state = None if initial_state is None else initial_state.contiguous()
    tensors = (x, dt, A, B, C, skip, z, bias, initial_state)
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        y, state = SelectiveScan.apply(*tensors, dt_softplus, return_final_state, tuning)
    else:
        maps = _maps(B, C, _padded(A.shape[1]))
        options = (dt_softplus, initial_state, return_final_state)
        y, state, _ = scan_fwd(x, dt, A, maps, skip, z, bias, *options, save=False, tuning=tuning)
    return (y, state) if return_final_state else y
