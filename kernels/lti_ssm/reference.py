"""The recurrence of `kernels.lti_ssm`, in one loop over time."""

from __future__ import annotations

import torch
from torch import Tensor


def lti_ssm_reference(
    u: Tensor,
    A: Tensor,
    B: Tensor | None,
    C: Tensor,
    dt: Tensor,
    *,
    conj_pairs: bool = True,
    D: Tensor | None = None,
    discretization: str = "zoh",
    bidirectional: bool = False,
    gate_in: Tensor | None = None,
    gate_out: Tensor | None = None,
    initial_state: Tensor | None = None,
    length: int | None = None,
    position: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """y [B, T, D] and the final state [B, D, N] (None where bidirectional), in the dtypes of the arguments."""
    v = u if gate_in is None else gate_in * u
    z = dt[:, None] * A
    whole = length or u.shape[1]

    def system(v: Tensor, C: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        weight = C if B is None else C * B
        if state is None:
            state = (z * weight).new_zeros(v.shape[0], *z.shape)
        if discretization == "dss-softmax":
            return _softmax_loop(v, z, A, weight, state, whole, position)
        return _loop(v, z, dt, A, B, C, discretization, state)

    if bidirectional:
        y, state = system(v, C[0], None)[0], None
        behind = system(v.flip(1), C[1], None)[0].flip(1)
        y = y + torch.cat([behind[:, 1:], torch.zeros_like(behind[:, :1])], dim=1)
    else:
        y, state = system(v, C, initial_state)
    y = 2 * y if conj_pairs else y
    if D is not None:
        y = y + D * v
    return (y if gate_out is None else gate_out * y), state


def lti_ssm_step_reference(
    u: Tensor,
    state: Tensor,
    *,
    log_dt: Tensor,
    log_A_real: Tensor,
    A_imag: Tensor,
    C: Tensor,
    skip: Tensor,
    B: Tensor | None = None,
    dt_scale: float = 1.0,
    conj_pairs: bool = True,
    discretization: str = "zoh",
    gate_in: Tensor | None = None,
    gate_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """y [B, D] and the next state of one step with the parameters of a `DiagonalSystem`, in their dtypes."""
    y, after = lti_ssm_reference(
        u.unsqueeze(1),
        torch.complex(-torch.exp(log_A_real), A_imag).expand(len(log_dt), -1),
        None if B is None else torch.view_as_complex(B),
        torch.view_as_complex(C),
        torch.exp(log_dt) * dt_scale,
        conj_pairs=conj_pairs,
        D=skip,
        discretization=discretization,
        gate_in=None if gate_in is None else gate_in.unsqueeze(1),
        gate_out=None if gate_out is None else gate_out.unsqueeze(1),
        initial_state=state,
    )
    assert after is not None
    return y.squeeze(1), after


def _real_sum(weight: Tensor, state: Tensor) -> Tensor:
    y = (weight * state).sum(-1)
    return y.real if y.is_complex() else y


def _loop(
    v: Tensor,
    z: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor | None,
    C: Tensor,
    discretization: str,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    if discretization == "bilinear":
        abar, bbar = (1 + z / 2) / (1 - z / 2), dt[:, None] / (1 - z / 2)
    else:
        abar = torch.exp(z)
        bbar = torch.ones_like(z) if discretization == "dss-exp-no-scale" else (abar - 1) / A
    bbar = bbar if B is None else bbar * B
    outputs = []
    for t in range(v.shape[1]):
        state = abar * state + bbar * v[:, t, :, None]
        outputs.append(_real_sum(C, state))
    return torch.stack(outputs, dim=1), state


def _softmax_loop(
    v: Tensor, z: Tensor, A: Tensor, weight: Tensor, state: Tensor, length: int, position: int
) -> tuple[Tensor, Tensor]:
    grows = z.real > 0
    # p z and (1 - p) z of section 3.4, and the guarded reciprocal of figure 6
    p_z, n_z = torch.where(grows, z, 0 * z), torch.where(grows, 0 * z, z)
    denominator = A * (torch.exp((n_z - p_z) * length) - 1)
    guarded = denominator.conj() / (denominator * denominator.conj() + 1e-7)
    scale = weight * (torch.exp(n_z - p_z) - 1) * guarded
    outputs = []
    for t in range(v.shape[1]):
        k = position + t
        state = torch.exp(n_z) * state + torch.exp(-k * p_z) * v[:, t, :, None]
        outputs.append(_real_sum(scale * torch.exp(p_z * (k - (length - 1))), state))
    return torch.stack(outputs, dim=1), state
