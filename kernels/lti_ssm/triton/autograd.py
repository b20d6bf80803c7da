"""The operator as one node of autograd."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kernels.autograd import OnceDifferentiable, save, saved
from kernels.layout import dense
from kernels.lti_ssm.triton.calls import lti_bwd, lti_fwd, prepare, prepare_bwd
from kernels.transpose import time_last


class LtiSsm(OnceDifferentiable):
    """y and, where the call plan says so, the state before chunk T // CHUNK (see the package docstring).

    Inputs: u, gate_in, gate_out, the initial state, A, B, C, dt, D, and the `CallPlan`.
    """

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
        tables = prepare(ctx.call, *system)
        y, end, states, ungated = lti_fwd(ctx.call, u, gate_in, gate_out, tables, initial_state)
        save(ctx, u, gate_in, gate_out, ungated, states, tables, *system)
        ctx.set_materialize_grads(False)
        return y, end

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dend: Tensor | None) -> tuple[Tensor | None, ...]:
        u, gate_in, gate_out, ungated, states, tables, *system = saved(ctx)
        call, with_start = ctx.call, ctx.needs_input_grad[3]
        dy = u.new_empty_strided(u.shape, call.time_last).zero_() if dy is None else time_last(dy)
        du, dgate_in, dgate_out, partial, dstart = lti_bwd(
            call,
            u=u,
            gate_in=gate_in,
            gate_out=gate_out,
            dy=dy,
            tables=tables,
            ungated=ungated,
            states=states,
            dend=dense(dend),
            with_start=with_start,
        )
        return du, dgate_in, dgate_out, dstart, *prepare_bwd(call, partial, *system), None
