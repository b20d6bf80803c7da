"""The norm in Triton as a differentiable function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from subquad.kernels.autograd import OnceDifferentiable, needs_gradient, save, saved
from subquad.kernels.layout import dense
from subquad.kernels.norm.triton.backward import norm_bwd
from subquad.kernels.norm.triton.forward import Statistics, gate_rows, norm_fwd
from subquad.kernels.norm.triton.plan import TUNING, Tuning


class Norm(OnceDifferentiable):
    """(x, residual, weight, bias, gate, skip, skip_scale) and options to (y, sum or None without a residual)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        gate: Tensor | None,
        skip: Tensor | None,
        skip_scale: Tensor | None,
        kind: str,
        eps: float,
        gate_activation: str,
        activation: str | None,
        out_dtype: torch.dtype,
        tuning: Tuning,
        gate_first: bool,
    ) -> tuple[Tensor, Tensor | None]:
        options = kind, eps, gate_activation, activation, out_dtype, tuning
        y, values = norm_fwd(x, residual, weight, bias, gate, *options, skip, skip_scale, gate_first=gate_first)
        save(ctx, *values, weight, bias, gate, skip, skip_scale)
        ctx.kind, ctx.gate_activation, ctx.activation, ctx.tuning = kind, gate_activation, activation, tuning
        ctx.gate_first = gate_first
        ctx.x_dtype, ctx.residual_dtype = x.dtype, None if residual is None else residual.dtype
        ctx.set_materialize_grads(False)
        return y, None if residual is None else values.total

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dtotal: Tensor | None) -> tuple[Tensor | None, ...]:
        total, mean, scale, weight, bias, gate, skip, skip_scale = saved(ctx)
        dy = torch.zeros_like(total) if dy is None else dense(dy)
        values = Statistics(total, mean, scale)
        gradients = norm_bwd(
            values,
            weight,
            bias,
            gate,
            ctx.kind,
            ctx.gate_activation,
            ctx.activation,
            dy,
            dense(dtotal),
            ctx.x_dtype,
            ctx.residual_dtype,
            ctx.tuning,
            skip,
            skip_scale,
            ctx.gate_first,
        )
        return *gradients, None, None, None, None, None, None, None


def norm_triton(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    kind: str,
    eps: float,
    residual: Tensor | None,
    gate: Tensor | None,
    gate_activation: str,
    activation: str | None,
    out_dtype: torch.dtype,
    tuning: Tuning = TUNING,
    skip: Tensor | None = None,
    skip_scale: Tensor | None = None,
    gate_first: bool = False,
) -> Any:
    """y, or (y, x + residual), for arguments whose shapes were checked."""
    gate, _ = gate_rows(gate)
    tensors = (dense(x), dense(residual), dense(weight), dense(bias), gate)
    skip, skip_scale = dense(skip), dense(skip_scale)
    if needs_gradient(*tensors, skip, skip_scale):
        options = kind, eps, gate_activation, activation, out_dtype, tuning, gate_first
        y, total = Norm.apply(*tensors, skip, skip_scale, *options)
    else:
        y, (total, _, _) = norm_fwd(
            *tensors, kind, eps, gate_activation, activation, out_dtype, tuning, skip, skip_scale, gate_first
        )
    return y if residual is None else (y, total)
