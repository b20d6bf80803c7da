"""Linear time-invariant diagonal state space model, with optional gates on both sides.

v_t       = gate_in_t * u_t
h_t[d, n] = Abar[d, n] h_{t-1}[d, n] + Bbar[d, n] v_t[d]
y_t[d]    = gate_out_t[d] * (s Re(sum_n C[d, n] h_t[d, n]) + D[d] v_t[d])

s = 2 where A holds one of each pair of conjugate eigenvalues (`conj_pairs`), else 1. `discretization` turns A, B and
dt into Abar and Bbar; the formulas are in `kernels.ssm_kernel`. Sources: S4D (Gu et al. 2022), sections 2 and 3; DSS
(Gupta et al. 2022), section 3.4; the gates are those of H3 (Fu et al. 2023), algorithm 1 with head dimension one.

The state of dss-softmax: its Bbar depends on the length L over which the filter is normalized (`length`), and where
Re(A) > 0 a state by the recurrence above would overflow. The state is kept as in section 3.4 of the paper, with
p = [Re(A) > 0],

h_k = exp(dt A (1 - p)) h_{k-1} + exp(-k dt A p) v_k,   x_k = h_k exp(dt A p (k - (L - 1))) scale,

so a caller who continues from a state must give its time k (`position`).

Two-sided (`bidirectional`): C is [2, D, N]; C[0] reads inputs up to t, C[1] those after t, with lag zero at t + 1, the
convention of the S4 code.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor

from subquad.kernels.autograd import kept, needs_gradient
from subquad.kernels.backend import NO_ELEMENT, NO_GRADIENT, on_device_of, use_triton
from subquad.kernels.checks import Allowed, check_choice, check_number, check_shapes
from subquad.kernels.lti_ssm.chunked import lti_ssm_chunked
from subquad.kernels.lti_ssm.systems import ContinuousSystem, DiagonalSystem
from subquad.kernels.operations import counted
from subquad.kernels.ssm_kernel import DISCRETIZATIONS, Discretization, check_parameters
from subquad.kernels.ssm_kernel.chunked import widen
from subquad.kernels.ssm_kernel.discretize import discretize, split_softmax

__all__ = ["ContinuousSystem", "DiagonalSystem", "lti_ssm", "lti_ssm_step"]

MAX_TRITON_STATE = 64
"""Maximum number of states of a channel on the Triton path, where they stay in registers."""
MAX_STATES_OF_STEP = 512
"""Maximum number of states of a channel in the kernel of `lti_ssm_step`."""
MAX_ROWS_OF_STEP = 4 * 65535
"""Maximum batch of that kernel: programs of large batches take four rows, and CUDA allows 65535 on axis y."""
MOST_STATES_FLOAT32 = 32
"""Maximum number of states for which `auto` takes the Triton path in float32 and float16 (three tf32 products each)."""
MOST_STEPS_FLOAT32 = 256
"""Maximum number of steps for which `auto` takes the Triton path in float32 and float16 in training."""


@counted("lti_ssm")
def lti_ssm(
    u: Tensor,
    A: Tensor,
    B: Tensor | None,
    C: Tensor,
    dt: Tensor,
    *,
    conj_pairs: bool = True,
    D: Tensor | None = None,
    discretization: Discretization = "zoh",
    bidirectional: bool = False,
    gate_in: Tensor | None = None,
    gate_out: Tensor | None = None,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
    length: int | None = None,
    position: int = 0,
    detach_maximum: bool = False,
    backend: Literal["auto", "torch", "triton"] = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """The recurrence of this module over a sequence; returns y [B, T, D], and (y, state) with `return_final_state`.

    u, gates: [B, T, D]; A: [D, N] or [N]; B, C: [D, N], B = None stands for ones; dt: [D], positive; D: [D];
    states: [B, D, N], complex where A, B or C is. y has the dtype of u. Filters, transforms and states are at least
    float32, also under autocast.

    length, position: for dss-softmax only, the L of its normalization (default T) and the time of the first input.
    detach_maximum: for dss-softmax only, its gradient as in the authors' figure 6 (`ssm_kernel`); states have the
        true one.
    backend: the Triton path takes N <= 64 and every discretization but dss-softmax. It returns y with time contiguous
    in memory and copies u and gates that are not. `auto` takes it on a GPU where it is faster: in bfloat16 always, in
    float32 and float16 for N <= 32 and, in training, for T <= 256. Otherwise the sequence is convolved with the filter,
    and `auto` holds for `ssm_kernel` and `fft_conv`, which make and apply it.

    ValueError where shapes, options or the backend do not fit together.
    """
    if bidirectional and (C.ndim != 3 or C.shape[0] != 2):
        raise ValueError(f"lti_ssm: bidirectional=True needs C as [2, D, N], one for each side, got {list(C.shape)}.")
    check_parameters(
        "lti_ssm", A, B, C[0] if bidirectional else C, dt, conj_pairs=conj_pairs, discretization=discretization
    )
    _check(u, A, dt, D, bidirectional, gate_in, gate_out, initial_state, return_final_state)
    _check_length(u.shape[1], discretization, length, position)
    options: dict[str, Any] = {
        "conj_pairs": conj_pairs,
        "D": D,
        "discretization": discretization,
        "gate_in": gate_in,
        "gate_out": gate_out,
    }
    if _use_triton(backend, discretization, (u, dt, D, gate_in, gate_out), (A, B, C, initial_state)):
        from subquad.kernels.lti_ssm.triton import lti_ssm_triton, lti_ssm_triton_bidirectional

        with on_device_of(u), _without_autocast(u):
            if bidirectional:
                return lti_ssm_triton_bidirectional(u, A, B, C, dt, **options)
            options |= {"initial_state": initial_state, "return_final_state": return_final_state}
            y, state = lti_ssm_triton(u, A, B, C, dt, **options)
    else:
        options |= {"initial_state": initial_state, "return_final_state": return_final_state}
        options |= {"bidirectional": bidirectional, "length": length, "position": position}
        options["detach_maximum"] = detach_maximum
        options["backend"] = backend
        with torch.autocast(u.device.type, enabled=False):
            y, state = lti_ssm_chunked(u, A, B, C, dt, **options)
    if not return_final_state:
        return y
    assert state is not None
    return y, state


@counted("lti_ssm_step")
def lti_ssm_step(
    u: Tensor,
    system: DiagonalSystem | ContinuousSystem,
    state: Tensor,
    *,
    conj_pairs: bool = True,
    discretization: Discretization = "zoh",
    dt_scale: float = 1.0,
    gate_in: Tensor | None = None,
    gate_out: Tensor | None = None,
    length: int | None = None,
    position: Tensor | int | None = None,
    backend: Literal["auto", "torch", "triton"] = "auto",
) -> Tensor:
    """y [B, D] of one step with inputs u and gates [B, D]; `state` [B, D, N] is updated in place.

    system:   a `DiagonalSystem` where the states are complex and A and dt are given by logarithms, which a kernel can
              read; a `ContinuousSystem` otherwise.
    dt_scale: factor of the dt of a `DiagonalSystem`. That of a `ContinuousSystem` is taken as it is.
    length, position: for dss-softmax only, and needed there: the L of its normalization, and the time of this step, as
              a tensor where the step is captured in a CUDA graph; a tensor [B] gives every row its own time.
    backend:  triton takes a `DiagonalSystem` with N up to 512, a state in complex64 and every discretization but
              dss-softmax on a CUDA device, where no gradient is recorded; auto takes it wherever it can.

    ValueError where shapes, options or the backend do not fit together.
    """
    _check_step(u, system, state, conj_pairs, discretization, gate_in, gate_out, length, position)
    check_number("lti_ssm_step", "dt_scale", dt_scale, above=0)
    obstacle = None
    tensors: tuple[Tensor | None, ...] = (gate_in, gate_out)
    if not isinstance(system, DiagonalSystem):
        obstacle = "takes a DiagonalSystem, got a ContinuousSystem"
    elif needs_gradient(u, state, *tensors, *system):
        obstacle = NO_GRADIENT
    elif discretization == "dss-softmax":
        obstacle = "takes no dss-softmax"
    elif state.shape[2] > MAX_STATES_OF_STEP:
        obstacle = f"takes N <= {MAX_STATES_OF_STEP}, got N={state.shape[2]}"
    elif len(u) > MAX_ROWS_OF_STEP:
        obstacle = f"takes B <= {MAX_ROWS_OF_STEP}, got B={len(u)}"
    elif state.dtype != torch.complex64:
        obstacle = f"takes a state in complex64, got {state.dtype}"
    else:
        tensors = (*tensors, *system)
    if use_triton("lti_ssm_step", backend, u, *tensors, beside=(state, *system), obstacle=obstacle):
        from subquad.kernels.lti_ssm.triton.step import lti_ssm_step_triton

        assert isinstance(system, DiagonalSystem)
        with on_device_of(u):
            return lti_ssm_step_triton(
                u, system, state, conj_pairs=conj_pairs, discretization=discretization, dt_scale=dt_scale,
                gate_in=gate_in, gate_out=gate_out,
            )  # fmt: skip
    with torch.autocast(u.device.type, enabled=False):
        if isinstance(system, DiagonalSystem):
            system = system.continuous(state.real.dtype, dt_scale)
        return _step(
            u, system, state, conj_pairs=conj_pairs, discretization=discretization, gate_in=gate_in, gate_out=gate_out,
            length=length, position=position,
        )  # fmt: skip


def _step(
    u: Tensor,
    system: ContinuousSystem,
    state: Tensor,
    *,
    conj_pairs: bool,
    discretization: Discretization,
    gate_in: Tensor | None,
    gate_out: Tensor | None,
    length: int | None,
    position: Tensor | int | None,
) -> Tensor:
    """Computes `lti_ssm_step` in plain PyTorch."""
    real = state.real.dtype if state.is_complex() else state.dtype
    v = u.to(real) if gate_in is None else gate_in.to(real) * u.to(real)

    def narrow(m: Tensor) -> Tensor:
        # a negative Abar has a complex logarithm, also in a real system
        return (m.real if m.is_complex() and not state.is_complex() else m).to(state.dtype)

    A, B, C, dt, _ = widen(system.A, system.B, system.C, system.dt)
    if discretization == "dss-softmax":
        assert length is not None
        assert position is not None
        if isinstance(position, Tensor) and position.ndim:
            position = position.view(-1, 1, 1)
        grows, z, scale = split_softmax(A, dt, length)
        one = torch.ones_like(z)
        decay, entry = torch.where(grows, one, torch.exp(z)), torch.where(grows, torch.exp(z * position), one)
        weight = (C if B is None else C * B) * scale
        weight = weight * torch.where(grows, torch.exp(z * (length - 1 - position)), one)
    else:
        log_abar, scale_or_one = discretize(A, dt, discretization)
        decay, weight = torch.exp(log_abar), C
        entry = torch.ones_like(log_abar) if scale_or_one is None else scale_or_one
        entry = entry if B is None else entry * B
    state.mul_(narrow(decay)).add_(narrow(entry) * v.unsqueeze(-1))
    y = (kept(state) * narrow(weight)).sum(-1)
    y = (2.0 if conj_pairs else 1.0) * (y.real if y.is_complex() else y)
    if system.D is not None:
        y = y + system.D.to(v.dtype) * v
    return (y if gate_out is None else gate_out.to(y.dtype) * y).to(u.dtype)


def _check_step(
    u: Tensor,
    system: DiagonalSystem | ContinuousSystem,
    state: Tensor,
    conj_pairs: bool,
    discretization: str,
    gate_in: Tensor | None,
    gate_out: Tensor | None,
    length: int | None,
    position: Tensor | int | None,
) -> None:
    if u.ndim != 2 or state.ndim != 3 or state.shape[:2] != u.shape:
        raise ValueError(
            f"lti_ssm_step: u must be [B, D] and state [B, D, N], got {list(u.shape)} and {list(state.shape)}."
        )
    (_, width), num_states = u.shape, state.shape[2]
    shape = tuple(u.shape)
    check_shapes("lti_ssm_step", {"gate_in": (gate_in, shape), "gate_out": (gate_out, shape)}, to_go_with="u")
    check_choice("lti_ssm_step", "discretization", discretization, DISCRETIZATIONS)
    if discretization == "dss-softmax" and (length is None or position is None):
        raise ValueError("lti_ssm_step: dss-softmax needs length (its normalization) and position (the time).")
    if isinstance(position, Tensor) and position.shape not in ((), u.shape[:1]):
        raise ValueError(f"lti_ssm_step: position must be a number or [{len(u)}], got {list(position.shape)}.")
    if isinstance(system, DiagonalSystem):
        system.check("lti_ssm_step", width, num_states)
        if not state.is_complex():
            raise ValueError(f"lti_ssm_step: a DiagonalSystem needs a complex state, got {state.dtype}.")
        return
    A, B, C, dt, skip = system
    check_parameters("lti_ssm_step", A, B, C, dt, conj_pairs=conj_pairs, discretization=discretization)
    wanted = {"dt": (dt, (width,)), "C": (C, (width, num_states)), "D": (skip, (width,))}
    check_shapes("lti_ssm_step", wanted, to_go_with="u and the state")


def _check(
    u: Tensor,
    A: Tensor,
    dt: Tensor,
    D: Tensor | None,
    bidirectional: bool,
    gate_in: Tensor | None,
    gate_out: Tensor | None,
    initial_state: Tensor | None,
    return_final_state: bool,
) -> None:
    if u.ndim != 3 or u.shape[1] == 0 or u.shape[2] != dt.shape[0]:
        raise ValueError(f"lti_ssm: u must be [B, T, D] with T >= 1 and D={dt.shape[0]} as dt, got {list(u.shape)}.")
    batch, _, width = u.shape
    if bidirectional and (initial_state is not None or return_final_state):
        raise ValueError("lti_ssm: bidirectional=True has no state to pass; drop initial_state and return_final_state.")
    shape = tuple(u.shape)
    wanted: dict[str, tuple[Tensor | None, Allowed]] = {
        "D": (D, (width,)),
        "gate_in": (gate_in, shape),
        "gate_out": (gate_out, shape),
        "initial_state": (initial_state, (batch, width, A.shape[-1])),
    }
    check_shapes("lti_ssm", wanted, to_go_with="u and A")


def _use_triton(
    backend: str,
    discretization: str,
    reals: tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None],
    maps: tuple[Tensor, Tensor | None, Tensor, Tensor | None],
) -> bool:
    """reals: u, dt, D and the gates.   maps: A, B, C and the state, of which each may be complex."""
    u, A, obstacle = reals[0], maps[0], None
    if discretization == "dss-softmax":
        obstacle = "takes no dss-softmax"
    elif A.shape[-1] > MAX_TRITON_STATE:
        obstacle = f"takes N <= {MAX_TRITON_STATE}, got N={A.shape[-1]}"
    elif not u.numel():
        obstacle = NO_ELEMENT
    is_faster = _kernels_win(u, A, *reals[1:], *maps[1:])
    parts = (_real(x, u) for x in maps)
    return use_triton("lti_ssm", backend, *reals, *parts, obstacle=obstacle, is_faster=is_faster)


def _kernels_win(u: Tensor, A: Tensor, *others: Tensor | None) -> bool:
    """Whether the Triton path was measured to be faster than transforms (figures: LOG.md)."""
    if u.dtype == torch.bfloat16:
        return True
    trained = needs_gradient(u, A, *others)
    return A.shape[-1] <= MOST_STATES_FLOAT32 and (not trained or u.shape[1] <= MOST_STEPS_FLOAT32)


def _real(x: Tensor | None, u: Tensor) -> Tensor | None:
    """x, or the real part of a complex x, for the checks of dtype and device; None where both are known to be right.

    Making the view of the real part takes the host longer than the check."""
    if x is None or not x.is_complex():
        return x
    return None if x.dtype == torch.complex64 and x.device == u.device else x.real


def _without_autocast(u: Tensor) -> AbstractContextManager:
    """A context without autocast, entered only where needed: that takes the host as long as a short kernel."""
    # meta tensors, on which launches are recorded, have no autocast of their own
    kind = "cuda" if u.is_cuda else "cpu"
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def _check_length(steps: int, discretization: str, length: int | None, position: int) -> None:
    if discretization != "dss-softmax":
        if length is not None or position:
            raise ValueError(f"lti_ssm: length and position belong to dss-softmax, not to {discretization}.")
    elif position < 0 or position + steps > (length or steps):
        raise ValueError(
            f"lti_ssm: dss-softmax is normalized over length={length or steps}, got {steps} steps from position "
            f"{position}; raise length to {position + steps} or shorten the input."
        )
