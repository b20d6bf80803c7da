"""The operator as one node of autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.launch import save, saved
from kernels.lti_ssm.triton.calls import _dense, lti_bwd, lti_fwd, prepare, prepare_bwd
from kernels.transpose import time_last


class LtiSsm(torch.autograd.Function):
    """(u, both gates, initial state, A, B, C, dt, D) and their `CallPlan` to y and the state before chunk T // C."""

    @staticmethod
    def forward(
        ctx: Any,
        u: Tensor,
        gate_in: Tensor | None,
        gate_out: Tensor | None,
        initial_state: Tensor | None,
        *rest: Any,
    ) -> tuple[Tensor, Tensor | None]:
        *system, ctx.call = rest
        small = prepare(ctx.call, *system)
        y, end, states = lti_fwd(ctx.call, u, gate_in, gate_out, small, initial_state)
        save(ctx, u, gate_in, gate_out, states, small, *system)
        ctx.set_materialize_grads(False)
        return y, end

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dend: Tensor | None) -> tuple[Tensor | None, ...]:
        u, gate_in, gate_out, states, small, *system = saved(ctx)
        call, with_start = ctx.call, ctx.needs_input_grad[3]
        dy = u.new_empty_strided(u.shape, call.time_last).zero_() if dy is None else time_last(dy)
        du, dgate_in, dgate_out, partial, dstart = lti_bwd(
            call, u, gate_in, gate_out, dy, small, states, _dense(dend), with_start
        )
        return du, dgate_in, dgate_out, dstart, *prepare_bwd(call, partial, *system), None
