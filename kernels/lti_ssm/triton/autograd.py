"""The operator as one node of autograd."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from subquad.kernels.autograd import OnceDifferentiable, save, saved
from subquad.kernels.layout import dense
from subquad.kernels.lti_ssm.triton.calls import lti_bwd, lti_fwd, prepare, prepare_bwd
from subquad.kernels.transpose import time_last


class LtiSsm(OnceDifferentiable):
    """y and, where the plan says so, the state before chunk T // CHUNK (see the package docstring).

    Inputs: u, gate_in, gate_out, the initial state, A, B, C, dt, D, and the `Plan`.
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
        *system, ctx.plan = rest
        tables = prepare(ctx.plan, *system)
        y, end, states, ungated = lti_fwd(ctx.plan, u, gate_in, gate_out, tables, initial_state)
        save(ctx, u, gate_in, gate_out, ungated, states, tables, *system)
        ctx.set_materialize_grads(False)
        return y, end

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dend: Tensor | None) -> tuple[Tensor | None, ...]:
        u, gate_in, gate_out, ungated, states, tables, *system = saved(ctx)
        plan, with_start = ctx.plan, ctx.needs_input_grad[3]
        dy = u.new_empty_strided(u.shape, plan.time_last).zero_() if dy is None else time_last(dy)
        du, dgate_in, dgate_out, partial, dstart = lti_bwd(
            plan,
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
        return du, dgate_in, dgate_out, dstart, *prepare_bwd(plan, partial, *system), None
