"""The operator in Triton, on one side and on both: what is done in PyTorch around the kernels."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from subquad.kernels.autograd import needs_gradient
from subquad.kernels.layout import dense, spec
from subquad.kernels.lti_ssm.chunked import powers_sum
from subquad.kernels.lti_ssm.triton.autograd import LtiSsm
from subquad.kernels.lti_ssm.triton.calls import Planner, lti_fwd, prepare
from subquad.kernels.ssm_kernel.chunked import widen
from subquad.kernels.ssm_kernel.discretize import discretize
from subquad.kernels.transpose import time_last

PLANNER = Planner()


def lti_ssm_triton(
    u: Tensor,
    A: Tensor,
    B: Tensor | None,
    C: Tensor,
    dt: Tensor,
    *,
    conj_pairs: bool = True,
    D: Tensor | None = None,
    discretization: str = "zoh",
    gate_in: Tensor | None = None,
    gate_out: Tensor | None = None,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
    planner: Planner = PLANNER,
) -> tuple[Tensor, Tensor | None]:
    """y [B, T, D] in the dtype of u with time contiguous, and on request the final state [B, D, N].

    The state is float32, or complex64 where any part of the system is complex.   planner: makes the plan of this call.
    """
    u = time_last(u)
    gate_in = None if gate_in is None else time_last(gate_in)
    gate_out = None if gate_out is None else time_last(gate_out)
    is_complex = A.is_complex() or C.is_complex() or (B is not None and B.is_complex())
    if initial_state is not None:
        initial_state = dense(initial_state.to(torch.complex64 if is_complex else torch.float32))
    system = A, B, C, dt, D = dense(A), dense(B), dense(C), dense(dt), dense(D)
    tensors = (u, gate_in, gate_out, initial_state, *system)
    trained = needs_gradient(*tensors)
    tuning = planner.tuning
    if trained and is_complex and tuning.needs_two_passes(u, A.shape[-1]):
        # a backward pass of all modes would take more shared memory than there is, and y is a sum over modes
        results = []
        for modes, skip in ((slice(tuning.max_pairs), D), (slice(tuning.max_pairs, None), None)):
            part = lti_ssm_triton(
                u,
                A[..., modes],
                None if B is None else B[..., modes],
                C[..., modes],
                dt,
                conj_pairs=conj_pairs,
                D=skip,
                discretization=discretization,
                gate_in=gate_in,
                gate_out=gate_out,
                initial_state=None if initial_state is None else initial_state[..., modes],
                return_final_state=return_final_state,
                planner=planner,
            )
            results.append(part)
        (y, state), (y_of_others, state_of_others) = results
        if state is not None and state_of_others is not None:
            state = torch.cat([state, state_of_others], -1)
        return y + y_of_others, state
    specs = spec(u), spec(gate_in), spec(gate_out), spec(A), spec(B), spec(C)
    plan = planner(
        u.is_cuda,
        2.0 if conj_pairs else 1.0,
        discretization,
        return_final_state,
        trained,
        specs,
    )
    if trained:
        y, state = LtiSsm.apply(*tensors, plan)
    else:
        y, state, _, _ = lti_fwd(plan, u, gate_in, gate_out, prepare(plan, *system), initial_state)
    rest = u.shape[1] % plan.division.chunk
    if state is None or not rest:
        return y, state
    # the kernel gives the state before the last steps, which are no whole chunk
    v = u[:, -rest:].float() if gate_in is None else gate_in[:, -rest:].float() * u[:, -rest:].float()
    return y, _pass_state(state, v, A, B, C, dt, discretization)


def _pass_state(
    state: Tensor, v: Tensor, A: Tensor, B: Tensor | None, C: Tensor, dt: Tensor, discretization: str
) -> Tensor:
    """The state after the inputs v [B, steps, D], from the state [B, D, N] before them, in its dtype."""
    A, B, _, dt, _ = widen(A, B, C, dt)
    log_abar, scale = discretize(A, dt, discretization)
    added = powers_sum(v, log_abar)
    for factor in (scale, B):
        added = added if factor is None else added * factor
    after = torch.exp(log_abar * v.shape[1]) * state + added
    # a negative Abar has a complex logarithm, also in a real system
    return (after if state.is_complex() else after.real).to(state.dtype)


def lti_ssm_triton_bidirectional(
    u: Tensor,
    A: Tensor,
    B: Tensor | None,
    C: Tensor,
    dt: Tensor,
    *,
    conj_pairs: bool = True,
    D: Tensor | None = None,
    discretization: str = "zoh",
    gate_in: Tensor | None = None,
    gate_out: Tensor | None = None,
    planner: Planner = PLANNER,
) -> Tensor:
    """y [B, T, D] from both sides: C[0] reads inputs up to t, C[1] those after it, by a causal run in reversed time."""
    one_side = partial(
        lti_ssm_triton, A=A, B=B, dt=dt, conj_pairs=conj_pairs, discretization=discretization, planner=planner
    )
    past, _ = one_side(u, C=C[0], D=D, gate_in=gate_in, gate_out=gate_out)
    if u.shape[1] == 1:
        return past
    # an output does not see its own input again: the reversed run goes from the last input to the second one, and its
    # results belong to the outputs from the last but one to the first
    u_reversed = u.transpose(1, 2)[..., 1:].flip(-1).transpose(1, 2)
    in_reversed = None if gate_in is None else gate_in.transpose(1, 2)[..., 1:].flip(-1).transpose(1, 2)
    out_reversed = None if gate_out is None else gate_out.transpose(1, 2)[..., :-1].flip(-1).transpose(1, 2)
    future, _ = one_side(u_reversed, C=C[1], gate_in=in_reversed, gate_out=out_reversed)
    future = future.transpose(1, 2).flip(-1)
    return past + torch.nn.functional.pad(future, (0, 1)).transpose(1, 2)
