"""One decoding step of everything between the two linear maps of an H3 layer with heads of one channel.

    k~ = sum_{m < M} taps[m] k_{t-m} + shift_skip k                     shift model over the window and k
    h = Abar h + Bbar k~ v,   A = -exp(log_A_real) + i A_imag           diagonal model, dt = dt_scale exp(log_dt)
    y = q (2 Re(C h) + D k~ v)

Abar and Bbar are those of `kernels.ssm_kernel`, by zero-order hold or the bilinear rule. Source: H3 (Fu et al. 2023),
section 3.2 and algorithm 1, at one position. It is one operator because each part would take longer to start than to
run.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from subquad.kernels.autograd import needs_gradient
from subquad.kernels.backend import NO_GRADIENT, on_device_of, use_triton
from subquad.kernels.checks import Allowed, check_choice, check_number, check_shapes
from subquad.kernels.lti_ssm import DiagonalSystem, lti_ssm_step
from subquad.kernels.operations import counted

__all__ = ["h3_inner_step"]

RULES = ("zoh", "bilinear")
"""Discretizations of the diagonal model."""
MAX_TAPS = 1024
MAX_STATES = 512
"""Maximum M and N of the Triton kernel."""


@counted("h3_inner_step")
def h3_inner_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: Tensor,
    state: Tensor,
    *,
    taps: Tensor,
    shift_skip: Tensor,
    system: DiagonalSystem,
    dt_scale: float = 1.0,
    discretization: Literal["zoh", "bilinear"] = "bilinear",
    backend: Literal["auto", "triton", "torch"] = "auto",
) -> Tensor:
    """y [B, D] in the dtype of q; `window` and `state` are updated in place.

    q, k, v:          [B, D].
    window:           [B, D, M - 1] with M >= 2, the inputs before k, newest first.
    state:            [B, D, N], complex.
    taps, shift_skip: [D, M] and [D].
    backend:          triton takes M up to 1024, N up to 512 and parameters in up to 32 bits on a CUDA device; auto
                      takes it there where no gradient is recorded, else the steps of the operators it is made of.

    Raises ValueError for shapes that do not fit.
    """
    _check(q, k, v, window, state, taps, shift_skip, system)
    check_number("h3_inner_step", "dt_scale", dt_scale, above=0)
    check_choice("h3_inner_step", "discretization", discretization, RULES)
    tensors = (k, v, window, taps, shift_skip, *system)
    obstacle = None
    if needs_gradient(q, state, *tensors):
        obstacle = NO_GRADIENT
    elif taps.shape[1] > MAX_TAPS or state.shape[2] > MAX_STATES:
        obstacle = f"takes M up to {MAX_TAPS} and N up to {MAX_STATES}, got {taps.shape[1]} and {state.shape[2]}"
    elif state.dtype != torch.complex64:
        obstacle = f"takes a state in complex64, got {state.dtype}"
    if use_triton("h3_inner_step", backend, q, *tensors, beside=(state,), obstacle=obstacle):
        from subquad.kernels.h3_inner.triton import h3_inner_step_triton

        with on_device_of(q):
            return h3_inner_step_triton(
                q, k, v, window, state, taps=taps, shift_skip=shift_skip, system=system, dt_scale=dt_scale,
                discretization=discretization,
            )  # fmt: skip
    newest = k.to(window.dtype)
    inputs = torch.cat([newest.unsqueeze(-1), window], dim=-1)
    window.copy_(inputs[..., :-1])
    shifted = (inputs * taps).sum(-1) + shift_skip * newest
    y = lti_ssm_step(
        v.to(state.real.dtype), system, state, discretization=discretization, dt_scale=dt_scale, gate_in=shifted,
        gate_out=q, backend=backend,
    )  # fmt: skip
    return y.to(q.dtype)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: Tensor,
    state: Tensor,
    taps: Tensor,
    shift_skip: Tensor,
    system: DiagonalSystem,
) -> None:
    if q.ndim != 2 or taps.ndim != 2 or taps.shape[1] < 2 or state.ndim != 3:
        raise ValueError(
            "h3_inner_step: q must be [B, D], taps [D, M] with M >= 2 and state [B, D, N], got "
            f"{list(q.shape)}, {list(taps.shape)} and {list(state.shape)}."
        )
    (batch, width), num_taps, num_states = q.shape, taps.shape[1], state.shape[2]
    wanted: dict[str, tuple[Tensor, Allowed]] = {
        "k": (k, (batch, width)),
        "v": (v, (batch, width)),
        "window": (window, (batch, width, num_taps - 1)),
        "state": (state, (batch, width, num_states)),
        "taps": (taps, (width, num_taps)),
        "shift_skip": (shift_skip, (width,)),
    }
    check_shapes("h3_inner_step", wanted)
    system.check("h3_inner_step", width, num_states)
    if not state.is_complex():
        raise ValueError(f"h3_inner_step: state must be complex, got {state.dtype}.")
