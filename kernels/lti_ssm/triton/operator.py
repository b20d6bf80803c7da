"""The operator in Triton on one side and on both."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from kernels.launch import form
from kernels.lti_ssm.chunked import _powers_sum
from kernels.lti_ssm.triton.autograd import LtiSsm
from kernels.lti_ssm.triton.calls import Planner, _dense, lti_fwd, prepare
from kernels.ssm_kernel.chunked import widen
from kernels.ssm_kernel.discretize import discretize
from kernels.transpose import time_last

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
    """y [B, T, D] as u, time contiguous, and on request the final state [B, D, N] in float32 or complex64."""
    u = time_last(u)
    gate_in, gate_out = (None if gate is None else time_last(gate) for gate in (gate_in, gate_out))
    is_complex = A.is_complex() or C.is_complex() or (B is not None and B.is_complex())
    if initial_state is not None:
        initial_state = _dense(initial_state.to(torch.complex64 if is_complex else torch.float32))
    system = A, B, C, dt, D = _dense(A), _dense(B), _dense(C), _dense(dt), _dense(D)
    tensors = (u, gate_in, gate_out, initial_state, *system)
    trained = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    max_pairs = planner.tuning.max_pairs
    single = u.dtype == torch.bfloat16 and u.shape[1] >= planner.tuning.averaging_length
    if trained and is_complex and A.shape[-1] > max_pairs and not single:
        # a backward pass of all modes would take more shared memory than there is; y is a sum over modes
        run = functools.partial(
            lti_ssm_triton,
            dt=dt,
            conj_pairs=conj_pairs,
            discretization=discretization,
            gate_in=gate_in,
            gate_out=gate_out,
            return_final_state=return_final_state,
            planner=planner,
        )
        (y, state), (others, state_of_others) = (
            run(
                u,
                A[..., modes],
                None if B is None else B[..., modes],
                C[..., modes],
                D=skip,
                initial_state=None if initial_state is None else initial_state[..., modes],
            )
            for modes, skip in ((slice(max_pairs), D), (slice(max_pairs, None), None))
        )
        if state is not None and state_of_others is not None:
            state = torch.cat([state, state_of_others], -1)
        return y + others, state
    options = 2.0 if conj_pairs else 1.0, discretization, return_final_state, trained
    call = planner(u.is_cuda, *options, *map(form, tensors))
    if trained:
        y, state = LtiSsm.apply(*tensors, call)
    else:
        y, state, _ = lti_fwd(call, u, gate_in, gate_out, prepare(call, *system), initial_state)
    if state is None:
        return y, None
    rest = u.shape[1] % call.plan.chunk
    if not rest:
        return y, state
    # the last steps that are no whole chunk
    A, B, _, dt, _ = widen(A, B, C, dt)
    z, bbar = discretize(A, dt, discretization)
    v = u[:, -rest:].float() if gate_in is None else gate_in[:, -rest:].float() * u[:, -rest:].float()
    added = _powers_sum(v, z)
    for factor in (bbar, B):
        added = added if factor is None else added * factor
    state = torch.exp(z * rest) * state + added
    # the logarithm of a negative Abar makes a real system complex on the way only
    return y, (state if call.complex else state.real).to(call.state_dtype)


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
    """y [B, T, D]: C[0] reads inputs up to t, C[1] those after it, as a causal run through reversed time."""
    same: dict[str, Any] = {"conj_pairs": conj_pairs, "discretization": discretization, "planner": planner}
    same |= {"initial_state": None, "return_final_state": False}
    past, _ = lti_ssm_triton(u, A, B, C[0], dt, D=D, gate_in=gate_in, gate_out=gate_out, **same)
    if u.shape[1] == 1:
        return past
    # without the first input the reversed run ends where the first output, which does not see its own input, begins
    reverse = (None if x is None else x.transpose(1, 2)[..., 1:].flip(-1).transpose(1, 2) for x in (u, gate_in))
    later, gate_later = reverse
    gate = None if gate_out is None else gate_out.transpose(1, 2)[..., :-1].flip(-1).transpose(1, 2)
    assert later is not None
    future, _ = lti_ssm_triton(later, A, B, C[1], dt, D=None, gate_in=gate_later, gate_out=gate, **same)
    future = future.transpose(1, 2).flip(-1)
    return past + torch.nn.functional.pad(future, (0, 1)).transpose(1, 2)
