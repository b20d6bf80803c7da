"""The scan as an operation of PyTorch with a gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from subquad.kernels.autograd import OnceDifferentiable, needs_gradient, save, saved
from subquad.kernels.layout import dense
from subquad.kernels.selective_scan.triton.backward import scan_backward
from subquad.kernels.selective_scan.triton.forward import scan_forward
from subquad.kernels.selective_scan.triton.inputs import contiguous_channels, readable_maps
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
        maps = readable_maps(B, C, A.shape[1])
        tensors = x, dt, A, *maps, skip, z, bias
        y, final_state, chunks, ctx.plan = scan_forward(
            (*tensors, initial_state), softplus, negative, return_final_state, True, tuning
        )
        # the maps may be copies that backward would have to make again
        save(ctx, *tensors, chunks)
        ctx.dtypes = B.dtype, C.dtype, None if initial_state is None else initial_state.dtype
        ctx.set_materialize_grads(False)
        return y, final_state

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dfinal: Tensor | None) -> tuple[Tensor | None, ...]:
        tensors = saved(ctx)
        dy = torch.zeros_like(tensors[0]) if dy is None else contiguous_channels(dy)
        gradients = scan_backward((*tensors, dy, dense(dfinal)), ctx.plan, *ctx.dtypes)
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
    A, D, dt_bias, initial_state = dense(A), dense(D), dense(dt_bias), dense(initial_state)
    options = dt_softplus, negative_eigenvalues, return_final_state
    if needs_gradient(x, dt, A, B, C, D, z, dt_bias, initial_state):
        y, state = SelectiveScan.apply(x, dt, A, B, C, D, z, dt_bias, initial_state, *options, tuning)
    else:
        maps = readable_maps(B, C, A.shape[1])
        y, state, _, _ = scan_forward((x, dt, A, *maps, D, z, dt_bias, initial_state), *options, False, tuning)
    return (y, state) if return_final_state else y
