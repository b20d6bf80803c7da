"""The short causal convolution in Triton as differentiable functions."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from subquad.kernels.autograd import OnceDifferentiable, needs_gradient, save, saved
from subquad.kernels.causal_conv1d.triton.backward import conv_bwd
from subquad.kernels.causal_conv1d.triton.forward import conv_fwd
from subquad.kernels.causal_conv1d.triton.plan import TUNING, Tuning, empty_in_layout, is_channel_first
from subquad.kernels.causal_conv1d.triton.step import conv_step
from subquad.kernels.layout import dense


class CausalConv1d(OnceDifferentiable):
    """(x, weight, bias, initial state) and options to (y, final state)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        initial_state: Tensor | None,
        activation: str | None,
        return_final_state: bool,
        time_last: bool,
        tuning: Tuning,
    ) -> tuple[Tensor, Tensor | None]:
        save(ctx, x, weight, bias, initial_state)
        ctx.activation, ctx.time_last, ctx.tuning = activation, time_last, tuning
        ctx.set_materialize_grads(False)
        return conv_fwd(x, weight, bias, initial_state, activation, return_final_state, time_last, tuning)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dfinal: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, bias, initial_state = saved(ctx)
        channel_first = ctx.time_last or is_channel_first(x)
        if dy is None:
            dy = empty_in_layout(x, channel_first).zero_()
        elif dy.stride(1 if channel_first else 2) != 1:
            # one copy takes less than the kernel would lose on narrow loads
            dy = empty_in_layout(x, channel_first).copy_(dy)
        dfinal = None if dfinal is None else dfinal.contiguous()
        gradients = conv_bwd(x, weight, bias, initial_state, ctx.activation, dy, dfinal, ctx.time_last, ctx.tuning)
        return *gradients, None, None, None, None


def causal_conv1d_triton(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    initial_state: Tensor | None,
    return_final_state: bool,
    time_last: bool = False,
    tuning: Tuning = TUNING,
) -> Tensor | tuple[Tensor, Tensor]:
    """y [B, T, D] and, on request, the final state [B, D, W - 1], both in the dtype of x.

    time_last: whether y has time contiguous; else it has the layout of x.
    """
    run = CausalConv1d.apply if needs_gradient(x, weight, bias, initial_state) else conv_fwd
    bias, initial_state = dense(bias), dense(initial_state)
    y, state = run(x, dense(weight), bias, initial_state, activation, return_final_state, time_last, tuning)
    return y if state is None else (y, state)


def causal_conv1d_step_triton(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, activation: str | None
) -> Tensor:
    """One step without gradients: x [B, D] to y [B, D]; state [B, D, W - 1] is updated in place."""
    return conv_step(x, dense(weight), dense(bias), state, activation)
