"""The scan as an operation of PyTorch with a gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from subquad.kernels.autograd import OnceDifferentiable, needs_gradient, save, saved
from subquad.kernels.layout import dense
from subquad.kernels.selective_scan.triton.backward import scan_backward
from subquad.kernels.selective_scan.triton.forward import scan_forward
from subquad.kernels.selective_scan.triton.inputs import ScanInputs, contiguous_channels, prepare_inputs
from subquad.kernels.selective_scan.triton.plan import TUNING, Tuning


class SelectiveScan(OnceDifferentiable):
    """The scan of inputs whose memory the kernels can read; gradients for all tensors."""

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
        negative: bool,
        return_final_state: bool,
        tuning: Tuning,
    ) -> tuple[Tensor, Tensor | None]:
        inputs = prepare_inputs(x, dt, A, B, C, skip, z, bias, softplus, negative, tuning)
        y, final_state, chunks = scan_forward(
            inputs, initial_state, return_final_state=return_final_state, keep_chunks=True
        )
        # the words of B and C are views, or copies that backward would have to make again
        save(ctx, *inputs.tensors, chunks)
        ctx.plan = inputs.plan
        ctx.initial_dtype = None if initial_state is None else initial_state.dtype
        ctx.set_materialize_grads(False)
        return y, final_state

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dfinal: Tensor | None) -> tuple[Tensor | None, ...]:
        *tensors, chunks = saved(ctx)
        inputs = ScanInputs._make((*tensors, ctx.plan))
        gradients = scan_backward(
            inputs,
            chunks,
            torch.zeros_like(inputs.x) if dy is None else contiguous_channels(dy),
            dense(dfinal),
            initial_dtype=ctx.initial_dtype,
        )
        return *gradients, None, None, None, None


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
    negative_eigenvalues: bool = False,
    tuning: Tuning = TUNING,
) -> Tensor | tuple[Tensor, Tensor]:
    """`selective_scan` for arguments whose shapes were checked; y in the dtype of x, the final state in float32."""
    x, dt = contiguous_channels(x), contiguous_channels(dt)
    z = None if z is None else contiguous_channels(z)
    # maps that depend on time are read with their strides
    B, C = (m if m.ndim == 3 else dense(m) for m in (B, C))
    tensors = (x, dt, dense(A), B, C, dense(D), z, dense(dt_bias))
    initial_state = dense(initial_state)
    if needs_gradient(*tensors, initial_state):
        y, state = SelectiveScan.apply(
            *tensors, initial_state, dt_softplus, negative_eigenvalues, return_final_state, tuning
        )
    else:
        y, state, _ = scan_forward(
            prepare_inputs(*tensors, dt_softplus, negative_eigenvalues, tuning),
            initial_state,
            return_final_state=return_final_state,
            keep_chunks=False,
        )
    return (y, state) if return_final_state else y
