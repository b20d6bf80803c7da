"""The norm in Triton as a differentiable function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from subquad.kernels.autograd import OnceDifferentiable, needs_gradient, save, saved
from subquad.kernels.layout import dense
from subquad.kernels.norm.chunked import in_rows
from subquad.kernels.norm.triton.backward import norm_bwd
from subquad.kernels.norm.triton.forward import Statistics, gate_rows, norm_fwd
from subquad.kernels.norm.triton.plan import Factors, Options


class Norm(OnceDifferentiable):
    """(options, x, residual and the tensors of `Factors`) to (y, sum or None without a residual)."""

    @staticmethod
    def forward(
        ctx: Any, options: Options, x: Tensor, residual: Tensor | None, *factors: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        y, values = norm_fwd(x, residual, Factors(*factors), options)
        save(ctx, *values, *factors)
        ctx.options, ctx.x_dtype, ctx.residual_dtype = options, x.dtype, None if residual is None else residual.dtype
        ctx.set_materialize_grads(False)
        return y, None if residual is None else values.total

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dtotal: Tensor | None) -> tuple[Tensor | None, ...]:
        total, mean, scale, *factors = saved(ctx)
        dy = torch.zeros_like(total) if dy is None else dense(dy)
        values, dtypes = Statistics(total, mean, scale), (ctx.x_dtype, ctx.residual_dtype)
        return None, *norm_bwd(values, Factors(*factors), ctx.options, dy, dense(dtotal), *dtypes)


class NormLinear(OnceDifferentiable):
    """(options, x, linear [O, F] and the tensors of `Factors`) to y linear^T [..., O]; y is not kept."""

    @staticmethod
    def forward(ctx: Any, options: Options, x: Tensor, linear: Tensor, *factors: Tensor | None) -> Tensor:
        y, values = norm_fwd(x, None, Factors(*factors), options)
        save(ctx, linear, *values, *factors)
        ctx.options = options
        return in_rows(y, linear) @ linear.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        linear, total, mean, scale, *factors = saved(ctx)
        rows = gradient.reshape(-1, len(linear))
        dy = (rows @ linear).view(total.shape)
        y = torch.empty_like(dy)
        values = Statistics(total, mean, scale)
        dx, _, *others = norm_bwd(values, Factors(*factors), ctx.options, dy, None, total.dtype, None, y)
        return None, dx, rows.t() @ y.view(-1, linear.shape[1]), *others


def norm_triton(
    x: Tensor, residual: Tensor | None, factors: Factors, options: Options, linear: Tensor | None = None
) -> Any:
    """y, (y, x + residual), or the product of y with a linear map, for arguments whose shapes were checked."""
    weight, bias, gate, skip, skip_scale = factors
    factors = Factors(dense(weight), dense(bias), gate_rows(gate)[0], dense(skip), dense(skip_scale))
    x, residual = dense(x), dense(residual)
    if linear is not None:
        with torch.autocast(x.device.type, enabled=False):
            if needs_gradient(x, linear, *factors):
                return NormLinear.apply(options, x, linear, *factors)
            return in_rows(norm_fwd(x, None, factors, options)[0], linear) @ linear.t()
    if needs_gradient(x, residual, *factors):
        y, total = Norm.apply(options, x, residual, *factors)
    else:
        y, (total, _, _) = norm_fwd(x, residual, factors, options)
    return y if residual is None else (y, total)
